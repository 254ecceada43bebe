package sqltest

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgproxy"
	"github.com/holdsend/holdsend-go/internal/pgtest"
	"github.com/holdsend/holdsend-go/sqlstore"
)

// A bed is a store on Postgres, the pool that it uses, and one beside it that the test uses.
type bed struct {
	*testing.T
	store *sqlstore.PostgresStore
	db    *sql.DB
	aside *pgxpool.Pool
	proxy *pgproxy.Proxy // between db and the server; counts nothing of aside
	gate  *gate
}

// newBed makes a bed in a fresh schema. Each connection that db opens comes through the gate.
func newBed(t *testing.T, driver string, o *sqlstore.Options) *bed {
	return newBedOn(t, driver, pgtest.URL(t), o)
}

func newBedOn(t *testing.T, driver, url string, o *sqlstore.Options) *bed {
	b := &bed{T: t, aside: pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 2 }), proxy: pgproxy.Start(t, url)}
	pgtest.Exec(t, b.aside, sqlstore.PostgresSchema(o))
	pgtest.Exec(t, b.aside, "CREATE TABLE writes (name text NOT NULL); CREATE TABLE picky (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
	opened, err := sql.Open(driver, "")
	require.NoError(t, err)
	require.NoError(t, opened.Close())
	b.gate = &gate{driver: opened.Driver(), url: b.proxy.URL()}
	b.db = sql.OpenDB(b.gate)
	t.Cleanup(func() { _ = b.db.Close() })
	b.store, err = sqlstore.NewPostgres(b.db, o)
	require.NoError(t, err)
	return b
}

// A gate opens connections, and does something before each.
type gate struct {
	driver driver.Driver
	url    string
	before atomic.Pointer[func(ctx context.Context) error]
}

func (g *gate) Driver() driver.Driver { return g.driver }

func (g *gate) Connect(ctx context.Context) (driver.Conn, error) {
	if before := g.before.Load(); before != nil {
		if err := (*before)(ctx); err != nil {
			return nil, err
		}
	}
	return g.driver.Open(g.url)
}

// guard makes before run before each use of a connection: none is kept.
func (b *bed) guard(before func(ctx context.Context) error) {
	b.db.SetMaxIdleConns(-1)
	b.gate.before.Store(&before)
}

func (b *bed) send(key string, create createFunc) (holdsend.Answer, error) {
	return holdsend.HandleIdempotent(context.Background(), b.store, request(key), create)
}

func (b *bed) notes() int {
	b.Helper()
	return pgtest.Value[int](b.T, b.aside, "SELECT count(*) FROM writes")
}

// roundTrips counts those since the proxy's reset, without the ping that pgx sends on a connection that was idle for a second,
// as one is where the machine is busy.
func (b *bed) roundTrips() int {
	trips := b.proxy.RoundTrips()
	for _, batch := range b.proxy.Batches() {
		if batch.Contains("-- ping") {
			trips--
		}
	}
	return trips
}

func (b *bed) requireFree(key string) {
	b.Helper()
	_, err := b.store.Find(context.Background(), holdsend.Scope{Owner: "owner-1", Operation: "note.create", Key: key})
	require.ErrorIs(b, err, holdsend.ErrNotFound, "the key must be free after a create that failed")
}

// killBackends ends those of the bed's pool, waits until they are gone, and returns how many they were.
func (b *bed) killBackends() int {
	b.Helper()
	pids := pgtest.Value[[]int32](b.T, b.aside, `SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity
		WHERE pid <> pg_backend_pid() AND query NOT LIKE '%not ours%' AND backend_type = 'client backend'
			AND application_name = current_setting('application_name') -- not ours`)
	pgtest.Exec(b.T, b.aside, "SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) pid -- not ours", pids)
	require.Eventually(b, func() bool {
		return pgtest.Value[bool](b.T, b.aside, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ANY ($1::int[])) -- not ours", pids)
	}, time.Minute, time.Millisecond)
	return len(pids)
}

func breakDeferredConstraint(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
	if _, err := tx.ExecContext(ctx, "INSERT INTO picky VALUES (1), (1)"); err != nil {
		return holdsend.Response{}, err
	}
	return insertNote(ctx, tx, in)
}

// assertAsksAgain returns when the store has asked for the second time what became of a commit, for it is still under way.
func (b *bed) assertAsksAgain() {
	assert.Eventually(b, func() bool {
		questions := 0
		for _, batch := range b.proxy.Batches() {
			if batch.Contains("SELECT state, how") {
				questions++
			}
		}
		return questions >= 2
	}, time.Minute, time.Millisecond)
}

