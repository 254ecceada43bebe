package holdsend

import (
	"context"
	"errors"
	"time"
)

// Errors that a Store or HandleIdempotent returns. Test for them with errors.Is: they may come wrapped.
var (
	// ErrClaimLost is returned when an attempt tries to complete a claim that is no longer its own: the key was taken
	// over, forgotten or purged meanwhile. Everything the attempt wrote was rolled back.
	ErrClaimLost = errors.New("holdsend: the claim was lost before completion, and its write was rolled back: retry with the same key")

	// ErrOutcomeUnknown is returned when the answer to a COMMIT was lost, or the connection before it, and the database
	// could not be asked for the truth. The write may or may not be there; the key is kept, so that a retry with it finds
	// out.
	ErrOutcomeUnknown = errors.New("holdsend: the outcome of the commit is unknown: retry with the same key")

	// ErrNotFound is returned by Store.Find when no record stands at the scope.
	ErrNotFound = errors.New("holdsend: no record at this scope")

	// ErrTxEnded is returned when create itself ended the transaction that it was handed, by a raw COMMIT or ROLLBACK.
	// Create must leave that to the store: a 2xx response commits, anything else rolls back.
	ErrTxEnded = errors.New("holdsend: create ended its own transaction: return a 2xx response to commit and anything else to roll back")
)

// Scope is what a record is unique on. Two requests with the same key share nothing unless owner and operation are the
// same too.
type Scope struct {
	Owner     string // the authenticated person or tenant: 1 to 255 bytes
	Operation string // the name of the create, such as "post.create": 1 to 255 bytes
	Key       string // the client's Idempotency-Key, without quotes
}

// Resource names what a create wrote, so that deleting it can turn its record into a tombstone.
type Resource struct {
	Owner     string
	Operation string // the operation that created it
	Ref       string // Response.ResourceRef of that create; never empty here
}

// State is the state of a record.
type State string

// The states of a record. A scope without a record has none.
const (
	StateClaimed   State = "claimed"   // an attempt holds it, or held it and died
	StateCompleted State = "completed" // the answer is kept and committed
	StateGone      State = "gone"      // a tombstone: the resource was deleted since, the answer erased
)

// Record is what a store keeps for one scope. A Record handed out is a copy: changing it changes nothing stored.
type Record struct {
	Scope       Scope
	State       State
	Fingerprint string
	ClaimID     string     // random, of the attempt that holds the record or completed it; a tombstone keeps it
	ClaimedAt   time.Time  // by the store's clock
	CompletedAt *time.Time // nil while claimed
	ExpiresAt   *time.Time // nil: kept until erased
	Response    Response   // the answer as given to Complete; zero while claimed and once gone

	// Expired reports that the record is completed or gone and past ExpiresAt. It stands as if it were not there.
	Expired bool
	// Abandoned reports that the record is claimed and its claim is old enough to try Claim.Replace on it. It does
	// not say that the attempt is dead: only the store can tell, and it refuses to replace a living one.
	Abandoned bool
}

