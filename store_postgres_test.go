package holdsend_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// A bed is a Postgres store, and a table of notes beside it that has no unique constraint to hide a double behind.
type bed struct {
	t     *testing.T
	url   string
	pool  *pgxpool.Pool // the store's
	aside *pgxpool.Pool // the test's
	store *holdsend.PostgresStore
}

func newBed(t *testing.T, o *holdsend.PostgresOptions, configure func(*pgxpool.Config)) *bed {
	url := pgtest.URL(t)
	return newBedOn(t, url, url, o, configure)
}

// newBedOn makes the tables through url, and the store on a pool through storeURL.
func newBedOn(t *testing.T, url, storeURL string, o *holdsend.PostgresOptions, configure func(*pgxpool.Config)) *bed {
	if o == nil {
		o = &holdsend.PostgresOptions{}
	}
	b := &bed{t: t, url: url, aside: pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 4 })}
	pgtest.Exec(t, b.aside, holdsend.PostgresSchema(o))
	pgtest.Exec(t, b.aside, "CREATE TABLE notes (text text NOT NULL)")
	b.pool = pgtest.Pool(t, storeURL, configure)
	store, err := holdsend.NewPostgresStore(b.pool, o)
	require.NoError(t, err)
	b.store = store
	return b
}

const key = "item-0001"

func request(key string) holdsend.Request {
	r := holdsend.Request{Owner: "ada", Operation: "note.create", Header: http.Header{}, Content: json.RawMessage(`{"text":"hello"}`)}
	if key != "" {
		r.Header.Set(holdsend.HeaderIdempotencyKey, key)
	}
	return r
}

// insertNote is a create with one INSERT.
func insertNote(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
	if _, err := tx.Exec(ctx, "INSERT INTO notes VALUES ('hello')"); err != nil {
		return holdsend.Response{}, err
	}
	return holdsend.Response{Status: 201, Header: http.Header{"Content-Type": {"text/plain"}}, Body: []byte("stored"), ResourceRef: "1"}, nil
}

// send is one attempt at the item with the given key.
func (b *bed) send(key string, create holdsend.CreateFunc[pgx.Tx]) (holdsend.Answer, error) {
	return holdsend.HandleIdempotent(context.Background(), b.store, request(key), create)
}

func (b *bed) notes() int {
	b.t.Helper()
	return pgtest.Value[int](b.t, b.aside, "SELECT count(*) FROM notes")
}

// requireFree shows that the key is free: a retry creates, at once.
func (b *bed) requireFree(key string) {
	b.t.Helper()
	_, err := b.store.Find(context.Background(), holdsend.Scope{Owner: "ada", Operation: "note.create", Key: key})
	require.ErrorIs(b.t, err, holdsend.ErrNotFound, "the key must be free after a create that failed")
}

func TestPostgresCreateThenReplay(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	first, err := b.send(key, insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeCreated, first.Outcome)

	second, err := b.send(key, insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeReplayed, second.Outcome)
	require.Equal(t, first.Status, second.Status)
	require.Equal(t, first.Body, second.Body)
	require.Equal(t, "true", second.Header.Get(holdsend.HeaderReplayed))
	require.Equal(t, 1, b.notes())
}

