package contracttest

import (
	"context"
	"time"

	"github.com/holdsend/holdsend-go"
)

// tombstoneCases has the rules for TombstoneResource.
func tombstoneCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "TombstoneErasesTheAnswer",
			rule: "a tombstone is in state gone, its answer and resource ref erased, its fingerprint and claim id kept",
			run: func(b *bench[Tx]) {
				before := b.completed(scope(), answer(), 0)
				if turned := b.tombstone(resource(answer().ResourceRef)); turned != 1 {
					b.broken("TombstoneResource returned %d, want 1", turned)
				}
				for _, r := range []*holdsend.Record{b.find(scope()), b.standing(claimOf(scope()))} {
					switch {
					case r.State != holdsend.StateGone:
						b.broken("saw %s", describe(r))
					case r.Fingerprint != before.Fingerprint:
						b.broken("the fingerprint is not kept")
					case r.ClaimID != before.ClaimID:
						b.broken("the claim id is not kept")
					case r.Abandoned:
						b.broken("a tombstone is abandoned")
					}
					if difference := sameAnswer(r.Response, holdsend.Response{}); difference != "" {
						b.broken("the answer is not erased: %s", difference)
					}
				}
			},
		},
		{
			name: "TombstoneKeepsItsExpiry",
			rule: "a tombstone expires when its record would have, or never",
			run: func(b *bench[Tx]) {
				for key, ttl := range map[string]time.Duration{"key-for-good": 0, "key-an-hour": time.Hour} {
					s := scopeOf(key)
					before := b.completed(s, responseOf("deleted", key), ttl)
					b.tombstone(resource(key))
					r := b.findState(s, holdsend.StateGone)
					if !sameTime(r.ExpiresAt, before.ExpiresAt) || r.Expired {
						b.broken("the expiry of a record with a TTL of %v changed", ttl)
					}
				}
			},
		},
		{
			name: "TombstoneRollsBackWithItsTransaction",
			rule: "a tombstone and the delete happen both or neither: rolled back with its transaction, the record is as before",
			run: func(b *bench[Tx]) {
				seen := b.completed(scope(), answer(), time.Hour)
				err := b.Store.InTx(b.context(), func(ctx context.Context, tx Tx) error {
					if err := b.Write(ctx, tx, "deleted"); err != nil {
						return err
					}
					if turned, err := b.Store.TombstoneResource(ctx, tx, resource(answer().ResourceRef)); err != nil || turned != 1 {
						b.breaks("TombstoneResource returned %d, error %v", turned, err)
					}
					return errOwn
				})
				if err != errOwn {
					b.broken("InTx returned %v", err)
				}
				b.unchanged(scope(), seen)
				b.wrote("deleted", 0)
				if turned := b.tombstone(resource(answer().ResourceRef)); turned != 1 {
					b.broken("after the rollback TombstoneResource returned %d, want 1", turned)
				}
			},
		},
		{
			name: "TombstoneCommitsWithItsTransaction",
			rule: "nobody sees a tombstone before its transaction commits, and everybody does afterwards",
			run: func(b *bench[Tx]) {
				seen := b.completed(scope(), answer(), 0)
				err := b.Store.InTx(b.context(), func(ctx context.Context, tx Tx) error {
					if err := b.Write(ctx, tx, "deleted"); err != nil {
						return err
					}
					if _, err := b.Store.TombstoneResource(ctx, tx, resource(answer().ResourceRef)); err != nil {
						return err
					}
					b.unchanged(scope(), seen)
					return nil
				})
				if err != nil {
					b.broken("the deleting transaction: %v", err)
				}
				b.findState(scope(), holdsend.StateGone)
				b.wrote("deleted", 1)
			},
		},
		{
			name: "TombstoneInAnAttempt",
			rule: "a tombstone in an attempt's transaction commits with Complete and rolls back with Abort",
			run: func(b *bench[Tx]) {
				seen := b.completed(scope(), answer(), 0)
				deleting := scopeOf("key-delete")
				turn := func() holdsend.Attempt[Tx] {
					attempt := b.begin(claimOf(deleting))
					turned, err := b.Store.TombstoneResource(b.context(), attempt.Tx(), resource(answer().ResourceRef))
					if err != nil || turned != 1 {
						b.broken("TombstoneResource returned %d, error %v", turned, err)
					}
					return attempt
				}
				b.abort(turn())
				b.unchanged(scope(), seen)
				b.complete(turn(), response("deleted"), 0)
				b.findState(scope(), holdsend.StateGone)
				b.findState(deleting, holdsend.StateCompleted)
			},
		},
		{
			name: "TombstoneOnlyItsOwnersAndOperations",
			rule: "TombstoneResource turns the records of its owner and its operation alone, and of no other ref",
			run: func(b *bench[Tx]) {
				others := []holdsend.Scope{scope(), scope(), scope()}
				others[0].Owner = "owner-2"
				others[1].Operation = "photo.create"
				others[2].Key = "key-other"
				refs := []string{"note-1", "note-1", "note-10"}
				b.completed(scope(), responseOf("deleted", "note-1"), 0)
				var seen []*holdsend.Record
				for i, s := range others {
					seen = append(seen, b.completed(s, responseOf("kept", refs[i]), 0))
				}
				without := scopeOf("key-no-ref")
				b.completed(without, response("kept"), 0)
				if turned := b.tombstone(resource("note-1")); turned != 1 {
					b.broken("TombstoneResource returned %d, want 1", turned)
				}
				b.findState(scope(), holdsend.StateGone)
				for i, s := range others {
					b.unchanged(s, seen[i])
				}
				b.findState(without, holdsend.StateCompleted)
			},
		},
		{
			name: "TombstoneEveryRecordOfTheResource",
			rule: "TombstoneResource turns every completed record of its resource, and says how many",
			run: func(b *bench[Tx]) {
				for _, key := range []string{"key-twice-1", "key-twice-2"} {
					b.completed(scopeOf(key), responseOf("deleted", "note-1"), 0)
				}
				if turned := b.tombstone(resource("note-1")); turned != 2 {
					b.broken("TombstoneResource returned %d, want 2", turned)
				}
				for _, key := range []string{"key-twice-1", "key-twice-2"} {
					b.findState(scopeOf(key), holdsend.StateGone)
				}
			},
		},
		{
			name: "TombstoneNothing",
			rule: "TombstoneResource returns 0 and no error where there is no completed record of its resource",
			run: func(b *bench[Tx]) {
				if turned := b.tombstone(resource("note-1")); turned != 0 {
					b.broken("in an empty store it returned %d", turned)
				}
				b.completed(scope(), responseOf("deleted", "note-1"), 0)
				b.tombstone(resource("note-1"))
				if turned := b.tombstone(resource("note-1")); turned != 0 {
					b.broken("on a tombstone it returned %d", turned)
				}
				b.findState(scope(), holdsend.StateGone)
			},
		},
		{
			name: "TombstoneIllFormedIsRefused",
			rule: "an empty or ill-formed owner, operation or ref is an error of TombstoneResource, and turns nothing",
			run: func(b *bench[Tx]) {
				b.completed(scope(), response("without a ref"), 0)
				good := resource("note-1")
				for what, name := range illFormed() {
					for part, ill := range map[string]holdsend.Resource{
						"owner":     {Owner: name, Operation: good.Operation, Ref: good.Ref},
						"operation": {Owner: good.Owner, Operation: name, Ref: good.Ref},
						"ref":       {Owner: good.Owner, Operation: good.Operation, Ref: name},
					} {
						_ = b.Store.InTx(b.context(), func(ctx context.Context, tx Tx) error {
							turned, err := b.Store.TombstoneResource(ctx, tx, ill)
							if err == nil {
								b.breaks("with a %s that is %s it returned %d and no error", part, what, turned)
							}
							return err
						})
					}
				}
				b.findState(scope(), holdsend.StateCompleted)
			},
		},
		{
			name: "TombstoneHoldsTheKey",
			rule: "a tombstone stands at its scope like any record: it is neither claimed again nor replaced before it expires",
			run: func(b *bench[Tx]) {
				b.completed(scope(), responseOf("deleted", "note-1"), time.Hour)
				b.tombstone(resource("note-1"))
				seen := b.standing(claimOf(scope()))
				c := claimOf(scope())
				c.Replace = seen
				if r := b.standing(c); r.State != holdsend.StateGone {
					b.broken("Begin returned %s", describe(r))
				}
				b.unchanged(scope(), seen)
			},
		},
	}
}
