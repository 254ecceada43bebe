package holdsend_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgproxy"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// Create commits by raw SQL, answers 2xx, and leaves behind what cannot be committed or written in any more. Its write is
// there for good, so the record must be completed all the same.
func TestPostgresCommittedByCreateThenUnfit(t *testing.T) {
	t.Parallel()
	const insert = "INSERT INTO notes VALUES ('hello')"
	for name, then := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"a read-only transaction": func(ctx context.Context, tx pgx.Tx) error {
			return execAll(ctx, tx, "BEGIN READ ONLY")
		},
		"a failed transaction": func(ctx context.Context, tx pgx.Tx) error {
			err := execAll(ctx, tx, "BEGIN")
			_, _ = tx.Exec(ctx, "SELECT 1/0")
			return err
		},
		"another role": func(ctx context.Context, tx pgx.Tx) error {
			return execAll(ctx, tx, "BEGIN", "SET LOCAL ROLE pg_monitor")
		},
		"another role, for good": func(ctx context.Context, tx pgx.Tx) error {
			return execAll(ctx, tx, "SET ROLE pg_monitor")
		},
		"open rows": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "SELECT generate_series(1, 1000000000)")
			rows.Next()
			return err
		},
		"a closed connection": func(ctx context.Context, tx pgx.Tx) error {
			return tx.Conn().Close(ctx)
		},
		"a broken connection": func(_ context.Context, tx pgx.Tx) error {
			return tx.Conn().PgConn().Conn().Close()
		},
		"nothing prepared": func(ctx context.Context, tx pgx.Tx) error {
			return execAll(ctx, tx, "DISCARD ALL")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, nil, nil)
			answer, err := b.send(key, func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
				err := execAll(ctx, tx, insert, "COMMIT")
				return holdsend.Response{Status: 201, Body: []byte("stored")}, errors.Join(err, then(ctx, tx))
			})
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
			again, err := b.send(key, insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeReplayed, again.Outcome)
			require.Equal(t, 1, b.notes())
		})
	}
}