// The answer to COMMIT is lost, in every way that a network has. The store returns the truth, and sends COMMIT once.
func TestPostgresLostCommitAnswer(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		for name, c := range map[string]struct {
			fault  pgproxy.Fault
			create createFunc
			stored bool
		}{
			"it had committed":                {fault: pgproxy.Fault{Do: pgproxy.LoseCommitAnswer}, stored: true},
			"it had committed, all lost":      {fault: pgproxy.Fault{Do: pgproxy.LoseAnswers}, stored: true},
			"it had committed, in silence":    {fault: pgproxy.Fault{Do: pgproxy.LoseCommitAnswer, Silent: true}, stored: true},
			"it never arrived":                {fault: pgproxy.Fault{Do: pgproxy.CutBeforeBatch}},
			"it had failed":                   {fault: pgproxy.Fault{Do: pgproxy.LoseCommitAnswer}, create: breakDeferredConstraint},
			"it was still running":            {fault: pgproxy.Fault{Do: pgproxy.HoldCommit}, stored: true},
			"it was still running, and fails": {fault: pgproxy.Fault{Do: pgproxy.HoldCommit}, create: breakDeferredConstraint},
			"the completion never arrived":    {fault: pgproxy.Fault{Do: pgproxy.CutBeforeBatch, When: isCompletion}},
			"the completion's answer":         {fault: pgproxy.Fault{Do: pgproxy.LoseAnswers, When: isCompletion}},
		} {
			if c.fault.Silent && driver == "postgres" {
				continue // lib/pq waits as long as the operating system does
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				b := newBed(t, driver, nil)
				if c.create == nil {
					c.create = insertNote
				}
				_, err := b.send("key-prepared", insertNote) // statements are prepared
				require.NoError(t, err)
				before := len(b.proxy.Batches())

				fault := b.proxy.Inject(c.fault)
				if c.fault.Do == pgproxy.HoldCommit {
					go func() {
						// The store must not answer before the commit that is still on its way.
						b.assertAsksAgain()
						fault.Release()
					}()
				}
				answer, err := b.send(key, c.create)
				require.True(t, fault.Happened())
				commits := 0
				for _, batch := range b.proxy.Batches()[before:] {
					if batch.EndsInCommit() && batch.Connection == 1 {
						commits++
					}
				}
				require.LessOrEqual(t, commits, 1, "COMMIT must be sent once")
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
	})
}

// The record is completed inside of a savepoint that create left open, and the answer to COMMIT is lost while it is under way.
func TestPostgresLostCommitAnswerInASavepoint(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		fault := b.proxy.Inject(pgproxy.Fault{Do: pgproxy.HoldCommit})
		go func() {
			b.assertAsksAgain()
			fault.Release()
		}()
		answer, err := b.send(key, inserting(created, nil, "SAVEPOINT one"))
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		require.Equal(t, 1, b.notes())
	})
}

// Create commits by itself, and the backend that completes its record, or keeps its key, ends before it has committed that.
func TestPostgresCommittedByCreateThenTerminated(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		for _, status := range []int{201, 404} {
			b := newBed(t, driver, nil)
			pgtest.Exec(t, b.aside, `CREATE SEQUENCE times; CREATE FUNCTION ends_once() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN IF nextval('times') = 1 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN NULL; END $$;
				CREATE TRIGGER ends_once AFTER UPDATE ON holdsend_records FOR EACH ROW EXECUTE FUNCTION ends_once()`)
			_, _ = b.send(key, inserting(holdsend.Response{Status: status}, nil, "COMMIT"))
			r := request(key)
			r.Wait = -1
			_, _ = holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
			require.Equal(t, 1, b.notes(), "the write was doubled")
		}
	})
}

// The database's default level changes while a service runs: the library's statements stay at read committed, but for the
// first claim, by which the store notices it.
func TestPostgresDefaultLevelChanges(t *testing.T) {
	t.Parallel()
	cluster := pgtest.StartCluster(t, nil)
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBedOn(t, driver, pgtest.Schema(t, cluster.URL()), nil)
		pgtest.Exec(t, b.aside, `CREATE TABLE levels (key text, level text);
			CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN INSERT INTO levels VALUES (NEW.key, current_setting('transaction_isolation')); RETURN NULL; END $$;
			CREATE TRIGGER note AFTER INSERT ON holdsend_records FOR EACH ROW EXECUTE FUNCTION note()`)
		send := func(key string) {
			_, err := b.send(key, insertNote)
			require.NoError(t, err)
		}
		send("item-0000")
		pgtest.Exec(t, b.aside, "ALTER ROLE CURRENT_USER SET default_transaction_isolation = 'repeatable read'")
		b.killBackends()
		send("item-0001")
		send("item-0002")
		require.Equal(t, "read committed", pgtest.Value[string](t, b.aside, "SELECT level FROM levels WHERE key = 'item-0002'"))
		pgtest.Exec(t, b.aside, "ALTER ROLE CURRENT_USER RESET default_transaction_isolation")
	})
}

