// Package contracttest tests whether a store keeps the contract of [holdsend.Store].
//
// Call [Run] from a test of your own. It runs one subtest per rule, each on a fresh harness, in parallel. The name of a
// subtest is stable, so that -run can pick it; its failure states the rule that was broken. What only the outside of a
// store can do (kill the holder of a claim, hold a commit back) is asked of the [Harness]; where it cannot, the cases
// that need it are logged as not run, and counted.
//
// The suite cannot test what becomes of a commit whose answer is lost: test that beside the store.
package contracttest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go"
)

// Harness is a store to test and what the suite needs around it. Each case gets its own: an empty store that no other
// case sees. A case keeps at most three transactions open at once, and may use Store, Write and Count from many
// goroutines. Whatever must be closed at the end belongs into t.Cleanup of the t that open got.
type Harness[Tx any] struct {
	// Store is the store, opened with a TakeOverAfter of 50 to 200 ms. Required.
	Store holdsend.Store[Tx]

	// Write writes something called name through tx. Required.
	Write func(ctx context.Context, tx Tx, name string) error

	// Count returns how many committed writes have that name, from outside of any transaction. Required.
	Count func(ctx context.Context, name string) (int, error)

	// Crash ends the holder of a as kill -9 would: its transaction is rolled back without a word to the store, and its
	// claim stays. The suite still calls a's methods afterwards, as a process that had only been cut off would. Nil:
	// the cases that need it are logged as not run.
	Crash func(ctx context.Context, a holdsend.Attempt[Tx]) error

	// HoldCommit makes the commit of tx wait, once it has begun, until release is called; release may be called more
	// than once. The suite calls HoldCommit before it writes through tx. In SQL, a deferred trigger that waits for a
	// lock does it. Nil: the cases that need it are logged as not run.
	HoldCommit func(ctx context.Context, tx Tx) (release func(), err error)

	// SingleWriter says that the database has one writing transaction at a time, as SQLite does: a second attempt, of
	// whatever key, waits until the first one ended. Cases then keep one transaction open at a time, and log what they
	// left out for that.
	SingleWriter bool

	// StaleClaim is how old a claim without a living attempt must be before the Store's PurgeExpired deletes it, if
	// that is at most 1 s. Zero: the case that needs it is logged as not run.
	StaleClaim time.Duration
}

// Run tests the store that open returns, one subtest per rule. It calls open once for each, with that subtest's t, and
// the subtests run in parallel with each other. The limits on time are generous: nothing fails because a machine is
// slow, unless a single step takes more than 30 s.
func Run[Tx any](t *testing.T, open func(t *testing.T) Harness[Tx]) {
	run(t, open, 30*time.Second)
}

// run is Run with a patience of its own: how long a step may take before it counts as one that never ends.
func run[Tx any](t *testing.T, open func(t *testing.T) Harness[Tx], patience time.Duration) {
	var notRun atomic.Int64
	t.Cleanup(func() {
		if n := notRun.Load(); n > 0 {
			t.Logf("%d cases of the store's contract were not run, each says why in its log", n)
		}
	})
	for _, c := range allCases[Tx]() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := open(t)
			if h.Store == nil || h.Write == nil || h.Count == nil {
				t.Fatal("contracttest: Harness.Store, Write and Count are required")
			}
			if missing := c.missing(h); missing != "" {
				notRun.Add(1)
				t.Logf("not run: %s (%s)", c.rule, missing)
				return
			}
			b := &bench[Tx]{Harness: h, t: t, rule: c.rule, patience: patience}
			t.Cleanup(b.close)
			c.run(b)
		})
	}
}

// A contractCase is one rule and how to break it.
type contractCase[Tx any] struct {
	name  string // of the subtest; stable
	rule  string // what a failure states
	needs needs
	run   func(b *bench[Tx])
}

// needs says which optional parts of the harness a case needs.
type needs int

const (
	needsCrash needs = 1 << iota
	needsHoldCommit
	needsStaleClaim
)

