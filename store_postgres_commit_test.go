package holdsend_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
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

// newProxiedBed is a bed whose store reaches Postgres through a proxy.
func newProxiedBed(t *testing.T, mode string, o *holdsend.PostgresOptions) (*bed, *pgproxy.Proxy) {
	url := pgtest.URL(t)
	proxy := pgproxy.Start(t, url)
	return newBedOn(t, url, pgtest.With(t, proxy.URL(), "default_query_exec_mode", mode), o, nil), proxy
}

// completions counts how often the end of an attempt was sent.
func completions(proxy *pgproxy.Proxy) int {
	n := 0
	for _, batch := range proxy.Batches() {
		if batch.Contains("state = 'completed', completed_at") && batch.EndsInCommit() {
			n++
		}
	}
	return n
}

// The answer to COMMIT is lost, in every way that a network has. The store returns the truth, and sends COMMIT once.
func TestPostgresLostCommitAnswer(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		for name, c := range map[string]struct {
			fault  pgproxy.Fault
			create holdsend.CreateFunc[pgx.Tx]
			stored bool
		}{
			"it had committed":                {fault: pgproxy.Fault{Do: pgproxy.LoseCommitAnswer}, stored: true},
			"it had committed, all lost":      {fault: pgproxy.Fault{Do: pgproxy.LoseAnswers}, stored: true},
			"it had committed, in silence":    {fault: pgproxy.Fault{Do: pgproxy.LoseCommitAnswer, Silent: true}, stored: true},
			"it had rolled back":              {fault: pgproxy.Fault{Do: pgproxy.CutBeforeCommit}},
			"it never arrived":                {fault: pgproxy.Fault{Do: pgproxy.CutBeforeBatch}},
			"it had failed":                   {fault: pgproxy.Fault{Do: pgproxy.LoseCommitAnswer}, create: breakDeferredConstraint},
			"it was still running":            {fault: pgproxy.Fault{Do: pgproxy.HoldCommit}, stored: true},
			"it was still running, and fails": {fault: pgproxy.Fault{Do: pgproxy.HoldCommit}, create: breakDeferredConstraint},
		} {
			t.Run(mode+"/"+name, func(t *testing.T) {
				t.Parallel()
				b, proxy := newProxiedBed(t, mode, nil)
				pgtest.Exec(t, b.aside, "CREATE TABLE picky (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
				if c.create == nil {
					c.create = insertNote
				}
				_, err := b.send("item-0000", insertNote) // statements are prepared
				require.NoError(t, err)
				proxy.Reset()

				fault := proxy.Inject(c.fault)
				if c.fault.Do == pgproxy.HoldCommit {
					go func() {
						// The store must not answer before the commit that is still on its way.
						assertAsksAgain(t, proxy)
						fault.Release()
					}()
				}
				answer, err := b.send(key, c.create)
				require.True(t, fault.Happened())
				require.Equal(t, 1, completions(proxy), "COMMIT must be sent once")
				if c.stored {
					require.NoError(t, err)
					require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
					require.Equal(t, 2, b.notes())
				} else {
					require.Error(t, err)
					require.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
					require.Equal(t, 1, b.notes())
					b.requireFree(key)
				}
				again, err := b.send(key, insertNote)
				require.NoError(t, err)
				require.Equal(t, c.stored, again.Outcome == holdsend.OutcomeReplayed)
				require.Equal(t, 2, b.notes())
			})
		}
	}
}

// What may fail runs in a nested transaction, and does: pgx rolls back to its savepoint and leaves it open, so the record is
// completed inside of it. The answer to COMMIT is lost while it is under way.
func TestPostgresLostCommitAnswerAfterANestedRollback(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b, proxy := newProxiedBed(t, mode, nil)
			fault := proxy.Inject(pgproxy.Fault{Do: pgproxy.HoldCommit})
			go func() {
				assertAsksAgain(t, proxy)
				fault.Release()
			}()
			answer, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return execAll(ctx, tx, "SELECT 1/0") })
				if err == nil {
					return holdsend.Response{}, errors.New("the savepoint hid an error")
				}
				return insertNote(ctx, tx, in)
			})
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
			require.Equal(t, 1, b.notes())
		})
	}
}

