package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A contender is one way to do an operation. n is another at every call.
type contender struct {
	name string
	do   func(n int64) error
}

// round lets clients call do for about as long as the setting says, and returns operations a second.
func (b *bench) round(c contender, clients int, length time.Duration, next *atomic.Int64) float64 {
	var failed atomic.Pointer[error]
	var done atomic.Int64
	var all sync.WaitGroup
	start := time.Now()
	for range clients {
		all.Go(func() {
			for time.Since(start) < length && failed.Load() == nil {
				if err := c.do(next.Add(1)); err != nil {
					failed.Store(&err)
				}
				done.Add(1)
			}
		})
	}
	all.Wait()
	took := time.Since(start)
	if err := failed.Load(); err != nil {
		b.Fatalf("%s: %v", c.name, *err)
	}
	b.check(b.ctx.Err())
	return float64(done.Load()) / took.Seconds()
}

// alternate lets the contenders take turns, and returns each one's rate in each round.
func (b *bench) alternate(clients int, contenders []contender) [][]float64 {
	next := make([]atomic.Int64, len(contenders))
	rates := make([][]float64, len(contenders))
	for i, c := range contenders { // connections open, statements get prepared
		b.round(c, clients, b.setting.round/2, &next[i])
	}
	for range b.setting.rounds {
		for i, c := range contenders {
			rates[i] = append(rates[i], b.round(c, clients, b.setting.round, &next[i]))
		}
	}
	return rates
}

// A spread is the median of some values, with the quartiles on both sides of it.
type spread struct{ low, median, high float64 }

func spreadOf(values []float64) spread {
	sorted := slices.Sorted(slices.Values(values))
	at := func(part float64) float64 {
		place := part * float64(len(sorted)-1)
		below := sorted[int(place)]
		above := sorted[int(math.Ceil(place))]
		return below + (above-below)*(place-math.Floor(place))
	}
	return spread{at(0.25), at(0.5), at(0.75)}
}

// ratios is the spread of a over b, round by round.
func ratios(a, b []float64) spread {
	quotients := make([]float64, len(a))
	for i := range a {
		quotients[i] = a[i] / b[i]
	}
	return spreadOf(quotients)
}

func (s spread) String() string {
	return fmt.Sprintf("%s (%s–%s)", number(s.median), number(s.low), number(s.high))
}

// number prints v to three figures or so.
func number(v float64) string {
	switch abs := math.Abs(v); {
	case abs >= 100:
		return fmt.Sprintf("%.0f", v)
	case abs >= 10:
		return fmt.Sprintf("%.1f", v)
	case abs >= 0.1 || v == 0:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// A table is what a part found. Its first row is the head.
type table struct {
	title string
	rows  [][]string
	notes []string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) note(format string, arguments ...any) {
	t.notes = append(t.notes, fmt.Sprintf(format, arguments...))
}

func (t table) markdown() string {
	var text strings.Builder
	if t.title != "" {
		fmt.Fprintf(&text, "**%s**\n\n", t.title)
	}
	for i, row := range t.rows {
		fmt.Fprintf(&text, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			fmt.Fprintf(&text, "|%s\n", strings.Repeat("---|", len(row)))
		}
	}
	for _, note := range t.notes {
		fmt.Fprintf(&text, "\n%s\n", note)
	}
	return text.String()
}
