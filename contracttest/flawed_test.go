package contracttest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/bounds"
)

const (
	flawedTakeOverAfter = 50 * time.Millisecond
	flawedStaleClaim    = 100 * time.Millisecond
)

// A flawedStore is a plain store in memory that breaks one rule: the one that flaw names. With no flaw it keeps them
// all. It favours plainness over speed.
type flawedStore struct {
	flaw string

	mu         sync.Mutex
	records    map[string]*flawedRecord // by name(scope)
	counts     map[string]int           // the committed writes
	forgetting map[string]bool          // owners whose ForgetOwner is waiting
	claims     int
}

// A flawedRecord is a record with what is known of its attempt.
type flawedRecord struct {
	holdsend.Record
	number     int  // of its claim
	living     bool // its attempt may still commit
	committing bool
	deleting   bool // a tombstone in an open transaction
}

// A flawedTx collects what happens at its commit.
type flawedTx struct {
	store      *flawedStore
	writes     []string
	tombstones []*flawedRecord
	hold       chan struct{} // nil, or the commit waits until it is closed
}

var _ holdsend.Store[*flawedTx] = (*flawedStore)(nil)

// newFlawedHarness opens a store with that flaw.
func newFlawedHarness(flaw string) Harness[*flawedTx] {
	s := &flawedStore{flaw: flaw, records: map[string]*flawedRecord{}, counts: map[string]int{}, forgetting: map[string]bool{}}
	return Harness[*flawedTx]{
		Store: s,
		Write: func(_ context.Context, tx *flawedTx, name string) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.is("a write is committed at once") {
				s.counts[name]++
				return nil
			}
			tx.writes = append(tx.writes, name)
			return nil
		},
		Count: func(_ context.Context, name string) (int, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.counts[name], nil
		},
		Crash: func(_ context.Context, a holdsend.Attempt[*flawedTx]) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			a.(*flawedAttempt).record.living = false
			return nil
		},
		HoldCommit: func(_ context.Context, tx *flawedTx) (func(), error) {
			tx.hold = make(chan struct{})
			return sync.OnceFunc(func() { close(tx.hold) }), nil
		},
		StaleClaim: flawedStaleClaim,
	}
}

// is reports whether the store has that flaw.
func (s *flawedStore) is(flaw string) bool { return s.flaw == flaw }

// name returns what a record is unique on.
func (s *flawedStore) name(scope holdsend.Scope) string {
	switch s.flaw {
	case "the owner is no part of the scope":
		scope.Owner = ""
	case "the operation is no part of the scope":
		scope.Operation = ""
	case "the key is no part of the scope":
		scope.Key = ""
	case "the parts of a scope are joined with a colon":
		return scope.Owner + ":" + scope.Operation + ":" + scope.Key
	case "the parts of a scope are joined with nothing":
		return scope.Owner + scope.Operation + scope.Key
	case "owners are compared without case":
		scope.Owner = strings.ToLower(scope.Owner)
	case "spaces around an operation are trimmed":
		scope.Operation = strings.TrimSpace(scope.Operation)
	case "owners are cut after 250 bytes":
		scope.Owner = scope.Owner[:min(250, len(scope.Owner))]
	case "names are cut at a NUL":
		scope.Owner, _, _ = strings.Cut(scope.Owner, "\x00")
	case "names are mended to UTF-8":
		scope.Operation = strings.ToValidUTF8(scope.Operation, "\uFFFD")
	case "names are cut after 255 bytes":
		scope.Owner = scope.Owner[:min(255, len(scope.Owner))]
	case "keys are cut after 64 bytes":
		scope.Key = scope.Key[:min(64, len(scope.Key))]
	}
	return fmt.Sprintf("%q %q %q", scope.Owner, scope.Operation, scope.Key)
}