// What create can do wrong with its transaction. Each gets an error that says so, or the record is completed; the key is
// never stuck.
func TestPostgresCreateThatMistreatsItsTransaction(t *testing.T) {
	t.Parallel()
	answer := holdsend.Response{Status: 201, Body: []byte("stored")}
	exec := func(ctx context.Context, tx pgx.Tx, statements ...string) error {
		for _, sql := range statements {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	}
	insert := "INSERT INTO notes VALUES ('hello')"

	for name, c := range map[string]struct {
		create holdsend.CreateFunc[pgx.Tx]
		err    string // a part of the error's text; empty: none
		is     error
		notes  int
		stored bool // the record is completed
		stands bool // the record stands as a claim that is kept for good
	}{
		"Commit by method": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, errors.Join(exec(ctx, tx, insert), tx.Commit(ctx))
		}, err: "must not end the transaction"},
		"Commit by method, its error ignored": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			_ = tx.Commit(ctx)
			return answer, exec(ctx, tx, insert)
		}, notes: 1, stored: true},
		"Rollback by method": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, tx.Rollback(ctx)
		}, err: "must not end the transaction"},
		"Rollback deferred, as by habit": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			defer func() { _ = tx.Rollback(ctx) }()
			return answer, exec(ctx, tx, insert)
		}, notes: 1, stored: true},
		"raw COMMIT": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "COMMIT")
		}, notes: 1, stored: true},
		"raw COMMIT and BEGIN": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "COMMIT", "BEGIN")
		}, notes: 1, stored: true},
		"raw COMMIT AND CHAIN": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "COMMIT AND CHAIN")
		}, notes: 1, stored: true},
		"raw COMMIT inside a savepoint": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return answer, err
			}
			return answer, exec(ctx, nested, insert, "COMMIT")
		}, notes: 1, stored: true},
		"raw COMMIT, then an error": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, errors.Join(exec(ctx, tx, insert, "COMMIT"), errors.New("too late"))
		}, err: "committed its transaction", is: holdsend.ErrTxEnded, notes: 1, stands: true},
		"raw COMMIT and BEGIN, then 404": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return holdsend.Response{Status: 404}, exec(ctx, tx, insert, "COMMIT", "BEGIN")
		}, err: "committed its transaction", is: holdsend.ErrTxEnded, notes: 1, stands: true},
		"raw ROLLBACK": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "ROLLBACK")
		}, err: "rolled its transaction back", is: holdsend.ErrTxEnded},
		"raw ROLLBACK and BEGIN": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "ROLLBACK", "BEGIN")
		}, err: "rolled its transaction back", is: holdsend.ErrTxEnded},
		"raw ROLLBACK, then an error": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, errors.Join(exec(ctx, tx, insert, "ROLLBACK"), errors.New("own error"))
		}, err: "own error"},
		"PREPARE TRANSACTION": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "PREPARE TRANSACTION 'two-phase'")
		}, err: "ignored-by-the-server-settings"},
		"a SQL error swallowed": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			_ = exec(ctx, tx, insert, "SELECT 1/0")
			return answer, nil
		}, err: "its error was ignored"},
		"a SQL error in a savepoint": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return exec(ctx, tx, "SELECT 1/0") })
			if err == nil {
				return answer, errors.New("the savepoint hid an error")
			}
			return answer, exec(ctx, tx, insert)
		}, notes: 1, stored: true},
		"rows left open": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			if err := exec(ctx, tx, insert); err != nil {
				return answer, err
			}
			rows, err := tx.Query(ctx, "SELECT generate_series(1, 1000)")
			rows.Next()
			return answer, err
		}, err: "rows still open"},
		"batch results left open": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			batch := &pgx.Batch{}
			batch.Queue(insert)
			tx.SendBatch(ctx, batch)
			return answer, nil
		}, err: "rows still open"},
		"a search path set": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "SET LOCAL search_path = pg_catalog")
		}, notes: 1, stored: true},
		"a search path set for the session": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, errors.Join(exec(ctx, tx, insert, "SET search_path = pg_catalog"), errors.New("own error"))
		}, err: "own error"},
		"a role set": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "SET LOCAL ROLE pg_monitor")
		}, err: "permission denied"},
		"read-only set": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, "SET TRANSACTION READ ONLY")
		}, err: "read-only"},
		"a deferred constraint broken": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, insert, "INSERT INTO picky VALUES (1), (1)")
		}, err: "picky_n_key"},
		"the record's lock given away by a savepoint": {create: func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return answer, exec(ctx, tx, "SAVEPOINT mine", insert, "ROLLBACK TO mine", insert)
		}, notes: 1, stored: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, &holdsend.PostgresOptions{TakeOverAfter: time.Microsecond, StaleClaim: time.Microsecond}, nil)
			pgtest.Exec(t, b.aside, "CREATE TABLE picky (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
			if name == "PREPARE TRANSACTION" {
				c.err = "" // whether the server allows it is its setting
			}
			var events []holdsend.Event
			r := request(key)
			r.Observe = func(_ context.Context, e holdsend.Event) { events = append(events, e) }
			got, err := holdsend.HandleIdempotent(context.Background(), b.store, r, c.create)
			if name == "PREPARE TRANSACTION" {
				require.Error(t, err)
				_, _ = b.aside.Exec(context.Background(), "ROLLBACK PREPARED 'two-phase'")
				return
			}
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
			} else {
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeCreated, got.Outcome)
			}
			if c.is != nil {
				require.ErrorIs(t, err, c.is)
			}
			require.Equal(t, c.notes, b.notes())
			require.Len(t, events, 1)

			switch {
			case c.stored:
				again, err := b.send(key, insertNote)
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeReplayed, again.Outcome)
			case c.stands:
				record, err := b.store.Find(context.Background(), holdsend.Scope{Owner: "ada", Operation: "note.create", Key: key})
				require.NoError(t, err)
				require.Equal(t, holdsend.StateClaimed, record.State)
				require.False(t, record.Abandoned, "a key whose write is committed must never be taken over")
				purged, err := b.store.PurgeExpired(context.Background())
				require.NoError(t, err)
				require.Zero(t, purged, "nor be freed by age")
				again := request(key)
				again.Wait = -1
				answer, err := holdsend.HandleIdempotent(context.Background(), b.store, again, insertNote)
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeInProgress, answer.Outcome)
				forgotten, err := b.store.ForgetOwner(context.Background(), "ada")
				require.NoError(t, err)
				require.EqualValues(t, 1, forgotten)
				b.requireFree(key)
			default:
				b.requireFree(key)
				again, err := b.send(key, insertNote)
				require.NoError(t, err)
				require.Equal(t, holdsend.OutcomeCreated, again.Outcome)
				require.Equal(t, 1, b.notes())
			}
		})
	}
}