// Create commits by itself and answers 2xx, and what the store does about it meets a fault that passes: the record is
// completed all the same. An error never says that nothing was stored.
func TestPostgresCommittedByCreateAndAFault(t *testing.T) {
	t.Parallel()
	created := holdsend.Response{Status: 201, Body: []byte("stored")}
	committing := func(then ...string) holdsend.CreateFunc[pgx.Tx] {
		return func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return created, execAll(ctx, tx, append([]string{"INSERT INTO notes VALUES ('hello')", "COMMIT"}, then...)...)
		}
	}
	requireCompleted := func(t *testing.T, b *bed, answer holdsend.Answer, err error) {
		t.Helper()
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		again, err := b.send(key, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeReplayed, again.Outcome)
		require.Equal(t, "stored", string(again.Body))
		require.Equal(t, 1, b.notes())
	}
	t.Run("the time of Complete is used up", func(t *testing.T) {
		t.Parallel()
		b := newBed(t, nil, nil)
		claim := holdsend.Claim{Scope: holdsend.Scope{Owner: "ada", Operation: "note.create", Key: key}, Fingerprint: "hs1:" + strings.Repeat("0", 64)}
		attempt, _, err := b.store.Begin(t.Context(), claim)
		require.NoError(t, err)
		_, err = committing()(t.Context(), attempt.Tx(), holdsend.Incoming{})
		require.NoError(t, err)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, attempt.Complete(ended, holdsend.Completion{Response: created}))
		require.ErrorIs(t, attempt.(holdsend.Warner).Warning(), holdsend.ErrTxEnded)
		record, err := b.store.Find(t.Context(), claim.Scope)
		require.NoError(t, err)
		require.Equal(t, holdsend.StateCompleted, record.State)
		require.Equal(t, "stored", string(record.Response.Body))
	})
	t.Run("the late completion fails at its commit, twice", func(t *testing.T) {
		t.Parallel()
		b := newBed(t, nil, nil)
		pgtest.Exec(t, b.aside, failsTwice)
		answer, err := b.send(key, committing())
		requireCompleted(t, b, answer, err)
	})
	for _, do := range []pgproxy.Action{pgproxy.LoseAnswers, pgproxy.CutBeforeBatch, pgproxy.CutBeforeCommit} {
		for name, late := range map[string]bool{"completion": false, "late completion": true} {
			t.Run(fmt.Sprintf("%v at the %s", do, name), func(t *testing.T) {
				t.Parallel()
				b, proxy := newProxiedBed(t, "cache_statement", nil)
				_, err := b.send("item-0000", committing()) // what is needed is prepared
				require.NoError(t, err)
				pgtest.Exec(t, b.aside, "DELETE FROM holdsend_records; DELETE FROM notes")
				fault := proxy.Inject(pgproxy.Fault{Do: do, When: func(batch pgproxy.Batch) bool {
					return batch.Contains("state = 'completed', completed_at") && batch.Contains("RETURNING true") == late
				}})
				answer, err := b.send(key, committing("BEGIN"))
				require.True(t, fault.Happened())
				requireCompleted(t, b, answer, err)
			})
		}
	}
	t.Run("the connection falls silent", func(t *testing.T) {
		t.Parallel()
		b, proxy := newProxiedBed(t, "cache_statement", nil)
		fault := proxy.Inject(pgproxy.Fault{Do: pgproxy.CutBeforeBatch, Silent: true, When: func(batch pgproxy.Batch) bool {
			return batch.Contains("RETURNING true")
		}})
		answer, err := b.send(key, committing())
		require.True(t, fault.Happened())
		requireCompleted(t, b, answer, err)
	})
	t.Run("its answer is lost, and somebody hears of it", func(t *testing.T) {
		t.Parallel()
		b, proxy := newProxiedBed(t, "cache_statement", nil)
		fault := proxy.Inject(pgproxy.Fault{Do: pgproxy.LoseAnswers, When: func(batch pgproxy.Batch) bool {
			return batch.Contains("RETURNING true")
		}})
		r := request(key)
		var event holdsend.Event
		r.Observe = func(_ context.Context, e holdsend.Event) { event = e }
		answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			answer, err := committing()(ctx, tx, in)
			return answer, errors.Join(err, tx.Conn().Close(ctx))
		})
		require.True(t, fault.Happened())
		require.ErrorIs(t, event.Err, holdsend.ErrTxEnded)
		requireCompleted(t, b, answer, err)
	})
	t.Run("the record can never be completed", func(t *testing.T) {
		t.Parallel()
		b := newBed(t, &holdsend.PostgresOptions{TakeOverAfter: time.Millisecond}, nil)
		pgtest.Exec(t, b.aside, strings.ReplaceAll(failsTwice, "<= 2", "> 0"))
		_, err := b.send(key, committing())
		require.ErrorIs(t, err, holdsend.ErrTxEnded)
		require.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
		require.ErrorContains(t, err, "not now", "the error says why")
		r := request(key)
		r.Wait = 100 * time.Millisecond
		answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeInProgress, answer.Outcome, "the key is kept")
		require.Equal(t, 1, b.notes())
	})
	for name, then := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"nothing more": func(context.Context, pgx.Tx) error { return nil },
		"open rows": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "SELECT generate_series(1, 1000000000)")
			rows.Next()
			return err
		},
		"a closed connection": func(ctx context.Context, tx pgx.Tx) error { return tx.Conn().Close(ctx) },
		"another role":        func(ctx context.Context, tx pgx.Tx) error { return execAll(ctx, tx, "SET ROLE pg_monitor") },
	} {
		t.Run("the database is away after "+name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, nil, nil)
			var away atomic.Bool
			store, err := holdsend.NewPostgresStore(acquireFunc(func(ctx context.Context) (*pgxpool.Conn, error) {
				if away.Load() {
					return nil, errors.New("the database is away")
				}
				return b.pool.Acquire(ctx)
			}), nil)
			require.NoError(t, err)
			_, err = holdsend.HandleIdempotent(context.Background(), store, request(key), func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				away.Store(true)
				r, err := committing()(ctx, tx, in)
				return r, errors.Join(err, then(ctx, tx))
			})
			require.Equal(t, 1, b.notes())
			if name == "nothing more" { // the attempt has a connection of its own
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, holdsend.ErrOutcomeUnknown)
			require.NotContains(t, err.Error(), "nothing was stored")
		})
	}
}

// failsTwice makes the first two completions fail at their commit.
const failsTwice = `CREATE SEQUENCE completions;
	CREATE FUNCTION fails_twice() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF NEW.state = 'completed' AND nextval('completions') <= 2 THEN RAISE EXCEPTION 'not now'; END IF;
		RETURN NULL;
	END $$;
	CREATE CONSTRAINT TRIGGER fails_twice AFTER UPDATE ON holdsend_records DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION fails_twice()`