func (s *flawedStore) checkScope(scope holdsend.Scope) error {
	switch s.flaw {
	case "names are cut at a NUL", "names are mended to UTF-8", "names are cut after 255 bytes":
		return nil
	}
	if err := bounds.Required("owner", scope.Owner); err != nil {
		return err
	}
	return bounds.Required("operation", scope.Operation)
}

func (s *flawedStore) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[*flawedTx], *holdsend.Record, error) {
	if ctx.Err() != nil && !s.is("Begin claims on an ended context") {
		if s.is("Begin returns a typed nil with an error") {
			return (*flawedAttempt)(nil), nil, ctx.Err()
		}
		return nil, nil, ctx.Err()
	}
	if err := s.checkScope(c.Scope); err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := s.name(c.Scope)
	for waits := true; waits; {
		r := s.records[name]
		waits = r != nil && ctx.Err() == nil &&
			(s.is("Begin waits for a running attempt") && r.living ||
				s.is("Begin waits for an open completion") && r.committing ||
				s.is("Begin waits for an open tombstone") && r.deleting)
		waits = waits || s.is("a waiting ForgetOwner holds the owner up") && s.forgetting[c.Scope.Owner] && ctx.Err() == nil
		if waits {
			s.pause()
		}
	}
	if ctx.Err() != nil && !s.is("Begin claims on an ended context") {
		return nil, nil, ctx.Err()
	}
	standing := s.records[name]
	if standing != nil && !s.mayReplace(standing, c.Replace) {
		record := s.view(standing)
		switch {
		case s.is("Begin returns a typed nil with a record"):
			return (*flawedAttempt)(nil), record, nil
		case s.is("Begin returns an error with a record"):
			return nil, record, errors.New("taken")
		case s.is("Begin fails beside an open completion") && standing.committing:
			return nil, nil, errors.New("locked")
		case s.is("Begin shows the caller's own fingerprint"):
			record.Fingerprint = c.Fingerprint
		case s.is("Begin's record does not name its claim"):
			record.ClaimID = ""
		}
		return nil, record, nil
	}
	if standing == nil && c.Replace != nil && s.is("Replace fails where nothing stands any more") {
		return nil, nil, holdsend.ErrNotFound
	}
	if standing == nil && s.is("Begin looks and claims in two steps") ||
		standing != nil && s.is("Replace looks and claims in two steps") {
		s.pauseFor(20 * time.Millisecond) // so long that it is caught each time
	}
	attempt := s.claim(name, c, standing)
	if s.is("Begin fails where a claim is lost in between") { // it claims, and makes the attempt live in a second step
		attempt.record.living = false
		s.pauseFor(20 * time.Millisecond)
		if s.records[name] != attempt.record {
			return nil, nil, holdsend.ErrClaimLost
		}
		attempt.record.living = true
	}
	if s.is("an attempt ends with the context of its Begin") {
		context.AfterFunc(ctx, func() { _ = attempt.Abort(ctx) })
	}
	return attempt, s.alsoRecord(name), nil
}

// alsoRecord returns a record where none belongs.
func (s *flawedStore) alsoRecord(name string) *holdsend.Record {
	if s.is("Begin returns a record with an attempt") {
		return s.view(s.records[name])
	}
	return nil
}

// mayReplace judges what stands, under the lock.
func (s *flawedStore) mayReplace(standing *flawedRecord, seen *holdsend.Record) bool {
	now := s.view(standing)
	switch {
	case s.is("every caller gets an attempt"):
		return true
	case s.is("Begin replaces an expired record unasked") && now.Expired:
		return true
	case s.is("Begin takes a dead claim over unasked") && now.Abandoned && !standing.living:
		return true
	case seen == nil:
		return false
	case seen.ClaimID != standing.ClaimID && !s.is("Replace does not compare the claim id"):
		return false
	case seen.State != standing.State && !s.is("Replace does not compare the state"):
		return false
	case s.is("Replace replaces whatever stands"):
		return true
	case s.is("Replace believes the caller's Expired") && seen.Expired:
		return true
	case s.is("expired records are never replaced") && now.Expired:
		return false
	case s.is("a tombstone is replaced at any time") && now.State == holdsend.StateGone:
		return true
	case s.is("a tombstone is never replaced") && now.State == holdsend.StateGone:
		return false
	case s.is("a dead claim is never taken over"):
		return now.Expired
	case s.is("a dead claim is taken over at any age") && now.State == holdsend.StateClaimed && !standing.living:
		return true
	}
	return now.Expired || now.Abandoned && (!standing.living || s.is("a living claim is taken over"))
}

