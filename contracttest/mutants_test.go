package contracttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// flawVariable names the flaw that TestFlawedStore runs the suite on.
const flawVariable = "HOLDSEND_CONTRACTTEST_FLAW"

// TestFlawedStore runs the suite on a store with the flaw that the environment names. With none named it must pass, so
// that what makes it fail is the flaw.
func TestFlawedStore(t *testing.T) {
	t.Parallel()
	flaw := os.Getenv(flawVariable)
	open := func(*testing.T) Harness[*flawedTx] { return newFlawedHarness(flaw) }
	if flaw == "" {
		Run(t, open)
		return
	}
	run(t, open, mutantPatience)
}

// mutantPatience is shorter than that of Run: many flaws show in that something never happens.
const mutantPatience = 2 * time.Second

// noFlaw is run among the mutants, with their patience, and must pass: none of them is caught by impatience alone.
const noFlaw = "(no flaw)"

// mutants has each flaw that a flawedStore can have, by the case that is there to catch it.
var mutants = []struct{ caughtBy, flaw string }{
	{"BeginClaims", "a claim is kept without its fingerprint"},
	{"BeginClaims", "a claim is hidden until it is completed"},
	{"BeginReturnsExactlyOne", "Begin returns a record with an attempt"},
	{"BeginReturnsExactlyOne", "Begin returns a typed nil with a record"},
	{"BeginReturnsExactlyOne", "Begin returns a typed nil with an error"},
	{"BeginReturnsExactlyOne", "Begin returns an error with a record"},
	{"BeginOneWinnerOfMany", "every caller gets an attempt"},
	{"BeginOneWinnerOfMany", "Begin looks and claims in two steps"},
	{"BeginGivesNewClaimIDs", "every claim has the same id"},
	{"BeginNeverReplacesUnasked", "Begin replaces an expired record unasked"},
	{"BeginNeverTakesOverUnasked", "Begin takes a dead claim over unasked"},
	{"BeginDoesNotWaitForAnAttempt", "Begin waits for a running attempt"},
	{"BeginDoesNotWaitForATombstone", "Begin waits for an open tombstone"},
	{"BeginDoesNotWaitForACompletion", "Begin waits for an open completion"},
	{"BeginBesideForgetOwner", "Begin fails where a claim is lost in between"},
	{"BeginOnEndedContext", "Begin claims on an ended context"},
	{"BeginContextBoundsBeginAlone", "an attempt ends with the context of its Begin"},
	{"AbandonedIsAMatterOfAge", "Abandoned is never true"},
	{"AbandonedIsAMatterOfAge", "Abandoned is true of every claim"},
	{"AbandonedIsAMatterOfAge", "Abandoned only tells of dead attempts"},
	{"AbandonedIsAMatterOfAge", "a completed record is abandoned when it is old"},
	{"ScopeByOwner", "the owner is no part of the scope"},
	{"ScopeByOperation", "the operation is no part of the scope"},
	{"ScopeByKey", "the key is no part of the scope"},
	{"ScopePartsAreNotJoined", "the parts of a scope are joined with a colon"},
	{"ScopePartsAreNotJoined", "the parts of a scope are joined with nothing"},
	{"ScopeHostileNames", "owners are compared without case"},
	{"ScopeHostileNames", "spaces around an operation are trimmed"},
	{"ScopeLongNames", "owners are cut after 250 bytes"},
	{"ScopeLongNames", "keys are cut after 64 bytes"},
	{"ScopeIllFormedIsNeverShared", "names are cut at a NUL"},
	{"ScopeIllFormedIsNeverShared", "names are mended to UTF-8"},
	{"ScopeIllFormedIsNeverShared", "names are cut after 255 bytes"},
	{"ReplaceExpired", "expired records are never replaced"},
	{"ReplaceExpired", "a replacement keeps the claim id"},
	{"ReplaceExpired", "a replacement keeps the fingerprint"},
	{"ReplaceExpired", "a replacement keeps the answer"},
	{"ReplaceExpired", "a replacement keeps the expiry"},
	{"ReplaceOneWinnerOfMany", "Replace looks and claims in two steps"},
	{"ReplaceKeptIsRefused", "Replace replaces whatever stands"},
	{"ReplaceKeptIsRefused", "Replace believes the caller's Expired"},
	{"ReplaceLivingIsRefused", "a living claim is taken over"},
	{"ReplaceChangedClaimIsRefused", "Replace does not compare the claim id"},
	{"ReplaceChangedStateIsRefused", "Replace does not compare the state"},
	{"ReplaceGoneIsRefused", "a tombstone is never replaced"},
	{"ReplaceNothingClaimsAfresh", "Replace fails where nothing stands any more"},
	{"TakeOver", "a dead claim is never taken over"},
	{"TakeOverYoungIsRefused", "a dead claim is taken over at any age"},
	{"TakenOverClaimIsYoung", "a replacement keeps the age"},
	{"CompleteIsAtomic", "a write is committed at once"},
	{"CompleteIsAtomic", "completion loses the write"},
	{"CompleteIsAtomic", "completion loses the record"},
	{"CompleteIsAtomic", "completion changes the claim id"},
	{"CompleteIsAtomic", "completion forgets the fingerprint"},
	{"CompleteIsAtomicWhileItCommits", "the write is committed before the record"},
	{"CompleteNeverShowsARecordWithoutItsWrite", "the record is completed before its write"},
	{"CompleteKeepsTheStatus", "every status is kept as 201"},
	{"CompleteKeepsTheHeaders", "headers are not kept"},
	{"CompleteKeepsTheHeaders", "one value of each header is kept"},
	{"CompleteKeepsTheHeaders", "header values are sorted"},
	{"CompleteKeepsTheHeaders", "header values are kept as UTF-8"},
	{"CompleteKeepsTheHeaders", "header names are canonicalised"},
	{"CompleteKeepsTheHeaders", "header values are trimmed"},
	{"CompleteKeepsTheBody", "a body is kept as UTF-8"},
	{"CompleteKeepsTheBody", "a body is cut after 64 KiB"},
	{"CompleteKeepsTheBody", "a body is trimmed"},
	{"CompleteKeepsTheBody", "a body is cut at a NUL"},
	{"CompleteKeepsTheResourceRef", "the resource ref is not kept"},
	{"CompleteKeepsTheResourceRef", "the resource ref is cut after 64 bytes"},
	{"CompleteCopiesItsAnswer", "an answer is kept without a copy"},
	{"RecordsAreCopies", "records are handed out without a copy"},
	{"CompleteTTL", "Expired is never true"},
	{"CompleteTTL", "the TTL is forgotten"},
	{"CompleteTTL", "the TTL is in milliseconds where nanoseconds are given"},
	{"CompleteTTLCountsFromCompletion", "the TTL counts from the claim"},
	{"CompleteWithoutTTL", "a TTL of 0 expires at once"},
	{"CompleteTwiceIsAnError", "Complete twice is no error"},
	{"CompleteTwiceIsAnError", "Complete twice changes the answer"},
	{"CompleteAfterAbortIsAnError", "Complete after Abort is no error"},
	{"CompleteAfterAbortIsAnError", "Complete after Abort stores the answer"},
	{"CompleteThatFailsRollsBack", "a Complete that fails commits the write"},
	{"CompleteThatFailsRollsBack", "a Complete that fails frees the key"},
	{"CompleteThatFailsRollsBack", "a Complete that fails keeps the key for good"},
	{"CompleteThatFailsRollsBack", "a Complete that fails reports a lost claim"},
	{"CompleteOfALostClaimFails", "a lost claim is completed"},
	{"CompleteOfALostClaimFails", "a lost claim commits its write"},
	{"CompleteOfALostClaimFails", "a lost claim reports success"},
	{"AbortFreesTheKey", "Abort keeps the key"},
	{"AbortFreesTheKey", "Abort commits the write"},
	{"AbortAfterCompleteDoesNothing", "Abort after Complete deletes the record"},
	{"AbortTwiceIsNoError", "Abort twice is an error"},
	{"AbortTwiceSparesTheNextClaim", "Abort deletes whatever stands"},
	{"AbortOfALostClaimSparesTheNewerClaim", "Abort deletes a newer claim"},
	{"AbortOfALostClaimSparesTheNewerClaim", "Abort waits for a newer claim"},
	{"InTxCommits", "InTx never commits"},
	{"InTxRollsBackOnError", "InTx commits when its function fails"},
	{"InTxRollsBackOnError", "InTx wraps its function's error"},
	{"InTxRollsBackOnPanic", "InTx commits when its function panics"},
	{"InTxRollsBackOnPanic", "InTx swallows a panic"},
	{"InTxRollsBackWhenItsGoroutineEnds", "InTx commits when its goroutine ends"},
	{"InTxOnEndedContext", "InTx runs on an ended context"},
	{"InTxCommitOutlivesItsContext", "InTx rolls back when its context ended"},
	{"FindNothing", "Find returns neither record nor error"},
	{"FindNothing", "Find returns an error of its own for nothing"},
	{"FindAnyState", "Find hides expired records"},
	{"FindAnyState", "Find hides tombstones"},
	{"FindWaitsForNobody", "Find waits for a running attempt"},
	{"FindOnEndedContext", "Find finds nothing on an ended context"},
	{"TombstoneErasesTheAnswer", "tombstones are never set"},
	{"TombstoneErasesTheAnswer", "a tombstone deletes the record"},
	{"TombstoneErasesTheAnswer", "a tombstone keeps the answer"},
	{"TombstoneErasesTheAnswer", "a tombstone keeps the resource ref"},
	{"TombstoneErasesTheAnswer", "a tombstone forgets its fingerprint"},
	{"TombstoneErasesTheAnswer", "a tombstone forgets its claim id"},
	{"TombstoneErasesTheAnswer", "TombstoneResource counts nothing"},
	{"TombstoneKeepsItsExpiry", "a tombstone forgets its expiry"},
	{"TombstoneKeepsItsExpiry", "a tombstone expires at once"},
	{"TombstoneRollsBackWithItsTransaction", "a tombstone is set outside the transaction"},
	{"TombstoneInAnAttempt", "completion forgets the transaction's tombstones"},
	{"TombstoneOnlyItsOwnersAndOperations", "tombstones are set for every owner"},
	{"TombstoneOnlyItsOwnersAndOperations", "tombstones are set for every operation"},
	{"TombstoneOnlyItsOwnersAndOperations", "tombstones are set by the ref's beginning"},
	{"TombstoneEveryRecordOfTheResource", "only one record of a resource becomes a tombstone"},
	{"TombstoneNothing", "a tombstone is counted again"},
	{"TombstoneIllFormedIsRefused", "ill-formed resources are accepted"},
	{"TombstoneIllFormedIsRefused", "an empty ref is accepted"},
	{"ForgetOwnerDeletesEveryRecord", "ForgetOwner spares tombstones"},
	{"ForgetOwnerDeletesEveryRecord", "ForgetOwner spares expired records"},
	{"ForgetOwnerDeletesEveryRecord", "ForgetOwner counts nothing"},
	{"ForgetOwnerDeletesDeadClaims", "ForgetOwner spares dead claims"},
	{"ForgetOwnerSparesOthers", "ForgetOwner deletes every owner's records"},
	{"ForgetOwnerSparesOthers", "owners are forgotten without case"},
	{"ForgetOwnerWaitsForLivingAttempts", "ForgetOwner does not wait"},
	{"ForgetOwnerWaitsForLivingAttempts", "ForgetOwner deletes living claims"},
	{"ForgetOwnerWaitsForAbandonedAttempts", "ForgetOwner waits for young attempts only"},
	{"ForgetOwnerEndsWithItsContext", "ForgetOwner ends with its context and no error"},
	{"ForgetOwnerEndsWithItsContext", "ForgetOwner waits on after its context ended"},
	{"ForgetOwnerHoldsNothingWhileItWaits", "ForgetOwner deletes younger records"},
	{"ForgetOwnerHoldsNothingWhileItWaits", "ForgetOwner waits for every attempt"},
	{"ForgetOwnerHoldsNothingWhileItWaits", "a waiting ForgetOwner holds the owner up"},
	{"ForgetOwnerWaitsForACompletion", "ForgetOwner does not wait for a commit"},
	{"ForgetOwnerIllFormedIsRefused", "an empty owner is forgotten"},
	{"ForgetOwnerOnEndedContext", "ForgetOwner deletes on an ended context"},
	{"PurgeDeletesExpired", "PurgeExpired never purges anything"},
	{"PurgeDeletesExpired", "PurgeExpired spares tombstones"},
	{"PurgeSparesKeptRecords", "PurgeExpired deletes records without an expiry"},
	{"PurgeSparesKeptRecords", "PurgeExpired deletes tombstones"},
	{"PurgeSparesLivingAttempts", "PurgeExpired deletes living claims"},
	{"PurgeSparesLivingAttempts", "PurgeExpired waits for living attempts"},
	{"PurgeBesideReplacements", "PurgeExpired waits for living attempts"},
	{"PurgeDeletesUnfinishedClaims", "PurgeExpired spares dead claims"},
	{"PurgeDeletesUnfinishedClaims", "PurgeExpired counts claims as records"},
	{"PurgeOnEndedContext", "PurgeExpired runs on an ended context"},
	{"BeginShowsTheClaim", "a claim is hidden until it is completed"},
	{"BeginShowsTheClaim", "Begin shows the caller's own fingerprint"},
	{"BeginDoesNotWaitForACompletion", "Begin fails beside an open completion"},
	{"BeginBesideCompletions", "the record is completed before its answer"},
	{"ReplaceExpiredByBeginsRecord", "Begin's record does not name its claim"},
	{"ReplaceAborted", "Abort of a replacement brings the old record back"},
	{"TakeOverOneWinnerOfMany", "Replace looks and claims in two steps"},
	{"CompleteAfterAbortSparesTheNextClaim", "Complete after Abort deletes what stands"},
	{"CompleteAfterTheNextCompletionFails", "a lost claim is completed"},
	{"TombstoneCommitsWithItsTransaction", "a tombstone is set outside the transaction"},
	{"TombstoneHoldsTheKey", "a tombstone is replaced at any time"},
	{"ForgetOwnerNobody", "ForgetOwner fails for an owner without records"},
	{"ProtocolCreatesOnce", "Begin looks and claims in two steps"},
	{"ProtocolReplays", "headers are not kept"},
	{"ProtocolRefusesOtherContent", "a tombstone forgets its fingerprint"},
	{"ProtocolFailureFreesTheKey", "Abort keeps the key"},
	{"ProtocolTakesOver", "a dead claim is never taken over"},
}

