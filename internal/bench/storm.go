package main

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

const (
	duplicates   = 50 // of each key, the first attempt among them
	stormKeys    = 4
	stormClients = 4 // that create other notes meanwhile
)

// A counter counts what waiting duplicates ask of the database: each look takes a connection for one query.
type counter struct {
	*pgxpool.Pool
	looks atomic.Int64
}

type waiting struct{} // marks a waiter's context

func (c *counter) Acquire(ctx context.Context) (*pgxpool.Conn, error) {
	if ctx.Value(waiting{}) != nil {
		c.looks.Add(1)
	}
	return c.Pool.Acquire(ctx)
}

// newStore returns a store that counts, as one process of a service has it. Several at one place are several processes.
func (b *bench) newStore(url string, connections int) (*holdsend.PostgresStore, *counter) {
	pool := &counter{Pool: b.pool(url, connections)}
	pgtest.Exec(b, pool, holdsend.PostgresSchema(nil))
	store, err := holdsend.NewPostgresStore(pool, nil)
	b.check(err)
	return store, pool
}

// A crowd is one key's first attempt, whose create takes as long as it is told, and the duplicates that wait for it.
type crowd struct {
	release func()           // lets create end
	first   func() time.Time // waits for the first attempt's answer, and returns when it came
	rest    func() []time.Time
}

// gather starts a crowd: the first attempt on one store, n duplicates on another, which may be the same.
func (b *bench) gather(first, rest holdsend.Store[pgx.Tx], key string, n int) crowd {
	started, released := make(chan struct{}), make(chan struct{})
	request := requestOf(owner, key)
	request.Wait = time.Minute
	var answered time.Time
	times := make([]time.Time, n)
	var failed atomic.Pointer[error]
	fail := func(err error) { failed.CompareAndSwap(nil, &err) }
	var winner, waiters sync.WaitGroup
	begun := sync.OnceFunc(func() { close(started) })
	winner.Go(func() {
		defer begun()
		answer, err := holdsend.HandleIdempotent(b.ctx, first, request, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			begun()
			<-released
			return createNote(ctx, tx, in)
		})
		answered = time.Now()
		if err != nil || answer.Outcome != holdsend.OutcomeCreated {
			fail(fmt.Errorf("the first attempt ended with %q: %w", answer.Outcome, err))
		}
	})
	<-started
	ctx := context.WithValue(b.ctx, waiting{}, true)
	for i := range n {
		waiters.Go(func() {
			answer, err := holdsend.HandleIdempotent(ctx, rest, request, createNote)
			times[i] = time.Now()
			if err != nil || answer.Outcome != holdsend.OutcomeReplayed || answer.Status != http.StatusCreated {
				fail(fmt.Errorf("a duplicate ended with %q: %w", answer.Outcome, err))
			}
		})
	}
	check := func() {
		if err := failed.Load(); err != nil {
			b.Fatal(*err)
		}
	}
	return crowd{
		release: sync.OnceFunc(func() { close(released) }),
		first:   func() time.Time { winner.Wait(); check(); return answered },
		rest:    func() []time.Time { waiters.Wait(); check(); return times },
	}
}

var places = []struct {
	name    string
	another bool
}{{"in the same process", false}, {"in another process", true}}

// measureStorms lets creates go on beside a storm and without one, in turns.
func measureStorms(b *bench) []table {
	t := table{rows: [][]string{{"the duplicates wait", "queries per waiter and second", "unrelated creates keep"}}}
	length := max(2*b.setting.round, time.Second)
	if b.setting.quick {
		length = 2 * b.setting.round
	}
	for _, place := range places {
		b.within(func(b *bench) {
			url := b.place()
			store, pool := b.newStore(url, stormKeys+stormClients+extraConnections)
			rest, asked := store, pool
			if place.another {
				rest, asked = b.newStore(url, stormClients)
			}
			var next atomic.Int64
			unrelated := contender{"unrelated creates", func(n int64) error {
				return handle(b.ctx, store, owner, key(n), holdsend.OutcomeCreated)
			}}
			b.round(unrelated, stormClients, b.setting.round, &next)
			var kept, looks []float64
			for round := range b.setting.rounds {
				calm := b.round(unrelated, stormClients, length, &next)
				before, start := asked.looks.Load(), time.Now()
				var crowds []crowd
				for n := range stormKeys {
					crowds = append(crowds, b.gather(store, rest, fmt.Sprintf("storm-%d-%d", round, n), duplicates-1))
				}
				stormy := b.round(unrelated, stormClients, length, &next)
				n := asked.looks.Load() - before
				looks = append(looks, float64(n)/float64(stormKeys*(duplicates-1))/time.Since(start).Seconds())
				kept = append(kept, stormy/calm)
				for _, c := range crowds {
					c.release()
				}
				for _, c := range crowds {
					c.first()
					c.rest()
				}
			}
			t.add(place.name, spreadOf(looks).String(), spreadOf(kept).String())
		})
	}
	t.note("A storm is %d keys with %d duplicates each, all of which wait for a create that takes %s; %d clients create "+
		"other notes meanwhile. The second column counts the looks of the first %s, the claim that was tried first among "+
		"them; the third is throughput with the storm over throughput without it.", stormKeys, duplicates, length, stormClients, length)
	return []table{t}
}

// measureWaiters tells how long after the first attempt's answer its waiters have theirs.
func measureWaiters(b *bench) []table {
	const waiters = 8
	t := table{rows: [][]string{{"the duplicates wait", "answered after the first attempt, ms"}}}
	for _, place := range places {
		b.within(func(b *bench) {
			url := b.place()
			store, _ := b.newStore(url, extraConnections)
			rest := store
			if place.another {
				rest, _ = b.newStore(url, extraConnections)
			}
			var after []float64
			for round := range 3 * b.setting.rounds {
				c := b.gather(store, rest, fmt.Sprintf("waited-%d", round), waiters)
				select { // until all of them wait, and each at a moment of its own
				case <-time.After(100*time.Millisecond + time.Duration(round%7)*13*time.Millisecond):
				case <-b.ctx.Done():
				}
				c.release()
				first := c.first()
				for _, at := range c.rest() {
					after = append(after, at.Sub(first).Seconds()*1000)
				}
			}
			t.add(place.name, spreadOf(after).String())
		})
	}
	t.note("The median over %d crowds of %d waiters, and the quartiles.", 3*b.setting.rounds, waiters)
	return []table{t}
}