// A database that is read-only claims nothing, but replays.
func TestPostgresReplaysFromAReadOnlyDatabase(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		url := pgtest.URL(t)
		_, err := newBedOn(t, driver, url, nil).send(key, insertNote)
		require.NoError(t, err)
		db, err := sql.Open(driver, pgtest.With(t, url, "default_transaction_read_only", "on"))
		require.NoError(t, err)
		t.Cleanup(func() { _ = db.Close() })
		store, err := sqlstore.NewPostgres(db, nil)
		require.NoError(t, err)
		answer, err := holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
		_, err = holdsend.HandleIdempotent(t.Context(), store, request("item-0002"), insertNote)
		require.ErrorContains(t, err, "read-only")
	})
}

func isCompletion(batch pgproxy.Batch) bool {
	return batch.Contains("state = 'completed', completed_at")
}

// The server restarts between the COMMIT and its answer, or before the COMMIT reached it.
func TestPostgresRestartsAtTheCommit(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		cluster := pgtest.StartCluster(t, nil)
		for _, stored := range []bool{true, false} {
			b := newBedOn(t, driver, pgtest.Schema(t, cluster.URL()), nil)
			do := pgproxy.CutBeforeBatch
			if stored {
				do = pgproxy.LoseCommitAnswer
			}
			fault := b.proxy.Inject(pgproxy.Fault{Do: do})
			restarted := make(chan struct{})
			go func() {
				defer close(restarted)
				select {
				case <-fault.Done():
				case <-fault.Ended(): // and did not happen, which is seen below
				}
				cluster.Stop(t, "immediate")
				cluster.Start(t)
			}()
			answer, err := b.send(key, insertNote)
			<-restarted
			require.True(t, fault.Happened())
			// Asked through the pool of the store: the connections of aside are dead.
			if stored {
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
				requireNotes(t, b.db, 1)
			} else {
				require.Error(t, err)
				requireNotes(t, b.db, 0)
			}
			if errors.Is(err, holdsend.ErrOutcomeUnknown) { // the crash took the claim, which need not be flushed, with it
				var records int
				require.NoError(t, b.db.QueryRow("SELECT count(*) FROM holdsend_records").Scan(&records))
				require.Zero(t, records)
			}
			retry := request(key)
			retry.Wait = time.Minute // until what the crash left is old enough to be taken over
			again, err := holdsend.HandleIdempotent(context.Background(), b.store, retry, insertNote)
			require.NoError(t, err)
			require.Equal(t, map[bool]holdsend.Outcome{true: holdsend.OutcomeReplayed, false: holdsend.OutcomeCreated}[stored], again.Outcome)
			requireNotes(t, b.db, 1)
		}
	})
}

// The database cannot be asked, or no longer knows: ErrOutcomeUnknown, and the key is kept.
func TestPostgresOutcomeUnknown(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		for do, stored := range map[pgproxy.Action]bool{pgproxy.LoseCommitAnswer: true, pgproxy.CutBeforeBatch: false} {
			t.Run(fmt.Sprintf("the database is away, stored %t", stored), func(t *testing.T) {
				t.Parallel()
				b := newBed(t, driver, nil)
				fault := b.proxy.Inject(pgproxy.Fault{Do: do})
				var connects atomic.Int32
				b.guard(func(context.Context) error {
					if connects.Add(1) > 1 { // the connection that is cut is the only one
						return errors.New("the database is away")
					}
					return nil
				})
				_, err := b.send(key, insertNote)
				require.True(t, fault.Happened())
				require.ErrorIs(t, err, holdsend.ErrOutcomeUnknown)
				refusal := holdsend.ErrorAnswer(err)
				require.Equal(t, 503, refusal.Status)
				require.NotEmpty(t, refusal.Header.Get("Retry-After"))

				b.guard(func(context.Context) error { return nil })
				r := request(key)
				r.Wait = time.Minute // the claim that was kept is taken over
				answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
				require.NoError(t, err)
				require.Equal(t, stored, answer.Outcome == holdsend.OutcomeReplayed, "outcome %s", answer.Outcome)
				require.Equal(t, 1, b.notes())
			})
		}
		for do, stored := range map[pgproxy.Action]int{pgproxy.LoseCommitAnswer: 1, pgproxy.CutBeforeBatch: 0} {
			t.Run(fmt.Sprintf("the record is gone, stored %d", stored), func(t *testing.T) {
				t.Parallel()
				b := newBed(t, driver, nil)
				b.proxy.Inject(pgproxy.Fault{Do: do})
				var connects atomic.Int32
				b.guard(func(ctx context.Context) (err error) {
					if connects.Add(1) > 1 { // somebody forgets the owner before the store asks
						_, err = b.aside.Exec(ctx, "DELETE FROM holdsend_records")
					}
					return err
				})
				_, err := b.send(key, insertNote)
				require.ErrorIs(t, err, holdsend.ErrOutcomeUnknown)
				require.Equal(t, stored, b.notes())
			})
		}
		t.Run("without a key", func(t *testing.T) {
			t.Parallel()
			b := newBed(t, driver, nil)
			b.proxy.Inject(pgproxy.Fault{Do: pgproxy.LoseCommitAnswer})
			err := b.store.InTx(context.Background(), func(ctx context.Context, tx *sql.Tx) error {
				_, err := insertNote(ctx, tx, holdsend.Incoming{})
				return err
			})
			require.ErrorIs(t, err, holdsend.ErrOutcomeUnknown)
			require.Equal(t, 1, b.notes())
		})
	})
}

