package holdsend_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

// memoryClock is a clock that a test sets.
type memoryClock struct {
	mu sync.Mutex
	at time.Time
}

func newMemoryClock() *memoryClock {
	return &memoryClock{at: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
}

func (c *memoryClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *memoryClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

var memoryScope = holdsend.Scope{Owner: "ada", Operation: "note.create", Key: "memory-0001"}

func memoryScopeOf(i int) holdsend.Scope {
	s := memoryScope
	s.Key = fmt.Sprintf("memory-%06d", i)
	return s
}

func beginMemory(t *testing.T, s *holdsend.MemoryStore, scope holdsend.Scope, replace *holdsend.Record) holdsend.Attempt[*holdsend.MemoryTx] {
	t.Helper()
	attempt, record, err := s.Begin(t.Context(), holdsend.Claim{Scope: scope, Fingerprint: "hs1:00", Replace: replace})
	require.NoError(t, err)
	require.Nil(t, record)
	require.NotNil(t, attempt)
	return attempt
}

func completeMemory(t *testing.T, a holdsend.Attempt[*holdsend.MemoryTx], ref string, ttl time.Duration) {
	t.Helper()
	response := holdsend.Response{Status: 201, ResourceRef: ref}
	require.NoError(t, a.Complete(t.Context(), holdsend.Completion{Response: response, TTL: ttl}))
}

func findMemory(t *testing.T, s *holdsend.MemoryStore, scope holdsend.Scope) *holdsend.Record {
	t.Helper()
	record, err := s.Find(t.Context(), scope)
	require.NoError(t, err)
	return record
}

func requireNoMemory(t *testing.T, s *holdsend.MemoryStore, scope holdsend.Scope) {
	t.Helper()
	_, err := s.Find(t.Context(), scope)
	require.ErrorIs(t, err, holdsend.ErrNotFound)
}

func TestMemoryOnCommitRunsInOrderBeforeTheRecordShows(t *testing.T) {
	t.Parallel()
	clock := newMemoryClock()
	s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: clock.now})
	attempt := beginMemory(t, s, memoryScope, nil)
	var order []int
	for i := range 5 {
		attempt.Tx().OnCommit(func() {
			order = append(order, i)
			clock.advance(time.Hour) // however long it takes, the claim is nobody else's
			record := findMemory(t, s, memoryScope)
			assert.Equal(t, holdsend.StateClaimed, record.State)
			assert.True(t, record.Abandoned)
			replacing, _, err := s.Begin(t.Context(), holdsend.Claim{Scope: memoryScope, Replace: record})
			assert.NoError(t, err)
			assert.Nil(t, replacing)
			purged, err := s.PurgeExpired(t.Context())
			assert.NoError(t, err)
			assert.Zero(t, purged)
		})
	}
	clock.advance(24 * time.Hour)
	assert.Empty(t, order)
	completeMemory(t, attempt, "", 0)
	assert.Equal(t, []int{0, 1, 2, 3, 4}, order)
	assert.Equal(t, holdsend.StateCompleted, findMemory(t, s, memoryScope).State)
}

func TestMemoryReplayNeverPrecedesItsEffect(t *testing.T) {
	t.Parallel()
	s := holdsend.NewMemoryStore(nil)
	for i := range 50 {
		var effect atomic.Bool
		var wait sync.WaitGroup
		for range 8 {
			wait.Go(func() {
				request := holdsend.Request{Owner: "ada", Operation: "note.create", Content: []byte("1"), Header: keyed(memoryScopeOf(i).Key), Wait: patience}
				answer, err := holdsend.HandleIdempotent(context.Background(), s, request,
					func(_ context.Context, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
						tx.OnCommit(func() {
							runtime.Gosched()
							assert.False(t, effect.Swap(true), "the effect happened twice")
						})
						return holdsend.Response{Status: 201}, nil
					})
				assert.NoError(t, err)
				assert.Equal(t, 201, answer.Status)
				assert.True(t, effect.Load(), "an answer came before its effect")
			})
		}
		wait.Wait()
	}
}

