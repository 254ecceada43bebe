package holdsend

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/holdsend/holdsend-go/internal/bounds"
)

const (
	defaultTakeOverAfter = time.Second
	defaultStaleClaim    = 24 * time.Hour
)

// scanBatch is how many records PurgeExpired and ForgetOwner look at before they let others have the lock.
const scanBatch = 1024

// MemoryOptions configures a [MemoryStore]. The zero value is ready for use.
type MemoryOptions struct {
	// TakeOverAfter is how old a claim must be for its record to be Abandoned; default 1 s, negative: at once. An
	// attempt that has not ended is never taken over, however old its claim.
	TakeOverAfter time.Duration
	// StaleClaim is how old a claim without a living attempt must be before PurgeExpired frees its key; default 24 h,
	// negative: at once.
	StaleClaim time.Duration
	// Now is the store's clock; default time.Now. It may be called from many goroutines and while the store is locked:
	// it must not call the store.
	Now func() time.Time
}

// MemoryStore is a Store that keeps its records in this process: for tests, and for services that keep nothing. What it
// knows ends with the process, and no other process sees it; a service that keeps its resources in a database needs a
// store in that database, or a restart doubles its writes.
//
// Its transaction is a [MemoryTx]: what create wants done goes into OnCommit. An attempt lives until its Complete or
// Abort, however long that takes. It starts no goroutine and needs no closing. Records are kept until they expire and
// PurgeExpired runs, or until they are forgotten; their memory is free for other use from then on.
//
// All methods may be called from many goroutines. Make one with [NewMemoryStore].
type MemoryStore struct {
	takeOverAfter time.Duration
	staleClaim    time.Duration
	now           func() time.Time
	waiters       Waiters

	mu         sync.Mutex // held for moments only: never while a function of the caller's runs, but for now
	records    map[Scope]*memoryRecord
	byResource map[Resource]map[*memoryRecord]struct{} // the records with a ref
	claims     uint64                                  // how many claims were ever made
	peak       int                                     // the most records since the maps were last made
}

var _ Store[*MemoryTx] = (*MemoryStore)(nil)

// NewMemoryStore returns an empty store. A nil o is the zero MemoryOptions.
func NewMemoryStore(o *MemoryOptions) *MemoryStore {
	s := &MemoryStore{
		takeOverAfter: defaultTakeOverAfter,
		staleClaim:    defaultStaleClaim,
		now:           time.Now,
		records:       map[Scope]*memoryRecord{},
		byResource:    map[Resource]map[*memoryRecord]struct{}{},
	}
	if o == nil {
		return s
	}
	if o.TakeOverAfter != 0 {
		s.takeOverAfter = o.TakeOverAfter
	}
	if o.StaleClaim != 0 {
		s.staleClaim = o.StaleClaim
	}
	if o.Now != nil {
		s.now = o.Now
	}
	return s
}

// Waiters returns where this process's duplicates wait: see [Waiters].
func (s *MemoryStore) Waiters() *Waiters { return &s.waiters }

// A memoryRecord is a record that stands, or stood, in a store. Its fields change only under the store's lock.
type memoryRecord struct {
	kept        Record // Expired and Abandoned are left false: they are judged on the way out
	completedAt time.Time
	number      uint64        // of its claim, in the order in which claims were made
	living      bool          // its attempt may still commit
	ended       chan struct{} // closed once its attempt no longer lives; nil: nobody has asked for it

	// ref is what its answer names, from when it is certain to be kept: what create wrote can be seen, and deleted,
	// before the record is completed.
	ref      string
	entombed bool // its resource was deleted before it was completed
}

// MemoryTx is the transaction of a [MemoryStore]. It has no isolation and holds no data: it collects what is to happen
// if it commits. Its methods may be called from many goroutines.
type MemoryTx struct {
	store      *MemoryStore
	mu         sync.Mutex
	ended      bool
	functions  []func()
	tombstones map[*memoryRecord]struct{}
}

