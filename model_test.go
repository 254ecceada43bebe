package holdsend_test

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/contracttest"
	"github.com/holdsend/holdsend-go/internal/model"
)

// explore holds stores to the model. Sequences on one store do not meet, but for a purge.
func explore[Tx any](t *testing.T, open func(t *testing.T) contracttest.Harness[Tx], stores int, o model.Options) (model.Explored, error) {
	t.Helper()
	var opened []contracttest.Harness[Tx]
	for range stores {
		opened = append(opened, open(t))
	}
	o.Seed = rand.Uint64()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	return model.Explore(ctx, opened, o)
}

func TestMemoryStoreFollowsTheModel(t *testing.T) {
	t.Parallel()
	explored, err := explore(t, memoryHarness, 32, model.Options{Depth: 6, Sequences: 512, Length: 30})
	require.NoError(t, err)
	t.Logf("%d sequences, %d steps", explored.Sequences, explored.Steps)
}

func TestPostgresFollowsTheModel(t *testing.T) {
	t.Parallel()
	explored, err := explore(t, func(t *testing.T) contracttest.Harness[pgx.Tx] {
		return newContractTables(t, plain).harness(t)
	}, 8, model.Options{Depth: 4, Sequences: 32, Length: 25})
	require.NoError(t, err)
	t.Logf("%d sequences, %d steps", explored.Sequences, explored.Steps)
}

func memoryHarness(*testing.T) contracttest.Harness[*holdsend.MemoryTx] {
	var mu sync.Mutex
	counts := map[string]int{}
	return contracttest.Harness[*holdsend.MemoryTx]{
		Store: holdsend.NewMemoryStore(&holdsend.MemoryOptions{TakeOverAfter: 20 * time.Millisecond, StaleClaim: 50 * time.Millisecond}),
		Write: func(_ context.Context, tx *holdsend.MemoryTx, name string) error {
			tx.OnCommit(func() {
				mu.Lock()
				defer mu.Unlock()
				counts[name]++
			})
			return nil
		},
		Count: func(_ context.Context, name string) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return counts[name], nil
		},
		Crash: func(_ context.Context, a holdsend.Attempt[*holdsend.MemoryTx]) error {
			holdsend.CrashMemoryAttempt(a)
			return nil
		},
	}
}

// The model catches a store that breaks a rule: it is what the tests above would fail for.
func TestModelCatchesFlawedStores(t *testing.T) {
	t.Parallel()
	for name, flaw := range map[string]func(*flawedStore){
		"fingerprints are not kept": func(s *flawedStore) {
			s.claim = func(c holdsend.Claim) holdsend.Claim {
				c.Fingerprint = "hs1:" + strings.Repeat("0", 64)
				return c
			}
		},
		"owners share their keys": func(s *flawedStore) {
			s.claim = func(c holdsend.Claim) holdsend.Claim {
				c.Scope.Owner = strings.Replace(c.Scope.Owner, "bob", "ada", 1)
				return c
			}
		},
		"nothing is taken over": func(s *flawedStore) {
			s.claim = func(c holdsend.Claim) holdsend.Claim { c.Replace = nil; return c }
		},
		"a completion writes nothing": func(s *flawedStore) {
			s.complete = func(ctx context.Context, a memoryAttempt, _ holdsend.Completion) error { return a.Abort(ctx) }
		},
		"a completion that is lost is told as done": func(s *flawedStore) {
			s.complete = func(ctx context.Context, a memoryAttempt, c holdsend.Completion) error {
				_ = a.Complete(ctx, c)
				return nil
			}
		},
		"an answer is kept without its body": func(s *flawedStore) {
			s.complete = func(ctx context.Context, a memoryAttempt, c holdsend.Completion) error {
				c.Response.Body = nil
				return a.Complete(ctx, c)
			}
		},
		"records never expire": func(s *flawedStore) {
			s.complete = func(ctx context.Context, a memoryAttempt, c holdsend.Completion) error {
				c.TTL = 0
				return a.Complete(ctx, c)
			}
		},
		"Abort keeps the key": func(s *flawedStore) {
			s.abort = func(context.Context, memoryAttempt) error { return nil }
		},
		"Abort commits": func(s *flawedStore) {
			s.abort = func(ctx context.Context, a memoryAttempt) error { return a.Complete(ctx, holdsend.Completion{}) }
		},
		"no tombstone is ever set":     func(s *flawedStore) { s.noTombstones = true },
		"the records of an owner stay": func(s *flawedStore) { s.noForgetting = true },
		"purge deletes what is kept":   func(s *flawedStore) { s.purgesAll = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			explored, err := explore(t, func(t *testing.T) contracttest.Harness[*holdsend.MemoryTx] {
				h := memoryHarness(t)
				s := &flawedStore{Store: h.Store}
				flaw(s)
				h.Store = s
				crash := h.Crash
				h.Crash = func(ctx context.Context, a memoryAttempt) error { return crash(ctx, a.(flawedAttempt).memoryAttempt) }
				return h
			}, 4, model.Options{Depth: 4, Sequences: 100, Length: 30, Patience: 2 * time.Second})
			require.ErrorContains(t, err, "store and model differ", "%d sequences passed", explored.Sequences)
		})
	}
}

