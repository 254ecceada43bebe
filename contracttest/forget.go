package contracttest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdsend/holdsend-go"
)

// forgetCases has the rules for ForgetOwner.
func forgetCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "ForgetOwnerDeletesEveryRecord",
			rule: "ForgetOwner deletes every record of the owner in any state, says how many, and frees their keys",
			run: func(b *bench[Tx]) {
				other := scope()
				other.Operation = "photo.create"
				scopes := []holdsend.Scope{scope(), other, scopeOf("key-gone-1"), scopeOf("key-expired"), scopeOf("key-an-hour")}
				b.completed(scopes[0], response("kept"), 0)
				b.completed(scopes[1], response("kept"), 0)
				b.completed(scopes[2], responseOf("gone", "note-1"), 0)
				b.tombstone(resource("note-1"))
				b.expired(scopes[3], response("expired"))
				b.completed(scopes[4], response("kept"), time.Hour)
				if forgotten := b.forget(scope().Owner); forgotten != 5 {
					b.broken("ForgetOwner returned %d, want 5", forgotten)
				}
				for _, s := range scopes {
					b.empty(s)
				}
				b.complete(b.begin(claimOf(scope())), response("new"), 0)
			},
		},
		{
			name:  "ForgetOwnerDeletesDeadClaims",
			rule:  "ForgetOwner deletes the claims of dead attempts, however young, and the dead cannot complete afterwards",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				dead := b.crashed(scope(), "dead")
				if forgotten := b.forget(scope().Owner); forgotten != 1 {
					b.broken("ForgetOwner returned %d, want 1", forgotten)
				}
				b.empty(scope())
				if err := dead.Complete(b.context(), holdsend.Completion{Response: response("dead")}); err == nil {
					b.broken("a forgotten claim was completed")
				}
				b.empty(scope())
				b.wrote("dead", 0)
			},
		},
		{
			name: "ForgetOwnerSparesOthers",
			rule: "ForgetOwner touches no record and waits for no attempt of another owner",
			run: func(b *bench[Tx]) {
				b.completed(scope(), response("forgotten"), 0)
				var spared []holdsend.Scope
				for _, owner := range []string{"owner-2", "owner-10", "Owner-1", "owner-", "owner_1"} {
					s := scope()
					s.Owner = owner
					b.completed(s, response(owner), 0)
					spared = append(spared, s)
				}
				running := holdsend.Scope{Owner: "owner-2", Operation: "note.create", Key: "key-running"}
				attempt := b.begin(claimOf(running))
				alone := b.alone("ForgetOwner beside another owner's attempt")
				if alone {
					b.complete(attempt, response("done"), 0)
				}
				b.promptly("ForgetOwner beside another owner's attempt", func(ctx context.Context) {
					if forgotten, err := b.Store.ForgetOwner(ctx, scope().Owner); err != nil || forgotten != 1 {
						b.breaks("ForgetOwner returned %d, error %v, want 1", forgotten, err)
					}
				})
				for _, s := range spared {
					if r := b.findState(s, holdsend.StateCompleted); string(r.Response.Body) != s.Owner {
						b.broken("another owner's answer changed")
					}
				}
				if !alone {
					b.complete(attempt, response("done"), 0)
				}
			},
		},
		{
			name: "ForgetOwnerNobody",
			rule: "ForgetOwner returns 0 and no error for an owner without records, again and again",
			run: func(b *bench[Tx]) {
				b.completed(scope(), response("once"), 0)
				if forgotten := b.forget("owner-unknown"); forgotten != 0 {
					b.broken("ForgetOwner returned %d", forgotten)
				}
				b.forget(scope().Owner)
				if forgotten := b.forget(scope().Owner); forgotten != 0 {
					b.broken("the second ForgetOwner returned %d", forgotten)
				}
			},
		},
		{
			name: "ForgetOwnerWaitsForLivingAttempts",
			rule: "ForgetOwner waits for the owner's living attempts: they complete, and their records are deleted then",
			run: func(b *bench[Tx]) {
				older := scopeOf("key-older-1")
				b.completed(older, response("older"), 0)
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "living")
				f := b.forgetting(context.Background())
				f.underway(older)
				f.mustWait()
				b.findState(scope(), holdsend.StateClaimed)
				b.write(attempt, "living")
				b.complete(attempt, response("done"), 0)
				b.wrote("living", 2)
				if forgotten, err := f.wait(); err != nil || forgotten != 2 {
					b.broken("ForgetOwner returned %d, error %v, want 2", forgotten, err)
				}
				b.empty(scope())
				b.empty(older)
			},
		},
		{
			name: "ForgetOwnerWaitsForAbandonedAttempts",
			rule: "ForgetOwner waits for a living attempt however old it is, also for one that aborts",
			run: func(b *bench[Tx]) {
				older := scopeOf("key-older-1")
				b.completed(older, response("older"), 0)
				attempt := b.begin(claimOf(scope()))
				b.findWhen(scope(), "abandoned", isAbandoned)
				f := b.forgetting(context.Background())
				f.underway(older)
				f.mustWait()
				b.abort(attempt)
				// An abort rolls back and frees the key, and ForgetOwner may get between the two: then it counts the claim.
				if forgotten, err := f.wait(); err != nil || forgotten < 1 || forgotten > 2 {
					b.broken("ForgetOwner returned %d, error %v, want 1 or 2", forgotten, err)
				}
				b.empty(scope())
			},
		},
		{
			name: "ForgetOwnerEndsWithItsContext",
			rule: "a waiting ForgetOwner ends with its context, and the attempt that it waited for goes on",
			run: func(b *bench[Tx]) {
				older := scopeOf("key-older-1")
				b.completed(older, response("older"), 0)
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "goes on")
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				f := b.forgetting(ctx)
				f.underway(older)
				f.mustWait()
				cancel()
				if _, err := f.wait(); err == nil {
					b.broken("ForgetOwner returned nil although an attempt was still running")
				}
				b.complete(attempt, response("done"), 0)
				b.wrote("goes on", 1)
				if r := b.findState(scope(), holdsend.StateCompleted); string(r.Response.Body) != "done" {
					b.broken("the record is not the attempt's")
				}
			},
		},
		{
			name: "ForgetOwnerHoldsNothingWhileItWaits",
			rule: "a waiting ForgetOwner holds up nothing else of the owner, and deletes no record that is younger than its call",
			run: func(b *bench[Tx]) {
				older, younger, running := scopeOf("key-older-1"), scopeOf("key-younger"), scopeOf("key-running")
				b.completed(older, response("older"), 0)
				attempt := b.begin(claimOf(scope()))
				f := b.forgetting(context.Background())
				if !f.underway(older) {
					// Without that sign the call may not have begun, and nothing would be younger than it.
					b.t.Logf("not run: %s (ForgetOwner deletes nothing before it waits, so that there is no telling when it began)", b.rule)
					return
				}
				b.promptly("an attempt beside a waiting ForgetOwner", func(ctx context.Context) {
					attempt, _, err := b.tryBegin(ctx, claimOf(younger))
					if attempt == nil {
						b.breaks("Begin beside a waiting ForgetOwner: %v", err)
						return
					}
					if err := b.Write(ctx, attempt.Tx(), "younger"); err != nil {
						b.breaks("Harness.Write: %v", err)
					}
					if err := attempt.Complete(ctx, holdsend.Completion{Response: response("younger")}); err != nil {
						b.breaks("Complete beside a waiting ForgetOwner: %v", err)
					}
				})
				still := b.begin(claimOf(running))
				f.mustWait() // long enough for it to look again, and to see the younger ones
				b.complete(attempt, response("done"), 0)
				if forgotten, err := f.wait(); err != nil || forgotten != 2 {
					b.broken("ForgetOwner returned %d, error %v, want 2", forgotten, err)
				}
				b.empty(scope())
				b.findState(younger, holdsend.StateCompleted)
				b.complete(still, response("done"), 0)
			},
		},
		{
			name:  "ForgetOwnerWaitsForACompletion",
			rule:  "ForgetOwner waits for a completion whose commit is under way",
			needs: needsHoldCommit,
			run: func(b *bench[Tx]) {
				older := scopeOf("key-older-1")
				b.completed(older, response("older"), 0)
				attempt := b.begin(claimOf(scope()))
				var f *forgetting[Tx]
				b.holdingCommit(attempt, "held", func() {
					f = b.forgetting(context.Background())
					f.underway(older)
					f.mustWait()
				})
				if forgotten, err := f.wait(); err != nil || forgotten != 2 {
					b.broken("ForgetOwner returned %d, error %v, want 2", forgotten, err)
				}
				b.wrote("held", 1)
				b.empty(scope())
			},
		},
		{
			name: "ForgetOwnerIllFormedIsRefused",
			rule: "an empty or ill-formed owner is an error of ForgetOwner, and deletes nothing",
			run: func(b *bench[Tx]) {
				b.completed(scope(), response("kept"), 0)
				for what, name := range illFormed() {
					if forgotten, err := b.Store.ForgetOwner(b.context(), name); err == nil || forgotten != 0 {
						b.broken("with an owner that is %s it returned %d, error %v", what, forgotten, err)
					}
				}
				b.findState(scope(), holdsend.StateCompleted)
			},
		},
		{
			name: "ForgetOwnerOnEndedContext",
			rule: "ForgetOwner on a context that has ended returns an error and deletes nothing",
			run: func(b *bench[Tx]) {
				b.completed(scope(), response("kept"), 0)
				if forgotten, err := b.Store.ForgetOwner(b.endedContext(), scope().Owner); err == nil || forgotten != 0 {
					b.broken("returned %d, error %v", forgotten, err)
				}
				b.findState(scope(), holdsend.StateCompleted)
			},
		},
	}
}