func (s *flawedStore) claim(name string, c holdsend.Claim, old *flawedRecord) *flawedAttempt {
	s.claims++
	id := fmt.Sprintf("claim-%d", s.claims)
	if s.is("every claim has the same id") || s.is("a replacement keeps the claim id") && old != nil {
		id = "claim-1"
		if old != nil {
			id = old.ClaimID
		}
	}
	r := &flawedRecord{number: s.claims, living: true, Record: holdsend.Record{
		Scope: c.Scope, State: holdsend.StateClaimed, Fingerprint: c.Fingerprint, ClaimID: id, ClaimedAt: time.Now(),
	}}
	if s.is("a claim is kept without its fingerprint") {
		r.Fingerprint = ""
	}
	if old != nil {
		switch s.flaw {
		case "a replacement keeps the fingerprint":
			r.Fingerprint = old.Fingerprint
		case "a replacement keeps the answer":
			r.Response = old.Response
		case "a replacement keeps the age":
			r.ClaimedAt = old.ClaimedAt
		case "a replacement keeps the expiry":
			r.ExpiresAt = old.ExpiresAt
		}
	}
	s.records[name] = r
	return &flawedAttempt{store: s, name: name, record: r, old: old, tx: &flawedTx{store: s}}
}

// pause lets others have the lock for a moment.
func (s *flawedStore) pause() { s.pauseFor(time.Millisecond) }

func (s *flawedStore) pauseFor(d time.Duration) {
	s.mu.Unlock()
	<-time.After(d)
	s.mu.Lock()
}

// view returns what others see of r.
func (s *flawedStore) view(r *flawedRecord) *holdsend.Record {
	record := r.Record
	if !s.is("records are handed out without a copy") {
		record.Response = copyAnswer(r.Response)
		record.ExpiresAt, record.CompletedAt = copyTime(r.ExpiresAt), copyTime(r.CompletedAt)
	}
	record.Expired = r.State != holdsend.StateClaimed && r.ExpiresAt != nil && !time.Now().Before(*r.ExpiresAt)
	record.Abandoned = r.State == holdsend.StateClaimed && time.Since(r.ClaimedAt) >= flawedTakeOverAfter
	switch s.flaw {
	case "Expired is never true":
		record.Expired = false
	case "Abandoned is never true":
		record.Abandoned = false
	case "Abandoned is true of every claim":
		record.Abandoned = r.State == holdsend.StateClaimed
	case "Abandoned only tells of dead attempts":
		record.Abandoned = record.Abandoned && !r.living
	case "a completed record is abandoned when it is old":
		record.Abandoned = time.Since(r.ClaimedAt) >= flawedTakeOverAfter
	}
	return &record
}

func copyTime(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	return new(*t)
}

func copyAnswer(r holdsend.Response) holdsend.Response {
	r.Header, r.Body = r.Header.Clone(), slices.Clone(r.Body)
	return r
}