func (c contractCase[Tx]) missing(h Harness[Tx]) string {
	switch {
	case c.needs&needsCrash != 0 && h.Crash == nil:
		return "Harness.Crash is nil"
	case c.needs&needsHoldCommit != 0 && h.HoldCommit == nil:
		return "Harness.HoldCommit is nil"
	case c.needs&needsStaleClaim != 0 && h.StaleClaim == 0:
		return "Harness.StaleClaim is 0"
	}
	return ""
}

func allCases[Tx any]() []contractCase[Tx] {
	var all []contractCase[Tx]
	for _, cases := range [][]contractCase[Tx]{
		beginCases[Tx](), scopeCases[Tx](), replaceCases[Tx](), completeCases[Tx](), abortCases[Tx](), inTxCases[Tx](),
		findCases[Tx](), tombstoneCases[Tx](), forgetCases[Tx](), purgeCases[Tx](), protocolCases[Tx](),
	} {
		all = append(all, cases...)
	}
	return all
}

// A bench is one harness at work for one case. Methods that return no error end the case if there is one.
type bench[Tx any] struct {
	Harness[Tx]
	t        *testing.T
	rule     string
	patience time.Duration

	mu   sync.Mutex
	over bool // t is no longer to be used
}

// alone reports whether the store has one writer, and logs what the case leaves out if so.
func (b *bench[Tx]) alone(leavesOut string) bool {
	b.t.Helper()
	if b.SingleWriter {
		b.t.Logf("left out: %s (Harness.SingleWriter)", leavesOut)
	}
	return b.SingleWriter
}

// close keeps a goroutine that a store holds up for too long from reporting to a test that is over.
func (b *bench[Tx]) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
}

// broken ends the case: the store broke its rule. Call it from the case's own goroutine.
func (b *bench[Tx]) broken(format string, args ...any) {
	b.t.Helper()
	b.t.Fatalf("rule broken: %s\n\t%s", b.rule, fmt.Sprintf(format, args...))
}

// breaks is broken without ending the case, for other goroutines.
func (b *bench[Tx]) breaks(format string, args ...any) {
	b.t.Helper()
	b.reports(b.rule, format, args...)
}

// reports is breaks for a rule that is not the case's own.
func (b *bench[Tx]) reports(rule, format string, args ...any) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.over {
		b.t.Errorf("rule broken: %s\n\t%s", rule, fmt.Sprintf(format, args...))
	}
}

// context returns a context that bounds one step.
func (b *bench[Tx]) context() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), b.patience)
	b.t.Cleanup(cancel)
	return ctx
}

// endedContext returns a context that has been cancelled.
func (b *bench[Tx]) endedContext() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// promptly runs step elsewhere and ends the case if it does not return: what should not wait may not listen to its
// context either. The context that step gets ends first, so that a store that does listen has let go by then.
func (b *bench[Tx]) promptly(what string, step func(ctx context.Context)) {
	b.t.Helper()
	ctx := b.context()
	done := make(chan struct{})
	go func() {
		defer close(done)
		step(ctx)
	}()
	if !b.isDone(done, b.patience*3/2) {
		b.broken("%s did not return within %v", what, b.patience)
	}
	if ctx.Err() != nil {
		b.broken("%s returned only when its context ended, after %v", what, b.patience)
	}
}

