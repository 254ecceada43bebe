package model

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdsend/holdsend-go/contracttest"
)

// Options says how far to go.
type Options struct {
	Depth     int           // every sequence of that many steps of up to three clients on one scope
	Sequences int           // that many random ones, of four clients on three scopes
	Length    int           // of that many steps each
	Seed      uint64        // of the random ones
	Patience  time.Duration // how long a step may take before it counts as one that never ends; default 30 s
}

// Explored counts what was run.
type Explored struct{ Sequences, Steps int }

// Explore runs sequences on the stores, one after the other on each, and compares each step with the model. The error
// has the first sequence that differs, with its steps and, if it was a random one, its seed. Crash is required of the
// harnesses.
func Explore[Tx any](ctx context.Context, stores []contracttest.Harness[Tx], o Options) (Explored, error) {
	e := &explorer[Tx]{pending: []prefix{{}}, depth: o.Depth, patience: cmp.Or(o.Patience, defaultPatience)}
	e.changed.L = &e.mu
	var workers sync.WaitGroup
	for i, h := range stores {
		workers.Go(func() {
			e.exhaust(ctx, h, i)
			for n := i; n < o.Sequences && !e.isOver(); n += len(stores) {
				e.walk(ctx, h, o.Seed+uint64(n), o.Length)
			}
		})
	}
	workers.Wait()
	return e.explored, e.failure
}

// A prefix is which of the possible steps each of the first steps of a sequence is, by number.
type prefix []int

type explorer[Tx any] struct {
	depth    int
	patience time.Duration

	mu       sync.Mutex
	changed  sync.Cond
	pending  []prefix // sequences still to run, each with all that begin with it
	working  int
	explored Explored
	failure  error
}

func (e *explorer[Tx]) isOver() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failure != nil
}

// exhaust runs sequences until all have been.
func (e *explorer[Tx]) exhaust(ctx context.Context, h contracttest.Harness[Tx], worker int) {
	for number := 0; ; number++ {
		e.mu.Lock()
		for len(e.pending) == 0 && e.working > 0 && e.failure == nil {
			e.changed.Wait()
		}
		if len(e.pending) == 0 || e.failure != nil || e.depth == 0 {
			e.mu.Unlock()
			return
		}
		begins := e.pending[len(e.pending)-1]
		e.pending = e.pending[:len(e.pending)-1]
		e.working++
		e.mu.Unlock()

		next := e.sequence(ctx, newRun(h, exhaustive, e.patience, fmt.Sprintf("%d-%d", worker, number)), "", e.depth,
			func(depth, count int) int {
				if depth < len(begins) {
					return min(begins[depth], count-1) // the clock may have taken one away
				}
				return 0
			})

		e.mu.Lock()
		e.working--
		chosen := prefix{}
		for depth, count := range next {
			if depth < len(begins) {
				chosen = append(chosen, begins[depth])
				continue
			}
			for other := 1; other < count; other++ {
				e.pending = append(e.pending, append(slices.Clone(chosen), other))
			}
			chosen = append(chosen, 0)
		}
		e.mu.Unlock()
		e.changed.Broadcast()
	}
}

// walk runs a random sequence.
func (e *explorer[Tx]) walk(ctx context.Context, h contracttest.Harness[Tx], seed uint64, length int) {
	choose := rand.New(rand.NewPCG(seed, 0))
	e.sequence(ctx, newRun(h, random, e.patience, fmt.Sprintf("seed-%d", seed)), fmt.Sprintf(" (seed %d)", seed), length,
		func(_, count int) int { return choose.IntN(count) })
}

// sequence runs one sequence and returns how many steps it could choose from each time.
func (e *explorer[Tx]) sequence(ctx context.Context, r *run[Tx], how string, length int, choose func(depth, count int) int) []int {
	var counts []int
	var err error
	for depth := 0; depth < length && err == nil && ctx.Err() == nil; depth++ {
		steps := r.steps()
		if len(steps) == 0 {
			break
		}
		counts = append(counts, len(steps))
		err = r.do(ctx, steps[choose(depth, len(steps))])
	}
	if closeErr := r.close(); err == nil {
		err = closeErr
	}
	if err == nil { // what is left would be in the way of the next sequence's purge
		err = r.clear()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.explored.Sequences++
	e.explored.Steps += len(r.trace)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil && e.failure == nil {
		e.failure = fmt.Errorf("store and model differ%s: %w\n  %s", how, err, strings.Join(r.trace, "\n  "))
	}
	return counts
}
