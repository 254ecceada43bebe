package contracttest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/holdsend/holdsend-go"
)

// beginCases has the rules for claiming an empty scope, and for what Begin returns.
func beginCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "BeginClaims",
			rule: "Begin on an empty scope returns an attempt, and a claimed record with its fingerprint and a claim id stands",
			run: func(b *bench[Tx]) {
				b.begin(claimOf(scope()))
				r := b.findState(scope(), holdsend.StateClaimed)
				switch {
				case r.Scope != scope():
					b.broken("the record has another scope")
				case r.Fingerprint != fingerprint:
					b.broken("the record has another fingerprint")
				case r.ClaimID == "":
					b.broken("the record has no claim id")
				case r.ClaimedAt.IsZero():
					b.broken("the record does not say when it was claimed")
				case r.CompletedAt != nil || r.ExpiresAt != nil || r.Expired:
					b.broken("a claimed record has a time of completion or an expiry")
				}
				if difference := sameAnswer(r.Response, holdsend.Response{}); difference != "" {
					b.broken("a claimed record has an answer: %s", difference)
				}
			},
		},
		{
			name: "BeginReturnsExactlyOne",
			rule: exactlyOneRule,
			run: func(b *bench[Tx]) {
				// tryBegin, which every case uses, looks at what comes back: this one has a call of each kind.
				attempt := b.begin(claimOf(scope()))
				seen := b.standing(claimOf(scope()))
				refused := claimOf(scope())
				refused.Replace = seen
				b.standing(refused)
				ended := claimOf(scopeOf("key-ended"))
				if _, _, err := b.tryBegin(b.endedContext(), ended); err == nil {
					b.broken("Begin on an ended context returned no error")
				}
				if _, record, _ := b.tryBegin(b.context(), claimOf(holdsend.Scope{})); record != nil {
					b.broken("Begin on a scope without names returned %s", describe(record))
				}
				b.complete(attempt, response("done"), 0)
				b.standing(claimOf(scope()))
			},
		},
		{
			name: "BeginOneWinnerOfMany",
			rule: "of many simultaneous calls of Begin for one scope, one gets the attempt and the others its record",
			run: func(b *bench[Tx]) {
				for round := range 4 {
					s := scopeOf("key-round-" + string(rune('a'+round)))
					winners, records := b.race(64, func() (holdsend.Attempt[Tx], *holdsend.Record, error) {
						return b.tryBegin(b.context(), claimOf(s))
					})
					if len(winners) != 1 {
						b.broken("%d attempts were handed out", len(winners))
					}
					id := b.find(s).ClaimID
					for _, r := range records {
						if r.State != holdsend.StateClaimed || r.ClaimID != id || r.Fingerprint != fingerprint {
							b.broken("a loser got %s that is not the winner's claim", describe(r))
						}
					}
					b.complete(winners[0], response("done"), 0)
				}
			},
		},
		{
			name: "BeginShowsTheClaim",
			rule: "a claim is visible to Find and to Begin, with its fingerprint, before Begin returns, and stays so while the attempt runs",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				check := func() {
					other := claimOf(scope())
					other.Fingerprint = otherFingerprint
					found, stood := b.find(scope()), b.standing(other)
					for _, r := range []*holdsend.Record{found, stood} {
						if r.State != holdsend.StateClaimed || r.Fingerprint != fingerprint {
							b.broken("saw %s, want the claim with its own fingerprint", describe(r))
						}
					}
					if found.ClaimID != stood.ClaimID {
						b.broken("Find and Begin showed different claim ids")
					}
				}
				check()
				b.write(attempt, "visible")
				check()
			},
		},
		{
			name: "BeginGivesNewClaimIDs",
			rule: "each claim has a claim id of its own, even of the same scope",
			run: func(b *bench[Tx]) {
				seen := map[string]bool{}
				for range 10 {
					attempt := b.begin(claimOf(scope()))
					seen[b.find(scope()).ClaimID] = true
					b.abort(attempt)
				}
				if len(seen) != 10 {
					b.broken("10 claims had %d claim ids", len(seen))
				}
			},
		},
		{
			name: "BeginNeverReplacesUnasked",
			rule: "without Replace, Begin returns an expired or abandoned record like any other",
			run: func(b *bench[Tx]) {
				b.expired(scope(), response("kept"))
				if r := b.standing(claimOf(scope())); !r.Expired {
					b.broken("Begin showed %s, want it expired", describe(r))
				}
				b.findState(scope(), holdsend.StateCompleted)

				running := scopeOf("key-running")
				b.begin(claimOf(running))
				b.findWhen(running, "abandoned", isAbandoned)
				if r := b.standing(claimOf(running)); !r.Abandoned {
					b.broken("Begin showed %s, want it abandoned", describe(r))
				}
			},
		},
		{
			name:  "BeginNeverTakesOverUnasked",
			rule:  "without Replace, Begin returns the record of a dead attempt like any other",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				b.crashed(scope(), "dead")
				seen := b.findWhen(scope(), "abandoned", isAbandoned)
				if r := b.standing(claimOf(scope())); r.ClaimID != seen.ClaimID {
					b.broken("the claim was replaced")
				}
			},
		},
		{
			name: "BeginDoesNotWaitForAnAttempt",
			rule: "Begin does not wait for another attempt that is running",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "open")
				b.promptly("Begin beside a running attempt", func(ctx context.Context) { b.mustStand(ctx, claimOf(scope())) })
				b.findWhen(scope(), "abandoned", isAbandoned)
				replace := claimOf(scope())
				replace.Replace = b.find(scope())
				b.promptly("Begin with Replace beside a running attempt", func(ctx context.Context) { b.mustStand(ctx, replace) })
				if b.alone("Begin of another key beside a running attempt") {
					return
				}
				b.promptly("Begin of another key beside a running attempt", func(ctx context.Context) {
					if attempt, _, err := b.tryBegin(ctx, claimOf(scopeOf("key-other"))); attempt == nil {
						b.breaks("Begin of another key: %v", err)
					}
				})
			},
		},
		{
			name: "BeginDoesNotWaitForATombstone",
			rule: "Begin does not wait for a tombstone whose transaction is open, and sees the record as it was",
			run: func(b *bench[Tx]) {
				seen := b.completed(scope(), responseOf("kept", "note-1"), 0)
				b.openTombstone(resource("note-1"), func() {
					b.promptly("Begin beside an open tombstone", func(ctx context.Context) {
						if r := b.mustStand(ctx, claimOf(scope())); r != nil && r.State != holdsend.StateCompleted {
							b.breaks("saw %s, want it completed until the deleting transaction commits", describe(r))
						}
					})
					replace := claimOf(scope())
					replace.Replace = seen
					b.promptly("Begin with Replace beside an open tombstone", func(ctx context.Context) { b.mustStand(ctx, replace) })
				})
			},
		},
		{
			name:  "BeginDoesNotWaitForACompletion",
			rule:  "Begin does not wait for a completion whose commit is under way, and sees the claim until it is done",
			needs: needsHoldCommit,
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.holdingCommit(attempt, "held", func() {
					replace := claimOf(scope())
					replace.Replace = b.findWhen(scope(), "abandoned", isAbandoned)
					for _, c := range []holdsend.Claim{claimOf(scope()), replace} {
						b.promptly("Begin beside an open completion", func(ctx context.Context) {
							if r := b.mustStand(ctx, c); r != nil && r.State != holdsend.StateClaimed {
								b.breaks("saw %s before its commit was done", describe(r))
							}
						})
					}
				})
				b.findState(scope(), holdsend.StateCompleted)
				b.wrote("held", 1)
			},
		},
		{
			name: "BeginBesideCompletions",
			rule: "Begin at the very moment of a completion returns the record, claimed or completed, and never fails or claims",
			run: func(b *bench[Tx]) {
				for round := range 30 {
					s := scopeOf("key-round-" + string(rune('A'+round)))
					attempt := b.begin(claimOf(s))
					wait := b.completing(attempt, response("done"))
					winners, records := b.race(8, func() (holdsend.Attempt[Tx], *holdsend.Record, error) {
						return b.tryBegin(b.context(), claimOf(s))
					})
					wait()
					if len(winners) > 0 {
						b.broken("Begin returned an attempt for a scope that was being completed")
					}
					for _, r := range records {
						if r.State == holdsend.StateCompleted && string(r.Response.Body) != "done" {
							b.broken("Begin showed a completed record without its answer")
						}
					}
				}
			},
		},
		{
			name: "BeginBesideForgetOwner",
			rule: "a claim lost before Begin returns is no error: Begin starts over, and what it returns can complete",
			run: func(b *bench[Tx]) {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				var forgetting sync.WaitGroup
				defer forgetting.Wait()
				defer cancel()
				forgetting.Go(func() {
					for ctx.Err() == nil {
						if _, err := b.Store.ForgetOwner(ctx, scope().Owner); err != nil && ctx.Err() == nil {
							b.breaks("ForgetOwner: %v", err)
							return
						}
					}
				})
				for range 60 {
					attempt := b.begin(claimOf(scope()))
					b.write(attempt, "beside")
					b.complete(attempt, response("done"), 0)
					// The next round needs the scope free, which the other goroutine sees to.
					b.eventually("ForgetOwner in a loop did not delete a completed record", func() bool {
						_, err := b.Store.Find(b.context(), scope())
						return errors.Is(err, holdsend.ErrNotFound)
					})
				}
				b.wrote("beside", 60)
			},
		},
		{
			name: "BeginOnEndedContext",
			rule: "Begin on a context that has ended returns an error and leaves no claim",
			run: func(b *bench[Tx]) {
				if attempt, record, err := b.tryBegin(b.endedContext(), claimOf(scope())); err == nil {
					b.broken("returned attempt %t, record %t", attempt != nil, record != nil)
				}
				b.empty(scope())
				b.complete(b.begin(claimOf(scope())), response("done"), 0)
			},
		},
		{
			name: "BeginContextBoundsBeginAlone",
			rule: "an attempt and its transaction outlive the context of their Begin",
			run: func(b *bench[Tx]) {
				ctx, cancel := context.WithTimeout(context.Background(), b.patience)
				defer cancel()
				attempt, _, err := b.tryBegin(ctx, claimOf(scope()))
				if attempt == nil {
					b.broken("Begin on an empty scope: %v", err)
				}
				b.write(attempt, "outlives")
				cancel()
				// What the end of the context sets off comes in its own time, if it comes.
				b.within(100*time.Millisecond, func() bool {
					b.findState(scope(), holdsend.StateClaimed)
					return false
				})
				b.write(attempt, "outlives")
				b.complete(attempt, response("done"), 0)
				b.wrote("outlives", 2)
				b.findState(scope(), holdsend.StateCompleted)
			},
		},
		{
			name: "AbandonedIsAMatterOfAge",
			rule: "a claim is not abandoned when it is new, becomes so with age although its attempt lives, and no other record ever is",
			run: func(b *bench[Tx]) {
				fresh := false
				for range 200 { // on a slow machine a claim may have aged before anybody looks
					attempt := b.begin(claimOf(scope()))
					fresh = !b.find(scope()).Abandoned
					b.abort(attempt)
					if fresh {
						break
					}
				}
				if !fresh {
					b.broken("every new claim was abandoned")
				}
				attempt := b.begin(claimOf(scope()))
				b.findWhen(scope(), "abandoned", isAbandoned)
				if r := b.standing(claimOf(scope())); !r.Abandoned || r.Expired {
					b.broken("Begin showed %s, want it abandoned and not expired", describe(r))
				}
				b.complete(attempt, response("done"), 0)
				if r := b.find(scope()); r.Abandoned {
					b.broken("a completed record is abandoned")
				}
			},
		},
	}
}

