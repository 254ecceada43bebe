package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

// What clients do besides retrying.
const (
	twoClients   = "sent by two clients at once"
	sentAgain    = "sent again after its 2xx"
	otherContent = "its key sent again with other content"
	anothersKey  = "the same key under another owner"
)

// A report adds up what happened.
type report struct {
	seed    uint64
	command string
	began   time.Time
	carried atomic.Int64 // items that are done with
	step    atomic.Value // what is done now, in words

	mu         sync.Mutex
	hits       map[string]map[string]map[service.Step]int // by world, fault and step
	behaviours map[string]int
	errors     map[string]int // as services counted them
	items      map[string]int // by world
	attempts   map[string]int
	zombies    int
	missed     int
	verdicts   map[string]int
	findings   []finding
	complaints []string
}

func newReport(seed uint64, command string) *report {
	return &report{
		seed: seed, command: command, began: time.Now(),
		hits: map[string]map[string]map[service.Step]int{}, behaviours: map[string]int{}, errors: map[string]int{},
		items: map[string]int{}, attempts: map[string]int{}, verdicts: map[string]int{},
	}
}

func (r *report) hit(world string, f planned) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hits[world] == nil {
		r.hits[world] = map[string]map[service.Step]int{}
	}
	if r.hits[world][f.fault] == nil {
		r.hits[world][f.fault] = map[service.Step]int{}
	}
	r.hits[world][f.fault][f.step]++
}

func (r *report) add(counts map[string]int, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts[name]++
}

func (r *report) behaved(how string) { r.add(r.behaviours, how) }

func (r *report) failed(kind string) { r.add(r.errors, kind) }

func (r *report) zombie() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.zombies++
}

func (r *report) complain(why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.complaints = append(r.complaints, why)
}

func (r *report) judged(world string, histories []history, findings []finding, attempts, missed int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range histories {
		if !h.waived {
			r.items[world]++
		}
	}
	r.attempts[world] += attempts
	r.missed += missed
	for _, f := range findings {
		r.verdicts[f.verdict]++
	}
	r.findings = append(r.findings, findings...)
}

// strikes returns how often faults struck, in all.
func (r *report) strikes() (n int) {
	for _, faults := range r.hits {
		for _, steps := range faults {
			for _, count := range steps {
				n += count
			}
		}
	}
	return n
}

// progress is one line on how far it is.
func (r *report) progress() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var verdict []string
	for _, v := range verdicts() {
		verdict = append(verdict, fmt.Sprintf("%s %d", v, r.verdicts[v]))
	}
	return fmt.Sprintf("%v: %d items done, %d faults struck; judged: %s", time.Since(r.began).Round(time.Second),
		r.carried.Load(), r.strikes(), strings.Join(verdict, ", "))
}

// markdown returns the table.
func (r *report) markdown() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var text strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&text, format+"\n", args...) }

	items, attempts := 0, 0
	for world := range r.items {
		items += r.items[world]
		attempts += r.attempts[world]
	}
	line("`%s`, seed %d, took %v on %s.\n", r.command, r.seed, time.Since(r.began).Round(time.Second), r.began.Format(time.DateOnly))
	line("| items | requests | faults that struck | %s |", strings.Join(verdicts(), " | "))
	line("|---:|---:|---:|%s", strings.Repeat("---:|", len(verdicts())))
	var cells []string
	for _, v := range verdicts() {
		cells = append(cells, fmt.Sprint(r.verdicts[v]))
	}
	strikes := r.strikes()
	line("| %d | %d | %d | %s |\n", items, attempts, strikes, strings.Join(cells, " | "))
	if len(r.findings) == 0 && strikes > 0 {
		line("No failure in %d faults: by the rule of three, a fault of this mixture makes an item fail with a probability below %s, at 95 %%.\n", strikes, bound(strikes))
	}
	for _, world := range slices.Sorted(maps.Keys(r.hits)) {
		r.world(line, world)
	}
	line("Of the services that were stopped in an attempt, %d woke up as zombies: another process had answered their item meanwhile.\n", r.zombies)
	line("What clients did besides retrying:\n")
	for _, how := range slices.Sorted(maps.Keys(r.behaviours)) {
		line("- %s: %d items", how, r.behaviours[how])
	}
	line("\nErrors that the services met, by SQLSTATE or kind:\n")
	for _, kind := range slices.Sorted(maps.Keys(r.errors)) {
		line("- %s: %d", kind, r.errors[kind])
	}
	if r.missed > 0 {
		line("\n%d planned faults found nothing to strike and are not counted.", r.missed)
	}
	return text.String()
}

func (r *report) world(line func(string, ...any), world string) {
	steps := append(service.Steps(), atRandom)
	line("**%s**: %d items, %d requests\n", world, r.items[world], r.attempts[world])
	var header []string
	for _, step := range steps {
		header = append(header, string(step))
	}
	line("| fault | %s | in all | failures below, at 95 %% |", strings.Join(header, " | "))
	line("|---|%s", strings.Repeat("---:|", len(steps)+2))
	sums := map[service.Step]int{}
	row := func(name string, counts map[service.Step]int) {
		var cells []string
		all := 0
		for _, step := range steps {
			all += counts[step]
			cell := ""
			if counts[step] > 0 {
				cell = fmt.Sprint(counts[step])
			}
			cells = append(cells, cell)
		}
		below := bound(all)
		if len(r.findings) > 0 {
			below = ""
		}
		line("| %s | %s | %d | %s |", name, strings.Join(cells, " | "), all, below)
	}
	for _, fault := range slices.Sorted(maps.Keys(r.hits[world])) {
		for step, n := range r.hits[world][fault] {
			sums[step] += n
		}
		row(fault, r.hits[world][fault])
	}
	row("**all**", sums)
	line("")
}

// bound is the rule of three: n trials without a failure make a probability of failure above 3/n unlikely, at 95 %.
func bound(n int) string {
	below := 300 / float64(n)
	switch {
	case n < 4:
		return ""
	case below >= 10:
		return fmt.Sprintf("%.0f %%", below)
	}
	return fmt.Sprintf("%.2g %%", below)
}

// The markers between which a document has the table.
const (
	tableBegins = "<!-- The table below is generated: go run ./internal/chaos -long -report docs/reliability.md -->\n"
	tableEnds   = "<!-- End of the generated table. -->\n"
)

// writeInto replaces the table in a document.
func (r *report) writeInto(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, begins := strings.Cut(string(text), tableBegins)
	_, after, ends := strings.Cut(rest, tableEnds)
	if !begins || !ends {
		return fmt.Errorf("%s has no generated table: put these lines where it belongs:\n%s%s", file, tableBegins, tableEnds)
	}
	return os.WriteFile(file, []byte(before+tableBegins+"\n"+r.markdown()+"\n"+tableEnds+after), 0o644)
}

// problem returns everything that was wrong, or "".
func (r *report) problem() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	const most = 20
	var text strings.Builder
	for n, f := range r.findings {
		if n == most {
			fmt.Fprintf(&text, "and %d more\n", len(r.findings)-most)
			break
		}
		text.WriteString(f.String())
	}
	for n, complaint := range r.complaints {
		if n == most {
			break
		}
		text.WriteString(complaint + "\n")
	}
	return text.String()
}
