package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
	"github.com/holdsend/holdsend-go/internal/pgproxy"
)

// The faults. Those that create makes itself are named in package service.
const (
	killService         = "SIGKILL of the service"
	stopService         = "SIGSTOP of the service, SIGCONT later"
	clientLeaves        = "client disconnects"
	terminateBackend    = "pg_terminate_backend"
	cancelBackend       = "pg_cancel_backend"
	killBackend         = "SIGKILL of a backend: Postgres restarts"
	crashDatabase       = "pg_ctl stop -m immediate, start"
	cutBeforeCommit     = "cut before the batch with COMMIT"
	cutInsideCommit     = "cut inside it: all but COMMIT arrives"
	delayCommit         = "cut, and COMMIT arrives later"
	loseCommitAnswer    = "COMMIT's answer lost, then cut"
	loseAnswers         = "all answers of its batch lost, then cut"
	silenceCommitAnswer = "COMMIT's answer lost, connection half open"
	cutConnection       = "connection cut"
	cutEverything       = "every connection cut"
	delayNetwork        = "network delayed by 20 to 100 ms"
	stallNetwork        = "network stalled for 1.5 s"
	readOnlyDatabase    = "database read-only for 0.3 s"
	fullPool            = "every connection of the pool taken for 0.3 s"
	restartPgBouncer    = "PgBouncer killed and started"
	busyWriter          = "another writer holds SQLite's lock for 0.3 s"
	fullDisk            = "the disk takes no more of SQLite's writes for 0.3 s"
	purgeRecords        = "PurgeExpired meanwhile"
	forgetOwner         = "ForgetOwner meanwhile"
	deleteResource      = "delete with tombstone meanwhile"
)

// A strike makes a fault happen. It returns an error if it could not.
type strike struct {
	do func(*target) error
	// alone: it hits everybody, so no other fault may be counted meanwhile.
	alone bool
	// before: at the commit, it strikes before COMMIT is sent, instead of while it is held on its way.
	before bool
}

func strikeFor(fault string) (strike, bool) {
	s, ok := map[string]strike{
		killService:      {do: (*target).killService},
		stopService:      {do: (*target).stopService},
		clientLeaves:     {do: (*target).clientLeaves},
		terminateBackend: {do: func(t *target) error { return t.signalBackend("pg_terminate_backend") }},
		cancelBackend:    {do: func(t *target) error { return t.signalBackend("pg_cancel_backend") }},
		killBackend:      {do: (*target).killBackend, alone: true},
		crashDatabase:    {do: func(t *target) error { return t.round.world.cluster.Crash() }, alone: true},
		restartPgBouncer: {do: func(t *target) error { return t.round.world.bouncer.Restart() }, alone: true},

		cutBeforeCommit: {do: func(t *target) error { return t.atProxy(pgproxy.Fault{Do: pgproxy.CutBeforeBatch}) }, before: true},
		cutInsideCommit: {do: func(t *target) error { return t.atProxy(pgproxy.Fault{Do: pgproxy.CutBeforeCommit}) }, before: true},
		delayCommit:     {do: (*target).delayCommit, before: true},
		loseCommitAnswer: {do: func(t *target) error {
			return t.atProxy(pgproxy.Fault{Do: pgproxy.LoseCommitAnswer})
		}, before: true},
		loseAnswers: {do: func(t *target) error { return t.atProxy(pgproxy.Fault{Do: pgproxy.LoseAnswers}) }, before: true},
		silenceCommitAnswer: {do: func(t *target) error {
			return t.atProxy(pgproxy.Fault{Do: pgproxy.LoseCommitAnswer, Silent: true})
		}, before: true},
		cutConnection: {do: func(t *target) error {
			if !t.round.world.proxy.CutBackend(t.message.Backend) {
				return errNothingThere
			}
			return nil
		}},
		cutEverything: {do: func(t *target) error { t.round.world.proxy.Cut(); return nil }},
		delayNetwork: {do: func(t *target) error {
			t.round.world.proxy.Pause(time.Duration(20+t.round.dice.below(80)) * time.Millisecond)
			return nil
		}, before: true},
		stallNetwork: {do: func(t *target) error {
			t.round.world.proxy.Pause(1500 * time.Millisecond)
			return nil
		}, before: true},

		readOnlyDatabase: {do: (*target).readOnlyDatabase, alone: true, before: true},
		fullPool:         {do: func(t *target) error { return t.fill(service.Fill) }, before: true},
		busyWriter:       {do: func(t *target) error { return t.fill(service.Fill) }, before: true},
		fullDisk:         {do: func(t *target) error { return t.fill(service.FillDisk) }, before: true},
		purgeRecords:     {do: (*target).purge},
		forgetOwner:      {do: (*target).forget},
		deleteResource:   {do: (*target).deleteResource},
	}[fault]
	return s, ok
}

