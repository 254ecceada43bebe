package contracttest

import (
	"time"

	"github.com/holdsend/holdsend-go"
)

// replaceCases has the rules for Begin with Replace.
func replaceCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "ReplaceExpired",
			rule: "an expired record is replaced by a new claim, whatever its content, and shows nothing of its answer any more",
			run: func(b *bench[Tx]) {
				old := b.expired(scope(), responseOf("old", "note-old"))
				c := holdsend.Claim{Scope: scope(), Fingerprint: otherFingerprint, Replace: old}
				attempt := b.begin(c)
				r := b.findState(scope(), holdsend.StateClaimed)
				switch {
				case r.ClaimID == old.ClaimID:
					b.broken("the new claim has the old one's id")
				case r.Fingerprint != otherFingerprint:
					b.broken("the new claim has not the new fingerprint")
				case r.Expired || r.ExpiresAt != nil || r.CompletedAt != nil:
					b.broken("the new claim has the old record's times")
				}
				if difference := sameAnswer(r.Response, holdsend.Response{}); difference != "" {
					b.broken("the new claim has an answer: %s", difference)
				}
				b.write(attempt, "new")
				b.complete(attempt, response("new"), 0)
				if r := b.findState(scope(), holdsend.StateCompleted); string(r.Response.Body) != "new" || r.Expired {
					b.broken("the new answer is not kept")
				}
				b.wrote("new", 1)
			},
		},
		{
			name: "ReplaceExpiredByBeginsRecord",
			rule: "the record to replace may come from Begin as well as from Find",
			run: func(b *bench[Tx]) {
				b.expired(scope(), response("old"))
				c := claimOf(scope())
				c.Replace = b.standing(claimOf(scope()))
				b.complete(b.begin(c), response("new"), 0)
			},
		},
		{
			name: "ReplaceAborted",
			rule: "an attempt that replaced a record frees the key when it is aborted",
			run: func(b *bench[Tx]) {
				c := claimOf(scope())
				c.Replace = b.expired(scope(), response("old"))
				b.abort(b.begin(c))
				b.empty(scope())
				b.complete(b.begin(claimOf(scope())), response("new"), 0)
			},
		},
		{
			name: "ReplaceOneWinnerOfMany",
			rule: "of many simultaneous calls of Begin that replace one record, one gets the attempt and the others its claim",
			run: func(b *bench[Tx]) {
				var scopes []holdsend.Scope
				for round := range 4 {
					scopes = append(scopes, scopeOf("key-round-"+string(rune('a'+round))))
					b.completed(scopes[round], response("old"), shortTTL)
				}
				for _, s := range scopes {
					c := claimOf(s)
					c.Replace = b.findWhen(s, "expired", isExpired)
					winners, records := b.race(32, func() (holdsend.Attempt[Tx], *holdsend.Record, error) {
						return b.tryBegin(b.context(), c)
					})
					if len(winners) != 1 {
						b.broken("%d attempts were handed out", len(winners))
					}
					winner := b.find(s).ClaimID
					for _, r := range records {
						// A loser may have looked while the winner was still replacing: then it saw the old record.
						if r.ClaimID != winner && r.ClaimID != c.Replace.ClaimID {
							b.broken("a loser got %s that is neither the winner's nor the old one", describe(r))
						}
					}
					b.complete(winners[0], response("new"), 0)
				}
			},
		},
		{
			name: "ReplaceKeptIsRefused",
			rule: "a completed record that has not expired is never replaced",
			run: func(b *bench[Tx]) {
				for key, ttl := range map[string]time.Duration{"key-for-good": 0, "key-an-hour": time.Hour} {
					s := scopeOf(key)
					seen := b.completed(s, response("kept"), ttl)
					seen.Expired, seen.Abandoned = true, true // what the caller says of it does not count
					c := claimOf(s)
					c.Replace = seen
					if r := b.standing(c); r.State != holdsend.StateCompleted || string(r.Response.Body) != "kept" {
						b.broken("Begin returned %s, want the completed record", describe(r))
					}
					b.unchanged(s, seen)
				}
			},
		},
		{
			name: "ReplaceLivingIsRefused",
			rule: "a claim whose attempt lives is never replaced, however old it is: Begin returns it",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				b.write(attempt, "living")
				seen := b.findWhen(scope(), "abandoned", isAbandoned)
				c := claimOf(scope())
				c.Replace = seen
				for range 20 {
					if r := b.standing(c); r.ClaimID != seen.ClaimID || r.State != holdsend.StateClaimed {
						b.broken("Begin returned %s of another claim", describe(r))
					}
				}
				b.complete(attempt, response("done"), 0)
				b.wrote("living", 1)
			},
		},
		{
			name: "ReplaceChangedClaimIsRefused",
			rule: "Replace takes a record's place only if it is the one that was seen: another claim id is another record",
			run: func(b *bench[Tx]) {
				old := claimOf(scope())
				old.Replace = b.expired(scope(), response("first"))
				b.complete(b.begin(old), response("second"), shortTTL)
				b.findWhen(scope(), "expired", isExpired)
				r := b.standing(old) // the first record is long gone, and the second expired too
				if r.State != holdsend.StateCompleted || string(r.Response.Body) != "second" {
					b.broken("Begin returned %s, want the second record", describe(r))
				}
				current := claimOf(scope())
				current.Replace = r
				b.complete(b.begin(current), response("third"), 0)
			},
		},
		{
			name: "ReplaceChangedStateIsRefused",
			rule: "Replace takes a record's place only if its state is the one that was seen",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				stale := claimOf(scope())
				stale.Replace = b.findWhen(scope(), "abandoned", isAbandoned)
				b.complete(attempt, response("done"), shortTTL)
				b.findWhen(scope(), "expired", isExpired)
				r := b.standing(stale)
				if r.State != holdsend.StateCompleted {
					b.broken("Begin returned %s, want the completed record", describe(r))
				}
				b.unchanged(scope(), r)
			},
		},
		{
			name: "ReplaceGoneIsRefused",
			rule: "a record that was seen completed and is gone by now is not replaced; once seen gone and expired, it is",
			run: func(b *bench[Tx]) {
				// The tombstone must come before the expiry, which a slow machine may need longer for.
				var stale holdsend.Claim
				var s holdsend.Scope
				for ttl, i := time.Second, 0; ; ttl, i = ttl*2, i+1 {
					s = scopeOf("key-round-" + string(rune('a'+i)))
					ref := "note-" + string(rune('a'+i))
					stale = claimOf(s)
					stale.Replace = b.completed(s, responseOf("deleted", ref), ttl)
					turned := b.tombstone(resource(ref))
					if r := b.find(s); !r.Expired {
						if turned != 1 || r.State != holdsend.StateGone {
							b.broken("TombstoneResource turned %d records, and left %s", turned, describe(r))
						}
						break
					}
					if ttl > b.patience {
						b.broken("a record with a TTL of %v expired before its tombstone", ttl)
					}
				}
				gone := b.findWhen(s, "expired", isExpired)
				r := b.standing(stale)
				if r.State != holdsend.StateGone {
					b.broken("Begin returned %s, want the tombstone", describe(r))
				}
				b.unchanged(s, gone)
				current := claimOf(s)
				current.Replace = gone
				b.complete(b.begin(current), response("new"), 0)
				b.findState(s, holdsend.StateCompleted)
			},
		},
		{
			name: "ReplaceNothingClaimsAfresh",
			rule: "if nothing stands any more where Replace saw a record, Begin claims the scope afresh",
			run: func(b *bench[Tx]) {
				attempt := b.begin(claimOf(scope()))
				c := claimOf(scope())
				c.Replace = b.findWhen(scope(), "abandoned", isAbandoned)
				b.abort(attempt)
				fresh := b.begin(c)
				if r := b.findState(scope(), holdsend.StateClaimed); r.ClaimID == c.Replace.ClaimID {
					b.broken("the fresh claim has the old one's id")
				}
				b.write(fresh, "fresh")
				b.complete(fresh, response("done"), 0)
				b.wrote("fresh", 1)
			},
		},
		{
			name:  "TakeOver",
			rule:  "the claim of a dead attempt is taken over once it is old enough: nothing of the dead one remains",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				b.crashed(scope(), "dead")
				old := b.find(scope())
				attempt := b.takeOver(scope())
				r := b.findState(scope(), holdsend.StateClaimed)
				if r.ClaimID == old.ClaimID {
					b.broken("the new claim has the dead one's id")
				}
				b.wrote("dead", 0)
				b.write(attempt, "alive")
				b.complete(attempt, response("done"), 0)
				b.findState(scope(), holdsend.StateCompleted)
				b.wrote("alive", 1)
				b.wrote("dead", 0)
			},
		},
		{
			name:  "TakeOverOneWinnerOfMany",
			rule:  "of many simultaneous calls of Begin that take a dead attempt's claim over, one gets it",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				b.crashed(scope(), "dead")
				// A store may need a moment to see that the holder is dead: all are refused until then.
				var winners []holdsend.Attempt[Tx]
				b.eventually("the claim of a dead attempt was not taken over", func() bool {
					c := claimOf(scope())
					c.Replace = b.findWhen(scope(), "abandoned", isAbandoned)
					winners, _ = b.race(16, func() (holdsend.Attempt[Tx], *holdsend.Record, error) {
						return b.tryBegin(b.context(), c)
					})
					return len(winners) > 0
				})
				if len(winners) != 1 {
					b.broken("%d attempts were handed out", len(winners))
				}
				b.complete(winners[0], response("done"), 0)
			},
		},
		{
			name:  "TakeOverYoungIsRefused",
			rule:  "the claim of a dead attempt is not taken over before it is abandoned, whatever the caller asks for",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				const leastTakeOverAfter = 50 * time.Millisecond // of a harness
				for _, key := range []string{"key-young-1", "key-young-2", "key-young-3", "key-young-4", "key-young-5"} {
					s := scopeOf(key)
					b.crashed(s, key)
					c := claimOf(s)
					c.Replace = b.find(s)
					attempt, _, err := b.tryBegin(b.context(), c)
					if err != nil {
						b.broken("Begin with Replace on the claim of a dead attempt: %v", err)
					}
					if attempt == nil {
						return
					}
					// On a slow machine the claim may be old by now. The store's clock says how old it was.
					if age := b.find(s).ClaimedAt.Sub(c.Replace.ClaimedAt); age < leastTakeOverAfter {
						b.broken("a claim that was %v old was taken over", age)
					}
					b.complete(attempt, response("done"), 0)
				}
				b.t.Logf("not run: %s (each claim was old before it could be asked for)", b.rule)
			},
		},
		{
			name:  "TakenOverClaimIsYoung",
			rule:  "a claim that took another over counts its own age, and lives like any other",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				b.crashed(scope(), "dead")
				old := b.findWhen(scope(), "abandoned", isAbandoned)
				attempt := b.takeOver(scope())
				r := b.find(scope())
				if !r.ClaimedAt.After(old.ClaimedAt) {
					b.broken("the new claim is as old as the one that it took over")
				}
				c := claimOf(scope())
				c.Replace = b.findWhen(scope(), "abandoned", isAbandoned)
				b.standing(c)
				b.complete(attempt, response("done"), 0)
			},
		},
	}
}
