package sqltest

import (
	"context"
	"database/sql"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/sqlstore"
)

func TestNewSQLiteChecksTheDataSourceName(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		for name, c := range map[string]struct {
			parameters string
			open       int
			want       string
		}{
			"no WAL":          {"_pragma=busy_timeout(5000)", 0, "_pragma=journal_mode(WAL)"},
			"no busy timeout": {"_pragma=busy_timeout(0)&_pragma=journal_mode(WAL)", 0, "_pragma=busy_timeout(5000)"},
			"query only":      {"_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=query_only(1)", 0, "query_only"},
			"one connection":  {"_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)", 1, "at least 2"},
		} {
			t.Run(name, func(t *testing.T) {
				path := (&url.URL{Path: filepath.Join(t.TempDir(), "test.db")}).EscapedPath()
				db, err := sql.Open(driver, "file:"+path+"?"+c.parameters)
				require.NoError(t, err)
				defer db.Close()
				db.SetMaxOpenConns(c.open)
				_, err = sqlstore.NewSQLite(db, nil)
				require.ErrorContains(t, err, c.want)
			})
		}
		t.Run("in memory", func(t *testing.T) {
			db, err := sql.Open(driver, ":memory:")
			require.NoError(t, err)
			defer db.Close()
			_, err = sqlstore.NewSQLite(db, nil)
			require.ErrorContains(t, err, "use a file")
		})
		t.Run("cache=shared", func(t *testing.T) {
			db, err := sql.Open(driver, sqliteDSN(filepath.Join(t.TempDir(), "test.db"))+"&cache=shared")
			require.NoError(t, err)
			defer db.Close()
			_, err = sqlstore.NewSQLite(db, nil)
			if driver == sqliteDrivers["ncruces"] { // it cannot share a cache, and ignores that
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "cache=shared")
			}
		})
		t.Run("PRAGMA by Exec", func(t *testing.T) {
			path := (&url.URL{Path: filepath.Join(t.TempDir(), "test.db")}).EscapedPath()
			db, err := sql.Open(driver, "file:"+path+"?_pragma=busy_timeout(0)&_pragma=journal_mode(WAL)")
			require.NoError(t, err)
			defer db.Close()
			execute(t, db, "PRAGMA busy_timeout = 5000") // of one connection
			_, err = sqlstore.NewSQLite(db, nil)
			require.ErrorContains(t, err, "data source name")
		})
		t.Run("options of Postgres", func(t *testing.T) {
			db := openSQLite(t, driver, filepath.Join(t.TempDir(), "test.db"))
			for _, o := range []sqlstore.Options{{Schema: "public"}, {MaxIdle: time.Minute}, {TxOptions: sql.TxOptions{Isolation: sql.LevelSerializable}}} {
				_, err := sqlstore.NewSQLite(db, &o)
				require.ErrorContains(t, err, "Postgres")
			}
		})
	})
}

// Any name of a table, beside live traffic, again and again.
func TestSQLiteSchemaOfAnyName(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		for _, table := range []string{"", "records", `o'dd "name"; --`, "holdsend_records_claims", strings.Repeat("t", 63)} {
			o := &sqlstore.Options{Table: table}
			store, db := newSQLite(t, driver, o)
			err := store.InTx(t.Context(), func(context.Context, *sql.Tx) error {
				execute(t, db, sqlstore.SQLiteSchema(o)) // waits for no writer
				return nil
			})
			require.NoError(t, err)
			a, err := holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeCreated, a.Outcome)
		}
	})
}

// While one create runs, another key waits for a bounded time and gets an error that asks for a retry; a duplicate of any
// other key is answered, as is one of the running create.
func TestSQLiteBusy(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		store, db := newSQLite(t, driver, &sqlstore.Options{BusyTimeout: 300 * time.Millisecond})
		done := "key-completed"
		_, err := holdsend.HandleIdempotent(t.Context(), store, request(done), insertNote)
		require.NoError(t, err)

		running, err := holdsend.HandleIdempotent(t.Context(), store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			replay, err := holdsend.HandleIdempotent(ctx, store, request(done), insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeReplayed, replay.Outcome)

			duplicate, err := holdsend.HandleIdempotent(ctx, store, request(key), insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeInProgress, duplicate.Outcome)

			_, err = holdsend.HandleIdempotent(ctx, store, request("key-another"), insertNote)
			require.ErrorIs(t, err, sqlstore.ErrBusy)
			require.Equal(t, 503, holdsend.ErrorAnswer(err).Status)
			require.NotEmpty(t, holdsend.ErrorAnswer(err).Header.Get("Retry-After"))
			_, err = store.Find(ctx, holdsend.Scope{Owner: "owner-1", Operation: "note.create", Key: "key-another"})
			require.ErrorIs(t, err, holdsend.ErrNotFound)

			err = store.InTx(ctx, func(context.Context, *sql.Tx) error { return nil })
			require.ErrorIs(t, err, sqlstore.ErrBusy)
			return insertNote(ctx, tx, in)
		})
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, running.Outcome)
		later, err := holdsend.HandleIdempotent(t.Context(), store, request("key-another"), insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, later.Outcome)
		requireNotes(t, db, 3)
	})
}