// The answer to the claim is lost: nobody holds that claim, and the key is given back before the store tries again.
func TestPostgresLostClaimAnswer(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		for _, do := range []pgproxy.Action{pgproxy.LoseAnswers, pgproxy.CutBeforeBatch} {
			for _, at := range []string{`INSERT INTO "holdsend_records"`, "FOR NO KEY UPDATE"} {
				b := newBed(t, driver, &sqlstore.Options{TakeOverAfter: time.Hour})
				fault := b.proxy.Inject(pgproxy.Fault{Do: do, When: func(batch pgproxy.Batch) bool { return batch.Contains(at) }})
				answer, err := b.send(key, insertNote)
				require.True(t, fault.Happened())
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
				require.Equal(t, 1, b.notes())
			}
		}
	})
}

// The claim is lost between its commit and its lock: forgotten, here. Create has not run, so Begin starts over.
func TestPostgresClaimLostBeforeItsLock(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		forgotten := false
		b.proxy.Inject(pgproxy.Fault{Do: pgproxy.CutBeforeBatch, When: func(batch pgproxy.Batch) bool {
			if !forgotten && batch.Contains("FOR NO KEY UPDATE") {
				forgotten = true
				_, err := b.aside.Exec(context.Background(), "DELETE FROM holdsend_records")
				assert.NoError(t, err)
			}
			return false
		}})
		answer, err := b.send(key, insertNote)
		require.NoError(t, err)
		require.True(t, forgotten)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		require.Equal(t, 1, b.notes())
	})
}

// How many round trips a create with one INSERT and a replay take.
func TestPostgresRoundTrips(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		for _, warm := range []string{"key-prepared", "key-prepared"} {
			_, err := b.send(warm, insertNote)
			require.NoError(t, err)
		}
		count := func(want holdsend.Outcome) int {
			b.proxy.Reset()
			answer, err := b.send(key, insertNote)
			require.NoError(t, err)
			require.Equal(t, want, answer.Outcome)
			return b.roundTrips()
		}
		create, replay := 6, 1
		if driver == "postgres" { // it prepares each statement with parameters anew: claim, lock and completion
			create, replay = 9, 2
		}
		require.Equal(t, create, count(holdsend.OutcomeCreated))
		require.Equal(t, replay, count(holdsend.OutcomeReplayed))
	})
}

// Which errors of a COMMIT prove that it did not take place. Without a key there is no record to ask, so the error shows
// what was made of it.
func TestPostgresWhatProvesARollback(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		for name, c := range map[string]struct {
			atCommit string // what the server does at COMMIT
			lost     bool
		}{
			"a constraint":              {atCommit: "RAISE EXCEPTION 'no' USING ERRCODE = '23514'"},
			"a trigger's exception":     {atCommit: "RAISE EXCEPTION 'no'"},
			"a serialization failure":   {atCommit: "RAISE EXCEPTION 'no' USING ERRCODE = '40001'"},
			"completion unknown":        {atCommit: "RAISE EXCEPTION 'no' USING ERRCODE = '40003'", lost: true},
			"a connection, says a pool": {atCommit: "RAISE EXCEPTION 'no' USING ERRCODE = '08006'", lost: true},
			"the end of the backend":    {atCommit: "PERFORM pg_terminate_backend(pg_backend_pid())", lost: true},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				b := newBed(t, driver, nil)
				pgtest.Exec(t, b.aside, `CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
					BEGIN `+c.atCommit+`; RETURN NULL; END $$;
					CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON writes DEFERRABLE INITIALLY DEFERRED
						FOR EACH ROW EXECUTE FUNCTION at_commit()`)
				err := b.store.InTx(context.Background(), func(ctx context.Context, tx *sql.Tx) error {
					_, err := insertNote(ctx, tx, holdsend.Incoming{})
					return err
				})
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
	})
}