func (s *flawedStore) Find(ctx context.Context, scope holdsend.Scope) (*holdsend.Record, error) {
	if ctx.Err() != nil {
		if s.is("Find finds nothing on an ended context") {
			return nil, holdsend.ErrNotFound
		}
		return nil, ctx.Err()
	}
	if err := s.checkScope(scope); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.is("Find waits for a running attempt") && s.records[s.name(scope)] != nil &&
		s.records[s.name(scope)].living && ctx.Err() == nil {
		s.pause()
	}
	r := s.records[s.name(scope)]
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case r == nil && s.is("Find returns neither record nor error"):
		return nil, nil
	case r == nil && s.is("Find returns an error of its own for nothing"):
		return nil, errors.New("no rows")
	case r == nil,
		s.is("a claim is hidden until it is completed") && r.State == holdsend.StateClaimed,
		s.is("Find hides expired records") && s.view(r).Expired,
		s.is("Find hides tombstones") && r.State == holdsend.StateGone:
		return nil, holdsend.ErrNotFound
	}
	return s.view(r), nil
}

func (s *flawedStore) InTx(ctx context.Context, fn func(ctx context.Context, tx *flawedTx) error) (err error) {
	if ctx.Err() != nil && !s.is("InTx runs on an ended context") {
		return ctx.Err()
	}
	tx := &flawedTx{store: s}
	returned := false
	defer func() {
		if returned {
			return
		}
		if s.is("InTx commits when its function panics") || s.is("InTx commits when its goroutine ends") && recover() == nil {
			s.commit(tx, nil)
			return
		}
		if s.is("InTx swallows a panic") {
			err = fmt.Errorf("panic: %v", recover())
		}
		s.rollback(tx)
	}()
	err = fn(ctx, tx)
	returned = true
	switch {
	case err != nil && !s.is("InTx commits when its function fails"):
		s.rollback(tx)
		if s.is("InTx wraps its function's error") {
			err = fmt.Errorf("in the transaction: %w", err)
		}
		return err
	case ctx.Err() != nil && s.is("InTx rolls back when its context ended"):
		s.rollback(tx)
		return ctx.Err()
	case s.is("InTx never commits"):
		s.rollback(tx)
		return nil
	}
	s.commit(tx, nil)
	return err
}

// commit does what tx collected, and then, in the same moment, what record says.
func (s *flawedStore) commit(tx *flawedTx, record func()) {
	if tx.hold != nil {
		<-tx.hold
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range tx.writes {
		s.counts[name]++
	}
	if record != nil {
		record()
	}
	for _, r := range tx.tombstones {
		r.deleting = false
		s.entomb(r)
	}
	tx.writes, tx.tombstones = nil, nil
}

func (s *flawedStore) rollback(tx *flawedTx) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range tx.tombstones {
		r.deleting = false
	}
	tx.writes, tx.tombstones = nil, nil
}