// Create leaves a query unread whose backend has nothing to send for long, and so would not notice that its client is gone.
func TestPostgresOpenRowsOfASlowQuery(t *testing.T) {
	t.Parallel()
	for _, status := range []int{201, 404} {
		b := newBed(t, nil, nil)
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			_, err := insertNote(ctx, tx, in)
			_, queryErr := tx.Query(context.Background(), slowQuery)
			require.Eventually(t, func() bool {
				return pgtest.Value[bool](t, b.aside, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query LIKE '%pg_sleep(1000)%')")
			}, time.Minute, time.Millisecond)
			return holdsend.Response{Status: status}, errors.Join(err, queryErr)
		})
		if status == 201 {
			require.ErrorContains(t, err, "rows still open")
			require.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
		} else {
			require.NoError(t, err)
		}
		require.Equal(t, 0, pgtest.Value[int](t, b.aside, "SELECT count(*) FROM holdsend_records"), "the key is not free")
		require.Equal(t, 0, b.notes())
	}
}

// slowQuery answers with two long rows at once, and with the third much later.
const slowQuery = "SELECT repeat('x', 20000), CASE WHEN n = 3 THEN pg_sleep(1000) END FROM generate_series(1, 3) n"

func execAll(ctx context.Context, tx pgx.Tx, statements ...string) error {
	for _, sql := range statements {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// Create deallocates what is prepared on the connection: the library's statements too.
func TestPostgresDeallocateAll(t *testing.T) {
	t.Parallel()
	for _, status := range []int{201, 404} {
		b := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
		for _, warm := range []string{"warm-0001", "warm-0002"} { // all statements are prepared
			_, err := b.send(warm, insertNote)
			require.NoError(t, err)
			_, err = b.send(warm+"x", func(context.Context, pgx.Tx, holdsend.Incoming) (holdsend.Response, error) {
				return holdsend.Response{Status: 404}, nil
			})
			require.NoError(t, err)
		}
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			response, err := insertNote(ctx, tx, in)
			response.Status = status
			return response, errors.Join(err, execAll(ctx, tx, "DEALLOCATE ALL"))
		})
		require.Equal(t, status == 201, err != nil)
		b.requireFree(key)
		require.Equal(t, 2, b.notes())
	}
}

// A duplicate that tries to take over while others have all connections: that is part of its wait.
func TestPostgresTakeOverIsBoundedByWait(t *testing.T) {
	t.Parallel()
	b := newBed(t, &holdsend.PostgresOptions{TakeOverAfter: time.Millisecond, MaxIdle: time.Hour}, nil)
	started, finish := make(chan struct{}), make(chan struct{})
	defer close(finish)
	go func() {
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			close(started)
			<-finish
			return insertNote(ctx, tx, in)
		})
		assert.NoError(t, err)
	}()
	<-started
	require.Eventually(t, func() bool {
		return pgtest.Value[bool](t, b.aside, "SELECT claimed_at < clock_timestamp() - interval '10 ms' FROM holdsend_records")
	}, time.Minute, time.Millisecond)
	calls := 0
	store, err := holdsend.NewPostgresStore(acquireFunc(func(ctx context.Context) (*pgxpool.Conn, error) {
		if calls++; calls == 2 {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return b.pool.Acquire(ctx)
	}), &holdsend.PostgresOptions{TakeOverAfter: time.Millisecond})
	require.NoError(t, err)
	r := request(key)
	r.Wait = 100 * time.Millisecond
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	answer, err := holdsend.HandleIdempotent(ctx, store, r, insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeInProgress, answer.Outcome)
	require.Equal(t, 2, calls)
}

type blockedSource struct{ block chan struct{} }

func (s blockedSource) Next() bool             { <-s.block; return false }
func (s blockedSource) Values() ([]any, error) { return nil, nil }
func (s blockedSource) Err() error             { return nil }

// Create leaves a goroutine behind in CopyFrom, whose source waits for what never comes: the request ends all the same, and
// the pool gets its connection back.
func TestPostgresCopyFromLeftBehind(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
	source := blockedSource{make(chan struct{})}
	left := make(chan struct{})
	defer func() { <-left }()
	defer close(source.block)
	_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		go func() {
			defer close(left)
			_, _ = tx.CopyFrom(context.Background(), pgx.Identifier{"notes"}, []string{"text"}, source)
		}()
		require.Eventually(t, func() bool {
			return pgtest.Value[bool](t, b.aside, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query ILIKE 'copy %notes%' AND state = 'active' AND application_name = current_setting('application_name'))")
		}, time.Minute, time.Millisecond)
		return holdsend.Response{Status: 201}, nil
	})
	require.ErrorContains(t, err, "in use by another goroutine")
	answer, err := b.send(key, insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	require.Equal(t, 1, b.notes())
}