// A COMMIT that fails, here by a deferred constraint, leaves nothing: no write, no claim, and no connection in a transaction.
func TestSQLiteCommitFails(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		db, err := sql.Open(driver, sqliteDSN(filepath.Join(t.TempDir(), "test.db"))+"&_pragma=foreign_keys(1)")
		require.NoError(t, err)
		t.Cleanup(func() { db.Close() })
		execute(t, db, sqlstore.SQLiteSchema(nil)+`CREATE TABLE writes (name TEXT NOT NULL);
			CREATE TABLE parents (id INTEGER PRIMARY KEY);
			CREATE TABLE children (parent INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED)`)
		store, err := sqlstore.NewSQLite(db, nil)
		require.NoError(t, err)
		orphan := func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "INSERT INTO children VALUES (1)")
			return err
		}
		_, err = holdsend.HandleIdempotent(t.Context(), store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
			if _, err := insertNote(ctx, tx, in); err != nil {
				return created, err
			}
			return created, orphan(ctx, tx)
		})
		require.Error(t, err)
		require.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
		requireNotes(t, db, 0)
		_, err = holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
		require.NoError(t, err)
		requireNotes(t, db, 1)
		require.Error(t, store.InTx(t.Context(), orphan))
		require.NoError(t, store.InTx(t.Context(), func(context.Context, *sql.Tx) error { return nil }))
	})
}

// What is set on a connection while the store hurries is set back: create sees the caller's settings, and so does whoever
// gets the connection next.
func TestSQLiteSettingsAreSetBack(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		path := filepath.Join(t.TempDir(), "test.db")
		db, err := sql.Open(driver, sqliteDSN(path)+"&_pragma=synchronous(EXTRA)")
		require.NoError(t, err)
		t.Cleanup(func() { db.Close() })
		execute(t, db, sqlstore.SQLiteSchema(nil)+"CREATE TABLE writes (name TEXT NOT NULL)")
		store, err := sqlstore.NewSQLite(db, nil)
		require.NoError(t, err)
		check := func(q interface {
			QueryRow(string, ...any) *sql.Row
		}) {
			var timeout, synchronous int
			require.NoError(t, q.QueryRow("SELECT timeout, synchronous FROM pragma_busy_timeout, pragma_synchronous").Scan(&timeout, &synchronous))
			require.Equal(t, 60_000, timeout) // sqliteDSN
			require.Equal(t, 3, synchronous)
		}
		for range 2 {
			_, err = holdsend.HandleIdempotent(t.Context(), store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				check(tx)
				return insertNote(ctx, tx, in)
			})
			require.NoError(t, err)
			check(db)
		}
		_, err = holdsend.HandleIdempotent(t.Context(), store, request("key-not-stored"), func(context.Context, *sql.Tx, holdsend.Incoming) (holdsend.Response, error) {
			return holdsend.Response{Status: 404}, nil
		})
		require.NoError(t, err)
		_, err = store.PurgeExpired(t.Context())
		require.NoError(t, err)
		check(db)
	})
}

// SQLite rolls the whole transaction back when a statement of it is interrupted or finds no room. A create that ignores that
// and answers 2xx has stored nothing: it is told so, and its key is free.
func TestSQLiteRollsBackByItself(t *testing.T) {
	t.Parallel()
	const endless = "INSERT INTO writes WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT 'endless' FROM n"
	eachSQLite(t, func(t *testing.T, driver string) {
		for name, c := range map[string]struct {
			fail func(ctx context.Context, tx *sql.Tx)
			ends bool // SQLite rolls back: where it does not, the create stands
		}{
			"interrupted": {func(ctx context.Context, tx *sql.Tx) {
				ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
				defer cancel()
				_, err := tx.ExecContext(ctx, endless)
				require.Error(t, err)
			}, true},
			"no room": {func(ctx context.Context, tx *sql.Tx) {
				var pages int
				require.NoError(t, tx.QueryRow("PRAGMA page_count").Scan(&pages))
				execute := func(pages int) {
					_, err := tx.ExecContext(ctx, "PRAGMA max_page_count = "+strconv.Itoa(pages))
					require.NoError(t, err)
				}
				execute(pages + 2)
				_, err := tx.ExecContext(ctx, endless)
				require.ErrorContains(t, err, "full")
				execute(1 << 30)
			}, false},
		} {
			t.Run(name, func(t *testing.T) {
				store, db := newSQLite(t, driver, nil)
				answer, err := holdsend.HandleIdempotent(t.Context(), store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
					if _, err := insertNote(ctx, tx, in); err != nil {
						return created, err
					}
					c.fail(ctx, tx)
					return created, nil // it should be the error
				})
				stored := !c.ends && err == nil
				if stored {
					require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
					requireNotes(t, db, 1)
				} else {
					require.ErrorIs(t, err, holdsend.ErrTxEnded)
					requireNotes(t, db, 0)
				}
				again, err := holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
				require.NoError(t, err)
				require.Equal(t, stored, again.Outcome == holdsend.OutcomeReplayed)
				requireNotes(t, db, 1)
			})
		}
	})
}