func TestMemoryOnCommitNeverRunsWithoutACommit(t *testing.T) {
	t.Parallel()
	s := holdsend.NewMemoryStore(nil)
	never := func() { t.Error("OnCommit's function ran without a commit") }
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, end := range map[string]func(a holdsend.Attempt[*holdsend.MemoryTx]) error{
		"abort": func(a holdsend.Attempt[*holdsend.MemoryTx]) error {
			return errors.Join(a.Abort(t.Context()), errors.New("aborted"))
		},
		"context ended": func(a holdsend.Attempt[*holdsend.MemoryTx]) error {
			return a.Complete(ended, holdsend.Completion{})
		},
		"ref too long": func(a holdsend.Attempt[*holdsend.MemoryTx]) error {
			return a.Complete(t.Context(), holdsend.Completion{Response: holdsend.Response{ResourceRef: strings.Repeat("r", 256)}})
		},
		"negative TTL": func(a holdsend.Attempt[*holdsend.MemoryTx]) error {
			return a.Complete(t.Context(), holdsend.Completion{TTL: -1})
		},
	} {
		attempt := beginMemory(t, s, memoryScope, nil)
		attempt.Tx().OnCommit(never)
		require.Error(t, end(attempt), name)
		if name != "abort" {
			assert.Equal(t, holdsend.StateClaimed, findMemory(t, s, memoryScope).State, name)
		}
		require.NoError(t, attempt.Abort(t.Context()), name)
		requireNoMemory(t, s, memoryScope)
	}
}

func TestMemoryOnCommitPanics(t *testing.T) {
	t.Parallel()
	s := holdsend.NewMemoryStore(nil)
	completeMemory(t, beginMemory(t, s, memoryScopeOf(1), nil), "note-1", 0)
	earlier := 0
	fill := func(tx *holdsend.MemoryTx, end func()) {
		tx.OnCommit(func() { earlier++ })
		tx.OnCommit(end)
		tx.OnCommit(func() { t.Error("a function ran after one that panicked") })
		turned, err := s.TombstoneResource(t.Context(), tx, holdsend.Resource{Owner: "ada", Operation: "note.create", Ref: "note-1"})
		require.NoError(t, err)
		require.EqualValues(t, 1, turned)
	}
	requireNothing := func(earlierRuns int) {
		t.Helper()
		assert.Equal(t, earlierRuns, earlier)
		requireNoMemory(t, s, memoryScope)
		assert.Equal(t, holdsend.StateCompleted, findMemory(t, s, memoryScopeOf(1)).State, "a tombstone was set without a commit")
	}

	attempt := beginMemory(t, s, memoryScope, nil)
	fill(attempt.Tx(), func() { panic("its own") })
	require.PanicsWithValue(t, "its own", func() { _ = attempt.Complete(t.Context(), holdsend.Completion{}) })
	requireNothing(1)
	require.NoError(t, attempt.Abort(t.Context()))
	require.Error(t, attempt.Complete(t.Context(), holdsend.Completion{}))
	requireNothing(1)

	attempt = beginMemory(t, s, memoryScope, nil)
	fill(attempt.Tx(), runtime.Goexit)
	var exited sync.WaitGroup
	exited.Go(func() { _ = attempt.Complete(context.Background(), holdsend.Completion{}) })
	exited.Wait()
	requireNothing(2)

	require.PanicsWithValue(t, "its own", func() {
		_ = s.InTx(t.Context(), func(_ context.Context, tx *holdsend.MemoryTx) error {
			fill(tx, func() { panic("its own") })
			return nil
		})
	})
	requireNothing(3)

	// The whole way: the panic goes up through the protocol, and the retry creates.
	request := holdsend.Request{Owner: "ada", Operation: "note.create", Content: []byte("1"), Header: keyed(memoryScope.Key)}
	require.PanicsWithValue(t, "its own", func() {
		_, _ = holdsend.HandleIdempotent(t.Context(), s, request,
			func(_ context.Context, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
				fill(tx, func() { panic("its own") })
				return holdsend.Response{Status: 201}, nil
			})
	})
	requireNothing(4)
	completeMemory(t, beginMemory(t, s, memoryScope, nil), "", 0)
}

