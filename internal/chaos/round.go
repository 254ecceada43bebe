package main

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

const (
	// clients is how many send at once. Faults strike several of them at a time.
	clients = 10

	// answerWithin is how long an item may take once the faults have stopped. After that it is stuck.
	answerWithin = time.Minute

	// quiet is how long no item at all may be answered. After that no more are sent.
	quiet = 20 * time.Second

	// owners is how many people share a world.
	owners = 20
)

// A round sends items to one world, with faults, and judges what came of them.
type round struct {
	world  *world
	number int
	report *report
	dice   *dice
	began  time.Time
	ctx    context.Context // ends when items may take no longer
	http   *http.Client
	slots  *slots

	attempts   atomic.Int64
	background sync.WaitGroup // answers that nobody waits for, and strikes
	fire       sync.RWMutex   // held while a fault is under way; alone, by one that hits everybody

	mu    sync.Mutex
	shots []*shot // by number
	spare []*shot // missed their item: for the next one
	items []*item
	next  int
}

// runRound runs one round and reports on it. stop ends it early. A round that is stuck fails t.
func runRound(t testing.TB, w *world, number, items int, faults []planned, dice *dice, rep *report, stop <-chan struct{}) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	services, kill := context.WithCancel(t.Context())
	defer kill()
	transport := &http.Transport{MaxIdleConnsPerHost: clients, DisableCompression: true}
	defer transport.CloseIdleConnections()
	r := &round{world: w, number: number, report: rep, dice: dice, began: time.Now(), ctx: ctx, http: &http.Client{Transport: transport}}
	r.makeItems(items, faults)
	r.slots = &slots{ctx: services, start: w.start, reached: r.reported, complain: func(why string) { rep.complain(why) }}

	ended := make(chan error, 1)
	go func() { ended <- r.run(t.Context(), stop, cancel, kill) }()
	if err := r.watch(ended); err != nil {
		t.Fatal(err)
	}
}

// run sends the items and judges what came of them. Each of its steps is named, for who waits in vain for its end.
func (r *round) run(ctx context.Context, stop <-chan struct{}, expire, kill func()) error {
	step := func(name string) { r.report.step.Store(fmt.Sprintf("%s, round %d: %s", r.world.name, r.number, name)) }
	step("empty the database")
	if err := r.world.empty(ctx, r.number); err != nil {
		return fmt.Errorf("empty the database: %w", err)
	}
	step("start the services")
	r.slots.open(len(r.world.poolSize))

	step("send the items")
	var workers sync.WaitGroup
	for range clients {
		workers.Go(func() {
			for i := r.take(stop); i != nil; i = r.take(stop) {
				r.carry(i)
				r.report.carried.Add(1)
			}
		})
	}
	allCarried := make(chan struct{})
	go func() {
		workers.Wait()
		close(allCarried)
	}()
	r.waitFor(allCarried, expire)
	step("wait for the last answers and faults")
	r.background.Wait()
	step("kill the services")
	kill()
	r.slots.running.Wait()

	step("read what the database holds")
	rows, err := r.world.rows(ctx)
	if err != nil {
		return fmt.Errorf("read what the database holds: %w", err)
	}
	step("judge")
	var histories []history
	for _, i := range r.items {
		histories = append(histories, i.history)
	}
	r.report.judged(r.world.name, histories, check(histories, rows), int(r.attempts.Load()), len(r.spare))
	return nil
}

// waitFor waits until all items are carried, or have had their time: answerWithin after the last of them was taken, for no
// fault comes by then. Where nothing moves for quiet, the rest is not sent.
func (r *round) waitFor(allCarried <-chan struct{}, expire func()) {
	look := time.NewTicker(time.Second)
	defer look.Stop()
	carried, moved := r.report.carried.Load(), time.Now()
	var taken time.Time
	for {
		select {
		case <-allCarried:
			return
		case <-look.C:
		}
		if now := r.report.carried.Load(); now != carried {
			carried, moved = now, time.Now()
		}
		switch {
		case taken.IsZero() && r.isTaken():
			taken = time.Now()
		case taken.IsZero() && time.Since(moved) > quiet:
			r.giveUp()
		case !taken.IsZero() && time.Since(taken) > answerWithin:
			expire()
		}
		if r.world.proxy != nil {
			r.world.proxy.Reset() // it would remember everything
		}
	}
}

