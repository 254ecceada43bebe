package sqltest

import (
	"context"
	"database/sql"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/contracttest"
	"github.com/holdsend/holdsend-go/internal/pgtest"
	"github.com/holdsend/holdsend-go/sqlstore"
)

// postgresDrivers has the names under which the drivers register.
var postgresDrivers = map[string]string{"pgx": "pgx", "pq": "postgres"}

func eachPostgres(t *testing.T, test func(t *testing.T, driver string)) {
	for name, driver := range postgresDrivers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, driver)
		})
	}
}

// newPostgres makes the tables of the tests in a fresh schema, and opens a store on it through storeURL, which is made
// from the schema's URL; nil: the same.
func newPostgres(t testing.TB, driver string, o *sqlstore.Options, storeURL func(url string) string) (*sqlstore.PostgresStore, *sql.DB, string) {
	url := pgtest.URL(t)
	aside := pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 1 })
	pgtest.Exec(t, aside, sqlstore.PostgresSchema(o))
	pgtest.Exec(t, aside, "CREATE TABLE writes (name text NOT NULL)")
	through := url
	if storeURL != nil {
		through = storeURL(url)
	}
	db, err := sql.Open(driver, through)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	db.SetMaxOpenConns(8)
	db.SetMaxIdleConns(8) // a new connection costs more than most tests
	store, err := sqlstore.NewPostgres(db, o)
	require.NoError(t, err)
	return store, db, url
}

func TestPostgresKeepsTheContract(t *testing.T) {
	for name, driver := range postgresDrivers {
		t.Run(name, func(t *testing.T) { keepsTheContract(t, driver, sql.TxOptions{}, nil) })
	}
}

// Serializable by the store's options; repeatable read by the database's default, at which the library's own statements
// must not run.
func TestPostgresKeepsTheContractUnderOtherLevels(t *testing.T) {
	keepsTheContract(t, "pgx", sql.TxOptions{Isolation: sql.LevelSerializable}, func(url string) string {
		return pgtest.With(t, url, "default_transaction_isolation", "repeatable read")
	})
}

// keepsTheContract runs the contract's cases, which use tables and connections one after the other. Tests of whole contracts
// are not parallel with each other: the cases that run at once have many connections.
func keepsTheContract(t *testing.T, driver string, options sql.TxOptions, storeURL func(string) string) {
	lend := pgtest.Lend(func() *contractTables { return newContractTables(t, driver, options, storeURL) },
		func(t testing.TB, c *contractTables) { pgtest.Empty(t, c.aside, "holdsend_records, writes, holds") })
	contracttest.Run(t, func(t *testing.T) contracttest.Harness[*sql.Tx] { return lend(t).harness(t) })
}

// contractTables are the tables that a case needs, and the pools on them.
type contractTables struct {
	url   string
	o     *sqlstore.Options
	db    *sql.DB
	aside *pgxpool.Pool
}

func newContractTables(t *testing.T, driver string, options sql.TxOptions, storeURL func(string) string) *contractTables {
	o := &sqlstore.Options{TakeOverAfter: 100 * time.Millisecond, StaleClaim: 300 * time.Millisecond, TxOptions: options}
	_, db, url := newPostgres(t, driver, o, storeURL)
	aside := pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 3 })
	// A commit that has begun waits in the trigger, for whoever holds the lock named in the row.
	pgtest.Exec(t, aside, `
		CREATE TABLE holds (lock bigint NOT NULL);
		CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN PERFORM pg_advisory_xact_lock(NEW.lock); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON holds DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION wait()`)
	return &contractTables{url: url, o: o, db: db, aside: aside}
}

// harness is for one case: its store is new.
func (c *contractTables) harness(t *testing.T) contracttest.Harness[*sql.Tx] {
	store, err := sqlstore.NewPostgres(c.db, c.o)
	require.NoError(t, err)
	return contracttest.Harness[*sql.Tx]{
		Store:      store,
		StaleClaim: c.o.StaleClaim,
		Write: func(ctx context.Context, tx *sql.Tx, name string) error {
			_, err := tx.ExecContext(ctx, "INSERT INTO writes VALUES ($1)", name)
			return err
		},
		Count: func(ctx context.Context, name string) (n int, err error) {
			err = c.aside.QueryRow(ctx, "SELECT count(*) FROM writes WHERE name = $1", name).Scan(&n)
			return n, err
		},
		Crash:      func(ctx context.Context, a holdsend.Attempt[*sql.Tx]) error { return crash(ctx, c.aside, a) },
		HoldCommit: func(ctx context.Context, tx *sql.Tx) (func(), error) { return holdCommit(ctx, t, c.url, tx) },
	}
}

// crash ends the connection under an attempt, and returns when its transaction is gone.
func crash(ctx context.Context, aside *pgxpool.Pool, a holdsend.Attempt[*sql.Tx]) error {
	var pid int32
	if err := a.Tx().QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		return err
	}
	for {
		var gone bool
		err := aside.QueryRow(ctx, "SELECT NOT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity WHERE pid = $1", pid).Scan(&gone)
		if err != nil || gone {
			return err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return errors.New("the server does not end the connection")
		}
	}
}

var lockNumber atomic.Int64 // advisory locks are the whole database's: no two tests may share one

func holdCommit(ctx context.Context, t *testing.T, url string, tx *sql.Tx) (func(), error) {
	lock := 1<<40 + lockNumber.Add(1)
	holder, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	release := func() { _ = holder.Close(context.Background()) }
	t.Cleanup(release)
	if _, err := holder.Exec(ctx, "SELECT pg_advisory_lock($1)", lock); err != nil {
		return nil, err
	}
	_, err = tx.ExecContext(ctx, "INSERT INTO holds VALUES ($1)", lock)
	return release, err
}