func TestMemoryLeakedTransaction(t *testing.T) {
	t.Parallel()
	s := holdsend.NewMemoryStore(nil)
	completeMemory(t, beginMemory(t, s, memoryScopeOf(1), nil), "note-1", 0)
	requireEnded := func(tx *holdsend.MemoryTx) {
		t.Helper()
		require.PanicsWithValue(t, "holdsend: MemoryTx.OnCommit on a transaction that has ended: call it before create returns",
			func() { tx.OnCommit(func() { t.Error("a leaked transaction's function ran") }) })
		_, err := s.TombstoneResource(t.Context(), tx, holdsend.Resource{Owner: "ada", Operation: "note.create", Ref: "note-1"})
		require.ErrorContains(t, err, "has ended")
	}

	completed := beginMemory(t, s, memoryScope, nil)
	completed.Tx().OnCommit(func() { requireEnded(completed.Tx()) }) // not even while it commits
	completeMemory(t, completed, "", 0)
	requireEnded(completed.Tx())

	aborted := beginMemory(t, s, memoryScopeOf(2), nil)
	require.NoError(t, aborted.Abort(t.Context()))
	requireEnded(aborted.Tx())

	var leaked *holdsend.MemoryTx
	require.NoError(t, s.InTx(t.Context(), func(_ context.Context, tx *holdsend.MemoryTx) error {
		leaked = tx
		return nil
	}))
	requireEnded(leaked)
	failed := errors.New("failed")
	require.ErrorIs(t, s.InTx(t.Context(), func(_ context.Context, tx *holdsend.MemoryTx) error {
		leaked = tx
		return failed
	}), failed)
	requireEnded(leaked)
	assert.Equal(t, holdsend.StateCompleted, findMemory(t, s, memoryScopeOf(1)).State)

	require.PanicsWithValue(t, "holdsend: MemoryTx.OnCommit needs a function", func() { leaked.OnCommit(nil) })
}

// TestMemoryLeakedTransactionRace has goroutines that go on adding to a transaction while it commits: what was added in
// time runs, what was not is refused, and nothing is lost between the two.
func TestMemoryLeakedTransactionRace(t *testing.T) {
	t.Parallel()
	s := holdsend.NewMemoryStore(nil)
	for i := range 50 {
		attempt := beginMemory(t, s, memoryScopeOf(i), nil)
		var added, ran atomic.Int64
		var wait sync.WaitGroup
		started := make(chan struct{}, 4)
		for range 4 {
			wait.Go(func() {
				defer func() { _ = recover() }() // the refusal
				for n := 0; ; n++ {
					attempt.Tx().OnCommit(func() { ran.Add(1) })
					added.Add(1)
					if n == 0 {
						started <- struct{}{}
					}
					runtime.Gosched() // or what is added grows until the one that completes gets its turn
				}
			})
		}
		<-started
		completeMemory(t, attempt, "", 0)
		wait.Wait()
		assert.Equal(t, added.Load(), ran.Load())
	}
}

func TestMemoryClaimLost(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*testing.T, *memoryClock, *holdsend.MemoryStore){
		"taken over": func(t *testing.T, clock *memoryClock, s *holdsend.MemoryStore) {
			clock.advance(time.Second)
			completeMemory(t, beginMemory(t, s, memoryScope, findMemory(t, s, memoryScope)), "", 0)
		},
		"forgotten": func(t *testing.T, _ *memoryClock, s *holdsend.MemoryStore) {
			forgotten, err := s.ForgetOwner(t.Context(), memoryScope.Owner)
			require.NoError(t, err)
			require.EqualValues(t, 1, forgotten)
		},
		"purged": func(t *testing.T, clock *memoryClock, s *holdsend.MemoryStore) {
			clock.advance(24 * time.Hour)
			purged, err := s.PurgeExpired(t.Context())
			require.NoError(t, err)
			require.Equal(t, holdsend.Purged{Claims: 1}, purged)
		},
		"dead": func(*testing.T, *memoryClock, *holdsend.MemoryStore) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := newMemoryClock()
			s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: clock.now})
			attempt := beginMemory(t, s, memoryScope, nil)
			attempt.Tx().OnCommit(func() { t.Error("a lost claim's write was committed") })
			holdsend.CrashMemoryAttempt(attempt)
			lose(t, clock, s)
			before, _ := s.Find(t.Context(), memoryScope)
			require.Equal(t, holdsend.ErrClaimLost, attempt.Complete(t.Context(), holdsend.Completion{}))
			require.NoError(t, attempt.Abort(t.Context()))
			after, _ := s.Find(t.Context(), memoryScope)
			assert.Equal(t, before, after)
		})
	}
}

