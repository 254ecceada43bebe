package contracttest

import (
	"context"
	"errors"

	"github.com/holdsend/holdsend-go"
)

// findCases has the rules for Find.
func findCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "FindNothing",
			rule: "Find returns ErrNotFound, and no record, where none stands",
			run: func(b *bench[Tx]) {
				b.empty(scope())
				b.begin(claimOf(scope()))
				b.empty(scopeOf("key-other"))
			},
		},
		{
			name: "FindAnyState",
			rule: "Find returns the record in any state, expired or not",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.findState(scope(), holdsend.StateClaimed)
				b.complete(attempt, responseOf("done", "note-1"), shortTTL)
				b.findState(scope(), holdsend.StateCompleted)
				b.findWhen(scope(), "expired", isExpired)
				gone := scopeOf("key-gone-1")
				b.completed(gone, responseOf("done", "note-2"), 0)
				b.tombstone(resource("note-2"))
				b.findState(gone, holdsend.StateGone)
			},
		},
		{
			name: "FindWaitsForNobody",
			rule: "Find does not wait for an attempt or a tombstone whose transaction is open",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "open")
				find := func(s holdsend.Scope, state holdsend.State) {
					b.promptly("Find", func(ctx context.Context) {
						if r, err := b.Store.Find(ctx, s); err != nil || r == nil || r.State != state {
							b.breaks("Find returned %s, error %v, want state %s", describe(r), err, state)
						}
					})
				}
				find(scope(), holdsend.StateClaimed)
				if b.SingleWriter { // the attempt has been looked at, and the tombstone comes after it
					b.complete(attempt, response("done"), 0)
				}
				deleted := scopeOf("key-deleted")
				b.completed(deleted, responseOf("done", "note-1"), 0)
				b.openTombstone(resource("note-1"), func() { find(deleted, holdsend.StateCompleted) })
				find(deleted, holdsend.StateGone)
			},
		},
		{
			name: "FindOnEndedContext",
			rule: "Find on a context that has ended returns an error, which is not ErrNotFound",
			run: func(b *bench[Tx]) {
				r, err := b.Store.Find(b.endedContext(), scope())
				if r != nil || err == nil || errors.Is(err, holdsend.ErrNotFound) {
					b.broken("returned %s, error %v", describe(r), err)
				}
			},
		},
	}
}