func (s *flawedStore) TombstoneResource(ctx context.Context, tx *flawedTx, r holdsend.Resource) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if !s.is("ill-formed resources are accepted") {
		for _, part := range []string{r.Owner, r.Operation, r.Ref} {
			if err := bounds.Required("resource", part); err != nil && !(s.is("an empty ref is accepted") && part == "") {
				return 0, err
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	turned := int64(0)
	for _, record := range s.records {
		switch {
		case record.State != holdsend.StateCompleted && !(s.is("a tombstone is counted again") && record.State == holdsend.StateGone),
			record.Scope.Owner != r.Owner && !s.is("tombstones are set for every owner"),
			record.Scope.Operation != r.Operation && !s.is("tombstones are set for every operation"),
			record.State == holdsend.StateCompleted && record.Response.ResourceRef != r.Ref &&
				!(s.is("tombstones are set by the ref's beginning") && strings.HasPrefix(record.Response.ResourceRef, r.Ref)):
			continue
		}
		if s.is("only one record of a resource becomes a tombstone") && turned == 1 {
			break
		}
		turned++
		if s.is("a tombstone is set outside the transaction") {
			s.entomb(record)
			continue
		}
		record.deleting = true
		tx.tombstones = append(tx.tombstones, record)
	}
	if s.is("TombstoneResource counts nothing") {
		turned = 0
	}
	return turned, nil
}

func (s *flawedStore) entomb(r *flawedRecord) {
	switch s.flaw {
	case "a tombstone deletes the record":
		delete(s.records, s.name(r.Scope))
		return
	case "tombstones are never set":
		return
	case "a tombstone forgets its expiry":
		r.ExpiresAt = nil
	case "a tombstone expires at once":
		r.ExpiresAt = new(time.Now())
	case "a tombstone forgets its fingerprint":
		r.Fingerprint = ""
	case "a tombstone forgets its claim id":
		r.ClaimID = ""
	}
	r.State = holdsend.StateGone
	ref := r.Response.ResourceRef
	if !s.is("a tombstone keeps the answer") {
		r.Response = holdsend.Response{}
	}
	if s.is("a tombstone keeps the resource ref") {
		r.Response.ResourceRef = ref
	}
}

func (s *flawedStore) ForgetOwner(ctx context.Context, owner string) (int64, error) {
	if err := bounds.Required("owner", owner); err != nil && !(s.is("an empty owner is forgotten") && owner == "") {
		return 0, err
	}
	if ctx.Err() != nil && !s.is("ForgetOwner deletes on an ended context") {
		return 0, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgetting[owner] = true
	defer delete(s.forgetting, owner)
	last := s.claims
	forgotten := int64(0)
	for {
		waiting := false
		for name, r := range s.records {
			switch {
			case r.Scope.Owner != owner &&
				!(s.is("ForgetOwner deletes every owner's records") ||
					s.is("owners are forgotten without case") && strings.EqualFold(r.Scope.Owner, owner)):
			case r.number > last && !s.is("ForgetOwner deletes younger records"):
			case s.is("ForgetOwner spares tombstones") && r.State == holdsend.StateGone:
			case s.is("ForgetOwner spares expired records") && s.view(r).Expired:
			case s.is("ForgetOwner spares dead claims") && r.State == holdsend.StateClaimed && !r.living:
			case r.living && s.is("ForgetOwner does not wait"):
			case r.living && s.is("ForgetOwner waits for young attempts only") && s.view(r).Abandoned:
			case r.living && s.is("ForgetOwner does not wait for a commit") && r.committing:
			case r.living && !s.is("ForgetOwner deletes living claims"):
				waiting = true
			default:
				delete(s.records, name)
				forgotten++
			}
		}
		if s.is("ForgetOwner fails for an owner without records") && forgotten == 0 && !waiting {
			return 0, holdsend.ErrNotFound
		}
		if s.is("ForgetOwner counts nothing") {
			forgotten = 0
		}
		if !waiting {
			return forgotten, nil
		}
		if s.is("ForgetOwner waits for every attempt") {
			last = s.claims
		}
		s.pause()
		if ctx.Err() != nil {
			if s.is("ForgetOwner ends with its context and no error") {
				return forgotten, nil
			}
			if !s.is("ForgetOwner waits on after its context ended") {
				return forgotten, ctx.Err()
			}
		}
	}
}

func (s *flawedStore) PurgeExpired(ctx context.Context) (holdsend.Purged, error) {
	if ctx.Err() != nil && !s.is("PurgeExpired runs on an ended context") {
		return holdsend.Purged{}, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var purged holdsend.Purged
	for name, r := range s.records {
		for s.is("PurgeExpired waits for living attempts") && r.living && ctx.Err() == nil {
			s.pause()
		}
		switch {
		case s.is("PurgeExpired spares tombstones") && r.State == holdsend.StateGone:
		case s.is("PurgeExpired never purges anything"):
		case s.view(r).Expired,
			s.is("PurgeExpired deletes records without an expiry") && r.State != holdsend.StateClaimed && r.ExpiresAt == nil,
			s.is("PurgeExpired deletes tombstones") && r.State == holdsend.StateGone:
			delete(s.records, name)
			purged.Records++
		case s.is("PurgeExpired spares dead claims"):
		case r.State == holdsend.StateClaimed && (!r.living || s.is("PurgeExpired deletes living claims")) &&
			time.Since(r.ClaimedAt) >= flawedStaleClaim:
			delete(s.records, name)
			purged.Claims++
		}
	}
	if s.is("PurgeExpired counts claims as records") {
		purged.Records, purged.Claims = purged.Records+purged.Claims, 0
	}
	return purged, nil
}

// A flawedAttempt is an attempt of a flawedStore.
type flawedAttempt struct {
	store     *flawedStore
	name      string
	record    *flawedRecord
	old       *flawedRecord // which the claim replaced
	tx        *flawedTx
	completed bool // no longer this attempt's to free
	ended     bool // Complete or Abort was called
}

func (a *flawedAttempt) Tx() *flawedTx { return a.tx }

func (a *flawedAttempt) Complete(ctx context.Context, c holdsend.Completion) error {
	s := a.store
	if a.ended {
		switch {
		case s.is("Complete twice is no error") && a.completed:
			return nil
		case s.is("Complete twice changes the answer") && a.completed:
			a.record.Response = copyAnswer(c.Response)
			return errors.New("ended")
		case s.is("Complete after Abort is no error") && !a.completed:
			return nil
		case s.is("Complete after Abort stores the answer") && !a.completed:
			s.records[a.name] = a.record
			a.record.State = holdsend.StateCompleted
			return errors.New("ended")
		case s.is("Complete after Abort deletes what stands") && !a.completed:
			delete(s.records, a.name)
		}
		return errors.New("the attempt has ended")
	}
	a.ended = true
	if err := ctx.Err(); err != nil {
		switch s.flaw {
		case "a Complete that fails commits the write":
			s.commit(a.tx, nil)
		case "a Complete that fails frees the key":
			s.rollback(a.tx)
			a.free()
		case "a Complete that fails keeps the key for good":
			s.rollback(a.tx)
			a.completed = true
		case "a Complete that fails reports a lost claim":
			s.rollback(a.tx)
			return holdsend.ErrClaimLost
		default:
			s.rollback(a.tx)
		}
		return err
	}
	s.mu.Lock()
	// Whether the attempt still lives is asked too: a dead one's transaction is gone, even where its claim stands.
	lost := s.records[a.name] != a.record || !a.record.living
	if s.is("a lost claim is completed") && lost && s.records[a.name] != nil {
		lost, a.record = false, s.records[a.name]
	}
	if s.is("a lost claim reports success") && lost {
		s.mu.Unlock()
		s.rollback(a.tx)
		return nil
	}
	if lost {
		a.completed = true
		s.mu.Unlock()
		if s.is("a lost claim commits its write") {
			s.commit(a.tx, nil)
		}
		s.rollback(a.tx)
		return holdsend.ErrClaimLost
	}
	a.record.committing = true
	s.mu.Unlock()

	now := time.Now()
	record := func() {
		r := a.record
		r.State, r.CompletedAt, r.living, r.committing = holdsend.StateCompleted, &now, false, false
		r.Response = s.keep(c.Response)
		if c.TTL != 0 || s.is("a TTL of 0 expires at once") {
			r.ExpiresAt = new(now.Add(c.TTL))
		}
		switch s.flaw {
		case "the TTL is forgotten":
			r.ExpiresAt = nil
		case "the TTL counts from the claim":
			if c.TTL != 0 {
				r.ExpiresAt = new(r.ClaimedAt.Add(c.TTL))
			}
		case "the TTL is in milliseconds where nanoseconds are given":
			r.ExpiresAt = new(now.Add(c.TTL / 1000))
		case "completion changes the claim id":
			r.ClaimID += "-completed"
		case "completion forgets the fingerprint":
			r.Fingerprint = ""
		}
	}
	switch s.flaw {
	case "the record is completed before its write":
		s.mu.Lock()
		record()
		s.mu.Unlock()
		s.mu.Lock()
		s.pauseFor(20 * time.Millisecond)
		s.mu.Unlock()
		s.commit(a.tx, nil)
	case "the record is completed before its answer":
		s.mu.Lock()
		a.record.State = holdsend.StateCompleted
		s.pauseFor(20 * time.Millisecond)
		s.mu.Unlock()
		s.commit(a.tx, record)
	case "the write is committed before the record":
		s.commit(&flawedTx{writes: a.tx.writes}, nil)
		a.tx.writes = nil
		s.commit(a.tx, record)
	case "completion loses the write":
		s.rollback(a.tx)
		s.commit(a.tx, record)
	case "completion loses the record":
		s.commit(a.tx, func() { delete(s.records, a.name) })
	case "completion forgets the transaction's tombstones":
		a.tx.tombstones = nil
		s.commit(a.tx, record)
	default:
		s.commit(a.tx, record)
	}
	a.completed = true
	return nil
}

// keep returns the answer as the store keeps it.
func (s *flawedStore) keep(r holdsend.Response) holdsend.Response {
	if s.is("an answer is kept without a copy") {
		return r
	}
	r = copyAnswer(r)
	switch s.flaw {
	case "every status is kept as 201":
		r.Status = 201
	case "headers are not kept":
		r.Header = nil
	case "one value of each header is kept":
		for name, values := range r.Header {
			r.Header[name] = values[:1]
		}
	case "header values are sorted":
		for _, values := range r.Header {
			slices.Sort(values)
		}
	case "header values are kept as UTF-8":
		for _, values := range r.Header {
			for i := range values {
				values[i] = strings.ToValidUTF8(values[i], "\uFFFD")
			}
		}
	case "header names are canonicalised":
		kept := http.Header{}
		for name, values := range r.Header {
			kept[http.CanonicalHeaderKey(name)] = values
		}
		r.Header = kept
	case "header values are trimmed":
		for _, values := range r.Header {
			for i := range values {
				values[i] = strings.TrimSpace(values[i])
			}
		}
	case "a body is kept as UTF-8":
		r.Body = []byte(strings.ToValidUTF8(string(r.Body), "\uFFFD"))
	case "a body is cut after 64 KiB":
		r.Body = r.Body[:min(len(r.Body), 64<<10)]
	case "a body is trimmed":
		r.Body = []byte(strings.TrimSpace(string(r.Body)))
	case "a body is cut at a NUL":
		body, _, _ := strings.Cut(string(r.Body), "\x00")
		r.Body = []byte(body)
	case "the resource ref is not kept":
		r.ResourceRef = ""
	case "the resource ref is cut after 64 bytes":
		r.ResourceRef = r.ResourceRef[:min(len(r.ResourceRef), 64)]
	}
	return r
}

func (a *flawedAttempt) Abort(ctx context.Context) error {
	s := a.store
	if s.is("Abort waits for a newer claim") {
		s.mu.Lock()
		for r := s.records[a.name]; r != nil && r != a.record && r.living && ctx.Err() == nil; r = s.records[a.name] {
			s.pause()
		}
		s.mu.Unlock()
	}
	again := a.ended && !a.completed && s.records[a.name] != a.record
	if s.is("Abort twice is an error") && again {
		return errors.New("the attempt has ended")
	}
	a.ended = true
	if s.is("Abort commits the write") {
		s.commit(a.tx, nil)
	}
	s.rollback(a.tx)
	if s.is("Abort keeps the key") {
		return nil
	}
	if s.is("Abort after Complete deletes the record") {
		a.completed = false
	}
	a.free()
	return nil
}

// free deletes the claim, if it is still this attempt's.
func (a *flawedAttempt) free() {
	s := a.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.completed && !s.is("Abort deletes whatever stands") {
		return
	}
	r := s.records[a.name]
	switch {
	case r == nil:
	case r == a.record,
		s.is("Abort deletes a newer claim") && r.State == holdsend.StateClaimed,
		s.is("Abort deletes whatever stands"):
		delete(s.records, a.name)
		a.record.living = false
		if s.is("Abort of a replacement brings the old record back") && a.old != nil {
			s.records[a.name] = a.old
		}
	}
}