func TestMemoryAges(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		options           holdsend.MemoryOptions
		takeOver, stale   time.Duration
		takeOver1, stale1 time.Duration // just too young; negative: there is no such age
	}{
		"by default": {
			takeOver: time.Second, takeOver1: time.Second - 1,
			stale: 24 * time.Hour, stale1: 24*time.Hour - 1,
		},
		"set": {
			options:  holdsend.MemoryOptions{TakeOverAfter: time.Minute, StaleClaim: time.Hour},
			takeOver: time.Minute, takeOver1: time.Minute - 1,
			stale: time.Hour, stale1: time.Hour - 1,
		},
		"at once": {
			options:   holdsend.MemoryOptions{TakeOverAfter: -1, StaleClaim: -1},
			takeOver1: -1, stale1: -1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := newMemoryClock()
			test.options.Now = clock.now
			s := holdsend.NewMemoryStore(&test.options)
			claimed := clock.now()
			holdsend.CrashMemoryAttempt(beginMemory(t, s, memoryScope, nil))
			assert.Equal(t, claimed, findMemory(t, s, memoryScope).ClaimedAt)

			if test.takeOver1 >= 0 {
				clock.advance(test.takeOver1)
				record := findMemory(t, s, memoryScope)
				assert.False(t, record.Abandoned)
				attempt, standing, err := s.Begin(t.Context(), holdsend.Claim{Scope: memoryScope, Replace: record})
				require.NoError(t, err)
				assert.Nil(t, attempt)
				assert.Equal(t, record, standing)
				clock.advance(test.takeOver - test.takeOver1)
			}
			record := findMemory(t, s, memoryScope)
			assert.True(t, record.Abandoned)
			holdsend.CrashMemoryAttempt(beginMemory(t, s, memoryScope, record))

			if test.stale1 >= 0 {
				clock.advance(test.stale1)
				purged, err := s.PurgeExpired(t.Context())
				require.NoError(t, err)
				assert.Zero(t, purged)
				clock.advance(test.stale - test.stale1)
			}
			purged, err := s.PurgeExpired(t.Context())
			require.NoError(t, err)
			assert.Equal(t, holdsend.Purged{Claims: 1}, purged)
		})
	}
}

func TestMemoryExpiry(t *testing.T) {
	t.Parallel()
	clock := newMemoryClock()
	s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: clock.now})
	attempt := beginMemory(t, s, memoryScope, nil)
	clock.advance(time.Minute)
	completed := clock.now()
	completeMemory(t, attempt, "", time.Hour)
	record := findMemory(t, s, memoryScope)
	assert.Equal(t, completed, *record.CompletedAt)
	assert.Equal(t, completed.Add(time.Hour), *record.ExpiresAt)

	clock.advance(time.Hour - 1)
	assert.False(t, findMemory(t, s, memoryScope).Expired)
	purged, err := s.PurgeExpired(t.Context())
	require.NoError(t, err)
	assert.Zero(t, purged)
	clock.advance(1)
	assert.True(t, findMemory(t, s, memoryScope).Expired)
	purged, err = s.PurgeExpired(t.Context())
	require.NoError(t, err)
	assert.Equal(t, holdsend.Purged{Records: 1}, purged)
}