// isDone waits until done is closed or the time is over, and reports which.
func (b *bench[Tx]) isDone(done <-chan struct{}, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// eventually calls probe until it returns true, and ends the case if that takes too long. It pauses between two looks.
func (b *bench[Tx]) eventually(what string, probe func() bool) {
	b.t.Helper()
	if !b.within(b.patience, probe) {
		b.broken("%s within %v", what, b.patience)
	}
}

// within calls probe until it returns true or the time is over, and reports which.
func (b *bench[Tx]) within(limit time.Duration, probe func() bool) bool {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(limit); ; <-ticker.C {
		if probe() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

// scope returns the scope that most cases use.
func scope() holdsend.Scope {
	return holdsend.Scope{Owner: "owner-1", Operation: "note.create", Key: "key-00000001"}
}

// scopeOf returns scope() with another key.
func scopeOf(key string) holdsend.Scope {
	s := scope()
	s.Key = key
	return s
}

// Fingerprints, as the protocol would hand them to a store.
const (
	fingerprint      = "hs1:1111111111111111111111111111111111111111111111111111111111111111"
	otherFingerprint = "hs1:2222222222222222222222222222222222222222222222222222222222222222"
)

func claimOf(s holdsend.Scope) holdsend.Claim {
	return holdsend.Claim{Scope: s, Fingerprint: fingerprint}
}

func response(body string) holdsend.Response {
	return holdsend.Response{Status: 201, Body: []byte(body)}
}

func responseOf(body, ref string) holdsend.Response {
	r := response(body)
	r.ResourceRef = ref
	return r
}

// exactlyOneRule holds for each call of Begin in any case.
const exactlyOneRule = "Begin returns exactly one of attempt, record and error; what it does not return is nil, and no nil pointer in an interface"

// tryBegin calls Begin and reports when it does not return exactly one of attempt, record and error. An attempt that it
// returns is aborted at the end of the case, which does nothing to one that ended. It may be called from any goroutine.
func (b *bench[Tx]) tryBegin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[Tx], *holdsend.Record, error) {
	b.t.Helper()
	attempt, record, err := b.Store.Begin(ctx, c)
	if isTypedNil(attempt) {
		b.reports(exactlyOneRule, "got a nil pointer in an interface")
		attempt = nil
	}
	returned := 0
	for _, is := range []bool{attempt != nil, record != nil, err != nil} {
		if is {
			returned++
		}
	}
	if returned != 1 {
		b.reports(exactlyOneRule, "got attempt %t, record %t, error %v", attempt != nil, record != nil, err)
	}
	if attempt != nil {
		b.t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), b.patience)
			defer cancel()
			_ = attempt.Abort(ctx) // it may have ended, or be dead: the case has looked at what matters
		})
	}
	if record != nil && record.Scope != c.Scope {
		b.reports("Begin returns the record that stands at the scope it was asked for", "got one of another scope")
	}
	return attempt, record, err
}

func isTypedNil(v any) bool {
	if v == nil {
		return false
	}
	switch r := reflect.ValueOf(v); r.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Func, reflect.Slice, reflect.Chan, reflect.Interface:
		return r.IsNil()
	}
	return false
}

// begin claims a scope that is free.
func (b *bench[Tx]) begin(c holdsend.Claim) holdsend.Attempt[Tx] {
	b.t.Helper()
	attempt, record, err := b.tryBegin(b.context(), c)
	if err != nil {
		b.broken("Begin on a scope that is free: %v", err)
	}
	if attempt == nil {
		b.broken("Begin on a scope that is free returned %s", describe(record))
	}
	return attempt
}

// standing calls Begin on a scope that is taken, and returns the record that stands there.
func (b *bench[Tx]) standing(c holdsend.Claim) *holdsend.Record {
	b.t.Helper()
	attempt, record, err := b.tryBegin(b.context(), c)
	if err != nil {
		b.broken("Begin on a scope that is taken: %v", err)
	}
	if attempt != nil {
		b.broken("Begin on a scope that is taken returned an attempt")
	}
	if record == nil {
		b.broken("Begin on a scope that is taken returned no record")
	}
	return record
}

// find returns the record that stands at s.
func (b *bench[Tx]) find(s holdsend.Scope) *holdsend.Record {
	b.t.Helper()
	record, err := b.Store.Find(b.context(), s)
	if err != nil {
		b.broken("Find on a scope with a record: %v", err)
	}
	if record == nil {
		b.broken("Find returned neither record nor error")
	}
	return record
}

// findState returns the record that stands at s, which must be in that state.
func (b *bench[Tx]) findState(s holdsend.Scope, state holdsend.State) *holdsend.Record {
	b.t.Helper()
	record := b.find(s)
	if record.State != state {
		b.broken("found %s, want state %s", describe(record), state)
	}
	return record
}

