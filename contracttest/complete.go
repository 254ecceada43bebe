package contracttest

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/holdsend/holdsend-go"
)

// completeCases has the rules for Complete, and for the answer that it keeps.
func completeCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "CompleteIsAtomic",
			rule: "the write and the completed record are visible together once Complete returned nil, and neither before",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "atomic")
				b.wrote("atomic", 0)
				claimed := b.findState(scope(), holdsend.StateClaimed)
				b.complete(attempt, response("done"), 0)
				b.wrote("atomic", 1)
				r := b.findState(scope(), holdsend.StateCompleted)
				switch {
				case r.ClaimID != claimed.ClaimID:
					b.broken("completion changed the claim id")
				case r.Fingerprint != fingerprint:
					b.broken("completion changed the fingerprint")
				case !r.ClaimedAt.Equal(claimed.ClaimedAt):
					b.broken("completion changed when the claim was made")
				case r.CompletedAt == nil || r.CompletedAt.Before(r.ClaimedAt):
					b.broken("the record does not say when it was completed, or says before its claim")
				}
			},
		},
		{
			name:  "CompleteIsAtomicWhileItCommits",
			rule:  "neither the write nor the completed record is visible before the commit is done",
			needs: needsHoldCommit,
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.holdingCommit(attempt, "atomic", func() {
					b.within(100*time.Millisecond, func() bool { // the commit may take a moment to begin
						b.findState(scope(), holdsend.StateClaimed)
						b.wrote("atomic", 0)
						return false
					})
				})
				b.findState(scope(), holdsend.StateCompleted)
				b.wrote("atomic", 1)
			},
		},
		{
			name: "CompleteNeverShowsARecordWithoutItsWrite",
			rule: "whoever sees a completed record sees its write too",
			run: func(b *bench[Tx]) {
				for round := range 20 {
					s := scopeOf("key-round-" + string(rune('A'+round)))
					name := fmt.Sprintf("round %d", round)
					attempt := b.begin(claimOf(s))
					b.write(attempt, name)
					wait := b.completing(attempt, response("done"))
					b.eventually("the record was not completed", func() bool {
						if b.find(s).State != holdsend.StateCompleted {
							return false
						}
						b.wrote(name, 1)
						return true
					})
					wait()
				}
			},
		},
		{
			name: "CompleteKeepsTheStatus",
			rule: "the status is kept as it was given",
			run: func(b *bench[Tx]) {
				for _, status := range []int{200, 201, 202, 203, 204, 206, 226, 299} {
					b.keeps(fmt.Sprintf("key-status-%d", status), holdsend.Response{Status: status})
				}
			},
		},
		{
			name: "CompleteKeepsTheHeaders",
			rule: "headers are kept with all their values in order and byte for byte",
			run: func(b *bench[Tx]) {
				var every strings.Builder
				for i := range 256 {
					every.WriteByte(byte(i))
				}
				b.keeps("key-headers", holdsend.Response{Status: 201, Header: http.Header{
					"Content-Type":  {"application/json; charset=utf-8"},
					"Link":          {"<b>; rel=next", "<a>; rel=prev", "<b>; rel=next"},
					"X-Empty":       {""},
					"X-Two-Empty":   {"", ""},
					"X-Comma":       {"a, b", `"c", d`},
					"X-Colon":       {"a: b", ":", "a:b\r\nX-Injected: c"},
					"X-Quotes":      {`'"\`, `{"a":["b"]}`, "$1 %s ?"},
					"X-Spaces":      {" a ", "\ta\t"},
					"X-Latin-1":     {"caf\xe9", "\x80\x81\xfe\xff"},
					"X-Every-Byte":  {every.String()},
					"X-Utf-8":       {"語 🙂 é e\u0301 \u2028"},
					"X-Long":        {strings.Repeat("v", 16<<10)},
					"x-as-it-is":    {"lower"},
					"X-AS-IT-IS":    {"upper"},
					"X-Look-A-Like": {"null", "NULL", "[]", "0"},
				}})
			},
		},
		{
			name: "CompleteKeepsTheBody",
			rule: "the body is kept byte for byte",
			run: func(b *bench[Tx]) {
				every := make([]byte, 256)
				for i := range every {
					every[i] = byte(i)
				}
				for name, body := range map[string][]byte{
					"none":       nil,
					"empty":      {},
					"a-nul":      {0},
					"every-byte": every,
					"text":       []byte("{\"a\" : 1e400,\r\n \"a\":\"\\u00e9\"}\n"),
					"escapes":    []byte(`\x00 \\x41 \101 '' "" $1 %s`),
					"one-mib":    bytes.Repeat(every, 4096),
				} {
					b.keeps("key-body-"+name, holdsend.Response{Status: 201, Body: body})
				}
			},
		},
		{
			name: "CompleteKeepsTheResourceRef",
			rule: "the resource ref is kept as it was given",
			run: func(b *bench[Tx]) {
				for i, ref := range []string{"", "note-1", " ", "'", "a/b?c=d&e", "語", strings.Repeat("r", 255), "NULL"} {
					b.keeps(fmt.Sprintf("key-ref-%d-0", i), responseOf("done", ref))
				}
			},
		},
		{
			name: "CompleteCopiesItsAnswer",
			rule: "an answer is copied on the way in: changing it after Complete changes nothing stored",
			run: func(b *bench[Tx]) {
				given := answer()
				b.complete(b.begin(claimOf(scope())), given, 0)
				spoil(given)
				r := b.findState(scope(), holdsend.StateCompleted)
				if difference := sameAnswer(r.Response, answer()); difference != "" {
					b.broken("the stored answer changed: %s", difference)
				}
			},
		},
		{
			name: "RecordsAreCopies",
			rule: "a record that is handed out is a copy: changing it changes nothing stored",
			run: func(b *bench[Tx]) {
				b.complete(b.begin(claimOf(scope())), answer(), time.Hour)
				for range 2 {
					for _, r := range []*holdsend.Record{b.find(scope()), b.standing(claimOf(scope()))} {
						if difference := sameAnswer(r.Response, answer()); difference != "" {
							b.broken("the stored answer changed: %s", difference)
						}
						if r.ExpiresAt == nil || time.Until(*r.ExpiresAt) < time.Minute || r.CompletedAt.IsZero() {
							b.broken("the stored times changed")
						}
						spoil(r.Response)
						*r.ExpiresAt, *r.CompletedAt = time.Time{}, time.Time{}
						r.State, r.Fingerprint, r.ClaimID = holdsend.StateGone, otherFingerprint, "spoiled"
					}
				}
				if r := b.findState(scope(), holdsend.StateCompleted); r.Fingerprint != fingerprint || r.ClaimID == "spoiled" {
					b.broken("the stored record changed")
				}
			},
		},
		{
			name: "CompleteTTL",
			rule: "a record expires its TTL after its completion, by the store's own clock",
			run: func(b *bench[Tx]) {
				r := b.completed(scope(), response("an hour"), time.Hour)
				if r.ExpiresAt == nil || r.CompletedAt == nil {
					b.broken("a record with a TTL has no expiry, or no time of completion")
				}
				if d := r.ExpiresAt.Sub(*r.CompletedAt) - time.Hour; d.Abs() > time.Minute {
					b.broken("the expiry of a record with a TTL of 1 h is off by %v", d)
				}
				if r.Expired {
					b.broken("a record with a TTL of 1 h is expired at once")
				}
				soon := scopeOf("key-soon-1")
				b.expired(soon, response("soon"))
				if r := b.standing(claimOf(soon)); !r.Expired {
					b.broken("Begin showed an expired record as not expired")
				}
			},
		},
		{
			name: "CompleteTTLCountsFromCompletion",
			rule: "the TTL counts from completion, not from the claim",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				claimed := b.findWhen(scope(), "abandoned", isAbandoned)
				b.complete(attempt, response("late"), time.Hour)
				r := b.findState(scope(), holdsend.StateCompleted)
				if r.ExpiresAt == nil || r.CompletedAt == nil {
					b.broken("a record with a TTL has no expiry, or no time of completion")
				}
				// An abandoned claim was at least 50 ms old, which a store's clock shows.
				if age := r.ExpiresAt.Sub(claimed.ClaimedAt); age < time.Hour+40*time.Millisecond {
					b.broken("the record expires %v after its claim, want more than its TTL of 1 h", age)
				}
			},
		},
		{
			name: "CompleteWithoutTTL",
			rule: "a record with a TTL of 0 has no expiry",
			run: func(b *bench[Tx]) {
				if r := b.completed(scope(), response("kept"), 0); r.ExpiresAt != nil || r.Expired {
					b.broken("the record has an expiry, or is expired")
				}
				if r := b.standing(claimOf(scope())); r.ExpiresAt != nil || r.Expired {
					b.broken("Begin showed an expiry")
				}
			},
		},
		{
			name: "CompleteTwiceIsAnError",
			rule: "Complete after Complete is an error and changes nothing",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "once")
				b.complete(attempt, response("first"), 0)
				seen := b.findState(scope(), holdsend.StateCompleted)
				if err := attempt.Complete(b.context(), holdsend.Completion{Response: response("second")}); err == nil {
					b.broken("Complete returned nil twice")
				}
				b.unchanged(scope(), seen)
				b.wrote("once", 1)
			},
		},
		{
			name: "CompleteAfterAbortIsAnError",
			rule: "Complete after Abort is an error, commits nothing and claims nothing",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "aborted")
				b.abort(attempt)
				if err := attempt.Complete(b.context(), holdsend.Completion{Response: response("done")}); err == nil {
					b.broken("Complete returned nil")
				}
				b.empty(scope())
				b.wrote("aborted", 0)
			},
		},
		{
			name: "CompleteAfterAbortSparesTheNextClaim",
			rule: "Complete after Abort is an error and touches no newer claim",
			run: func(b *bench[Tx]) {
				first := b.begin(claimOf(scope()))
				b.write(first, "first")
				b.abort(first)
				second := b.begin(claimOf(scope()))
				seen := b.find(scope())
				if err := first.Complete(b.context(), holdsend.Completion{Response: response("first")}); err == nil {
					b.broken("Complete returned nil")
				}
				b.unchanged(scope(), seen)
				b.complete(second, response("second"), 0)
				b.wrote("first", 0)
			},
		},
		{
			name: "CompleteThatFailsRollsBack",
			rule: "after a Complete that failed nothing is committed, and the claim is held until Abort frees it",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "failed")
				err := attempt.Complete(b.endedContext(), holdsend.Completion{Response: response("done")})
				switch {
				case err == nil: // a store need not look at the context
					b.findState(scope(), holdsend.StateCompleted)
					b.wrote("failed", 1)
				case errors.Is(err, holdsend.ErrClaimLost):
					b.broken("a claim that nobody took was reported lost")
				case errors.Is(err, holdsend.ErrOutcomeUnknown):
					committed := 0
					if b.find(scope()).State == holdsend.StateCompleted {
						committed = 1
					}
					b.wrote("failed", committed)
				default:
					b.wrote("failed", 0)
					b.findState(scope(), holdsend.StateClaimed)
					b.abort(attempt)
					b.empty(scope())
					b.wrote("failed", 0)
				}
			},
		},
		{
			name:  "CompleteOfALostClaimFails",
			rule:  "a claim that was taken over cannot complete: ErrClaimLost or another error, its write rolled back, the newer claim untouched",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				dead := b.crashed(scope(), "dead")
				newer := b.takeOver(scope())
				seen := b.find(scope())
				if err := dead.Complete(b.context(), holdsend.Completion{Response: response("dead")}); err == nil {
					b.broken("Complete returned nil")
				}
				b.wrote("dead", 0)
				b.unchanged(scope(), seen)
				_ = dead.Abort(b.context()) // whether a dead attempt can say anything is not the point
				b.unchanged(scope(), seen)
				b.write(newer, "newer")
				b.complete(newer, response("newer"), 0)
				b.wrote("newer", 1)
				b.wrote("dead", 0)
			},
		},
		{
			name:  "CompleteAfterTheNextCompletionFails",
			rule:  "a claim that was taken over and completed by another cannot complete once more",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				dead := b.crashed(scope(), "dead")
				newer := b.takeOver(scope())
				b.complete(newer, response("newer"), 0)
				seen := b.findState(scope(), holdsend.StateCompleted)
				if err := dead.Complete(b.context(), holdsend.Completion{Response: response("dead")}); err == nil {
					b.broken("Complete returned nil")
				}
				_ = dead.Abort(b.context()) // whether a dead attempt can say anything is not the point
				b.unchanged(scope(), seen)
				b.wrote("dead", 0)
			},
		},
	}
}

// answer returns an answer with something in each part.
func answer() holdsend.Response {
	return holdsend.Response{
		Status:      201,
		Header:      http.Header{"Content-Type": {"text/plain"}, "Link": {"first", "second"}},
		Body:        []byte("the original answer"),
		ResourceRef: "note-1",
	}
}

// spoil changes all that an answer shares with its copies.
func spoil(r holdsend.Response) {
	for i := range r.Body {
		r.Body[i] = 'x'
	}
	for _, values := range r.Header {
		for i := range values {
			values[i] = "spoiled"
		}
	}
	r.Header["X-Added"] = []string{"spoiled"}
}

// keeps completes a record with r and checks that Find and Begin return it as it was.
func (b *bench[Tx]) keeps(key string, r holdsend.Response) {
	b.t.Helper()
	given := r
	given.Header, given.Body = r.Header.Clone(), slices.Clone(r.Body)
	b.complete(b.begin(claimOf(scopeOf(key))), given, 0)
	if difference := sameAnswer(b.findState(scopeOf(key), holdsend.StateCompleted).Response, r); difference != "" {
		b.broken("Find returned %s", difference)
	}
	if difference := sameAnswer(b.standing(claimOf(scopeOf(key))).Response, r); difference != "" {
		b.broken("Begin returned %s", difference)
	}
}