// One key, 64 requests at once: one row, 64 equal answers.
func TestPostgresStormOfDuplicates(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 16 })
	answers := make([]holdsend.Answer, 64)
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() {
			r := request(key)
			r.Wait = time.Minute
			answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
			assert.NoError(t, err)
			answers[i] = answer
		})
	}
	all.Wait()
	created := 0
	for _, a := range answers {
		if a.Outcome == holdsend.OutcomeCreated {
			created++
		} else {
			require.Equal(t, holdsend.OutcomeReplayed, a.Outcome)
		}
		require.Equal(t, 201, a.Status)
		require.Equal(t, "stored", string(a.Body))
		require.Equal(t, "text/plain", a.Header.Get("Content-Type"))
	}
	require.Equal(t, 1, created)
	require.Equal(t, 1, b.notes())
}

// A slow create on a pool of one connection, and 50 retries beside it: they hold nothing while they wait, so all end well.
func TestPostgresWaitersHoldNoConnection(t *testing.T) {
	t.Parallel()
	b := newBed(t, &holdsend.PostgresOptions{MaxIdle: time.Hour}, func(c *pgxpool.Config) { c.MaxConns = 2 })
	started, finish := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			close(started)
			<-finish
			return insertNote(ctx, tx, in)
		})
		assert.NoError(t, err)
	})
	<-started
	var replayed atomic.Int64
	for range 50 {
		all.Go(func() {
			r := request(key)
			r.Wait = 10 * time.Minute
			answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
			if assert.NoError(t, err) && answer.Outcome == holdsend.OutcomeReplayed {
				replayed.Add(1)
			}
		})
	}
	// While all 50 wait, somebody else's create gets the one connection that the slow one leaves.
	for i := range 5 {
		_, err := b.send("other-item-"+strconv.Itoa(i), insertNote)
		require.NoError(t, err)
	}
	require.EqualValues(t, 0, replayed.Load())
	close(finish)
	all.Wait()
	require.EqualValues(t, 50, replayed.Load())
	require.Equal(t, 6, b.notes())
}

func TestPostgresSlowCreateOnAPoolOfOne(t *testing.T) {
	t.Parallel()
	b := newBed(t, &holdsend.PostgresOptions{MaxIdle: time.Hour}, func(c *pgxpool.Config) { c.MaxConns = 1 })
	started, finish := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			close(started)
			<-finish
			return insertNote(ctx, tx, in)
		})
		assert.NoError(t, err)
	})
	<-started
	for range 50 {
		all.Go(func() {
			answer, err := b.send(key, insertNote)
			if assert.NoError(t, err) {
				assert.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
			}
		})
	}
	require.Eventually(t, func() bool { return b.pool.Stat().EmptyAcquireCount() > 0 || b.pool.Stat().AcquiredConns() == 1 }, time.Minute, time.Millisecond)
	close(finish)
	all.Wait()
	require.Equal(t, 1, b.notes())
}

// The backend of a running create is killed. The create fails, its key is free at once, and a waiting retry creates.
func TestPostgresBackendKilledDuringCreate(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	running := make(chan int32, 1)
	killed := make(chan struct{})
	first := make(chan error, 1)
	go func() {
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			response, err := insertNote(ctx, tx, in)
			var pid int32
			if err := tx.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
				return response, err
			}
			running <- pid
			<-killed
			return response, err // create itself has not noticed
		})
		first <- err
	}()
	pid := <-running
	retry := make(chan holdsend.Answer, 1)
	go func() {
		r := request(key)
		r.Wait = time.Minute
		answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
		assert.NoError(t, err)
		retry <- answer
	}()
	pgtest.Exec(t, b.aside, "SELECT pg_terminate_backend($1)", pid)
	start := time.Now()
	close(killed)
	require.Error(t, <-first)
	require.Equal(t, holdsend.OutcomeCreated, (<-retry).Outcome)
	t.Logf("the retry had created %v after the kill", time.Since(start))
	require.Less(t, time.Since(start), 10*time.Second)
	require.Equal(t, 1, b.notes())
}

// The process that ran the create is gone, with its connection: nobody frees the key, and a retry takes it over.
func TestPostgresTakeOverFromADeadProcess(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	a, record, err := b.store.Begin(context.Background(), holdsend.Claim{
		Scope: holdsend.Scope{Owner: "ada", Operation: "note.create", Key: key}, Fingerprint: mustFingerprint(t),
	})
	require.NoError(t, err)
	require.Nil(t, record)
	require.NoError(t, crash(context.Background(), b.aside, a))

	var event holdsend.Event
	r := request(key)
	r.Wait = time.Minute
	r.Observe = func(_ context.Context, e holdsend.Event) { event = e }
	answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	require.True(t, event.TookOver)
	require.Equal(t, 1, b.notes())

	// The dead one comes back to life: it is fenced.
	require.Error(t, a.Complete(context.Background(), holdsend.Completion{Response: holdsend.Response{Status: 201}}))
	require.NoError(t, a.Abort(context.Background()))
	answer, err = b.send(key, insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
}

func mustFingerprint(t *testing.T) string {
	fingerprint, err := holdsend.Fingerprint("note.create", json.RawMessage(`{"text":"hello"}`))
	require.NoError(t, err)
	return fingerprint
}

// A slow create is never robbed, however old its claim is, and a retry does not wait longer than it was told to.
func TestPostgresSlowCreateIsNotRobbed(t *testing.T) {
	t.Parallel()
	b := newBed(t, &holdsend.PostgresOptions{TakeOverAfter: time.Millisecond, MaxIdle: time.Hour}, nil)
	started, finish := make(chan struct{}), make(chan struct{})
	first := make(chan holdsend.Answer, 1)
	go func() {
		answer, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			close(started)
			<-finish
			return insertNote(ctx, tx, in)
		})
		assert.NoError(t, err)
		first <- answer
	}()
	<-started
	for range 3 {
		r := request(key)
		r.Wait = 100 * time.Millisecond
		answer, err := holdsend.HandleIdempotent(context.Background(), b.store, r, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeInProgress, answer.Outcome)
		require.Equal(t, "1", answer.Header.Get("Retry-After"))
	}
	close(finish)
	require.Equal(t, holdsend.OutcomeCreated, (<-first).Outcome)
	require.Equal(t, 1, b.notes())
}