// made says what the database must have said for a fault that create makes itself to count.
func made(fault, said string) bool {
	expected := map[string]string{
		service.MakeError: "", service.MakePanic: "", service.MakeUnavailable: "",
		service.MakeStatementTimeout: "57014",
		service.MakeLockTimeout:      "55P03",
		service.MakeIdleTimeout:      "25P03 connection lost",
		service.MakeDeadlock:         "40P01",
		service.MakeSerialization:    "40001",
	}[fault]
	return said == expected || said != "" && strings.Contains(expected, said)
}

var errNothingThere = errors.New("there was nothing to strike")

// A shot is a planned fault on its way.
type shot struct {
	planned
	number int
	leave  chan struct{} // closed: the client hangs up
	moveOn chan struct{} // closed: the client goes on without its answer
	done   chan struct{} // closed once it has struck, or could not

	mu    sync.Mutex
	armed bool // a request with it is under way and has not reached its step
	item  *item
	begun bool
	hit   bool // written before done is closed
}

func (s *shot) isAtRandom() bool { return s.step == atRandom }

// ask puts the fault into the headers of a request.
func (s *shot) ask(header http.Header) {
	if _, isStrike := strikeFor(s.fault); isStrike {
		header.Set(service.FaultHeader, fmt.Sprintf("%d %s", s.number, s.step))
	} else {
		header.Set(service.MakeHeader, fmt.Sprintf("%d %s", s.number, s.fault))
	}
}

// arm says that a request with the fault leaves; disarm, that its answer is there. begin says that it has reached its
// step: false if nobody waits for that any more.
func (s *shot) arm(i *item) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed, s.item = true, i
}

func (s *shot) disarm() (begun bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed = false
	return s.begun
}

// isUnderWay reports that the fault has begun and not ended. It never waits: see round.watch.
func (s *shot) isUnderWay() bool {
	if !s.mu.TryLock() {
		return true
	}
	defer s.mu.Unlock()
	return s.begun && !isClosed(s.done)
}

func (s *shot) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.armed || s.begun {
		return false
	}
	s.begun = true
	return true
}

// attemptUnderFire sends an item once, with a fault, and reports whether that has struck or could not.
func (r *round) attemptUnderFire(i *item, s *shot) (a answer, over bool) {
	lock, unlock := r.fire.RLock, r.fire.RUnlock
	if strike, _ := strikeFor(s.fault); strike.alone {
		lock, unlock = r.fire.Lock, r.fire.Unlock
	}
	lock()
	s.arm(i)
	a = r.attempt(i, s)
	if !s.disarm() {
		unlock()
		return a, false
	}
	r.background.Go(func() {
		defer unlock()
		<-s.done
		if !s.hit {
			r.missed(s)
		}
	})
	return a, true
}