type memoryAttempt = holdsend.Attempt[*holdsend.MemoryTx]

// A flawedStore is a memory store with one fault.
type flawedStore struct {
	holdsend.Store[*holdsend.MemoryTx]
	claim        func(holdsend.Claim) holdsend.Claim
	complete     func(context.Context, memoryAttempt, holdsend.Completion) error
	abort        func(context.Context, memoryAttempt) error
	noTombstones bool
	noForgetting bool
	purgesAll    bool

	mu     sync.Mutex
	owners map[string]bool
}

func (s *flawedStore) Begin(ctx context.Context, c holdsend.Claim) (memoryAttempt, *holdsend.Record, error) {
	s.mu.Lock()
	if s.owners == nil {
		s.owners = map[string]bool{}
	}
	s.owners[c.Scope.Owner] = true
	s.mu.Unlock()
	if s.claim != nil {
		c = s.claim(c)
	}
	a, record, err := s.Store.Begin(ctx, c)
	if a == nil {
		return nil, record, err
	}
	return flawedAttempt{a, s}, nil, nil
}

func (s *flawedStore) TombstoneResource(ctx context.Context, tx *holdsend.MemoryTx, r holdsend.Resource) (int64, error) {
	if s.noTombstones {
		return 1, nil
	}
	return s.Store.TombstoneResource(ctx, tx, r)
}

func (s *flawedStore) ForgetOwner(ctx context.Context, owner string) (int64, error) {
	if s.noForgetting {
		return 1, nil
	}
	return s.Store.ForgetOwner(ctx, owner)
}

func (s *flawedStore) PurgeExpired(ctx context.Context) (holdsend.Purged, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for owner := range s.owners {
		if s.purgesAll {
			short, cancel := context.WithTimeout(ctx, time.Millisecond) // what lives is not waited for
			_, _ = s.Store.ForgetOwner(short, owner)
			cancel()
		}
	}
	return s.Store.PurgeExpired(ctx)
}

type flawedAttempt struct {
	memoryAttempt
	store *flawedStore
}

func (a flawedAttempt) Complete(ctx context.Context, c holdsend.Completion) error {
	if a.store.complete != nil {
		return a.store.complete(ctx, a.memoryAttempt, c)
	}
	return a.memoryAttempt.Complete(ctx, c)
}

func (a flawedAttempt) Abort(ctx context.Context) error {
	if a.store.abort != nil {
		return a.store.abort(ctx, a.memoryAttempt)
	}
	return a.memoryAttempt.Abort(ctx)
}