// race calls begin from many goroutines at once, and returns what came back. Errors break the rule.
func (b *bench[Tx]) race(callers int, begin func() (holdsend.Attempt[Tx], *holdsend.Record, error)) ([]holdsend.Attempt[Tx], []*holdsend.Record) {
	b.t.Helper()
	var (
		mu       sync.Mutex
		attempts []holdsend.Attempt[Tx]
		records  []*holdsend.Record
		wait     sync.WaitGroup
		start    = make(chan struct{})
	)
	for range callers {
		wait.Go(func() {
			<-start
			attempt, record, err := begin()
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				b.breaks("one of %d simultaneous calls of Begin: %v", callers, err)
			case attempt != nil:
				attempts = append(attempts, attempt)
			case record != nil:
				records = append(records, record)
			}
		})
	}
	close(start)
	wait.Wait()
	return attempts, records
}

// mustStand is standing for goroutines other than the case's own.
func (b *bench[Tx]) mustStand(ctx context.Context, c holdsend.Claim) *holdsend.Record {
	attempt, record, err := b.tryBegin(ctx, c)
	switch {
	case err != nil:
		b.breaks("Begin on a scope that is taken: %v", err)
	case attempt != nil:
		b.breaks("Begin on a scope that is taken returned an attempt")
	}
	return record
}