// TestMemoryAttemptLivesHoweverOld has no limit to end an attempt: only Complete and Abort do.
func TestMemoryAttemptLivesHoweverOld(t *testing.T) {
	t.Parallel()
	clock := newMemoryClock()
	s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: clock.now})
	attempt := beginMemory(t, s, memoryScope, nil)
	clock.advance(10 * 365 * 24 * time.Hour)
	record := findMemory(t, s, memoryScope)
	assert.True(t, record.Abandoned)
	replacing, standing, err := s.Begin(t.Context(), holdsend.Claim{Scope: memoryScope, Replace: record})
	require.NoError(t, err)
	assert.Nil(t, replacing)
	assert.Equal(t, record, standing)
	purged, err := s.PurgeExpired(t.Context())
	require.NoError(t, err)
	assert.Zero(t, purged)
	completeMemory(t, attempt, "", 0)
}

func TestMemoryTombstone(t *testing.T) {
	t.Parallel()
	clock := newMemoryClock()
	s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: clock.now})
	note := holdsend.Resource{Owner: "ada", Operation: "note.create", Ref: "note-1"}
	tombstone := func(tx *holdsend.MemoryTx) int64 {
		t.Helper()
		turned, err := s.TombstoneResource(t.Context(), tx, note)
		require.NoError(t, err)
		return turned
	}

	t.Run("needs a transaction of its own store", func(t *testing.T) {
		_, err := s.TombstoneResource(t.Context(), nil, note)
		require.ErrorContains(t, err, "a transaction of the same store")
		other := holdsend.NewMemoryStore(nil)
		err = other.InTx(t.Context(), func(_ context.Context, tx *holdsend.MemoryTx) error {
			_, err := s.TombstoneResource(t.Context(), tx, note)
			return err
		})
		require.ErrorContains(t, err, "a transaction of the same store")
	})

	t.Run("counts a record once in a transaction", func(t *testing.T) {
		completeMemory(t, beginMemory(t, s, memoryScopeOf(1), nil), note.Ref, 0)
		require.NoError(t, s.InTx(t.Context(), func(_ context.Context, tx *holdsend.MemoryTx) error {
			assert.EqualValues(t, 1, tombstone(tx))
			assert.EqualValues(t, 0, tombstone(tx))
			return nil
		}))
		assert.Equal(t, holdsend.StateGone, findMemory(t, s, memoryScopeOf(1)).State)
	})

	t.Run("leaves what took the record's place meanwhile", func(t *testing.T) {
		completeMemory(t, beginMemory(t, s, memoryScopeOf(2), nil), note.Ref, time.Minute)
		require.NoError(t, s.InTx(t.Context(), func(_ context.Context, tx *holdsend.MemoryTx) error {
			assert.EqualValues(t, 1, tombstone(tx))
			clock.advance(time.Minute)
			completeMemory(t, beginMemory(t, s, memoryScopeOf(2), findMemory(t, s, memoryScopeOf(2))), note.Ref, 0)
			return nil
		}))
		assert.Equal(t, holdsend.StateCompleted, findMemory(t, s, memoryScopeOf(2)).State)
	})

	t.Run("finds a record whose effect shows already", func(t *testing.T) {
		attempt := beginMemory(t, s, memoryScopeOf(3), nil)
		attempt.Tx().OnCommit(func() {
			require.NoError(t, s.InTx(t.Context(), func(_ context.Context, tx *holdsend.MemoryTx) error {
				turned, err := s.TombstoneResource(t.Context(), tx, holdsend.Resource{Owner: "ada", Operation: "note.create", Ref: "note-3"})
				assert.EqualValues(t, 1, turned)
				return err
			}))
			assert.Equal(t, holdsend.StateClaimed, findMemory(t, s, memoryScopeOf(3)).State)
		})
		completeMemory(t, attempt, "note-3", time.Hour)
		record := findMemory(t, s, memoryScopeOf(3))
		assert.Equal(t, holdsend.StateGone, record.State)
		assert.Zero(t, record.Response)
		assert.NotNil(t, record.ExpiresAt)
	})

	t.Run("follows its functions", func(t *testing.T) {
		require.NoError(t, s.InTx(t.Context(), func(_ context.Context, tx *holdsend.MemoryTx) error {
			assert.EqualValues(t, 1, tombstone(tx))
			tx.OnCommit(func() { assert.Equal(t, holdsend.StateCompleted, findMemory(t, s, memoryScopeOf(2)).State) })
			return nil
		}))
		assert.Equal(t, holdsend.StateGone, findMemory(t, s, memoryScopeOf(2)).State)
	})
}

func TestMemoryForgetOwnerWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := holdsend.NewMemoryStore(nil)
		var attempts []holdsend.Attempt[*holdsend.MemoryTx]
		for i := range 3 {
			attempts = append(attempts, beginMemory(t, s, memoryScopeOf(i), nil))
		}
		completeMemory(t, beginMemory(t, s, memoryScopeOf(3), nil), "", 0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		var forgotten int64
		var err error
		done := make(chan struct{})
		go func() {
			defer close(done)
			forgotten, err = s.ForgetOwner(ctx, memoryScope.Owner)
		}()
		synctest.Wait() // it waits for an attempt, with nothing left to do
		requireNoMemory(t, s, memoryScopeOf(3))
		completeMemory(t, attempts[0], "", 0)
		require.NoError(t, attempts[1].Abort(t.Context()))
		younger := beginMemory(t, s, memoryScopeOf(1), nil)
		holdsend.CrashMemoryAttempt(attempts[2])
		<-done
		requireNoMemory(t, s, memoryScopeOf(0))
		require.NoError(t, err)
		assert.EqualValues(t, 3, forgotten) // what was complete, what completed, and what died; not what aborted
		requireNoMemory(t, s, memoryScopeOf(2))
		completeMemory(t, younger, "", 0)

		// And once more, until its context ends.
		attempt := beginMemory(t, s, memoryScope, nil)
		start := time.Now()
		forgotten, err = s.ForgetOwner(ctx, memoryScope.Owner)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.EqualValues(t, 1, forgotten)
		assert.Equal(t, time.Hour, time.Since(start))
		completeMemory(t, attempt, "", 0)
	})
}

// TestMemoryStoreUnderLoad has everything at once on few scopes, for the race detector, and then counts: each key that is
// completed at the end had one effect per completion.
func TestMemoryStoreUnderLoad(t *testing.T) {
	t.Parallel()
	s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{TakeOverAfter: -1, StaleClaim: -1})
	var completions, effects, living atomic.Int64
	var wait sync.WaitGroup
	for worker := range 8 {
		wait.Go(func() {
			for i := range 300 {
				scope := memoryScopeOf(i % 7)
				record, err := s.Find(context.Background(), scope)
				if err != nil {
					record = nil
				}
				attempt, _, err := s.Begin(context.Background(), holdsend.Claim{Scope: scope, Replace: record})
				if !assert.NoError(t, err) || attempt == nil {
					continue
				}
				living.Add(1)
				attempt.Tx().OnCommit(func() { effects.Add(1) })
				switch (i + worker) % 5 {
				case 0:
					assert.NoError(t, attempt.Abort(context.Background()))
				default:
					response := holdsend.Response{Status: 201, ResourceRef: "note", Body: []byte("x")}
					err := attempt.Complete(context.Background(), holdsend.Completion{Response: response, TTL: time.Nanosecond})
					if assert.NoError(t, err) {
						completions.Add(1)
					}
				}
				living.Add(-1)
			}
		})
		wait.Go(func() {
			for range 100 {
				switch worker % 3 {
				case 0:
					_, err := s.PurgeExpired(context.Background())
					assert.NoError(t, err)
				case 1:
					_, err := s.ForgetOwner(context.Background(), "ada")
					assert.NoError(t, err)
				default:
					err := s.InTx(context.Background(), func(ctx context.Context, tx *holdsend.MemoryTx) error {
						_, err := s.TombstoneResource(ctx, tx, holdsend.Resource{Owner: "ada", Operation: "note.create", Ref: "note"})
						return err
					})
					assert.NoError(t, err)
				}
			}
		})
	}
	wait.Wait()
	assert.Positive(t, completions.Load())
	assert.Equal(t, completions.Load(), effects.Load())
	_, err := s.ForgetOwner(t.Context(), "ada")
	require.NoError(t, err)
	for i := range 7 {
		requireNoMemory(t, s, memoryScopeOf(i))
	}
}