// TestEveryMutantIsCaught proves the suite: a store that breaks one rule fails in the case that states the rule, and
// every case is there for some mutant. A test that fails needs a process of its own. The table is in the log (-v).
func TestEveryMutantIsCaught(t *testing.T) {
	t.Parallel()
	rules := map[string]string{}
	for _, c := range allCases[*flawedTx]() {
		if rules[c.name] != "" {
			t.Errorf("two cases are called %s", c.name)
		}
		rules[c.name] = c.rule
	}

	results := make([]mutantResult, len(mutants))
	var control mutantResult
	var wait sync.WaitGroup
	turn := make(chan struct{}, 4) // processes at a time: they mostly wait
	start := func(flaw, cases string, result *mutantResult) {
		wait.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			*result = runMutant(t.Context(), flaw, cases)
		})
	}
	for i, m := range mutants {
		if i == len(mutants)/2 { // in the thick of it
			start(noFlaw, ".*", &control)
		}
		start(m.flaw, "^"+m.caughtBy+"$", &results[i])
	}
	wait.Wait()

	if control.err != nil || len(control.failed) > 0 {
		t.Errorf("the store without a flaw failed among the mutants: %v %v\n%s", control.failed, control.err, control.output)
	}
	var table strings.Builder
	idle := maps.Clone(rules)
	for i, m := range mutants {
		delete(idle, m.caughtBy)
		result, verdict := results[i], "caught by "+m.caughtBy
		switch {
		case rules[m.caughtBy] == "":
			verdict = "NOT CAUGHT: there is no case " + m.caughtBy
		case result.err != nil:
			verdict = "NOT CAUGHT: " + result.err.Error()
		case !slices.Contains(result.failed, m.caughtBy):
			verdict = "NOT CAUGHT: the suite passed"
		case !strings.Contains(result.output, "rule broken: "+rules[m.caughtBy]):
			verdict = "NOT CAUGHT: the case failed without stating its rule"
		}
		if strings.HasPrefix(verdict, "NOT") {
			t.Errorf("%s: %s\n%s", m.flaw, verdict, result.output)
		}
		fmt.Fprintf(&table, "\nmutant: %s\n  rule: %s\n  %s\n", m.flaw, rules[m.caughtBy], verdict)
	}
	t.Logf("%d mutants, %d rules\n%s", len(mutants), len(rules), table.String())
	for name := range idle {
		t.Errorf("%s is there for no mutant: add one that breaks its rule", name)
	}
}