// Create commits by itself, answers 2xx, and leaves behind what cannot be committed or written in any more. Its write is
// there for good, so the record must be completed all the same.
func TestPostgresCommittedByCreateThenUnfit(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		ignoring := func(statement string) func(*sql.Tx) error {
			return func(tx *sql.Tx) error { _, _ = tx.Exec(statement); return nil }
		}
		for name, steps := range map[string][]any{
			"a read-only transaction": {"BEGIN READ ONLY"},
			"a failed transaction":    {"BEGIN", ignoring("SELECT 1/0")},
			"another role":            {"BEGIN", "SET LOCAL ROLE pg_monitor"},
			"another role, for good":  {"SET ROLE pg_monitor"},
			"open rows":               {openRows},
			"a dead connection":       {ignoring("SELECT pg_terminate_backend(pg_backend_pid())")},
			"nothing prepared":        {"DISCARD ALL"},
			"a closed transaction":    {func(tx *sql.Tx) error { _ = tx.Rollback(); return nil }},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				b := newBed(t, driver, nil)
				answer, err := b.send(key, inserting(created, nil, append([]any{"COMMIT"}, steps...)...))
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
				again, err := b.send(key, insertNote)
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeReplayed, again.Outcome)
				require.Equal(t, 1, b.notes())
			})
		}
	})
}

// Create commits by itself and answers 2xx, and what the store does about it meets a fault that passes: the record is
// completed all the same. An error never says that nothing was stored.
func TestPostgresCommittedByCreateAndAFault(t *testing.T) {
	t.Parallel()
	requireCompleted := func(t *testing.T, b *bed, answer holdsend.Answer, err error) {
		t.Helper()
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		again, err := b.send(key, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeReplayed, again.Outcome)
		require.Equal(t, created.Body, again.Body)
		require.Equal(t, 1, b.notes())
	}
	eachPostgres(t, func(t *testing.T, driver string) {
		t.Run("the time of Complete is used up", func(t *testing.T) {
			t.Parallel()
			b := newBed(t, driver, nil)
			claim := holdsend.Claim{Scope: holdsend.Scope{Owner: "ada", Operation: "note.create", Key: key}, Fingerprint: "hs1:" + strings.Repeat("0", 64)}
			attempt, _, err := b.store.Begin(t.Context(), claim)
			require.NoError(t, err)
			_, err = inserting(created, nil, "COMMIT")(t.Context(), attempt.Tx(), holdsend.Incoming{})
			require.NoError(t, err)
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			require.NoError(t, attempt.Complete(ended, holdsend.Completion{Response: created}))
			require.ErrorIs(t, attempt.(holdsend.Warner).Warning(), holdsend.ErrTxEnded)
			record, err := b.store.Find(t.Context(), claim.Scope)
			require.NoError(t, err)
			require.Equal(t, holdsend.StateCompleted, record.State)
			require.Equal(t, created.Body, record.Response.Body)
		})
		t.Run("the late completion fails at its commit, twice", func(t *testing.T) {
			t.Parallel()
			b := newBed(t, driver, nil)
			pgtest.Exec(t, b.aside, `CREATE SEQUENCE completions;
				CREATE FUNCTION fails_twice() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF NEW.state = 'completed' AND nextval('completions') <= 2 THEN RAISE EXCEPTION 'not now'; END IF;
					RETURN NULL;
				END $$;
				CREATE CONSTRAINT TRIGGER fails_twice AFTER UPDATE ON holdsend_records DEFERRABLE INITIALLY DEFERRED
					FOR EACH ROW EXECUTE FUNCTION fails_twice()`)
			answer, err := b.send(key, inserting(created, nil, "COMMIT"))
			requireCompleted(t, b, answer, err)
		})
		for _, times := range []int{1, 6} { // more often than one call tries connections
			t.Run(fmt.Sprintf("the connection is cut at the late completion, %d times", times), func(t *testing.T) {
				t.Parallel()
				b := newBed(t, driver, nil)
				var last *pgproxy.Injected
				for range times {
					last = b.proxy.Inject(pgproxy.Fault{Do: pgproxy.CutBeforeBatch, When: func(batch pgproxy.Batch) bool {
						return batch.Contains("state = 'completed', completed_at") && batch.Contains("RETURNING true")
					}})
				}
				answer, err := b.send(key, inserting(created, nil, "COMMIT"))
				require.True(t, last.Happened())
				requireCompleted(t, b, answer, err)
			})
		}
		t.Run("the record can never be completed", func(t *testing.T) {
			t.Parallel()
			b := newBed(t, driver, &sqlstore.Options{TakeOverAfter: time.Millisecond})
			pgtest.Exec(t, b.aside, `CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF NEW.state = 'completed' THEN RAISE EXCEPTION 'not now'; END IF;
					RETURN NEW;
				END $$;
				CREATE TRIGGER fails BEFORE UPDATE ON holdsend_records FOR EACH ROW EXECUTE FUNCTION fails()`)
			_, err := b.send(key, inserting(created, nil, "COMMIT"))
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
		t.Run("the pool has no connection for a while", func(t *testing.T) {
			t.Parallel()
			b := newBed(t, driver, nil)
			b.db.SetMaxOpenConns(1)
			asking, other := make(chan struct{}), make(chan error, 1)
			answer, err := b.send(key, inserting(created, nil, "COMMIT", func(*sql.Tx) error {
				go func() { // it gets the connection that the attempt gives up
					close(asking)
					conn, err := b.db.Conn(context.Background())
					if err == nil {
						_, err = conn.ExecContext(context.Background(), "SELECT pg_sleep(6)") // longer than Complete has time
						_ = conn.Close()
					}
					other <- err
				}()
				<-asking
				return nil
			}))
			require.NoError(t, <-other)
			requireCompleted(t, b, answer, err)
		})
		for name, steps := range map[string][]any{
			"nothing more":         {},
			"a failed transaction": {"BEGIN", func(tx *sql.Tx) error { _, _ = tx.Exec("SELECT 1/0"); return nil }},
			"open rows":            {openRows},
		} {
			t.Run("the database is away after "+name, func(t *testing.T) {
				t.Parallel()
				b := newBed(t, driver, nil)
				var connects atomic.Int32
				b.guard(func(context.Context) error {
					if connects.Add(1) > 1 {
						return errors.New("the database is away")
					}
					return nil
				})
				_, err := b.send(key, inserting(created, nil, append([]any{"COMMIT"}, steps...)...))
				require.ErrorIs(t, err, holdsend.ErrOutcomeUnknown)
				require.NotContains(t, err.Error(), "nothing was stored")
				require.Equal(t, 1, b.notes())
			})
		}
	})
}

func openRows(tx *sql.Tx) error {
	rows, err := tx.Query("SELECT generate_series(1, 1000000000)")
	if err == nil {
		rows.Next()
	}
	return err
}

// A *sql.DB on a pgxpool.Pool gives connections back to it. One whose transaction create ended goes to nobody else: neither
// as create left it, nor while the store is not done with it.
func TestPostgresOnAPoolOfPgx(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 1 })
	pgtest.Exec(t, pool, sqlstore.PostgresSchema(nil))
	pgtest.Exec(t, pool, "CREATE TABLE writes (name text NOT NULL)")
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	store, err := sqlstore.NewPostgres(db, nil)
	require.NoError(t, err)
	for range 10 {
		asking, next := make(chan struct{}), make(chan error, 1)
		answer, err := holdsend.HandleIdempotent(t.Context(), store, request(fmt.Sprint("item-", rand.Int())), inserting(created, nil, "COMMIT", "SET ROLE pg_monitor", func(*sql.Tx) error {
			go func() { // it waits for the pool's one connection
				var same bool
				close(asking)
				err := pool.QueryRow(context.Background(), "SELECT current_user = session_user FROM pg_sleep(0.02)").Scan(&same)
				if err == nil && !same {
					err = errors.New("the role is the one that create set")
				}
				next <- err
			}()
			<-asking
			return nil
		}))
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		require.NoError(t, <-next)
	}
}