// TestMemoryPurgeBesideClaims purges more records than it looks at in one go, while others come and go.
func TestMemoryPurgeBesideClaims(t *testing.T) {
	t.Parallel()
	clock := newMemoryClock()
	s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: clock.now})
	const many = 10_000
	for i := range many {
		completeMemory(t, beginMemory(t, s, memoryScopeOf(i), nil), "", time.Minute)
	}
	clock.advance(time.Minute)
	var purged atomic.Int64
	var wait sync.WaitGroup
	for range 3 {
		wait.Go(func() {
			p, err := s.PurgeExpired(context.Background())
			assert.NoError(t, err)
			purged.Add(p.Records)
		})
		wait.Go(func() {
			for i := range 2000 {
				attempt, _, err := s.Begin(context.Background(), holdsend.Claim{Scope: memoryScopeOf(many + i)})
				assert.NoError(t, err)
				if attempt != nil {
					assert.NoError(t, attempt.Complete(context.Background(), holdsend.Completion{}))
				}
			}
		})
	}
	wait.Wait()
	assert.EqualValues(t, many, purged.Load())
	for i := range 2000 {
		assert.Equal(t, holdsend.StateCompleted, findMemory(t, s, memoryScopeOf(many+i)).State)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.PurgeExpired(ended)
	require.ErrorIs(t, err, context.Canceled)
}

// A gapContext calls a function whenever it is asked whether it has ended, as a long scan asks while it lets others have
// the lock.
type gapContext struct {
	context.Context
	gap func() error
}

func (c gapContext) Err() error { return c.gap() }

func TestMemoryLongScan(t *testing.T) {
	t.Parallel()
	const many = 5000
	fill := func(s *holdsend.MemoryStore, from, to int) {
		for i := from; i < to; i++ {
			completeMemory(t, beginMemory(t, s, memoryScopeOf(i), nil), "", 0)
		}
	}
	// inGap calls ForgetOwner, and gap once while it is at work.
	inGap := func(s *holdsend.MemoryStore, gap func() error) (int64, error) {
		asked := 0
		ctx := gapContext{t.Context(), func() error {
			if asked++; asked == 2 { // the first is at entry
				return gap()
			}
			return nil
		}}
		forgotten, err := s.ForgetOwner(ctx, memoryScope.Owner)
		assert.GreaterOrEqual(t, asked, 2, "it never let go of the lock")
		return forgotten, err
	}

	t.Run("spares younger records", func(t *testing.T) {
		t.Parallel()
		s := holdsend.NewMemoryStore(nil)
		fill(s, 0, many)
		forgotten, err := inGap(s, func() error { fill(s, many, 2*many); return nil })
		require.NoError(t, err)
		assert.EqualValues(t, many, forgotten)
		requireNoMemory(t, s, memoryScopeOf(0))
		for i := many; i < 2*many; i++ {
			findMemory(t, s, memoryScopeOf(i))
		}
	})

	t.Run("counts what it deleted itself", func(t *testing.T) {
		t.Parallel()
		s := holdsend.NewMemoryStore(nil)
		for i := range 5 * many {
			scope := memoryScopeOf(i)
			scope.Owner = "bob"
			completeMemory(t, beginMemory(t, s, scope, nil), "", 0)
		}
		fill(s, 0, many)
		var meanwhile int64
		forgotten, err := inGap(s, func() error {
			// Once bob is forgotten the store makes its maps anew, and the scan still goes over the old one.
			_, bobErr := s.ForgetOwner(t.Context(), "bob")
			var err error
			meanwhile, err = s.ForgetOwner(t.Context(), memoryScope.Owner)
			fill(s, 0, many)
			return errors.Join(bobErr, err)
		})
		require.NoError(t, err)
		assert.Positive(t, meanwhile)
		assert.EqualValues(t, many, forgotten+meanwhile)
		for i := range many {
			findMemory(t, s, memoryScopeOf(i))
		}
	})

	t.Run("ends with its context", func(t *testing.T) {
		t.Parallel()
		s := holdsend.NewMemoryStore(nil)
		fill(s, 0, many)
		ended := errors.New("ended")
		asked := 0
		forgotten, err := s.ForgetOwner(gapContext{t.Context(), func() error {
			if asked++; asked == 2 {
				return ended
			}
			return nil
		}}, memoryScope.Owner)
		require.ErrorIs(t, err, ended)
		assert.Positive(t, forgotten)
		assert.Less(t, forgotten, int64(many))
		rest, err := s.ForgetOwner(t.Context(), memoryScope.Owner)
		require.NoError(t, err)
		assert.EqualValues(t, many, forgotten+rest)
	})
}

