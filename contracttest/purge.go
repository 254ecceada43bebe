package contracttest

import (
	"context"
	"sync"
	"time"

	"github.com/holdsend/holdsend-go"
)

// purgeCases has the rules for PurgeExpired.
func purgeCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "PurgeDeletesExpired",
			rule: "PurgeExpired deletes expired records, tombstones too, says how many, and frees their keys",
			run: func(b *bench[Tx]) {
				b.expired(scope(), response("expired"))
				gone := scopeOf("key-gone-1")
				b.completed(gone, responseOf("gone", "note-1"), time.Second)
				b.tombstone(resource("note-1"))
				b.findWhen(gone, "expired", isExpired)
				if purged := b.purge(); purged.Records != 2 || purged.Claims != 0 {
					b.broken("PurgeExpired returned %+v, want 2 records", purged)
				}
				b.empty(scope())
				b.empty(gone)
				if purged := b.purge(); purged.Records != 0 || purged.Claims != 0 {
					b.broken("the second PurgeExpired returned %+v", purged)
				}
				b.complete(b.begin(claimOf(scope())), response("new"), 0)
			},
		},
		{
			name: "PurgeSparesKeptRecords",
			rule: "PurgeExpired spares records and tombstones that have no expiry or have not reached it",
			run: func(b *bench[Tx]) {
				var scopes []holdsend.Scope
				var seen []*holdsend.Record
				for key, ttl := range map[string]time.Duration{"for-good": 0, "an-hour": time.Hour} {
					kept, gone := scopeOf("key-kept-"+key), scopeOf("key-gone-"+key)
					b.completed(kept, response("kept"), ttl)
					b.completed(gone, responseOf("gone", key), ttl)
					b.tombstone(resource(key))
					scopes = append(scopes, kept, gone)
					seen = append(seen, b.find(kept), b.findState(gone, holdsend.StateGone))
				}
				b.expired(scope(), response("expired")) // so that there is something to purge
				if purged := b.purge(); purged.Records != 1 || purged.Claims != 0 {
					b.broken("PurgeExpired returned %+v, want 1 record", purged)
				}
				for i, s := range scopes {
					b.unchanged(s, seen[i])
				}
			},
		},
		{
			name: "PurgeSparesLivingAttempts",
			rule: "PurgeExpired neither deletes the claim of a living attempt, however old, nor waits for it",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "living")
				seen := b.findWhen(scope(), "abandoned", isAbandoned)
				old := time.Now().Add(b.StaleClaim)
				b.eventually("the claim did not grow old", func() bool { return !time.Now().Before(old) })
				for range 3 {
					b.promptly("PurgeExpired beside a living attempt", func(ctx context.Context) {
						if purged, err := b.Store.PurgeExpired(ctx); err != nil || purged != (holdsend.Purged{}) {
							b.breaks("PurgeExpired returned %+v, error %v", purged, err)
						}
					})
				}
				b.unchanged(scope(), seen)
				b.complete(attempt, response("done"), 0)
				b.wrote("living", 1)
			},
		},
		{
			name: "PurgeBesideReplacements",
			rule: "PurgeExpired neither waits for an attempt that takes an expired record's place at that moment, nor takes it away",
			run: func(b *bench[Tx]) {
				for round := range 6 {
					c := claimOf(scopeOf("key-round-" + string(rune('a'+round))))
					c.Replace = b.expired(c.Scope, response("old"))
					var attempt holdsend.Attempt[Tx]
					b.promptly("PurgeExpired beside a replacement", func(ctx context.Context) {
						var purges sync.WaitGroup
						for range 2 {
							purges.Go(func() {
								for range 2 {
									if _, err := b.Store.PurgeExpired(ctx); err != nil {
										b.breaks("PurgeExpired: %v", err)
									}
								}
							})
						}
						var err error
						for attempt == nil && err == nil { // a purge that has the record keeps it from being replaced
							attempt, _, err = b.tryBegin(ctx, c)
						}
						if err != nil {
							b.breaks("Begin beside PurgeExpired: %v", err)
						}
						purges.Wait()
					})
					if attempt != nil {
						b.complete(attempt, response("new"), 0)
						b.findState(c.Scope, holdsend.StateCompleted)
					}
				}
			},
		},
		{
			name:  "PurgeDeletesUnfinishedClaims",
			rule:  "PurgeExpired deletes old claims that nobody finished, says how many, and frees their keys",
			needs: needsCrash | needsStaleClaim,
			run: func(b *bench[Tx]) {
				dead := b.crashed(scope(), "dead")
				var claims, records int64
				b.eventually("PurgeExpired did not delete the claim of a dead attempt", func() bool {
					purged := b.purge()
					claims, records = claims+purged.Claims, records+purged.Records
					return claims > 0
				})
				if claims != 1 || records != 0 {
					b.broken("PurgeExpired returned %d claims and %d records, want 1 claim", claims, records)
				}
				b.empty(scope())
				if err := dead.Complete(b.context(), holdsend.Completion{Response: response("dead")}); err == nil {
					b.broken("a purged claim was completed")
				}
				b.empty(scope())
				b.wrote("dead", 0)
			},
		},
		{
			name: "PurgeOnEndedContext",
			rule: "PurgeExpired on a context that has ended returns an error",
			run: func(b *bench[Tx]) {
				b.expired(scope(), response("expired"))
				if _, err := b.Store.PurgeExpired(b.endedContext()); err == nil {
					b.broken("returned nil")
				}
			},
		},
	}
}

func (b *bench[Tx]) purge() holdsend.Purged {
	b.t.Helper()
	purged, err := b.Store.PurgeExpired(b.context())
	if err != nil {
		b.broken("PurgeExpired: %v", err)
	}
	return purged
}