// Rows that create leaves open do no harm to whoever gets the connection next. Whether they can be committed with depends
// on the driver.
func TestPostgresOpenRows(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		b.db.SetMaxOpenConns(1)
		answer, err := b.send(key, inserting(created, nil, openRows))
		stored := 0
		if err == nil {
			require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
			stored = 1
		} else {
			require.ErrorContains(t, err, "close them")
			require.NotErrorIs(t, err, holdsend.ErrTxEnded)
			b.requireFree(key)
		}
		require.Equal(t, stored, b.notes())
		if err := b.store.InTx(t.Context(), func(_ context.Context, tx *sql.Tx) error { return openRows(tx) }); err != nil {
			require.ErrorContains(t, err, "close them")
			require.NotErrorIs(t, err, holdsend.ErrTxEnded)
		}
		again, err := b.send(key, insertNote)
		require.NoError(t, err)
		require.Equal(t, stored == 1, again.Outcome == holdsend.OutcomeReplayed)
		require.Equal(t, 1, b.notes())
	})
}

// Create fails and leaves rows open, more than anybody would read: the key is free all the same.
func TestPostgresAbortWithOpenRows(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		aside := pgtest.Pool(t, pgtest.URL(t), func(c *pgxpool.Config) { c.MaxConns = 1 })
		cases := map[string]func(*sql.Tx) error{"many": openRows}
		if driver == "pgx" { // lib/pq cannot cancel a query that is under way on a context without an end
			cases["slow"] = func(tx *sql.Tx) error { // the third row comes much later
				_, err := tx.Query("SELECT repeat('x', 20000), CASE WHEN n = 3 THEN pg_sleep(1000)::text END FROM generate_series(1, 3) n")
				require.Eventually(t, func() bool {
					return pgtest.Value[bool](t, aside, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query LIKE '%pg_sleep(1000)::text%')")
				}, time.Minute, time.Millisecond)
				return err
			}
		}
		for name, open := range cases {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				b := newBed(t, driver, nil)
				b.db.SetMaxOpenConns(1)
				answer, err := b.send(key, inserting(holdsend.Response{Status: 404}, nil, open))
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeNotStored, answer.Outcome)
				b.requireFree(key)
				_, err = holdsend.HandleIdempotent(context.Background(), b.store, request(""), inserting(holdsend.Response{Status: 404}, nil, open))
				require.NoError(t, err)
				require.Equal(t, 0, b.notes())
			})
		}
	})
}