// All connections of the pool break while create runs: the key is freed although the first one that the pool offers is dead.
func TestPostgresKeyIsFreedThroughBrokenConnections(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 2 })
	ctx := context.Background()
	one, err := b.pool.Acquire(ctx)
	require.NoError(t, err)
	two, err := b.pool.Acquire(ctx)
	require.NoError(t, err)
	one.Release()
	two.Release()
	_, err = b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		b.killBackends("true")
		return insertNote(ctx, tx, in)
	})
	require.Error(t, err)
	b.requireFree(key)
}

// Idle connections die while a duplicate waits: its next look finds one, and goes to another.
func TestPostgresWaiterFindsBrokenConnections(t *testing.T) {
	t.Parallel()
	b := newBed(t, &holdsend.PostgresOptions{MaxIdle: time.Hour}, func(c *pgxpool.Config) { c.MaxConns = 2 })
	started, finish := make(chan struct{}), make(chan struct{})
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			close(started)
			<-finish
			return insertNote(ctx, tx, in)
		})
		first <- err
	}()
	<-started
	looked := pgtest.Value[time.Time](t, b.aside, "SELECT clock_timestamp()")
	go func() {
		r := request(key)
		r.Wait = time.Minute
		_, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
		second <- err
	}()
	// Idle between two looks, and not for the moment between the preparation of a look and the look: three connections that
	// die then, one after the other, end the call.
	const idle = "state = 'idle' AND query_start > $2 AND state_change < clock_timestamp() - interval '30 ms'"
	for range 3 {
		require.Eventually(t, func() bool { return b.killBackends(idle, looked) > 0 }, time.Minute, time.Millisecond)
	}
	close(finish)
	require.NoError(t, <-first)
	require.NoError(t, <-second)
}

// killBackends ends those of the store's pool for which where is true, and waits until they are gone.
func (b *bed) killBackends(where string, args ...any) int {
	b.t.Helper()
	ours := "FROM pg_stat_activity WHERE application_name = current_setting('application_name') AND pid <> ALL ($1::int[]) AND " + where
	args = append([]any{b.asidePIDs()}, args...)
	var pids []int32
	rows, err := b.aside.Query(context.Background(), "SELECT pid "+ours, args...)
	require.NoError(b.t, err)
	pids, err = pgx.CollectRows(rows, pgx.RowTo[int32])
	require.NoError(b.t, err)
	pgtest.Exec(b.t, b.aside, "SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) pid", pids)
	require.Eventually(b.t, func() bool {
		return pgtest.Value[bool](b.t, b.aside, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY ($1::int[]))", pids)
	}, time.Minute, time.Millisecond)
	return len(pids)
}

// asidePIDs are the backends of the test's own pool.
func (b *bed) asidePIDs() []int32 {
	var pids []int32
	idle := b.aside.AcquireAllIdle(context.Background())
	for _, conn := range idle {
		pids = append(pids, int32(conn.Conn().PgConn().PID()))
		conn.Release()
	}
	return pids
}

// As TestPostgresCopyFromLeftBehind, for a request without a key.
func TestPostgresCopyFromLeftBehindUnkeyed(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
	source := blockedSource{make(chan struct{})}
	left := make(chan struct{})
	defer func() { <-left }()
	defer close(source.block)
	_, err := b.send("", func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		go func() {
			defer close(left)
			_, _ = tx.CopyFrom(context.Background(), pgx.Identifier{"notes"}, []string{"text"}, source)
		}()
		require.Eventually(t, func() bool {
			return pgtest.Value[bool](t, b.aside, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query ILIKE 'copy %notes%' AND state = 'active' AND application_name = current_setting('application_name'))")
		}, time.Minute, time.Millisecond)
		return holdsend.Response{Status: 201}, nil
	})
	require.ErrorContains(t, err, "in use by another goroutine")
	_, err = b.send(key, insertNote)
	require.NoError(t, err)
	require.Equal(t, 1, b.notes())
}

// A table that drops what is inserted, or hides it, is an error and no endless loop.
func TestPostgresTableTakesNoClaim(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	pgtest.Exec(t, b.aside, pgtest.DropInserts)
	_, err := b.send(key, insertNote)
	require.ErrorContains(t, err, "row security or a trigger")
}