// A mutantResult is what the suite said of a store.
type mutantResult struct {
	failed []string // the cases that failed
	output string
	err    error // it ended in another way than by failing or passing
}

var failedCase = regexp.MustCompile(`(?m)^ +--- FAIL: TestFlawedStore/(\w+)`)

// runMutant runs TestFlawedStore in a process of its own.
func runMutant(ctx context.Context, flaw, cases string) mutantResult {
	program, err := os.Executable()
	if err != nil {
		return mutantResult{err: err}
	}
	// All cases at a time: most of them wait most of the time.
	cmd := exec.CommandContext(ctx, program, "-test.run=^TestFlawedStore$/"+cases,
		"-test.v", "-test.count=1", "-test.parallel=100", "-test.timeout=90s")
	cmd.Env = append(os.Environ(), flawVariable+"="+flaw)
	out, err := cmd.CombinedOutput()
	result := mutantResult{output: string(out)}
	for _, match := range failedCase.FindAllStringSubmatch(result.output, -1) {
		result.failed = append(result.failed, match[1])
	}
	var exit *exec.ExitError
	switch {
	case err != nil && !errors.As(err, &exit):
		result.err = err
	case strings.Contains(result.output, "\npanic: "), strings.Contains(result.output, "\nfatal error: "):
		result.err = errors.New("the suite broke down")
	case err != nil && len(result.failed) == 0:
		result.err = fmt.Errorf("no case failed, but the process did: %w", err)
	}
	return result
}