// Create commits by itself, and the statement that completes its record, or keeps its key, does not get to its COMMIT.
func TestPostgresCommittedByCreateThenCut(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		for _, status := range []int{201, 404} {
			t.Run(fmt.Sprintf("%s/%d", mode, status), func(t *testing.T) {
				t.Parallel()
				b, proxy := newProxiedBed(t, mode, nil)
				cut := proxy.Inject(pgproxy.Fault{Do: pgproxy.CutBeforeCommit, When: func(batch pgproxy.Batch) bool {
					return batch.Contains("WITH attempt AS") || batch.Contains("RETURNING true")
				}})
				_, _ = b.send(key, func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
					return holdsend.Response{Status: status}, execAll(ctx, tx, "INSERT INTO notes VALUES ('hello')", "COMMIT")
				})
				require.True(t, cut.Happened())
				r := request(key)
				r.Wait = -1
				_, _ = holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
				require.Equal(t, 1, b.notes(), "the write was doubled")
			})
		}
	}
}

// The answer waits for the commit under every default of the database, and is the same.
func TestPostgresLostCommitAnswerUnderEveryIsolationLevel(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			url := pgtest.URL(t)
			proxy := pgproxy.Start(t, url)
			b := newBedOn(t, url, pgtest.With(t, proxy.URL(), "default_transaction_isolation", string(level)), nil, nil)
			fault := proxy.Inject(pgproxy.Fault{Do: pgproxy.HoldCommit})
			go func() {
				assertAsksAgain(t, proxy)
				fault.Release()
			}()
			answer, err := b.send(key, insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
			require.Equal(t, 1, b.notes())
		})
	}
}

func breakDeferredConstraint(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
	if _, err := tx.Exec(ctx, "INSERT INTO picky VALUES (1), (1)"); err != nil {
		return holdsend.Response{}, err
	}
	return insertNote(ctx, tx, in)
}

// assertAsksAgain returns when the store has asked for the second time what became of a commit, for it is still under way.
func assertAsksAgain(t *testing.T, proxy *pgproxy.Proxy) {
	assert.Eventually(t, func() bool {
		questions := 0
		for _, batch := range proxy.Batches() {
			if batch.Contains("SELECT state, how") {
				questions++
			}
		}
		return questions >= 2
	}, time.Minute, time.Millisecond)
}

// The transaction of an attempt was rolled back, and another takes its claim over before anybody asks: the outcome is known
// all the same.
func TestPostgresRolledBackThenTakenOver(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"a constraint at COMMIT": func(ctx context.Context, tx pgx.Tx) error {
			return execAll(ctx, tx, "INSERT INTO picky VALUES (1), (1)")
		},
		"a failed transaction": func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "SELECT 1/0")
			return nil
		},
		"a lost connection": func(ctx context.Context, tx pgx.Tx) error { return tx.Conn().Close(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &holdsend.PostgresOptions{TakeOverAfter: time.Millisecond}
			b := newBed(t, o, nil)
			pgtest.Exec(t, b.aside, "CREATE TABLE picky (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
			other, err := holdsend.NewPostgresStore(b.aside, o)
			require.NoError(t, err)
			// What the store asks next is held up, on whatever connection, until the claim is another's.
			var before atomic.Pointer[func()]
			pool := pgtest.Pool(t, b.url, func(c *pgxpool.Config) { c.ConnConfig.Tracer = outcomeTracer{&before} })
			store, err := holdsend.NewPostgresStore(pool, o)
			require.NoError(t, err)
			takeOver := func() {
				r := request(key)
				r.Wait = time.Minute
				answer, err := holdsend.HandleIdempotent(context.Background(), other, r, insertNote)
				assert.NoError(t, err)
				assert.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
			}
			before.Store(&takeOver)
			_, err = holdsend.HandleIdempotent(context.Background(), store, request(key), func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
				return holdsend.Response{Status: 201}, fail(ctx, tx)
			})
			require.Error(t, err)
			require.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
		})
	}
}

// An outcomeTracer calls *before once, before an outcome is asked for.
type outcomeTracer struct{ before *atomic.Pointer[func()] }