// The client leaves while create runs: rolled back, key free. It leaves after create answered 2xx: committed.
func TestPostgresClientLeaves(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	ctx, leave := context.WithCancel(context.Background())
	_, err := holdsend.HandleIdempotent(ctx, b.store, request(key), func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		if _, err := insertNote(ctx, tx, in); err != nil {
			return holdsend.Response{}, err
		}
		leave()
		return insertNote(ctx, tx, in)
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 0, b.notes())
	b.requireFree(key)

	ctx, leave = context.WithCancel(context.Background())
	answer, err := holdsend.HandleIdempotent(ctx, b.store, request(key), func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		response, err := insertNote(ctx, tx, in)
		leave()
		return response, err
	})
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	require.Equal(t, 1, b.notes())
}

// A transaction that leaked from create is refused, and writes into nobody else's.
func TestPostgresLeakedTransactionIsRefused(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
	ctx := context.Background()
	var leaked, nested pgx.Tx
	leak := func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		var err error
		if nested, err = tx.Begin(ctx); err != nil {
			return holdsend.Response{}, err
		}
		leaked = tx
		return insertNote(ctx, tx, in)
	}
	for name, end := range map[string]func(key string) error{
		"after a commit": func(key string) error { _, err := b.send(key, leak); return err },
		"after an abort": func(key string) error {
			_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				_, err := leak(ctx, tx, in)
				return holdsend.Response{Status: 404}, err
			})
			return err
		},
		"without a key": func(string) error { _, err := b.send("", leak); return err },
	} {
		require.NoError(t, end("leak-"+name[len(name)-3:]+"-0001"), name)
		before := b.notes()
		// The next borrower of the one connection is in its transaction meanwhile.
		_, err := b.send("next-"+name[len(name)-3:]+"-0001", func(_ context.Context, _ pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			for _, tx := range []pgx.Tx{leaked, nested} {
				_, err := tx.Exec(ctx, "INSERT INTO notes VALUES ('leaked')")
				require.ErrorIs(t, err, pgx.ErrTxClosed, name)
				_, err = tx.Query(ctx, "SELECT 1")
				require.ErrorIs(t, err, pgx.ErrTxClosed, name)
				require.ErrorIs(t, tx.QueryRow(ctx, "SELECT 1").Scan(nil), pgx.ErrTxClosed, name)
				_, err = tx.Begin(ctx)
				require.ErrorIs(t, err, pgx.ErrTxClosed, name)
				_, err = tx.CopyFrom(ctx, pgx.Identifier{"notes"}, []string{"text"}, pgx.CopyFromRows([][]any{{"leaked"}}))
				require.ErrorIs(t, err, pgx.ErrTxClosed, name)
				_, err = tx.Prepare(ctx, "leaked", "SELECT 1")
				require.ErrorIs(t, err, pgx.ErrTxClosed, name)
				require.ErrorIs(t, tx.SendBatch(ctx, &pgx.Batch{}).Close(), pgx.ErrTxClosed, name)
				require.ErrorIs(t, tx.Commit(ctx), pgx.ErrTxClosed, name)
				require.ErrorIs(t, tx.Rollback(ctx), pgx.ErrTxClosed, name)
			}
			return holdsend.Response{Status: 200}, nil
		})
		require.NoError(t, err, name)
		require.Equal(t, before, b.notes(), name)
	}
}

// A goroutine that create left behind is in the middle of a query when create returns.
func TestPostgresGoroutineStillUsesTheTransaction(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	for _, status := range []int{201, 404} {
		left := make(chan error, 1)
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			var pid int32
			if err := tx.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
				return holdsend.Response{}, err
			}
			go func() {
				_, err := tx.Exec(context.Background(), "SELECT pg_sleep(60)")
				left <- err
			}()
			require.Eventually(t, func() bool {
				return pgtest.Value[bool](t, b.aside, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND query LIKE '%pg_sleep%' AND state = 'active')", pid)
			}, time.Minute, time.Millisecond)
			return holdsend.Response{Status: status}, nil
		})
		if status == 201 {
			require.ErrorContains(t, err, "in use by another goroutine")
		} else {
			require.NoError(t, err)
		}
		require.Error(t, <-left, "the query that was left behind must end")
		require.Eventually(t, func() bool {
			_, err := b.store.Find(context.Background(), holdsend.Scope{Owner: "ada", Operation: "note.create", Key: key})
			return errors.Is(err, holdsend.ErrNotFound)
		}, time.Minute, time.Millisecond, "the key must be free")
	}
	require.Equal(t, 0, b.notes())
}