// OnCommit has f called if the transaction commits, and never otherwise. The functions of a transaction are called in
// the order of their OnCommit calls, once it is certain to commit and before anybody can see its record completed, so
// that no replay comes before its effect. They must not fail, but they may call the store, which shows the record as
// claimed by a living attempt meanwhile (so ForgetOwner of that owner would wait for itself).
//
// If f panics, the panic goes on, the transaction does not commit and the key is free again. What the functions before
// f did stays done: a retry runs create, and then them, once more.
//
// OnCommit panics if f is nil, and on a transaction that has ended: f would never be called.
func (tx *MemoryTx) OnCommit(f func()) {
	if f == nil {
		panic("holdsend: MemoryTx.OnCommit needs a function")
	}
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.ended {
		panic("holdsend: MemoryTx.OnCommit on a transaction that has ended: call it before create returns")
	}
	tx.functions = append(tx.functions, f)
}

// end ends the transaction and hands over what is to happen if this is a commit; false if it had ended before. Nothing
// is added to a transaction from then on, so one that create leaked cannot touch what is committed.
func (tx *MemoryTx) end() (functions []func(), tombstones map[*memoryRecord]struct{}, ok bool) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.ended {
		return nil, nil, false
	}
	functions, tombstones = tx.functions, tx.tombstones
	tx.ended, tx.functions, tx.tombstones = true, nil, nil
	return functions, tombstones, true
}

