package holdsend_test

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/contracttest"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// queryModes are pgx's, by their names in a connection URL.
var queryModes = []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"}

var isolationLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func TestPostgresKeepsTheContract(t *testing.T) {
	t.Parallel()
	contracttest.Run(t, func(t *testing.T) contracttest.Harness[pgx.Tx] {
		url := pgtest.URL(t)
		return postgresHarness(t, url, url, nil)
	})
}

func TestPostgresKeepsTheContractInEveryQueryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range queryModes[1:] { // the first is the default, and has a test of its own
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			contracttest.Run(t, func(t *testing.T) contracttest.Harness[pgx.Tx] {
				url := pgtest.URL(t)
				return postgresHarness(t, url, pgtest.With(t, url, "default_query_exec_mode", mode), nil)
			})
		})
	}
}

// Read committed is what TestPostgresKeepsTheContract has. TxOptions leave the library's own statements as they are, so one
// level by them is enough: the strictest.
func TestPostgresKeepsTheContractUnderEveryIsolationLevel(t *testing.T) {
	t.Parallel()
	t.Run("by TxOptions/serializable", func(t *testing.T) {
		t.Parallel()
		contracttest.Run(t, func(t *testing.T) contracttest.Harness[pgx.Tx] {
			url := pgtest.URL(t)
			return postgresHarness(t, url, url, &holdsend.PostgresOptions{TxOptions: pgx.TxOptions{IsoLevel: pgx.Serializable}})
		})
	})
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run("by the database's default/"+string(level), func(t *testing.T) {
			t.Parallel()
			contracttest.Run(t, func(t *testing.T) contracttest.Harness[pgx.Tx] {
				url := pgtest.URL(t)
				return postgresHarness(t, url, pgtest.With(t, url, "default_transaction_isolation", string(level)), nil)
			})
		})
	}
}

// Through PgBouncer in transaction mode, in the query modes in which no prepared statement has to outlive a transaction
// (PgBouncer 1.21 and its max_prepared_statements lift that; simple_protocol has nothing to outlive anything). One PgBouncer
// serves all cases, so each names its schema.
func TestPostgresKeepsTheContractThroughPgBouncer(t *testing.T) {
	t.Parallel()
	pooledURL := pgtest.PgBouncer(t, pgtest.URL(t), map[string]string{"default_pool_size": "100", "max_client_conn": "1000"})
	for _, mode := range []string{"exec", "cache_describe"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			contracttest.Run(t, func(t *testing.T) contracttest.Harness[pgx.Tx] {
				url := pgtest.URL(t)
				o := &holdsend.PostgresOptions{Schema: schemaOf(t, url)}
				return postgresHarness(t, url, pgtest.With(t, pooledURL, "default_query_exec_mode", mode), o)
			})
		})
	}
}

func schemaOf(t *testing.T, url string) string {
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	return config.RuntimeParams["search_path"]
}

// postgresHarness makes the tables through url and the store on a pool of its own through storeURL.
func postgresHarness(t *testing.T, url, storeURL string, o *holdsend.PostgresOptions) contracttest.Harness[pgx.Tx] {
	if o == nil {
		o = &holdsend.PostgresOptions{}
	}
	o.TakeOverAfter, o.StaleClaim = 100*time.Millisecond, 300*time.Millisecond
	aside := pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 3 })
	pgtest.Exec(t, aside, holdsend.PostgresSchema(o))
	// A commit that has begun waits in the trigger, for whoever holds the lock named in the row.
	schema := pgx.Identifier{schemaOf(t, url)}.Sanitize()
	pgtest.Exec(t, aside, `
		CREATE TABLE writes (name text NOT NULL);
		CREATE TABLE holds (lock bigint NOT NULL);
		CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN PERFORM pg_advisory_xact_lock(NEW.lock); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON holds DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION wait()`)
	pool := pgtest.Pool(t, storeURL, func(c *pgxpool.Config) { c.MaxConns = 8 })
	store, err := holdsend.NewPostgresStore(pool, o)
	require.NoError(t, err)
	return contracttest.Harness[pgx.Tx]{
		Store:      store,
		StaleClaim: o.StaleClaim,
		Write: func(ctx context.Context, tx pgx.Tx, name string) error {
			_, err := tx.Exec(ctx, "INSERT INTO "+schema+".writes VALUES ($1)", name)
			return err
		},
		Count: func(ctx context.Context, name string) (n int, err error) {
			err = aside.QueryRow(ctx, "SELECT count(*) FROM writes WHERE name = $1", name).Scan(&n)
			return n, err
		},
		Crash:      func(ctx context.Context, a holdsend.Attempt[pgx.Tx]) error { return crash(ctx, aside, a) },
		HoldCommit: func(ctx context.Context, tx pgx.Tx) (func(), error) { return holdCommit(ctx, t, url, schema, tx) },
	}
}

// crash does what the death of a process does to its connection: the socket closes without a word. It returns when the
// server has noticed.
func crash(ctx context.Context, aside *pgxpool.Pool, a holdsend.Attempt[pgx.Tx]) error {
	var pid int32
	if err := a.Tx().QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		return err
	}
	_ = a.Tx().Conn().PgConn().Conn().Close()
	for {
		var gone bool
		// Behind a pooler another client may get the backend: what matters is that its transaction has ended.
		err := aside.QueryRow(ctx, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND xact_start IS NOT NULL)", pid).Scan(&gone)
		if err != nil || gone {
			return err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return errors.New("the server has not noticed that the connection is gone")
		}
	}
}

var lockNumber atomic.Int64 // advisory locks are the whole database's: no two tests may share one

func holdCommit(ctx context.Context, t *testing.T, url, schema string, tx pgx.Tx) (func(), error) {
	lock := lockNumber.Add(1)
	holder, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	release := func() { _ = holder.Close(context.Background()) }
	t.Cleanup(release)
	if _, err := holder.Exec(ctx, "SELECT pg_advisory_lock($1)", lock); err != nil {
		return nil, err
	}
	_, err = tx.Exec(ctx, "INSERT INTO "+schema+".holds VALUES ("+strconv.FormatInt(lock, 10)+")")
	return release, err
}