// A request that ends while it waits for the writer leaves no claim.
func TestSQLiteRequestEndsWhileItWaits(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		store, _ := newSQLite(t, driver, &sqlstore.Options{BusyTimeout: time.Hour})
		err := store.InTx(t.Context(), func(ctx context.Context, _ *sql.Tx) error { // holds the lock
			waiting, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
			defer cancel()
			_, err := holdsend.HandleIdempotent(waiting, store, request(key), insertNote)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			_, err = store.Find(ctx, holdsend.Scope{Owner: "owner-1", Operation: "note.create", Key: key})
			require.ErrorIs(t, err, holdsend.ErrNotFound)
			return nil
		})
		require.NoError(t, err)
	})
}

// A claim from before the clock was set back has a time in the future, and is taken over all the same, or purged.
func TestSQLiteClockIsSetBack(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		store, db := newSQLite(t, driver, nil)
		const claim = "INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at) VALUES ('owner-1', 'note.create', ?, 'claimed', ?, 'dead', unixepoch() * 1000 + 90000000)"
		fingerprint, err := holdsend.Fingerprint("note.create", request(key).Content)
		require.NoError(t, err)
		execute(t, db, claim, key, fingerprint)
		execute(t, db, claim, "key-purged", fingerprint)
		req := request(key)
		req.Wait = 0
		answer, err := holdsend.HandleIdempotent(t.Context(), store, req, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		purged, err := store.PurgeExpired(t.Context())
		require.NoError(t, err)
		require.Equal(t, holdsend.Purged{Claims: 1}, purged)
	})
}

// A record from before the clock was set back has a time in the future, and is older than a call of ForgetOwner all the same.
func TestSQLiteForgetsAfterTheClockIsSetBack(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		store, db := newSQLite(t, driver, nil)
		_, err := holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
		require.NoError(t, err)
		execute(t, db, "UPDATE holdsend_records SET claimed_at = claimed_at + 3600000")
		forgotten, err := store.ForgetOwner(t.Context(), "owner-1")
		require.NoError(t, err)
		require.EqualValues(t, 1, forgotten)
	})
}

// Create leaves the rows of a writing statement open, with which SQLite commits nothing. That is no end of its
// transaction: it is told what to do, nothing is stored and the key is free. Rows that only read do no harm.
func TestSQLiteOpenRows(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		open := func(query string) func(*sql.Tx) error {
			return func(tx *sql.Tx) error {
				rows, err := tx.Query(query)
				if err == nil {
					require.True(t, rows.Next())
				}
				return err
			}
		}
		writing := open("INSERT INTO writes VALUES ('note'), ('note') RETURNING name")
		store, db := newSQLite(t, driver, nil)
		requireToldToClose := func(err error) {
			t.Helper()
			require.ErrorContains(t, err, "close them")
			require.NotErrorIs(t, err, holdsend.ErrTxEnded)
			require.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
			requireNotes(t, db, 0)
		}
		_, err := holdsend.HandleIdempotent(t.Context(), store, request(key), inserting(created, nil, writing))
		requireToldToClose(err)
		requireToldToClose(store.InTx(t.Context(), func(_ context.Context, tx *sql.Tx) error { return writing(tx) }))
		_, err = holdsend.HandleIdempotent(t.Context(), store, request("key-not-stored"), inserting(holdsend.Response{Status: 404}, nil, writing))
		require.NoError(t, err)
		requireNotes(t, db, 0)

		answer, err := holdsend.HandleIdempotent(t.Context(), store, request(key), inserting(created, nil, open("SELECT name FROM writes, (VALUES (1), (2))")))
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		requireNotes(t, db, 1)
	})
}

// A completed record lacks a part of its answer: there is nothing to replay. An empty body is none that is lacking.
func TestSQLiteDamagedRecord(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		store, db := newSQLite(t, driver, nil)
		_, err := holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
		require.NoError(t, err)
		for _, damage := range []string{"header = 'damaged'", "header = NULL", "status = NULL", "body = NULL"} {
			execute(t, db, "UPDATE holdsend_records SET header = '{}', status = 201, body = x''")
			answer, err := holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
			execute(t, db, "UPDATE holdsend_records SET "+damage)
			answer, err = holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
			require.Error(t, err, "replayed %d after %s", answer.Status, damage)
		}
		requireNotes(t, db, 1)
	})
}