// Begin implements [Store].
func (s *MemoryStore) Begin(ctx context.Context, c Claim) (Attempt[*MemoryTx], *Record, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	if err := checkScope(c.Scope); err != nil {
		return nil, nil, err
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if standing := s.records[c.Scope]; standing != nil {
		if !s.isReplaceable(standing, c.Replace, now) {
			return nil, s.view(standing, now), nil
		}
		s.remove(standing)
	}
	s.claims++
	r := &memoryRecord{
		kept: Record{
			Scope:       c.Scope,
			State:       StateClaimed,
			Fingerprint: c.Fingerprint,
			ClaimID:     rand.Text(), // 128 random bits
			ClaimedAt:   now,
		},
		number: s.claims,
		living: true,
	}
	s.records[c.Scope] = r
	s.peak = max(s.peak, len(s.records))
	return &memoryAttempt{record: r, tx: MemoryTx{store: s}}, nil, nil
}

func checkScope(s Scope) error {
	if err := bounds.Required("Scope.Owner", s.Owner); err != nil {
		return err
	}
	if err := bounds.Required("Scope.Operation", s.Operation); err != nil {
		return err
	}
	return bounds.Required("Scope.Key", s.Key)
}

// isReplaceable compares what stands with the record that the caller saw: it must be unchanged, and nobody's any more.
func (s *MemoryStore) isReplaceable(standing *memoryRecord, seen *Record, now time.Time) bool {
	if seen == nil || seen.ClaimID != standing.kept.ClaimID || seen.State != standing.kept.State {
		return false
	}
	return s.isExpired(standing, now) || s.isAbandoned(standing, now) && !standing.living
}

func (s *MemoryStore) isExpired(r *memoryRecord, now time.Time) bool {
	return r.kept.State != StateClaimed && r.kept.ExpiresAt != nil && !now.Before(*r.kept.ExpiresAt)
}

func (s *MemoryStore) isAbandoned(r *memoryRecord, now time.Time) bool {
	return r.kept.State == StateClaimed && now.Sub(r.kept.ClaimedAt) >= s.takeOverAfter
}

// stands reports whether r is still the record at its scope: it may have been replaced or forgotten since.
func (s *MemoryStore) stands(r *memoryRecord) bool { return s.records[r.kept.Scope] == r }

// view returns a copy of r to hand out.
func (s *MemoryStore) view(r *memoryRecord, now time.Time) *Record {
	record := r.kept
	record.CompletedAt = copyTime(r.kept.CompletedAt)
	record.ExpiresAt = copyTime(r.kept.ExpiresAt)
	record.Response = copyResponse(r.kept.Response)
	record.Expired = s.isExpired(r, now)
	record.Abandoned = s.isAbandoned(r, now)
	return &record
}

func copyTime(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	return new(*t)
}

func copyResponse(r Response) Response {
	r.Header = r.Header.Clone()
	r.Body = bytes.Clone(r.Body)
	return r
}

// resource returns what r's answer names; the Ref is empty if it names nothing.
func (r *memoryRecord) resource() Resource {
	return Resource{Owner: r.kept.Scope.Owner, Operation: r.kept.Scope.Operation, Ref: r.ref}
}

// remove takes away r, which stands.
func (s *MemoryStore) remove(r *memoryRecord) {
	s.unindex(r)
	s.letGo(r)
	delete(s.records, r.kept.Scope)
}

func (s *MemoryStore) index(r *memoryRecord) {
	resource := r.resource()
	if resource.Ref == "" {
		return
	}
	if s.byResource[resource] == nil {
		s.byResource[resource] = map[*memoryRecord]struct{}{}
	}
	s.byResource[resource][r] = struct{}{}
}

func (s *MemoryStore) unindex(r *memoryRecord) {
	resource := r.resource()
	delete(s.byResource[resource], r)
	if len(s.byResource[resource]) == 0 {
		delete(s.byResource, resource)
	}
}

// letGo marks the attempt of r as one that can no longer commit.
func (s *MemoryStore) letGo(r *memoryRecord) {
	if r.living && r.ended != nil {
		close(r.ended)
	}
	r.living = false
}

// shrink makes the maps anew once most of what they held is gone: a map keeps its room when keys are deleted. It copies
// at most a quarter of what was deleted, so it costs little beside the deleting.
func (s *MemoryStore) shrink() {
	if len(s.records) >= s.peak/4 {
		return
	}
	records := make(map[Scope]*memoryRecord, len(s.records))
	maps.Copy(records, s.records)
	byResource := make(map[Resource]map[*memoryRecord]struct{}, len(s.byResource))
	maps.Copy(byResource, s.byResource)
	s.records, s.byResource, s.peak = records, byResource, len(records)
}

// scan calls visit, under the lock, for every record that stands when scan is called and still stands at its turn. It
// lets others have the lock now and then, so that a long scan holds up nobody. It ends early with ctx.
func (s *MemoryStore) scan(ctx context.Context, visit func(*memoryRecord)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	visited := 0
	// The map may change, and even be another one (shrink), while the lock is let go. A range over a map visits each
	// entry that stays in it all the same.
	for _, r := range s.records {
		if visited++; visited%scanBatch == 0 {
			s.mu.Unlock()
			err := ctx.Err()
			s.mu.Lock()
			if err != nil {
				return err
			}
		}
		if s.stands(r) {
			visit(r)
		}
	}
	s.shrink()
	return nil
}

// Find implements [Store].
func (s *MemoryStore) Find(ctx context.Context, scope Scope) (*Record, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := checkScope(scope); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.records[scope]
	if r == nil {
		return nil, ErrNotFound
	}
	return s.view(r, s.now()), nil
}

// InTx implements [Store].
func (s *MemoryStore) InTx(ctx context.Context, fn func(ctx context.Context, tx *MemoryTx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	tx := &MemoryTx{store: s}
	defer tx.end() // rolls back when fn fails, panics or ends its goroutine; does nothing after the end below
	if err := fn(ctx, tx); err != nil {
		return err
	}
	functions, tombstones, _ := tx.end()
	for _, f := range functions {
		f()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entomb(tombstones)
	return nil
}

// TombstoneResource implements [Store]. It counts the records that are completed, or about to be, when it is called, and
// turns them when tx commits.
func (s *MemoryStore) TombstoneResource(ctx context.Context, tx *MemoryTx, r Resource) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if err := checkResource(r); err != nil {
		return 0, err
	}
	if tx == nil || tx.store != s {
		return 0, errors.New("holdsend: TombstoneResource needs a transaction of the same store: hand it the tx that the delete writes in")
	}
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.ended {
		return 0, errors.New("holdsend: TombstoneResource on a transaction that has ended: call it before the delete's function returns")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	turned := int64(0)
	for record := range s.byResource[r] {
		if _, again := tx.tombstones[record]; again {
			continue
		}
		if tx.tombstones == nil {
			tx.tombstones = map[*memoryRecord]struct{}{}
		}
		tx.tombstones[record] = struct{}{}
		turned++
	}
	return turned, nil
}

func checkResource(r Resource) error {
	if err := bounds.Required("Resource.Owner", r.Owner); err != nil {
		return err
	}
	if err := bounds.Required("Resource.Operation", r.Operation); err != nil {
		return err
	}
	return bounds.Required("Resource.Ref", r.Ref)
}

// entomb turns records into tombstones, but for those that are gone, forgotten or replaced by now.
func (s *MemoryStore) entomb(records map[*memoryRecord]struct{}) {
	for r := range records {
		if !s.stands(r) || r.kept.State == StateGone {
			continue
		}
		if r.kept.State == StateClaimed { // about to be completed: see memoryRecord.ref
			r.entombed = true
			continue
		}
		s.unindex(r)
		r.ref = ""
		r.kept.State = StateGone
		r.kept.Response = Response{}
	}
}

// ForgetOwner implements [Store].
func (s *MemoryStore) ForgetOwner(ctx context.Context, owner string) (int64, error) {
	if err := bounds.Required("owner", owner); err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	last := s.claims
	s.mu.Unlock()

	forgotten := int64(0)
	var living []*memoryRecord
	err := s.scan(ctx, func(r *memoryRecord) {
		switch {
		case r.kept.Scope.Owner != owner || r.number > last: // another's, or younger than this call
		case r.living:
			if r.ended == nil {
				r.ended = make(chan struct{})
			}
			living = append(living, r)
		default:
			s.remove(r)
			forgotten++
		}
	})
	if err != nil {
		return forgotten, err
	}
	for _, r := range living {
		select {
		case <-r.ended:
		case <-ctx.Done():
			return forgotten, ctx.Err()
		}
		s.mu.Lock()
		if s.stands(r) {
			s.remove(r)
			forgotten++
		}
		s.mu.Unlock()
	}
	return forgotten, nil
}

// PurgeExpired implements [Store]. It holds nobody up for long, however many records there are.
func (s *MemoryStore) PurgeExpired(ctx context.Context) (Purged, error) {
	if err := ctx.Err(); err != nil {
		return Purged{}, err
	}
	var purged Purged
	now := s.now()
	err := s.scan(ctx, func(r *memoryRecord) {
		switch {
		case s.isExpired(r, now):
			s.remove(r)
			purged.Records++
		case r.kept.State == StateClaimed && !r.living && now.Sub(r.kept.ClaimedAt) >= s.staleClaim:
			s.remove(r)
			purged.Claims++
		}
	})
	return purged, err
}

// A memoryAttempt holds a claim of a MemoryStore.
type memoryAttempt struct {
	record   *memoryRecord
	tx       MemoryTx
	finished bool // the key is no longer this attempt's to free
}

// Tx implements [Attempt].
func (a *memoryAttempt) Tx() *MemoryTx { return &a.tx }

var errAttemptEnded = errors.New("holdsend: this attempt has ended: Complete may be called once, and not after Abort")

// Complete implements [Attempt].
func (a *memoryAttempt) Complete(ctx context.Context, c Completion) error {
	functions, tombstones, ok := a.tx.end()
	if !ok {
		return errAttemptEnded
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.TTL < 0 {
		return errors.New("holdsend: Completion.TTL is negative: use 0 to keep records until they are erased")
	}
	if err := bounds.Optional("Response.ResourceRef", c.Response.ResourceRef); err != nil {
		return err
	}
	response := copyResponse(c.Response) // before the functions run: they are the caller's

	s := a.tx.store
	s.mu.Lock()
	if !s.stands(a.record) || !a.record.living {
		a.finished = true
		s.mu.Unlock()
		return ErrClaimLost
	}
	a.record.ref = response.ResourceRef
	s.index(a.record)
	s.mu.Unlock()

	// Nobody takes a living claim away, so the commit is certain but for a panic in the functions below.
	committed := false
	defer func() {
		if !committed {
			a.free()
		}
	}()
	for _, f := range functions {
		f()
	}
	committed = true

	s.mu.Lock()
	defer s.mu.Unlock()
	a.finished = true
	a.record.completedAt = s.now()
	kept := &a.record.kept
	kept.State, kept.CompletedAt, kept.Response = StateCompleted, &a.record.completedAt, response
	if c.TTL > 0 {
		kept.ExpiresAt = new(kept.CompletedAt.Add(c.TTL))
	}
	s.letGo(a.record)
	s.entomb(tombstones)
	if a.record.entombed {
		s.entomb(map[*memoryRecord]struct{}{a.record: {}})
	}
	return nil
}

// Abort implements [Attempt]. It has nothing to wait for, so it does not look at its context.
func (a *memoryAttempt) Abort(context.Context) error {
	a.tx.end()
	a.free()
	return nil
}

// free takes the claim away, if it is still this attempt's.
func (a *memoryAttempt) free() {
	s := a.tx.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.finished {
		return
	}
	a.finished = true
	if s.stands(a.record) {
		s.remove(a.record)
	}
}