// MaxIdle ends an attempt whose process hangs; a stricter limit is not raised.
func TestPostgresMaxIdle(t *testing.T) {
	t.Parallel()
	b := newBed(t, &holdsend.PostgresOptions{MaxIdle: 2 * time.Second}, nil)
	_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		var pid int32
		if err := tx.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
			return holdsend.Response{}, err
		}
		require.Eventually(t, func() bool {
			return pgtest.Value[bool](t, b.aside, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid)
		}, time.Minute, time.Millisecond, "the database must end an attempt that idles")
		return holdsend.Response{Status: 201}, nil
	})
	require.Error(t, err)
	b.requireFree(key)

	for setting, want := range map[string]string{"20s": "20s", "0": "1min", "2min": "1min", "59000": "59s"} {
		url := pgtest.URL(t)
		b := newBedOn(t, url, pgtest.With(t, url, "idle_in_transaction_session_timeout", setting), nil, nil)
		_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			require.Equal(t, want, pgtest.Value[string](t, tx, "SELECT current_setting('idle_in_transaction_session_timeout')"))
			return holdsend.Response{Status: 201}, nil
		})
		require.NoError(t, err)
		require.Equal(t, setting == "0", pgtest.Value[string](t, b.pool, "SELECT current_setting('idle_in_transaction_session_timeout')") == "0",
			"the limit must end with the transaction")
	}
}

// Creates that have nothing to do with each other do not fail each other under Serializable.
func TestPostgresSerializableCreatesDoNotConflict(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	for name, c := range map[string]struct {
		url string
		o   holdsend.PostgresOptions
	}{
		"by TxOptions":              {url, holdsend.PostgresOptions{TxOptions: pgx.TxOptions{IsoLevel: pgx.Serializable}}},
		"by the database's default": {pgtest.With(t, url, "default_transaction_isolation", "serializable"), holdsend.PostgresOptions{}},
	} {
		t.Run(name, func(t *testing.T) {
			c.o.Table = "records of " + name[3:6]
			aside := pgtest.Pool(t, url, nil)
			pgtest.Exec(t, aside, holdsend.PostgresSchema(&c.o))
			pgtest.Exec(t, aside, "CREATE TABLE IF NOT EXISTS notes (text text NOT NULL)")
			pool := pgtest.Pool(t, c.url, func(c *pgxpool.Config) { c.MaxConns = 16 })
			store, err := holdsend.NewPostgresStore(pool, &c.o)
			require.NoError(t, err)
			var conflicts atomic.Int64
			var all sync.WaitGroup
			for client := range 16 {
				all.Go(func() {
					for i := range 25 {
						answer, err := holdsend.HandleIdempotent(context.Background(), store, request(fmt.Sprintf("item-%04d-%04d", client, i)),
							func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
								if got := pgtest.Value[string](t, tx, "SHOW transaction_isolation"); got != "serializable" {
									return holdsend.Response{}, errors.New("create runs under " + got)
								}
								return insertNote(ctx, tx, in)
							})
						var pgErr *pgconn.PgError
						if errors.As(err, &pgErr) && pgErr.Code == "40001" {
							conflicts.Add(1)
						} else if assert.NoError(t, err) {
							assert.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
						}
					}
				})
			}
			all.Wait()
			require.EqualValues(t, 0, conflicts.Load(), "of 400 creates, so many failed with 40001 although they share nothing")
		})
	}
}

// PostgresSchema on a live table: it waits for no open completion, and many may run it at once.
func TestPostgresSchemaBesideLiveTraffic(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		// This transaction has written to the table and stays open: it deletes a record, as a completion changes one.
		pgtest.Exec(t, tx, "INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at) VALUES ('a', 'b', 'c', 'claimed', '', gen_random_uuid(), now())")
		conn, err := pgx.Connect(ctx, b.url)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		pgtest.Exec(t, conn, "SET lock_timeout = '5s'")
		pgtest.Exec(t, conn, holdsend.PostgresSchema(nil))
		return insertNote(ctx, tx, in)
	})
	require.NoError(t, err)

	for _, level := range isolationLevels {
		url := pgtest.URL(t)
		var all sync.WaitGroup
		for range 6 {
			all.Go(func() {
				conn, err := pgx.Connect(context.Background(), pgtest.With(t, url, "default_transaction_isolation", string(level)))
				if !assert.NoError(t, err) {
					return
				}
				defer func() { _ = conn.Close(context.Background()) }()
				_, err = conn.Exec(context.Background(), holdsend.PostgresSchema(nil))
				assert.NoError(t, err)
			})
		}
		all.Wait()
		require.Equal(t, 4, countIndexes(t, pgtest.Pool(t, url, nil)), "under %s", level)
	}
}