// The server's own answer to COMMIT is the truth: nobody has to be asked, which a service that is shutting down could not.
func TestPostgresErrorAtCommitWhileClosing(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		_, err := b.send(key, func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			answer, err := breakDeferredConstraint(ctx, tx, in)
			closing := make(chan struct{})
			go func() {
				close(closing)
				_ = b.db.Close()
			}()
			<-closing
			for b.db.PingContext(ctx) == nil {
			}
			return answer, err
		})
		require.ErrorContains(t, err, "picky_n_key")
		require.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
	})
}

// Create deallocates what is prepared on the connection: the library's statements too.
func TestPostgresDeallocateAll(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		for _, status := range []int{201, 404} {
			b := newBed(t, driver, nil)
			b.db.SetMaxOpenConns(1)
			answer := holdsend.Response{Status: status}
			for _, warm := range []string{"warm-0001", "warm-0002"} { // all statements are prepared
				_, err := b.send(warm, insertNote)
				require.NoError(t, err)
				_, err = b.send(warm+"x", inserting(holdsend.Response{Status: 404}, nil))
				require.NoError(t, err)
			}
			before := b.notes()
			_, err := b.send(key, inserting(answer, nil, "DEALLOCATE ALL"))
			stored := err == nil && status == 201 // the driver prepares nothing that outlives a statement
			if stored {
				require.Equal(t, before+1, b.notes())
			} else {
				b.requireFree(key)
				require.Equal(t, before, b.notes())
			}
			again, err := b.send(key, insertNote)
			require.NoError(t, err)
			require.Equal(t, stored, again.Outcome == holdsend.OutcomeReplayed)
			require.Equal(t, before+1, b.notes())
		}
	})
}

// A duplicate that tries to take over while others have all connections: that is part of its wait.
func TestPostgresTakeOverIsBoundedByWait(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, &sqlstore.Options{TakeOverAfter: time.Millisecond, MaxIdle: time.Hour})
		started, finish, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			_, err := b.send(key, func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
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
		var connects atomic.Int32
		b.guard(func(ctx context.Context) error {
			if connects.Add(1) > 1 {
				<-ctx.Done()
			}
			return ctx.Err()
		})
		r := request(key)
		r.Wait = 100 * time.Millisecond
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		answer, err := holdsend.HandleIdempotent(ctx, b.store, r, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeInProgress, answer.Outcome)
		require.Greater(t, connects.Load(), int32(1))
		b.guard(func(context.Context) error { return nil })
		close(finish)
		<-ended
	})
}

// fill puts n connections into the pool that are used by nobody.
func (b *bed) fill(n int) {
	b.db.SetMaxIdleConns(n)
	conns := make([]*sql.Conn, n)
	for i := range conns {
		conn, err := b.db.Conn(context.Background())
		require.NoError(b, err)
		conns[i] = conn
	}
	for _, conn := range conns {
		require.NoError(b, conn.Close())
	}
}

// All connections of the pool are dead, as after a restart of the database: whatever comes first goes to another.
func TestPostgresBrokenConnections(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		scope := holdsend.Scope{Owner: "owner-1", Operation: "note.create", Key: key}
		for name, do := range map[string]func() error{
			"a create": func() error { _, err := b.send("key-create", insertNote); return err },
			"no key": func() error {
				return b.store.InTx(context.Background(), func(context.Context, *sql.Tx) error { return nil })
			},
			"Find": func() error {
				_, err := b.store.Find(context.Background(), scope)
				if errors.Is(err, holdsend.ErrNotFound) {
					return nil
				}
				return err
			},
			"a create that fails": func() error {
				_, err := b.send(key, func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
					b.killBackends()
					return insertNote(ctx, tx, in)
				})
				require.Error(t, err)
				b.requireFree(key)
				return nil
			},
		} {
			t.Run(name, func(t *testing.T) {
				b.fill(2)
				require.Equal(t, 2, b.killBackends())
				require.NoError(t, do())
			})
		}
		require.Equal(t, 1, b.notes())
	})
}