// openTombstone calls beside while a transaction that turned one record of r is open, and then commits it.
func (b *bench[Tx]) openTombstone(r holdsend.Resource, beside func()) {
	b.t.Helper()
	err := b.Store.InTx(b.context(), func(ctx context.Context, tx Tx) error {
		turned, err := b.Store.TombstoneResource(ctx, tx, r)
		if err != nil {
			return err
		}
		if turned != 1 {
			b.breaks("TombstoneResource turned %d records, want 1", turned)
		}
		beside()
		return nil
	})
	if err != nil {
		b.broken("the deleting transaction: %v", err)
	}
}

// holdingCommit has attempt write something, completes it, calls beside while its commit is held back, and waits for the
// completion.
func (b *bench[Tx]) holdingCommit(attempt holdsend.Attempt[Tx], write string, beside func()) {
	b.t.Helper()
	release, err := b.HoldCommit(b.context(), attempt.Tx())
	if err != nil {
		b.t.Fatalf("contracttest: Harness.HoldCommit: %v", err)
	}
	defer release() // if the write ends the case
	b.write(attempt, write)
	done := make(chan struct{})
	var completeErr error
	// Longer than a step: beside takes several.
	ctx, cancel := context.WithTimeout(context.Background(), 5*b.patience)
	go func() {
		defer cancel()
		defer close(done)
		completeErr = attempt.Complete(ctx, holdsend.Completion{Response: response("done")})
	}()
	defer func() { <-done }()
	defer release() // before the wait above, also when beside ends the case
	beside()
	select {
	case <-done:
		b.broken("Complete returned before its commit could: %v", completeErr)
	default:
	}
	release()
	<-done
	if completeErr != nil {
		b.broken("Complete whose commit took a while: %v", completeErr)
	}
}