func countIndexes(t *testing.T, db pgtest.Database) int {
	return pgtest.Value[int](t, db, "SELECT count(*) FROM pg_index WHERE indrelid = 'holdsend_records'::regclass")
}

// What an older schema lacks is added, and a hand-made index of another name is not doubled.
func TestPostgresSchemaAddsWhatIsMissing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), nil)
	pgtest.Exec(t, pool, holdsend.PostgresSchema(nil))
	require.Equal(t, 4, countIndexes(t, pool))
	pgtest.Exec(t, pool, "DROP INDEX holdsend_records_expires_at_idx; ALTER INDEX holdsend_records_claimed_at_idx RENAME TO mine")
	pgtest.Exec(t, pool, holdsend.PostgresSchema(nil))
	require.Equal(t, 4, countIndexes(t, pool))
}

func TestPostgresHostileNames(t *testing.T) {
	t.Parallel()
	for _, o := range []holdsend.PostgresOptions{
		{Table: `we"ird'; DROP TABLE notes; --`},
		{Table: `$holdsend$ \ E'x`},
		{Table: "{records} {record} {scope} $1"},
		{Table: strings.Repeat("n", 63)},
		{Table: strings.Repeat("n", 62) + "m"},
		{Table: "holdsend_records"},
		{Table: "Grüße"},
		{Schema: `sch"ema.'x$holdsend$`, Table: "Holdsend_Records"},
		{Schema: `sch"ema.'x$holdsend$`},
	} {
		t.Run(o.Schema+"/"+o.Table, func(t *testing.T) {
			t.Parallel()
			url := pgtest.URL(t)
			if o.Schema != "" {
				o.Schema += rand.Text()[:8] // a schema is the whole database's
				aside := pgtest.Pool(t, url, nil)
				pgtest.Exec(t, aside, "CREATE SCHEMA "+pgx.Identifier{o.Schema}.Sanitize())
				t.Cleanup(func() { pgtest.Exec(t, aside, "DROP SCHEMA "+pgx.Identifier{o.Schema}.Sanitize()+" CASCADE") })
			}
			b := newBedOn(t, url, url, &o, nil)
			pgtest.Exec(t, b.aside, holdsend.PostgresSchema(&o))
			for _, want := range []holdsend.Outcome{holdsend.OutcomeCreated, holdsend.OutcomeReplayed} {
				answer, err := b.send(key, insertNote)
				require.NoError(t, err)
				require.Equal(t, want, answer.Outcome)
			}
			require.Equal(t, 1, b.notes())
		})
	}
}

func TestPostgresOptionsOutOfBounds(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), nil)
	for name, o := range map[string]holdsend.PostgresOptions{
		"a long table":       {Table: strings.Repeat("n", 64)},
		"a NUL":              {Schema: "a\x00b"},
		"no UTF-8":           {Table: "\xff"},
		"negative take-over": {TakeOverAfter: -1},
		"negative stale":     {StaleClaim: -1},
		"negative idle":      {MaxIdle: -1},
		"tiny idle":          {MaxIdle: 1},
		"read-only":          {TxOptions: pgx.TxOptions{AccessMode: pgx.ReadOnly}},
		"BeginQuery":         {TxOptions: pgx.TxOptions{BeginQuery: "begin"}},
		"CommitQuery":        {TxOptions: pgx.TxOptions{CommitQuery: "commit"}},
		"a level with SQL":   {TxOptions: pgx.TxOptions{IsoLevel: "serializable; drop table notes"}},
		"a mode with SQL":    {TxOptions: pgx.TxOptions{DeferrableMode: "; drop table notes"}},
		"access with SQL":    {TxOptions: pgx.TxOptions{AccessMode: "; drop table notes"}},
	} {
		_, err := holdsend.NewPostgresStore(pool, &o)
		require.Error(t, err, name)
	}
	_, err := holdsend.NewPostgresStore(nil, nil)
	require.Error(t, err)
	_, err = holdsend.NewPostgresStore((*pgxpool.Pool)(nil), nil)
	require.Error(t, err)
	_, err = holdsend.NewPostgresStore(pool, &holdsend.PostgresOptions{TxOptions: pgx.TxOptions{
		IsoLevel: pgx.Serializable, AccessMode: pgx.ReadWrite, DeferrableMode: pgx.NotDeferrable}})
	require.NoError(t, err)
}

// A database that is not set up: the error says what to do, and nothing is stuck.
func TestPostgresDatabaseNotSetUp(t *testing.T) {
	t.Parallel()
	ctx := context.Background()

	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, nil)
	store, err := holdsend.NewPostgresStore(pool, nil)
	require.NoError(t, err)
	_, err = holdsend.HandleIdempotent(ctx, store, request(key), insertNote)
	require.ErrorContains(t, err, "run PostgresSchema")
	_, err = store.PurgeExpired(ctx)
	require.ErrorContains(t, err, "run PostgresSchema")

	readOnly := newBedOn(t, url, pgtest.With(t, url, "default_transaction_read_only", "on"), nil, nil)
	_, err = readOnly.send(key, insertNote)
	require.ErrorContains(t, err, "connect to a primary")
	readOnly.requireFree(key)

	closed := newBed(t, nil, nil)
	closed.pool.Close()
	_, err = closed.send(key, insertNote)
	require.ErrorContains(t, err, "closed pool")

	full := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
	conn, err := full.pool.Acquire(ctx)
	require.NoError(t, err)
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err = holdsend.HandleIdempotent(short, full.store, request(key), insertNote)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	conn.Release()
	full.requireFree(key)
}