func (o outcomeTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, start pgx.TraceBatchStartData) context.Context {
	for _, q := range start.Batch.QueuedQueries {
		if strings.HasPrefix(q.SQL, "SELECT state, how") {
			if do := o.before.Swap(nil); do != nil {
				(*do)()
			}
		}
	}
	return ctx
}
func (o outcomeTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (o outcomeTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
func (o outcomeTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (o outcomeTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// The answer to COMMIT is lost, and the pool has no connection to ask on for longer than one question may take.
func TestPostgresLostCommitAnswerBesideABusyPool(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	proxy := pgproxy.Start(t, url)
	b := newBedOn(t, url, proxy.URL(), nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
	proxy.Inject(pgproxy.Fault{Do: pgproxy.LoseCommitAnswer})
	var others sync.WaitGroup
	answer, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		for range 3 { // whoever gives its place in the queue up is behind all of them again
			asking := make(chan struct{})
			others.Go(func() {
				close(asking)
				for began := time.Now(); time.Since(began) < 8*time.Second; {
					_, err := b.pool.Exec(context.Background(), "SELECT pg_sleep(1.5)")
					assert.NoError(t, err)
				}
			})
			<-asking
		}
		return insertNote(ctx, tx, in)
	})
	others.Wait()
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	require.Equal(t, 1, b.notes())
}

// The database cannot be asked, or no longer knows: ErrOutcomeUnknown, and the key is kept.
func TestPostgresOutcomeUnknown(t *testing.T) {
	t.Parallel()
	t.Run("the database is away", func(t *testing.T) {
		t.Parallel()
		for do, stored := range map[pgproxy.Action]bool{pgproxy.LoseCommitAnswer: true, pgproxy.CutBeforeCommit: false} {
			url := pgtest.URL(t)
			proxy := pgproxy.Start(t, url)
			b := newBedOn(t, url, proxy.URL(), nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
			fault := proxy.Inject(pgproxy.Fault{Do: do})
			store, err := holdsend.NewPostgresStore(acquireFunc(func(ctx context.Context) (*pgxpool.Conn, error) {
				if fault.Happened() { // the connection that was cut was the only one, and there is no other from now on
					proxy.Refuse(true)
				}
				return b.pool.Acquire(ctx)
			}), nil)
			require.NoError(t, err)
			_, err = holdsend.HandleIdempotent(context.Background(), store, request(key), insertNote)
			require.True(t, fault.Happened())
			require.ErrorIs(t, err, holdsend.ErrOutcomeUnknown)
			refusal := holdsend.ErrorAnswer(err)
			require.Equal(t, 503, refusal.Status)
			require.NotEmpty(t, refusal.Header.Get("Retry-After"))

			proxy.Refuse(false)
			answer, err := b.send(key, insertNote)
			require.NoError(t, err)
			require.Equal(t, stored, answer.Outcome == holdsend.OutcomeReplayed, "outcome %s", answer.Outcome)
			require.Equal(t, 1, b.notes())
		}
	})
	for do, stored := range map[pgproxy.Action]int{pgproxy.LoseCommitAnswer: 1, pgproxy.CutBeforeCommit: 0} {
		t.Run(fmt.Sprintf("the record is gone, stored %d", stored), func(t *testing.T) {
			t.Parallel()
			url := pgtest.URL(t)
			proxy := pgproxy.Start(t, url)
			b := newBedOn(t, url, proxy.URL(), nil, nil)
			fault := proxy.Inject(pgproxy.Fault{Do: do})
			store, err := holdsend.NewPostgresStore(acquireFunc(func(ctx context.Context) (*pgxpool.Conn, error) {
				if fault.Happened() { // somebody forgets the owner before the store asks
					pgtest.Exec(t, b.aside, "DELETE FROM holdsend_records")
				}
				return b.pool.Acquire(ctx)
			}), nil)
			require.NoError(t, err)
			_, err = holdsend.HandleIdempotent(context.Background(), store, request(key), insertNote)
			require.ErrorIs(t, err, holdsend.ErrOutcomeUnknown)
			require.Equal(t, stored, b.notes())
		})
	}
	t.Run("without a key", func(t *testing.T) {
		t.Parallel()
		b, proxy := newProxiedBed(t, "cache_statement", nil)
		proxy.Inject(pgproxy.Fault{Do: pgproxy.LoseCommitAnswer})
		_, err := b.send("", insertNote)
		require.ErrorIs(t, err, holdsend.ErrOutcomeUnknown)
		require.Equal(t, 1, b.notes())
	})
}

type acquireFunc func(context.Context) (*pgxpool.Conn, error)

func (f acquireFunc) Acquire(ctx context.Context) (*pgxpool.Conn, error) { return f(ctx) }

// The answer to the claim is lost: nobody holds that claim, and it is taken over before the request would give up.
func TestPostgresLostClaimAnswer(t *testing.T) {
	t.Parallel()
	for _, do := range []pgproxy.Action{pgproxy.LoseAnswers, pgproxy.CutBeforeBatch} {
		b, proxy := newProxiedBed(t, "cache_statement", &holdsend.PostgresOptions{TakeOverAfter: 100 * time.Millisecond})
		fault := proxy.Inject(pgproxy.Fault{Do: do, When: func(batch pgproxy.Batch) bool { return batch.Contains("INSERT INTO \"holdsend_records\"") }})
		r := request(key)
		r.Wait = time.Minute
		answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
		require.True(t, fault.Happened())
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		require.Equal(t, 1, b.notes())
	}
}

// A create with one INSERT takes three round trips, as an unprotected transaction does (BEGIN, INSERT, COMMIT), and seven
// statements; a replay takes two, and six, or one and three in the process that has created.
func TestPostgresRoundTrips(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b, proxy := newProxiedBed(t, mode, nil)
			for _, prepare := range []string{"item-0000", "item-0000"} {
				_, err := b.send(prepare, insertNote)
				require.NoError(t, err)
			}
			elsewhere, err := holdsend.NewPostgresStore(b.pool, nil)
			require.NoError(t, err)
			_, err = holdsend.HandleIdempotent(context.Background(), elsewhere, request("item-0000"), insertNote)
			require.NoError(t, err)
			count := func(store *holdsend.PostgresStore, want holdsend.Outcome) (roundTrips, statements int) {
				proxy.Reset()
				answer, err := holdsend.HandleIdempotent(context.Background(), store, request(key), insertNote)
				require.NoError(t, err)
				require.Equal(t, want, answer.Outcome)
				for _, batch := range proxy.Batches() {
					for _, sql := range batch.SQL {
						statements += len(strings.Split(strings.Trim(sql, ";"), ";")) // the simple protocol sends many as one
					}
				}
				return proxy.RoundTrips(), statements
			}
			create, replay, known := 3, 2, 1
			if mode == "describe_exec" { // pgx describes each batch and statement with parameters anew, in a round trip of its own
				create, replay, known = 5, 4, 2
			}
			roundTrips, statements := count(b.store, holdsend.OutcomeCreated)
			require.Equal(t, create, roundTrips)
			require.Equal(t, 7, statements, "begin, claim, commit and chain, lock; the INSERT; completion, commit")
			roundTrips, statements = count(elsewhere, holdsend.OutcomeReplayed)
			require.Equal(t, replay, roundTrips)
			require.Equal(t, 6, statements, "begin, claim, commit and chain, lock; the record, rollback")
			roundTrips, statements = count(b.store, holdsend.OutcomeReplayed)
			require.Equal(t, known, roundTrips)
			require.Equal(t, 3, statements, "begin, the record, commit")
		})
	}
}

// A create flushes the write-ahead log once, as an unprotected one does; a replay writes nothing to it.
func TestPostgresFlushes(t *testing.T) {
	t.Parallel()
	cluster := pgtest.StartCluster(t, map[string]string{
		// Nothing but the test may write or flush.
		"autovacuum": "off", "wal_writer_delay": "10s", "checkpoint_timeout": "1h", "bgwriter_lru_maxpages": "0",
		"wal_level": "minimal", "max_wal_senders": "0", // above it, a snapshot is logged every 15 s
	})
	url := pgtest.Schema(t, cluster.URL())
	b := newBedOn(t, url, url, nil, nil)
	const n = 40
	measure := func(do func(i int)) (flushes, records int) {
		// A backend reports its statistics at the latest when it ends.
		stat := func() (flushes, records int) {
			b.pool.Reset()
			b.aside.Reset()
			conn, err := pgx.Connect(context.Background(), url)
			require.NoError(t, err)
			defer func() { _ = conn.Close(context.Background()) }()
			require.Eventually(t, func() bool {
				return pgtest.Value[int](t, conn, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'") == 1
			}, time.Minute, time.Millisecond)
			// What a claim left to be flushed later is not whoever comes next's.
			require.Eventually(t, func() bool {
				return pgtest.Value[bool](t, conn, "SELECT pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()")
			}, time.Minute, time.Millisecond)
			sql := "SELECT wal_sync, wal_records FROM pg_stat_wal" // new in 14
			if pgtest.Value[int](t, conn, "SELECT current_setting('server_version_num')::int") >= 180000 {
				sql = "SELECT (SELECT sum(fsyncs)::bigint FROM pg_stat_io WHERE object = 'wal'), wal_records FROM pg_stat_wal"
			}
			require.NoError(t, conn.QueryRow(context.Background(), sql).Scan(&flushes, &records))
			return flushes, records
		}
		flushesBefore, recordsBefore := stat()
		for i := range n {
			do(i)
		}
		flushesAfter, recordsAfter := stat()
		return flushesAfter - flushesBefore, recordsAfter - recordsBefore
	}
	handle := func(i int) {
		_, err := b.send("item-0000"+strings.Repeat("x", i), insertNote)
		require.NoError(t, err)
	}
	handle(n) // the table's first pages
	unprotected, _ := measure(func(int) {
		require.NoError(t, pgx.BeginFunc(context.Background(), b.pool, func(tx pgx.Tx) error {
			_, err := insertNote(context.Background(), tx, holdsend.Incoming{})
			return err
		}))
	})
	created, _ := measure(handle)
	t.Logf("%d creates: %d flushes, unprotected %d", n, created, unprotected)
	require.LessOrEqual(t, created, unprotected+n/10, "a claim must not be flushed apart")
	require.GreaterOrEqual(t, created, n, "an answer must not leave before its commit is flushed")
	measure(handle) // the first read of a page may tidy it up, which is logged
	replayed, records := measure(handle)
	require.Zero(t, replayed, "a replay must flush nothing")
	require.Zero(t, records, "a replay must write nothing")
	require.Equal(t, 1+n+n, b.notes())
}

// The claim is lost between its commit and its lock: forgotten, here. Create has not run, so Begin starts over.
func TestPostgresClaimLostBeforeItsLock(t *testing.T) {
	t.Parallel()
	// Under Serializable the lock is a batch of its own, so the proxy can get in between.
	b, proxy := newProxiedBed(t, "cache_statement", &holdsend.PostgresOptions{TxOptions: pgx.TxOptions{IsoLevel: pgx.Serializable}})
	forgotten := false
	proxy.Inject(pgproxy.Fault{Do: pgproxy.CutBeforeBatch, When: func(batch pgproxy.Batch) bool {
		if !forgotten && batch.Contains("FOR NO KEY UPDATE") && batch.Contains("begin isolation level serializable") {
			forgotten = true
			pgtest.Exec(t, b.aside, "DELETE FROM holdsend_records")
		}
		return false
	}})
	answer, err := b.send(key, insertNote)
	require.NoError(t, err)
	require.True(t, forgotten)
	require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	require.Equal(t, 1, b.notes())
}

// Which errors of a COMMIT prove that it did not take place. Without a key there is no record to ask, so the error shows
// what was made of it.
func TestPostgresWhatProvesARollback(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		atCommit string // what the server does at COMMIT
		lost     bool
	}{
		"an error":                  {atCommit: "RAISE EXCEPTION 'no' USING ERRCODE = '23514'"},
		"a serialization failure":   {atCommit: "RAISE EXCEPTION 'no' USING ERRCODE = '40001'"},
		"completion unknown":        {atCommit: "RAISE EXCEPTION 'no' USING ERRCODE = '40003'", lost: true},
		"a connection, says a pool": {atCommit: "RAISE EXCEPTION 'no' USING ERRCODE = '08006'", lost: true},
		"the end of the backend":    {atCommit: "PERFORM pg_terminate_backend(pg_backend_pid())", lost: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, nil, nil)
			pgtest.Exec(t, b.aside, `CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN `+c.atCommit+`; RETURN NULL; END $$;
				CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON notes DEFERRABLE INITIALLY DEFERRED
					FOR EACH ROW EXECUTE FUNCTION at_commit()`)
			_, err := b.send("", insertNote)
			require.Error(t, err)
			require.Equal(t, c.lost, errors.Is(err, holdsend.ErrOutcomeUnknown), "%v", err)

			// With a key the store finds out: rolled back, whatever the error was.
			_, err = b.send(key, insertNote)
			require.Error(t, err)
			require.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
			b.requireFree(key)
			require.Equal(t, 0, b.notes())
		})
	}
}

// The claim's answer is lost. Begin tries on another connection, and must not meet its own claim there: nobody else sent
// this key, so it cannot be in progress.
func TestPostgresDoesNotMeetItsOwnLostClaim(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	proxy := pgproxy.Start(t, url)
	b := newBedOn(t, url, proxy.URL(), nil, nil)
	lost := proxy.Inject(pgproxy.Fault{When: func(batch pgproxy.Batch) bool { return batch.Contains("INSERT INTO") }, Do: pgproxy.LoseAnswers})
	req := request(key)
	req.Wait = -1
	answer, err := holdsend.HandleIdempotent(context.Background(), b.store, req, insertNote)
	require.True(t, lost.Happened())
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	require.Equal(t, 1, b.notes())
}