// empty checks that no record stands at s.
func (b *bench[Tx]) empty(s holdsend.Scope) {
	b.t.Helper()
	record, err := b.Store.Find(b.context(), s)
	if record != nil {
		b.broken("found %s, want no record", describe(record))
	}
	if !errors.Is(err, holdsend.ErrNotFound) {
		b.broken("Find on an empty scope: %v, want ErrNotFound", err)
	}
}

// findWhen polls Find until the record at s is as wanted, and returns it.
func (b *bench[Tx]) findWhen(s holdsend.Scope, what string, is func(*holdsend.Record) bool) *holdsend.Record {
	b.t.Helper()
	var record *holdsend.Record
	b.eventually("the record was not "+what, func() bool {
		record = b.find(s)
		return is(record)
	})
	return record
}

func isExpired(r *holdsend.Record) bool   { return r.Expired }
func isAbandoned(r *holdsend.Record) bool { return r.Abandoned }

func (b *bench[Tx]) write(a holdsend.Attempt[Tx], name string) {
	b.t.Helper()
	if err := b.Write(b.context(), a.Tx(), name); err != nil {
		b.broken("Harness.Write in a running attempt: %v", err)
	}
}

func (b *bench[Tx]) count(name string) int {
	b.t.Helper()
	n, err := b.Count(b.context(), name)
	if err != nil {
		b.t.Fatalf("contracttest: Harness.Count: %v", err)
	}
	return n
}

// wrote checks how many committed writes have that name.
func (b *bench[Tx]) wrote(name string, want int) {
	b.t.Helper()
	if got := b.count(name); got != want {
		b.broken("%d committed writes of %q, want %d", got, name, want)
	}
}

func (b *bench[Tx]) complete(a holdsend.Attempt[Tx], r holdsend.Response, ttl time.Duration) {
	b.t.Helper()
	if err := a.Complete(b.context(), holdsend.Completion{Response: r, TTL: ttl}); err != nil {
		b.broken("Complete of an attempt that holds its claim: %v", err)
	}
}

// completing completes a elsewhere, and returns a function that waits for it. The case does not end before.
func (b *bench[Tx]) completing(a holdsend.Attempt[Tx], r holdsend.Response) (wait func()) {
	b.t.Helper()
	ctx := b.context()
	started, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		close(started)
		if err := a.Complete(ctx, holdsend.Completion{Response: r}); err != nil {
			b.breaks("Complete beside other calls: %v", err)
		}
	}()
	wait = func() { b.isDone(done, b.patience*3/2) }
	b.t.Cleanup(wait)
	<-started
	return wait
}

func (b *bench[Tx]) abort(a holdsend.Attempt[Tx]) {
	b.t.Helper()
	if err := a.Abort(b.context()); err != nil {
		b.broken("Abort: %v", err)
	}
}

// completed leaves a completed record at s and returns it.
func (b *bench[Tx]) completed(s holdsend.Scope, r holdsend.Response, ttl time.Duration) *holdsend.Record {
	b.t.Helper()
	b.complete(b.begin(claimOf(s)), r, ttl)
	return b.findState(s, holdsend.StateCompleted)
}

// shortTTL is for records that a case wants to expire.
const shortTTL = 50 * time.Millisecond

// expired leaves a record at s that is completed and expired, and returns it.
func (b *bench[Tx]) expired(s holdsend.Scope, r holdsend.Response) *holdsend.Record {
	b.t.Helper()
	b.complete(b.begin(claimOf(s)), r, shortTTL)
	return b.findWhen(s, "expired", isExpired)
}

// crashed leaves a claim at s whose holder died, and returns its attempt.
func (b *bench[Tx]) crashed(s holdsend.Scope, write string) holdsend.Attempt[Tx] {
	b.t.Helper()
	attempt := b.begin(claimOf(s))
	b.write(attempt, write)
	b.crash(attempt)
	return attempt
}