// A record that somebody damaged is an error that shows nothing of it; create is not run again.
func TestPostgresCorruptRecord(t *testing.T) {
	t.Parallel()
	for _, damage := range []string{
		"header = 'secret'", "header = NULL", "status = NULL", "fingerprint = 'hs9:secret'",
	} {
		b := newBed(t, nil, nil)
		_, err := b.send(key, insertNote)
		require.NoError(t, err)
		pgtest.Exec(t, b.aside, "UPDATE holdsend_records SET "+damage)
		_, err = b.send(key, insertNote)
		require.Error(t, err, damage)
		require.NotContains(t, err.Error(), "secret")
		require.Equal(t, 500, holdsend.ErrorAnswer(err).Status)
		require.Equal(t, 1, b.notes(), damage)
	}
}

// A server that went away and came back leaves broken connections in the pool: a create does not fail for them.
func TestPostgresBrokenIdleConnections(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
	_, err := b.send("item-0000", insertNote)
	require.NoError(t, err)
	conn, err := b.pool.Acquire(context.Background())
	require.NoError(t, err)
	pid := conn.Conn().PgConn().PID()
	conn.Release()
	pgtest.Exec(t, b.aside, "SELECT pg_terminate_backend($1)", int32(pid))
	require.Eventually(t, func() bool {
		return pgtest.Value[bool](t, b.aside, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", int32(pid))
	}, time.Minute, time.Millisecond)
	answer, err := b.send(key, insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
}

// Purge and forget work in batches, and know the end.
func TestPostgresPurgeAndForgetManyRecords(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	ctx := context.Background()
	fill := func(owner, state, ages string, n int) {
		pgtest.Exec(t, b.aside, `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, `+ages+`, status, header)
			SELECT $1, 'op ' || n % 3, 'key-' || n, $2, 'hs1:', gen_random_uuid(), now() - interval '2 days', now() - (n % 7) * interval '1 hour', 201, '{}'
			FROM generate_series(1, $3) n`, owner, state, n)
	}
	fill("ada", "completed", "claimed_at, expires_at", 2500)
	fill("bob", "claimed", "claimed_at, completed_at", 1000)
	pgtest.Exec(t, b.aside, "UPDATE holdsend_records SET completed_at = NULL, status = NULL, header = NULL WHERE state = 'claimed'")
	fill("cyd", "completed", "claimed_at, completed_at", 3001)
	purged, err := b.store.PurgeExpired(ctx)
	require.NoError(t, err)
	require.Equal(t, holdsend.Purged{Records: 2500, Claims: 1000}, purged)
	purged, err = b.store.PurgeExpired(ctx)
	require.NoError(t, err)
	require.Equal(t, holdsend.Purged{}, purged)
	forgotten, err := b.store.ForgetOwner(ctx, "cyd")
	require.NoError(t, err)
	require.EqualValues(t, 3001, forgotten)
	require.Equal(t, 0, pgtest.Value[int](t, b.aside, "SELECT count(*) FROM holdsend_records"))
}

// A tombstone keeps nothing of the answer in the table.
func TestPostgresTombstoneErasesTheAnswer(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	_, err := b.send(key, insertNote)
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(context.Background(), b.pool, func(tx pgx.Tx) error {
		turned, err := b.store.TombstoneResource(context.Background(), tx, holdsend.Resource{Owner: "ada", Operation: "note.create", Ref: "1"})
		require.EqualValues(t, 1, turned)
		return err
	}))
	require.Equal(t, 1, pgtest.Value[int](t, b.aside, `SELECT count(*) FROM holdsend_records
		WHERE state = 'gone' AND num_nonnulls(status, header, body, resource_ref) = 0`))
}

// Somebody holds an expired record (an open tombstone does): PurgeExpired goes on without it, and ForgetOwner takes the
// others first.
func TestPostgresPurgeAndForgetBesideALock(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	ctx := context.Background()
	for _, k := range []string{"item-0001", "item-0002", "item-0003"} {
		r := request(k)
		r.CompletedTTL = time.Microsecond
		_, err := holdsend.HandleIdempotent(ctx, b.store, r, insertNote)
		require.NoError(t, err)
	}
	tx, err := b.aside.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	pgtest.Exec(t, tx, "SELECT FROM holdsend_records WHERE key = 'item-0001' FOR UPDATE")

	purged, err := b.store.PurgeExpired(ctx)
	require.NoError(t, err)
	require.Equal(t, holdsend.Purged{Records: 2}, purged)

	_, err = b.send("item-0004", insertNote)
	require.NoError(t, err)
	forgotten := make(chan int64, 1)
	go func() {
		n, err := b.store.ForgetOwner(ctx, "ada")
		assert.NoError(t, err)
		forgotten <- n
	}()
	require.Eventually(t, func() bool {
		return pgtest.Value[int](t, b.aside, "SELECT count(*) FROM holdsend_records") == 1
	}, time.Minute, time.Millisecond, "ForgetOwner must not wait before it has taken what is free")
	require.NoError(t, tx.Rollback(ctx))
	require.EqualValues(t, 2, <-forgotten)
}

// An answer that no create can have stored is damage, and not an answer. Create does not run again.
func TestPostgresDamagedAnswer(t *testing.T) {
	t.Parallel()
	for _, damage := range []string{"body = NULL", "header = NULL", "status = NULL", "status = 0", "status = 99", "status = 302", "status = 404", "status = 700"} {
		b := newBed(t, nil, nil)
		_, err := b.send(key, insertNote)
		require.NoError(t, err)
		pgtest.Exec(t, b.aside, "UPDATE holdsend_records SET "+damage)
		answer, err := b.send(key, insertNote)
		require.Error(t, err, "%s: replayed %d with %d bytes of body", damage, answer.Status, len(answer.Body))
		require.Equal(t, 1, b.notes())
	}
}

// What is dated later than now was written before the database's clock was set back, and is its owner's to be forgotten.
func TestPostgresForgetsAfterTheClockIsSetBack(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	_, err := b.send(key, insertNote)
	require.NoError(t, err)
	pgtest.Exec(t, b.aside, "UPDATE holdsend_records SET claimed_at = claimed_at + interval '1 hour'")
	forgotten, err := b.store.ForgetOwner(t.Context(), request(key).Owner)
	require.NoError(t, err)
	require.EqualValues(t, 1, forgotten)
}

// A database that is read-only claims nothing, but replays. One that is so by default alone claims where the options say that
// an attempt writes.
func TestPostgresReplaysFromAReadOnlyDatabase(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	_, err := b.send(key, insertNote)
	require.NoError(t, err)
	pool := pgtest.Pool(t, pgtest.With(t, b.url, "default_transaction_read_only", "on"), nil)
	store, err := holdsend.NewPostgresStore(pool, nil)
	require.NoError(t, err)
	answer, err := holdsend.HandleIdempotent(context.Background(), store, request(key), insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
	_, err = holdsend.HandleIdempotent(context.Background(), store, request("item-0002"), insertNote)
	require.ErrorContains(t, err, "read-only")

	writing, err := holdsend.NewPostgresStore(pool, &holdsend.PostgresOptions{TxOptions: pgx.TxOptions{AccessMode: pgx.ReadWrite}})
	require.NoError(t, err)
	for _, want := range []holdsend.Outcome{holdsend.OutcomeCreated, holdsend.OutcomeReplayed} {
		answer, err = holdsend.HandleIdempotent(context.Background(), writing, request("item-0002"), insertNote)
		require.NoError(t, err)
		require.Equal(t, want, answer.Outcome)
	}
	_, err = writing.PurgeExpired(t.Context())
	require.NoError(t, err)
	forgotten, err := writing.ForgetOwner(t.Context(), request(key).Owner)
	require.NoError(t, err)
	require.EqualValues(t, 2, forgotten)
}

// A purge leaves two thirds of the time to others. The trigger makes each statement that deletes take 50 ms: two batches and
// one that finds nothing more, and one for claims.
func TestPostgresPurgeRests(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	pgtest.Exec(t, b.aside, `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at, completed_at, expires_at)
		SELECT 'ada', 'note.create', 'item-' || n, 'completed', 'hs1:', gen_random_uuid(), now(), now(), now() FROM generate_series(1, 1001) n;
		CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.05); RETURN NULL; END $$;
		CREATE TRIGGER slow AFTER DELETE ON holdsend_records EXECUTE FUNCTION slow()`)
	start := time.Now()
	purged, err := b.store.PurgeExpired(t.Context())
	require.NoError(t, err)
	require.Equal(t, holdsend.Purged{Records: 1001}, purged)
	require.GreaterOrEqual(t, time.Since(start), (4+2*2)*50*time.Millisecond)
}

// A lock_timeout of the role's strikes before the purge's own, and asks for no endless tries.
func TestPostgresPurgeUnderTheRolesLockTimeout(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	b := newBedOn(t, url, pgtest.With(t, url, "lock_timeout", "1ms"), nil, nil)
	tx, err := b.aside.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE holdsend_records IN SHARE MODE") // as CREATE INDEX does
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_, err = b.store.PurgeExpired(ctx)
	require.ErrorContains(t, err, "55P03")
}

// A completion that finds no claim of its own rolls the write back. While the lock is held, nobody but create itself can
// take the claim away.
func TestPostgresCompletionWithoutItsClaim(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		if _, err := tx.Exec(ctx, "DELETE FROM holdsend_records"); err != nil {
			return holdsend.Response{}, err
		}
		return insertNote(ctx, tx, in)
	})
	require.ErrorIs(t, err, holdsend.ErrClaimLost)
	require.Equal(t, 0, b.notes())
	answer, err := b.send(key, insertNote)
	require.NoError(t, err)
	require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	require.Equal(t, 1, b.notes())
}