// A record that cannot be read is no fault of the connection, which goes back to the pool: it is asked once.
func TestPostgresDamagedRecord(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		b.db.SetMaxOpenConns(1)
		backend := func() (pid int) {
			require.NoError(t, b.db.QueryRow("SELECT pg_backend_pid()").Scan(&pid))
			return pid
		}
		_, err := b.send(key, insertNote)
		require.NoError(t, err)
		_, err = b.send(key, insertNote) // all statements are prepared
		require.NoError(t, err)
		before := backend()
		replay := 1
		if driver == "postgres" { // it prepares the statement anew
			replay = 2
		}
		for _, damage := range []string{"header = 'damaged'", "header = NULL", "status = NULL", "body = NULL"} {
			pgtest.Exec(t, b.aside, "UPDATE holdsend_records SET header = '{}', status = 201, body = ''")
			answer, err := b.send(key, insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
			pgtest.Exec(t, b.aside, "UPDATE holdsend_records SET "+damage)
			b.proxy.Reset()
			answer, err = b.send(key, insertNote)
			require.Error(t, err, "replayed %d after %s", answer.Status, damage)
			require.Equal(t, replay, b.roundTrips())
			require.Equal(t, before, backend())
		}
		require.Equal(t, 1, b.notes())
	})
}

// Create's context ends while its statement runs. The key is free, and the connection does nobody any harm.
func TestPostgresRequestIsCancelled(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		b.db.SetMaxOpenConns(1)
		ctx, cancel := context.WithCancel(context.Background())
		_, err := holdsend.HandleIdempotent(ctx, b.store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			if _, err := insertNote(ctx, tx, in); err != nil {
				return created, err
			}
			go func() {
				assert.Eventually(t, func() bool {
					var sleeps bool
					err := b.aside.QueryRow(context.Background(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep'
						AND application_name = current_setting('application_name'))`).Scan(&sleeps)
					return err == nil && sleeps
				}, time.Minute, time.Millisecond)
				cancel()
			}()
			_, err := tx.ExecContext(ctx, "SELECT pg_sleep(600)")
			return created, err
		})
		require.Error(t, err)
		b.requireFree(key)
		require.Equal(t, 0, b.notes())
		answer, err := b.send(key, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	})
}

// A create without a key fails while the network is silent: its rollback is not waited for as long as that lasts.
func TestPostgresRollbackOnASilentNetwork(t *testing.T) {
	t.Parallel()
	b := newBed(t, "pgx", nil) // lib/pq waits as long as the operating system does
	errOwn := errors.New("too late")
	ended := make(chan error, 1)
	go func() {
		ended <- b.store.InTx(context.Background(), func(context.Context, *sql.Tx) error {
			b.proxy.Pause(time.Hour)
			return errOwn
		})
	}()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, errOwn)
	case <-time.After(50 * time.Second): // ten times what it needs
		b.proxy.Cut()
		<-ended
		t.Fatal("the rollback waits as long as the network is silent")
	}
}

// The request ends after create answered: the answer is stored all the same.
func TestPostgresRequestIsCancelledAfterCreate(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		ctx, cancel := context.WithCancel(context.Background())
		_, err := holdsend.HandleIdempotent(ctx, b.store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			defer cancel()
			return insertNote(ctx, tx, in)
		})
		require.NoError(t, err)
		answer, err := b.send(key, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
		require.Equal(t, 1, b.notes())
	})
}

// A table that drops what is inserted, or hides it, is an error and no endless loop.
func TestPostgresTableTakesNoClaim(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		pgtest.Exec(t, b.aside, pgtest.DropInserts)
		_, err := b.send(key, insertNote)
		require.ErrorContains(t, err, "row security or a trigger")
	})
}

// Errors for a wrong set-up say what to do, and show no value.
func TestPostgresExplains(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		pgtest.Exec(t, b.aside, "DROP TABLE holdsend_records")
		_, err := b.send(key, insertNote)
		require.ErrorContains(t, err, "run PostgresSchema")
		require.False(t, strings.Contains(err.Error(), key))
	})
}

// A completion that finds no claim of its own rolls the write back. While the lock is held, nobody but create itself can
// take the claim away.
func TestPostgresCompletionWithoutItsClaim(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		b := newBed(t, driver, nil)
		_, err := b.send(key, func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			if _, err := tx.ExecContext(ctx, "DELETE FROM holdsend_records"); err != nil {
				return holdsend.Response{}, err
			}
			return insertNote(ctx, tx, in)
		})
		require.ErrorIs(t, err, holdsend.ErrClaimLost)
		require.Equal(t, 0, b.notes())
	})
}
