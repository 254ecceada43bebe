package contracttest

import (
	"context"
	"github.com/holdsend/holdsend-go"
)

// abortCases has the rules for Abort.
func abortCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "AbortFreesTheKey",
			rule: "Abort rolls the write back and frees the key at once: nothing of the attempt remains",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "aborted")
				b.abort(attempt)
				b.empty(scope())
				b.wrote("aborted", 0)
				next := b.begin(claimOf(scope()))
				b.write(next, "next")
				b.complete(next, response("done"), 0)
				b.wrote("aborted", 0)
				b.wrote("next", 1)
			},
		},
		{
			name: "AbortAfterCompleteDoesNothing",
			rule: "Abort does nothing after Complete returned nil",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "done")
				b.complete(attempt, answer(), 0)
				seen := b.findState(scope(), holdsend.StateCompleted)
				b.abort(attempt)
				b.abort(attempt)
				b.unchanged(scope(), seen)
				b.wrote("done", 1)
			},
		},
		{
			name: "AbortTwiceIsNoError",
			rule: "Abort twice is no error, and the second one does nothing",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "aborted")
				b.abort(attempt)
				b.abort(attempt)
				b.empty(scope())
				b.wrote("aborted", 0)
			},
		},
		{
			name: "AbortTwiceSparesTheNextClaim",
			rule: "Abort never touches a newer claim, which the key got after the first Abort freed it",
			run: func(b *bench[Tx]) {
				first := b.begin(claimOf(scope()))
				b.abort(first)
				next := b.begin(claimOf(scope()))
				b.write(next, "next")
				seen := b.find(scope())
				b.abort(first)
				b.unchanged(scope(), seen)
				b.complete(next, response("done"), 0)
				b.wrote("next", 1)
				seen = b.find(scope())
				b.abort(first)
				b.unchanged(scope(), seen)
			},
		},
		{
			name:  "AbortOfALostClaimSparesTheNewerClaim",
			rule:  "Abort never touches a newer claim, which took over from the attempt that is aborted, nor waits for it",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				dead := b.crashed(scope(), "dead")
				newer := b.takeOver(scope())
				b.write(newer, "newer")
				seen := b.find(scope())
				b.promptly("Abort of an attempt whose claim was taken over", func(ctx context.Context) {
					_ = dead.Abort(ctx) // whether a dead attempt can say anything is not the point
				})
				b.unchanged(scope(), seen)
				b.complete(newer, response("newer"), 0)
				b.wrote("newer", 1)
				b.wrote("dead", 0)
			},
		},
	}
}