// makeItems makes what clients will send, and spreads the faults over all but the last tenth, so that the last ones are
// answered after the faults have stopped.
func (r *round) makeItems(n int, faults []planned) {
	struck := map[int]planned{}
	for k, f := range faults {
		at := k * n * 9 / 10 / len(faults)
		if _, taken := struck[at]; taken {
			r.spare = append(r.spare, r.newShot(f))
		} else {
			struck[at] = f
		}
	}
	var previous *item
	for k := range n {
		name := fmt.Sprintf("%d-%06d", r.number, k)
		operation := service.Notes
		if r.dice.oneIn(3) {
			operation = service.Orders
		}
		i := newItem(name, fmt.Sprintf("owner-%d", r.dice.below(owners)), operation, "key-of-"+name, once)
		f, isStruck := struck[k]
		switch {
		case isStruck && f.fault == forgetOwner:
			i.owner, i.rule = "forgotten-"+name, forgotten
		case isStruck && f.fault == deleteResource, !isStruck && r.dice.oneIn(40):
			i.operation, i.rule = service.Notes, deleted
		case !isStruck && r.dice.oneIn(40):
			i.operation, i.rule = service.Fleeting, fleeting
		case !isStruck && r.dice.oneIn(25) && previous != nil && previous.rule == once:
			i.owner, i.operation, i.key = previous.owner+"-other", previous.operation, previous.key
			r.report.behaved(anothersKey)
		case r.dice.oneIn(25):
			i.conflict = newItem(name+"-conflict", i.owner, i.operation, i.key, refused)
			r.report.behaved(otherContent)
		}
		if isStruck {
			i.shot = r.newShot(f)
		}
		if i.rule == once && r.dice.oneIn(6) {
			i.twins = true
			r.report.behaved(twoClients)
		}
		if i.rule == once && r.dice.oneIn(6) {
			i.resends = 1 + r.dice.below(2)
			r.report.behaved(sentAgain)
		}
		r.items = append(r.items, i)
		previous = i
	}
	for _, i := range r.items {
		if i.conflict != nil {
			r.items = append(r.items, i.conflict)
		}
	}
}

func (r *round) newShot(f planned) *shot {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &shot{planned: f, number: len(r.shots), leave: make(chan struct{}), moveOn: make(chan struct{}), done: make(chan struct{})}
	r.shots = append(r.shots, s)
	return s
}

func (r *round) shotNumber(n int) *shot {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n < 0 || n >= len(r.shots) {
		return nil
	}
	return r.shots[n]
}

// missed has a later item try the fault of a shot that did not strike. A fault that has a rule of its own for its item is
// not tried again.
func (r *round) missed(s *shot) {
	if s.fault == forgetOwner || s.fault == deleteResource {
		return
	}
	again := r.newShot(s.planned)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spare = append(r.spare, again)
}

// giveUp leaves out what was not sent yet. It is not judged.
func (r *round) giveUp() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, i := range r.items[r.next:] {
		if i.rule == refused { // as the item that it conflicts with
			break
		}
		i.waived = true
		if i.conflict != nil {
			i.conflict.waived = true
		}
	}
	r.next = len(r.items)
}

// take returns the next item, or nil if there is none or the run is to stop.
func (r *round) take(stop <-chan struct{}) *item {
	if isClosed(stop) {
		r.giveUp()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.next < len(r.items) {
		i := r.items[r.next]
		r.next++
		if i.rule == refused { // it comes after the item that it conflicts with
			continue
		}
		if i.shot == nil && len(r.spare) > 0 && r.next < len(r.items)*9/10 {
			i.shot, r.spare = r.spare[0], r.spare[1:]
		}
		return i
	}
	return nil
}

func (r *round) isTaken() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next == len(r.items)
}