// strikeAtRandom strikes at no step in particular.
func (r *round) strikeAtRandom(s *shot) {
	r.background.Go(func() {
		r.fire.RLock()
		defer r.fire.RUnlock()
		p := r.slots.pick(r.dice, nil)
		if p == nil {
			r.missed(s)
			return
		}
		strike, _ := strikeFor(s.fault)
		if err := strike.do(&target{round: r, process: p, shot: s, released: true}); err != nil {
			r.missed(s)
			return
		}
		r.report.hit(r.world.name, s.planned)
	})
}

// reported handles what a service reports.
func (r *round) reported(p *process, m service.Message) {
	switch m.Kind {
	case service.Failed:
		r.report.failed(m.Text)
	case service.Made:
		if s := r.shotNumber(m.Fault); s != nil && s.begin() {
			s.hit = made(s.fault, m.Text)
			if s.hit {
				r.report.hit(r.world.name, s.planned)
			}
			close(s.done)
		}
	case service.Reached:
		s := r.shotNumber(m.Fault)
		if s == nil || !s.begin() {
			p.send(service.Message{Kind: service.Go, Fault: m.Fault})
			return
		}
		r.background.Go(func() {
			defer close(s.done)
			strike, _ := strikeFor(s.fault)
			t := &target{round: r, process: p, message: m, shot: s}
			defer t.release()
			if err := t.strike(strike); err != nil {
				return
			}
			s.hit = true
			r.report.hit(r.world.name, s.planned)
		})
	}
}

// A target is a request that stands at the step at which it is to be struck.
type target struct {
	round    *round
	process  *process
	message  service.Message
	shot     *shot
	released bool
}

// release lets the request go on.
func (t *target) release() {
	if !t.released {
		t.released = true
		t.process.send(service.Message{Kind: service.Go, Fault: t.message.Fault})
	}
}

// strikeTimeout bounds the wait for a COMMIT to come by.
const strikeTimeout = 3 * time.Second

// strike strikes. At the commit, it does so while COMMIT is on its way: held by the proxy between the service and the
// database, and delivered afterwards. Half of the kills come when it was executed and its answer is on its way. Where there
// is no proxy, it strikes a moment after the library was told to commit.
func (t *target) strike(s strike) error {
	if t.message.Step != service.Committing || s.before {
		return s.do(t)
	}
	proxy := t.round.world.proxy
	if proxy == nil {
		t.release()
		time.Sleep(time.Duration(t.round.dice.below(2000)) * time.Microsecond)
		return s.do(t)
	}
	fault := pgproxy.Fault{Do: pgproxy.HoldCommit, Silent: true}
	if t.shot.fault == killService && t.round.dice.oneIn(2) {
		fault.Do = pgproxy.LoseCommitAnswer
	}
	held, err := t.inject(fault)
	if err != nil {
		return err
	}
	defer held.Release()
	return s.do(t)
}

// inject has the proxy make a fault at the COMMIT of the target, and waits until that has come by.
func (t *target) inject(fault pgproxy.Fault) (*pgproxy.Injected, error) {
	proxy, backend := t.round.world.proxy, t.message.Backend
	fault.When = func(b pgproxy.Batch) bool { return b.Backend == backend && b.EndsInCommit() }
	injected := proxy.Inject(fault)
	t.release()
	select {
	case <-injected.Done():
	case <-injected.Ended():
	case <-t.process.died:
	case <-time.After(strikeTimeout):
	}
	if !injected.Withdraw(proxy) { // it has met its COMMIT, whose connection another fault may end first
		select {
		case <-injected.Done():
		case <-injected.Ended():
		}
	}
	if !injected.Happened() {
		return nil, errNothingThere
	}
	return injected, nil
}

func (t *target) atProxy(fault pgproxy.Fault) error {
	_, err := t.inject(fault)
	return err
}

func (t *target) delayCommit() error {
	held, err := t.inject(pgproxy.Fault{Do: pgproxy.HoldCommit})
	if err != nil {
		return err
	}
	time.Sleep(time.Duration(t.round.dice.below(300)) * time.Millisecond)
	held.Release()
	return nil
}