// TestMemoryIsReturned looks at the heap, so it runs alone: tests that run in parallel wait until it is done.
func TestMemoryIsReturned(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // what the first one finalised
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	clock := newMemoryClock()
	for name, empty := range map[string]func(s *holdsend.MemoryStore){
		"purge": func(s *holdsend.MemoryStore) {
			clock.advance(time.Hour)
			purged, err := s.PurgeExpired(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 30_000, purged.Records)
		},
		"forget": func(s *holdsend.MemoryStore) {
			forgotten, err := s.ForgetOwner(t.Context(), memoryScope.Owner)
			require.NoError(t, err)
			require.EqualValues(t, 30_000, forgotten)
		},
	} {
		s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: clock.now})
		before := heap()
		for i := range 30_000 {
			completeMemory(t, beginMemory(t, s, memoryScopeOf(i), nil), memoryScopeOf(i).Key, time.Hour)
		}
		full := heap() - before
		require.Greater(t, full, int64(5<<20), "the records do not show on the heap")
		empty(s)
		left := heap() - before
		assert.Less(t, left, full/50, "%s left %d of %d bytes", name, left, full)
		runtime.KeepAlive(s)
	}
}

// TestMemoryKeepsWhatItKeepsWhenItShrinks purges most records, and finds the others by scope and by resource.
func TestMemoryKeepsWhatItKeepsWhenItShrinks(t *testing.T) {
	t.Parallel()
	clock := newMemoryClock()
	s := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: clock.now})
	for i := range 1000 {
		ttl := time.Minute
		if i%100 == 0 {
			ttl = 0
		}
		completeMemory(t, beginMemory(t, s, memoryScopeOf(i), nil), memoryScopeOf(i).Key, ttl)
	}
	clock.advance(time.Minute)
	purged, err := s.PurgeExpired(t.Context())
	require.NoError(t, err)
	require.Equal(t, holdsend.Purged{Records: 990}, purged)
	for i := 0; i < 1000; i += 100 {
		require.NoError(t, s.InTx(t.Context(), func(ctx context.Context, tx *holdsend.MemoryTx) error {
			turned, err := s.TombstoneResource(ctx, tx, holdsend.Resource{Owner: "ada", Operation: "note.create", Ref: memoryScopeOf(i).Key})
			assert.EqualValues(t, 1, turned)
			return err
		}))
		assert.Equal(t, holdsend.StateGone, findMemory(t, s, memoryScopeOf(i)).State)
	}
	forgotten, err := s.ForgetOwner(t.Context(), "ada")
	require.NoError(t, err)
	assert.EqualValues(t, 10, forgotten)
}

func ExampleNewMemoryStore() {
	store := holdsend.NewMemoryStore(nil)
	var notes []string
	create := func(_ context.Context, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
		// What must happen only if the answer is kept waits for the commit.
		tx.OnCommit(func() { notes = append(notes, "buy milk") })
		return holdsend.JSON(201, map[string]int{"id": 1})
	}
	request := holdsend.Request{
		Owner:     "ada",
		Operation: "note.create",
		Header:    map[string][]string{"Idempotency-Key": {"note-7f3a9c"}},
		Content:   map[string]string{"text": "buy milk"},
	}
	for range 2 {
		answer, err := holdsend.HandleIdempotent(context.Background(), store, request, create)
		fmt.Println(answer.Outcome, answer.Status, string(answer.Body), err)
	}
	fmt.Println(notes)
	// Output:
	// created 201 {"id":1} <nil>
	// replayed 201 {"id":1} <nil>
	// [buy milk]
}