func (b *bench[Tx]) crash(a holdsend.Attempt[Tx]) {
	b.t.Helper()
	if err := b.Crash(b.context(), a); err != nil {
		b.t.Fatalf("contracttest: Harness.Crash: %v", err)
	}
}

// takeOver replaces the claim at s, whose holder died, as soon as the store lets it.
func (b *bench[Tx]) takeOver(s holdsend.Scope) holdsend.Attempt[Tx] {
	b.t.Helper()
	var attempt holdsend.Attempt[Tx]
	b.eventually("the claim of a dead attempt was not taken over", func() bool {
		c := claimOf(s)
		c.Replace = b.findWhen(s, "abandoned", isAbandoned)
		var err error
		if attempt, _, err = b.tryBegin(b.context(), c); err != nil {
			b.broken("Begin with Replace on the claim of a dead attempt: %v", err)
		}
		return attempt != nil
	})
	return attempt
}

// tombstone turns the records of r in a transaction of its own, and returns how many.
func (b *bench[Tx]) tombstone(r holdsend.Resource) int64 {
	b.t.Helper()
	var turned int64
	err := b.Store.InTx(b.context(), func(ctx context.Context, tx Tx) error {
		var err error
		turned, err = b.Store.TombstoneResource(ctx, tx, r)
		return err
	})
	if err != nil {
		b.broken("TombstoneResource in a transaction of its own: %v", err)
	}
	return turned
}

// resource names the resource ref of scope()'s owner and operation.
func resource(ref string) holdsend.Resource {
	return holdsend.Resource{Owner: scope().Owner, Operation: scope().Operation, Ref: ref}
}

// describe tells what matters of a record, without its answer.
func describe(r *holdsend.Record) string {
	if r == nil {
		return "no record"
	}
	return fmt.Sprintf("a record in state %q (expired %t, abandoned %t)", r.State, r.Expired, r.Abandoned)
}

// sameAnswer says how got differs from want, or nothing. A nil header or body equals an empty one.
func sameAnswer(got, want holdsend.Response) string {
	switch {
	case got.Status != want.Status:
		return fmt.Sprintf("status %d, want %d", got.Status, want.Status)
	case string(got.Body) != string(want.Body):
		return fmt.Sprintf("a body of %d bytes that differs from the %d bytes given to Complete", len(got.Body), len(want.Body))
	case got.ResourceRef != want.ResourceRef:
		return fmt.Sprintf("resource ref %q, want %q", got.ResourceRef, want.ResourceRef)
	case len(got.Header) != len(want.Header):
		return fmt.Sprintf("%d headers, want %d", len(got.Header), len(want.Header))
	}
	for name, values := range want.Header {
		kept := got.Header[name]
		if len(kept) != len(values) {
			return fmt.Sprintf("%d values of header %q, want %d", len(kept), name, len(values))
		}
		for i := range values {
			if kept[i] != values[i] {
				return fmt.Sprintf("header %q has value %q at %d, want %q", name, kept[i], i, values[i])
			}
		}
	}
	return ""
}

// unchanged checks that the record at s is as it was seen, answer included. Abandoned may have become true meanwhile.
func (b *bench[Tx]) unchanged(s holdsend.Scope, seen *holdsend.Record) {
	b.t.Helper()
	now := b.find(s)
	switch {
	case now.State != seen.State:
		b.broken("the record went from state %s to %s", seen.State, now.State)
	case now.ClaimID != seen.ClaimID:
		b.broken("the record's claim id changed")
	case now.Fingerprint != seen.Fingerprint:
		b.broken("the record's fingerprint changed")
	case !sameTime(now.ExpiresAt, seen.ExpiresAt):
		b.broken("the record's expiry changed")
	}
	if difference := sameAnswer(now.Response, seen.Response); difference != "" {
		b.broken("the record's answer changed: %s", difference)
	}
}

func sameTime(a, b *time.Time) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Equal(*b)
}