func (t *target) killService() error { return t.process.kill() }

// stopService stops the service and has the client go on elsewhere. If another service answers it meanwhile although this
// one was in the middle of an attempt, that is a zombie when it wakes up.
func (t *target) stopService() error {
	if err := t.process.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	t.process.stopped.Store(true)
	defer t.process.stopped.Store(false)
	close(t.shot.moveOn)
	select {
	case <-t.shot.item.acknowledged:
		if t.round.world.proxy == nil {
			break // SQLite's lock is the sleeper's: nobody takes over, and what was answered is its own commit
		}
		switch t.message.Step {
		case service.Claimed, service.InCreate, service.Completing, service.Committing:
			t.round.report.zombie()
		}
	case <-time.After(zombieTimeout):
	case <-t.process.died:
	}
	return t.process.signal(syscall.SIGCONT)
}

// zombieTimeout is how long a service sleeps if nobody takes over: longer than maxIdle and a retry.
const zombieTimeout = 3 * time.Second

func (t *target) clientLeaves() error {
	close(t.shot.leave)
	time.Sleep(5 * time.Millisecond) // so that the service may notice before it goes on
	return nil
}

// signalBackend has the database end or cancel what it does for the target, or, where that has no transaction, for anybody.
func (t *target) signalBackend(function string) error {
	var struck bool
	backend := t.message.Server
	err := t.round.world.admin(t.round.ctx, func(ctx context.Context, db database) error {
		if backend != 0 {
			return db.QueryRow(ctx, "SELECT "+function+"($1::int)", backend).Scan(&struck)
		}
		return db.QueryRow(ctx, "SELECT "+function+"(pid) FROM pg_stat_activity WHERE "+ofServices+" ORDER BY random() LIMIT 1").Scan(&struck)
	})
	if err == nil && !struck {
		return errNothingThere
	}
	return err
}

func (t *target) killBackend() error {
	if t.message.Server == 0 {
		return errNothingThere
	}
	return syscall.Kill(int(t.message.Server), syscall.SIGKILL)
}

func (t *target) readOnlyDatabase() error {
	set := func(sql string) error {
		return t.round.world.admin(t.round.ctx, func(ctx context.Context, db database) error {
			if _, err := db.Exec(ctx, sql); err != nil {
				return err
			}
			_, err := db.Exec(ctx, "SELECT pg_reload_conf()")
			return err
		})
	}
	if err := set("ALTER SYSTEM SET default_transaction_read_only = on"); err != nil {
		return err
	}
	time.Sleep(50 * time.Millisecond) // so that it may be noticed before the request goes on
	t.release()
	time.Sleep(250 * time.Millisecond)
	return set("ALTER SYSTEM RESET default_transaction_read_only")
}

func (t *target) fill(what string) error {
	t.process.send(service.Message{Kind: what})
	time.Sleep(20 * time.Millisecond)
	return nil
}

// purge waits until the target's claim is old enough to be purged if it were not alive.
func (t *target) purge() error {
	time.Sleep(staleClaim + 50*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.round.ctx, patience)
	defer cancel()
	return t.round.call(ctx, t.process, http.MethodPost, service.Purge, "nobody")
}

// forget asks for the target's owner to be forgotten, which waits for the target.
func (t *target) forget() error {
	i := t.shot.item
	i.mu.Lock()
	i.forgets++
	i.mu.Unlock()
	t.round.background.Go(func() {
		ctx, cancel := context.WithTimeout(t.round.ctx, patience)
		defer cancel()
		_ = t.round.call(ctx, t.process, http.MethodPost, service.Forget, i.owner) // it may have worked all the same
	})
	time.Sleep(20 * time.Millisecond)
	return nil
}

func (t *target) deleteResource() error {
	if !t.round.delete(t.shot.item) {
		return errNothingThere
	}
	return nil
}
