package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

// A rule says what must hold for an item once everything is over.
type rule int

const (
	// once: it was answered 2xx, always the same way, and there is one row, which is the one that the answers name.
	once rule = iota
	// refused: its key stands for other content, so it was refused, and there is no row.
	refused
	// deleted: as once, until its deletion was acknowledged. After that there is no row, and what is sent then is
	// answered 410.
	deleted
	// fleeting: its record expires soon, so a retry whose first answer was lost may create again. Each 2xx names a row
	// that is there.
	fleeting
	// forgotten: its owner was forgotten while it was sent, which frees the key: each time may add one row. Each 2xx
	// names a row that is there.
	forgotten
)

// An answer is what a client saw of one attempt.
type answer struct {
	service        int           // which one it was sent to
	started, ended time.Duration // since the round began
	status         int           // 0: none came
	code           string        // of a refusal
	replayed       bool
	location       string
	body           string
	problem        string // why none came
}

func (a answer) is2xx() bool { return 200 <= a.status && a.status <= 299 }

// isFinal reports that a client need not send the item again: all else is an invitation to do so.
func (a answer) isFinal() bool {
	return a.is2xx() || a.status == 409 && a.code == "key_conflict" || a.status == 410
}

func (a answer) String() string {
	return fmt.Sprintf("%9.3fs to %9.3fs  service %d  %d %s replayed=%t %s %s %s", a.started.Seconds(), a.ended.Seconds(), a.service,
		a.status, a.code, a.replayed, a.location, a.body, a.problem)
}

// A history is what clients know of one item.
type history struct {
	name, owner, operation, key, text string
	rule                              rule
	answers                           []answer
	forgets                           int           // how often its owner was asked to be forgotten
	deletedAt                         time.Duration // when its deletion was acknowledged; 0: not
	deleting                          bool          // somebody asked for its deletion
	unanswered                        int           // how many clients gave up in the end, without a final answer of their own
	waived                            bool          // it was never sent: the run was cut short
}

// The ways in which an item can be wrong.
const (
	lost    = "lost"         // acknowledged, and not there
	doubled = "doubled"      // there more than once
	stuck   = "stuck"        // not answered in time after the faults had stopped
	wrong   = "wrong answer" // answered otherwise than the first time, or with what is not there
)

func verdicts() []string { return []string{lost, doubled, stuck, wrong} }

// A finding is one item that broke its rule.
type finding struct {
	verdict string
	why     string
	history history
	rows    []service.Row
}

func (f finding) String() string {
	var text strings.Builder
	h := f.history
	fmt.Fprintf(&text, "%s: item %s (owner %s, operation %s, key %s, rule %d): %s\n", f.verdict, h.name, h.owner, h.operation, h.key, h.rule, f.why)
	for _, a := range h.answers {
		fmt.Fprintf(&text, "\t%v\n", a)
	}
	for _, row := range f.rows {
		fmt.Fprintf(&text, "\trow %+v\n", row)
	}
	return text.String()
}

// check judges from the outside: by what clients saw and by the rows that the database holds, and nothing else.
func check(histories []history, rows []service.Row) []finding {
	byItem := map[string][]service.Row{}
	for _, row := range rows {
		byItem[row.Item] = append(byItem[row.Item], row)
	}
	var findings []finding
	for _, h := range histories {
		if h.waived {
			continue
		}
		found := byItem[h.name]
		delete(byItem, h.name)
		checkItem(h, found, func(verdict, why string) {
			findings = append(findings, finding{verdict, why, h, found})
		})
	}
	for item, found := range byItem {
		findings = append(findings, finding{wrong, "a row of an item that nobody sent", history{name: item}, found})
	}
	return findings
}

// checkItem reports each verdict on an item at most once.
func checkItem(h history, rows []service.Row, report func(verdict, why string)) {
	said := map[string]bool{}
	say := func(verdict, why string, args ...any) {
		if !said[verdict] {
			said[verdict] = true
			report(verdict, fmt.Sprintf(why, args...))
		}
	}
	var acknowledged []answer
	for _, a := range h.answers {
		if a.is2xx() {
			acknowledged = append(acknowledged, a)
		}
	}
	slices.SortStableFunc(acknowledged, func(a, b answer) int { return int(a.ended - b.ended) })

	if !slices.ContainsFunc(h.answers, answer.isFinal) {
		say(stuck, "no 2xx and no final refusal in %d attempts", len(h.answers))
	}
	if h.unanswered > 0 {
		say(stuck, "a client that sent it, perhaps again, was never answered")
	}
	for _, row := range rows {
		if row.Owner != h.owner || row.Operation != h.operation || row.Text != h.text {
			say(wrong, "row %d has another owner, operation or text", row.ID)
		}
	}
	if h.rule == refused {
		if len(acknowledged) > 0 {
			say(wrong, "its key stands for other content, and it was answered %d", acknowledged[0].status)
		}
		if len(rows) > 0 {
			say(wrong, "its key stands for other content, and it was created")
		}
		return
	}

	for _, a := range h.answers {
		if a.status == 409 && a.code == "key_conflict" {
			say(wrong, "refused for other content, which was never sent")
		}
		switch {
		case a.status == 410 && !h.deleting:
			say(wrong, "410, and nobody deleted it")
		case a.is2xx() && h.deletedAt > 0 && a.started > h.deletedAt:
			say(wrong, "2xx after it was deleted")
		}
	}
	checkAnswers(h, acknowledged, rows, say)

	limit := 1
	switch h.rule {
	case forgotten:
		limit += h.forgets
	case fleeting:
		limit = len(h.answers)
	case deleted:
		if h.deletedAt > 0 {
			if len(rows) > 0 {
				say(wrong, "it is there after it was deleted")
			}
			return
		}
	}
	if len(rows) > limit {
		say(doubled, "%d rows", len(rows))
	}
	if len(rows) == 0 && len(acknowledged) > 0 && !h.deleting {
		say(lost, "answered %d at %v, and there is no row", acknowledged[0].status, acknowledged[0].ended)
	}
}

// checkAnswers holds the acknowledgements of an item against each other and against its rows.
func checkAnswers(h history, acknowledged []answer, rows []service.Row, say func(verdict, why string, args ...any)) {
	mayDiffer := h.rule == fleeting || h.rule == forgotten
	originals := 0
	for _, a := range acknowledged {
		var note service.Note
		if err := json.Unmarshal([]byte(a.body), &note); err != nil {
			say(wrong, "an answer that is not what create wrote")
			continue
		}
		if note.Owner != h.owner || note.Operation != h.operation || note.Item != h.name || note.Text != h.text {
			say(wrong, "an answer that is another item's")
		}
		first := acknowledged[0]
		if !mayDiffer && (a.status != first.status || a.body != first.body || a.location != first.location) {
			say(wrong, "an answer that differs from the first")
		}
		if len(rows) > 0 && !slices.ContainsFunc(rows, func(row service.Row) bool { return row.ID == note.ID }) {
			say(wrong, "an answer that names row %d, which is not there", note.ID)
		}
		if !a.replayed {
			originals++
		}
	}
	if originals > 1 && !mayDiffer {
		say(wrong, "%d answers say that they are the original", originals)
	}
}
