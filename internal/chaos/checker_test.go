package main

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

// told is what a checker is told of one item. Its methods change it, for cases to be read in one line.
type told struct {
	history history
	rows    []service.Row
}

func tell(rule rule) *told {
	return &told{history: history{name: "item", owner: "ada", operation: service.Notes, key: "key-0001", text: "text", rule: rule}}
}

func (s *told) row(id int64) *told {
	s.rows = append(s.rows, service.Row{ID: id, Owner: "ada", Operation: service.Notes, Item: "item", Text: "text"})
	return s
}

// at is the time between two answers.
const at = time.Second

func (s *told) answer(a answer) *told {
	a.started = time.Duration(len(s.history.answers)) * at
	a.ended = a.started + at/2
	s.history.answers = append(s.history.answers, a)
	return s
}

func created(id int64) answer {
	body, err := json.Marshal(service.Note{ID: id, Owner: "ada", Operation: service.Notes, Item: "item", Text: "text"})
	if err != nil {
		panic(err)
	}
	return answer{status: 201, body: string(body)}
}

func replayed(id int64) answer {
	a := created(id)
	a.replayed = true
	return a
}

func (s *told) created(id int64) *told  { return s.answer(created(id)) }
func (s *told) replayed(id int64) *told { return s.answer(replayed(id)) }
func (s *told) nothing() *told          { return s.answer(answer{problem: "EOF"}) }
func (s *told) refused(status int, code string) *told {
	return s.answer(answer{status: status, code: code})
}

func (s *told) deletedNow() *told {
	s.history.deleting, s.history.deletedAt = true, time.Duration(len(s.history.answers))*at-at/4
	return s
}