// forget calls ForgetOwner where nothing runs.
func (b *bench[Tx]) forget(owner string) int64 {
	b.t.Helper()
	forgotten, err := b.Store.ForgetOwner(b.context(), owner)
	if err != nil {
		b.broken("ForgetOwner: %v", err)
	}
	return forgotten
}

// A forgetting is a call of ForgetOwner that is under way.
type forgetting[Tx any] struct {
	b         *bench[Tx]
	done      chan struct{}
	forgotten int64
	err       error
}

// forgetting calls ForgetOwner elsewhere. It ends with the case at the latest.
func (b *bench[Tx]) forgetting(ctx context.Context) *forgetting[Tx] {
	f := &forgetting[Tx]{b: b, done: make(chan struct{})}
	ctx, cancel := context.WithCancel(ctx)
	b.t.Cleanup(func() {
		cancel()
		b.isDone(f.done, b.patience)
	})
	go func() {
		defer close(f.done)
		f.forgotten, f.err = b.Store.ForgetOwner(ctx, scope().Owner)
	}()
	return f
}

// underway waits for a sign that the call has begun: that it deleted the record at s. A store that waits before it
// deletes anything gives none; the case goes on after a while all the same.
func (f *forgetting[Tx]) underway(s holdsend.Scope) bool {
	return f.b.within(min(f.b.patience, 2*time.Second), func() bool {
		_, err := f.b.Store.Find(f.b.context(), s)
		return errors.Is(err, holdsend.ErrNotFound)
	})
}

// mustWait checks for a while that the call has not returned.
func (f *forgetting[Tx]) mustWait() {
	f.b.t.Helper()
	if f.b.isDone(f.done, 100*time.Millisecond) {
		f.b.broken("ForgetOwner returned %s although an attempt of the owner was still running", f.result())
	}
}

// wait returns what the call returned.
func (f *forgetting[Tx]) wait() (int64, error) {
	f.b.t.Helper()
	if !f.b.isDone(f.done, f.b.patience) {
		f.b.broken("ForgetOwner did not return within %v", f.b.patience)
	}
	return f.forgotten, f.err
}

func (f *forgetting[Tx]) result() string { return fmt.Sprintf("%d, error %v", f.forgotten, f.err) }