// A Store keeps one record per scope in the database that creates write to. It claims, finds and completes; it decides
// nothing about content, waiting or answers, which [HandleIdempotent] does for every store alike.
//
// Expired and Abandoned are judged by the store's own clock (the database's, where there is one), never by the clock of
// the process that asks. Records are copied on the way in and out. All methods may be called from many goroutines.
//
// A store with a method Waiters() *[Waiters] has its duplicates woken when the attempt that they wait for ends in their
// own process.
//
// Test your own with package contracttest, which has one case for each rule below.
type Store[Tx any] interface {
	// Begin claims c.Scope and opens the attempt's transaction, or returns the record that stands there. It returns
	// exactly one of attempt, record and error; the other two are nil (a nil interface, not a nil pointer in one).
	//
	// The claim is visible to every other caller, with its fingerprint, before Begin returns, and stays so while the
	// attempt runs. Of many simultaneous calls for one scope, one gets the attempt.
	//
	// With c.Replace it takes that record's place with a new claim id, if the record standing there is unchanged (same
	// claim id and state) and is either expired, or a claim that is abandoned and whose attempt can no longer commit.
	// If not (it changed, its attempt lives, another caller is replacing it), Begin returns the record that
	// stands there. If nothing stands there any more, it claims the scope afresh. Without c.Replace, a record that
	// is expired or abandoned is returned like any other.
	//
	// It never waits for another attempt, an open completion or an open tombstone. If the claim is lost before Begin
	// returns (forgotten, purged or taken over in between), Begin starts over.
	//
	// ctx bounds Begin alone: the attempt and its transaction outlive it. An error leaves no claim behind, as far as
	// the store can still reach its database.
	Begin(ctx context.Context, c Claim) (Attempt[Tx], *Record, error)

	// InTx runs fn in a transaction without a record: for requests without a key. It commits if fn returns nil; if fn
	// returns an error or panics it rolls back, and that error is returned as it is, or the panic goes on.
	// The commit does not depend on ctx once fn returned nil. If its answer is lost: ErrOutcomeUnknown.
	InTx(ctx context.Context, fn func(ctx context.Context, tx Tx) error) error

	// Find returns the record at s, in any state, or ErrNotFound. It writes and locks nothing, and waits for nobody.
	Find(ctx context.Context, s Scope) (*Record, error)

	// TombstoneResource turns the completed records of r (its owner's and operation's alone) into tombstones: state
	// gone, answer and resource ref erased, fingerprint, claim id and expiry kept. It runs inside tx, the transaction that deletes
	// the resource: both happen or neither. It returns how many records it turned; 0 is no error. An empty or
	// ill-formed owner, operation or ref is an error.
	TombstoneResource(ctx context.Context, tx Tx, r Resource) (int64, error)

	// ForgetOwner deletes every record of owner that is older than the call, in any state, and returns how many. It
	// waits for that owner's attempts still running, holding nothing else meanwhile, and ends with ctx (what was
	// deleted by then stays deleted). An empty or ill-formed owner is an error. Do not call it from a create of that
	// owner: it would wait for itself.
	ForgetOwner(ctx context.Context, owner string) (int64, error)

	// PurgeExpired deletes expired records, and claims that nobody finished (old, with no living attempt). Kept records
	// and living attempts are spared, and it waits for neither. Call it now and then, such as hourly.
	PurgeExpired(ctx context.Context) (Purged, error)
}

// Claim asks for a scope.
type Claim struct {
	Scope       Scope
	Fingerprint string
	Replace     *Record // a record that Begin or Find returned, expired or abandoned; nil: claim only an empty scope
}

// An Attempt is one run of create: it holds the claim and an open transaction. It is for one goroutine. The caller ends
// every attempt with Complete or Abort, on a context that is not the client's.
type Attempt[Tx any] interface {
	// Tx returns the transaction that create writes in. It must not be used after Complete or Abort; a store makes
	// what it can of its methods refuse by then.
	Tx() Tx

	// Complete stores the answer and commits it together with what was written through Tx, or neither. It fails
	// unless the record is still claimed under this attempt's claim id.
	//
	//   - nil: committed.
	//   - ErrClaimLost: rolled back, the claim belongs to another or is gone.
	//   - ErrOutcomeUnknown: it may have been committed, and the truth could not be had. COMMIT is never sent twice.
	//   - any other error: rolled back, the claim still held until Abort frees it.
	//
	// Complete after Abort, or twice, is an error.
	Complete(ctx context.Context, c Completion) error

	// Abort rolls back and frees the key, and never touches a newer claim. It does nothing after Complete returned nil,
	// ErrClaimLost or ErrOutcomeUnknown; it frees the key after any other error. Aborting twice is no error.
	//
	// If create committed the transaction itself, Abort returns ErrTxEnded and the key stays claimed for good (until
	// ForgetOwner): a freed key would double that write.
	Abort(ctx context.Context) error
}

// A Warner is an Attempt that may have something to report although Complete returned nil, such as ErrTxEnded when
// create had committed by itself and the record was completed afterwards. It ends up in Event.Err.
type Warner interface {
	Warning() error
}

// Completion is what Complete stores.
type Completion struct {
	Response Response
	TTL      time.Duration // 0: kept until erased. Counts from completion, by the store's clock
}

// Purged counts what PurgeExpired deleted.
type Purged struct {
	Records int64 // expired records
	Claims  int64 // claims that nobody finished
}