func TestTheCheckerSeesEachFault(t *testing.T) {
	t.Parallel()
	changed := func(change func(*answer)) answer {
		a := replayed(1)
		change(&a)
		return a
	}
	note := func(change func(*service.Note)) answer {
		return changed(func(a *answer) {
			n := service.Note{ID: 1, Owner: "ada", Operation: service.Notes, Item: "item", Text: "text"}
			change(&n)
			body, _ := json.Marshal(n)
			a.body = string(body)
		})
	}
	notReplayed := tell(once).created(1).refused(409, "in_progress").row(1)
	notReplayed.history.unanswered = 1
	forgottenOnce := func() *told {
		s := tell(forgotten)
		s.history.forgets = 1
		return s
	}
	for name, c := range map[string]struct {
		told *told
		want []string
	}{
		"created at once":                          {tell(once).created(1).row(1), nil},
		"created, and replayed":                    {tell(once).nothing().created(1).replayed(1).row(1), nil},
		"its answer was lost, and it was replayed": {tell(once).nothing().replayed(1).row(1), nil},
		"acknowledged, and not there":              {tell(once).created(1), []string{lost}},
		"there twice":                              {tell(once).created(1).row(1).row(2), []string{doubled}},
		"there twice, and seen so":                 {tell(once).created(1).created(2).row(1).row(2), []string{wrong, doubled}},
		"never answered":                           {tell(once).nothing().refused(409, "in_progress").row(1), []string{stuck}},
		"never answered, and there twice":          {tell(once).nothing().row(1).row(2), []string{stuck, doubled}},
		"never sent at all":                        {tell(once), []string{stuck}},
		"acknowledged, and never replayed":         {notReplayed, []string{stuck}},
		"two answers are the original":             {tell(once).created(1).created(1).row(1), []string{wrong}},
		"another status":                           {tell(once).created(1).answer(changed(func(a *answer) { a.status = 200 })).row(1), []string{wrong}},
		"another body":                             {tell(once).created(1).answer(changed(func(a *answer) { a.body += " " })).row(1), []string{wrong}},
		"another location":                         {tell(once).created(1).answer(changed(func(a *answer) { a.location = "/notes/2" })).row(1), []string{wrong}},
		"a body that is none":                      {tell(once).answer(answer{status: 201, body: "{"}).row(1), []string{wrong}},
		"another's owner":                          {tell(once).answer(note(func(n *service.Note) { n.Owner = "bob" })).row(1), []string{wrong}},
		"another's item":                           {tell(once).answer(note(func(n *service.Note) { n.Item = "other" })).row(1), []string{wrong}},
		"another operation":                        {tell(once).answer(note(func(n *service.Note) { n.Operation = service.Orders })).row(1), []string{wrong}},
		"a row that is not there":                  {tell(once).created(2).row(1), []string{wrong}},
		"refused for content never sent":           {tell(once).refused(409, "key_conflict").row(1), []string{wrong}},
		"gone, and nobody deleted it":              {tell(once).refused(410, "gone").row(1), []string{wrong}},

		"other content, refused":   {tell(refused).nothing().refused(409, "key_conflict"), nil},
		"other content, created":   {tell(refused).created(1).row(1), []string{wrong}},
		"other content, replayed":  {tell(refused).replayed(1), []string{wrong}},
		"other content, there":     {tell(refused).refused(409, "key_conflict").row(1), []string{wrong}},
		"other content, no answer": {tell(refused).nothing(), []string{stuck}},

		"deleted":                       {tell(deleted).created(1).deletedNow().refused(410, "gone"), nil},
		"deleted, and there":            {tell(deleted).created(1).deletedNow().refused(410, "gone").row(1), []string{wrong}},
		"deleted, and created again":    {tell(deleted).created(1).deletedNow().created(2).row(2), []string{wrong}},
		"deleted, and replayed":         {tell(deleted).created(1).deletedNow().replayed(1), []string{wrong}},
		"not deleted in the end":        {tell(deleted).created(1).row(1), nil},
		"not deleted, and there twice":  {tell(deleted).created(1).row(1).row(2), []string{doubled}},
		"to be deleted, and never sent": {tell(deleted), []string{stuck}},

		"fleeting, created again":         {tell(fleeting).nothing().created(2).row(1).row(2), nil},
		"fleeting, more than it was sent": {tell(fleeting).created(1).row(1).row(2), []string{doubled}},
		"fleeting, and not there":         {tell(fleeting).created(1), []string{lost}},
		"fleeting, another row":           {tell(fleeting).created(2).row(1), []string{wrong}},

		"forgotten, created again":         {forgottenOnce().created(1).created(2).row(1).row(2), nil},
		"forgotten once, and there thrice": {forgottenOnce().created(1).row(1).row(2).row(3), []string{doubled}},
		"forgotten, and not there":         {forgottenOnce().created(1), []string{lost}},
		"forgotten, and stuck":             {forgottenOnce().nothing(), []string{stuck}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := []string{}
			for _, f := range check([]history{c.told.history}, c.told.rows) {
				got = append(got, f.verdict)
			}
			assert.ElementsMatch(t, c.want, got)
		})
	}
}

func TestTheCheckerSeesRowsOfAnother(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]service.Row{
		"owner":     {ID: 1, Owner: "bob", Operation: service.Notes, Item: "item", Text: "text"},
		"operation": {ID: 1, Owner: "ada", Operation: service.Orders, Item: "item", Text: "text"},
		"text":      {ID: 1, Owner: "ada", Operation: service.Notes, Item: "item", Text: "other"},
		"item":      {ID: 1, Owner: "ada", Operation: service.Notes, Item: "nobody's", Text: "text"},
	} {
		s := tell(once).created(1)
		if name == "item" {
			s.row(1)
		}
		findings := check([]history{s.history}, append(s.rows, row))
		if assert.Len(t, findings, 1, name) {
			assert.Equal(t, wrong, findings[0].verdict, name)
		}
	}
}

func TestWhatWasNotSentIsNotJudged(t *testing.T) {
	t.Parallel()
	s := tell(once)
	s.history.waived = true
	assert.Empty(t, check([]history{s.history}, nil))
}
