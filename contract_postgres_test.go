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
	keepsTheContract(t, plain)
}

func plain(url string) (string, holdsend.PostgresOptions) { return url, holdsend.PostgresOptions{} }

// Each attempt is one of a process that has completed nothing yet, and so looks for no record before it claims.
func TestPostgresKeepsTheContractInEveryQueryMode(t *testing.T) {
	for _, mode := range queryModes[1:] { // the first is the default, and has a test of its own
		t.Run(mode, func(t *testing.T) {
			lend := lendContractTables(t, func(url string) (string, holdsend.PostgresOptions) {
				return pgtest.With(t, url, "default_query_exec_mode", mode), holdsend.PostgresOptions{}
			})
			contracttest.Run(t, func(t *testing.T) contracttest.Harness[pgx.Tx] {
				c := lend(t)
				h := c.harness(t)
				h.Store = manyProcesses{c.store(t), func() *holdsend.PostgresStore { return c.store(t) }}
				return h
			})
		})
	}
}

type manyProcesses struct {
	*holdsend.PostgresStore
	start func() *holdsend.PostgresStore
}

func (m manyProcesses) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[pgx.Tx], *holdsend.Record, error) {
	return m.start().Begin(ctx, c)
}

// Read committed is what TestPostgresKeepsTheContract has. TxOptions leave the library's own statements as they are, so one
// level by them is enough: the strictest.
func TestPostgresKeepsTheContractUnderEveryIsolationLevel(t *testing.T) {
	t.Run("by TxOptions/serializable", func(t *testing.T) {
		keepsTheContract(t, func(url string) (string, holdsend.PostgresOptions) {
			return url, holdsend.PostgresOptions{TxOptions: pgx.TxOptions{IsoLevel: pgx.Serializable}}
		})
	})
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run("by the database's default/"+string(level), func(t *testing.T) {
			keepsTheContract(t, func(url string) (string, holdsend.PostgresOptions) {
				return pgtest.With(t, url, "default_transaction_isolation", string(level)), holdsend.PostgresOptions{}
			})
		})
	}
}

// Through PgBouncer in transaction mode, in the query modes in which no prepared statement has to outlive a transaction
// (PgBouncer 1.21 and its max_prepared_statements lift that; simple_protocol has nothing to outlive anything). One PgBouncer
// serves all cases, so each names its schema.
func TestPostgresKeepsTheContractThroughPgBouncer(t *testing.T) {
	pooledURL := pgtest.PgBouncer(t, pgtest.URL(t), map[string]string{"default_pool_size": "100", "max_client_conn": "1000"})
	for _, mode := range []string{"exec", "cache_describe"} {
		t.Run(mode, func(t *testing.T) {
			keepsTheContract(t, func(url string) (string, holdsend.PostgresOptions) {
				return pgtest.With(t, pooledURL, "default_query_exec_mode", mode), holdsend.PostgresOptions{Schema: schemaOf(t, url)}
			})
		})
	}
}

func schemaOf(t *testing.T, url string) string {
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	return config.RuntimeParams["search_path"]
}

// keepsTheContract runs the contract's cases. variant gets the URL of a schema, and returns that of the store and its options.
// Cases use tables and pools one after the other. Tests of whole contracts are not parallel with each other: each of the
// cases that run at once has tables and connections, and the server does not have enough of them for all contracts.
func keepsTheContract(t *testing.T, variant func(url string) (string, holdsend.PostgresOptions)) {
	lend := lendContractTables(t, variant)
	contracttest.Run(t, func(t *testing.T) contracttest.Harness[pgx.Tx] { return lend(t).harness(t) })
}

func lendContractTables(t *testing.T, variant func(url string) (string, holdsend.PostgresOptions)) func(testing.TB) *contractTables {
	return pgtest.Lend(func() *contractTables { return newContractTables(t, variant) }, func(t testing.TB, c *contractTables) {
		pgtest.Empty(t, c.aside, "holdsend_records, writes, holds")
	})
}

// contractTables are the tables that a case needs, and the pools on them.
type contractTables struct {
	url, schema string
	o           holdsend.PostgresOptions
	aside, pool *pgxpool.Pool
}

func newContractTables(t *testing.T, variant func(url string) (string, holdsend.PostgresOptions)) *contractTables {
	url := pgtest.URL(t)
	storeURL, o := variant(url)
	o.TakeOverAfter, o.StaleClaim = 100*time.Millisecond, 300*time.Millisecond
	c := &contractTables{
		url: url, schema: pgx.Identifier{schemaOf(t, url)}.Sanitize(), o: o,
		aside: pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 3 }),
		pool:  pgtest.Pool(t, storeURL, func(c *pgxpool.Config) { c.MaxConns = 8 }),
	}
	// A commit that has begun waits in the trigger, for whoever holds the lock named in the row.
	pgtest.Exec(t, c.aside, holdsend.PostgresSchema(&o)+`;
		CREATE TABLE writes (name text NOT NULL);
		CREATE TABLE holds (lock bigint NOT NULL);
		CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN PERFORM pg_advisory_xact_lock(NEW.lock); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON holds DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION wait()`)
	return c
}

func (c *contractTables) store(t *testing.T) *holdsend.PostgresStore {
	store, err := holdsend.NewPostgresStore(c.pool, &c.o)
	require.NoError(t, err)
	return store
}

// harness is for one case: its store is new.
func (c *contractTables) harness(t *testing.T) contracttest.Harness[pgx.Tx] {
	return contracttest.Harness[pgx.Tx]{
		Store:      c.store(t),
		StaleClaim: c.o.StaleClaim,
		Write: func(ctx context.Context, tx pgx.Tx, name string) error {
			_, err := tx.Exec(ctx, "INSERT INTO "+c.schema+".writes VALUES ($1)", name)
			return err
		},
		Count: func(ctx context.Context, name string) (n int, err error) {
			err = c.aside.QueryRow(ctx, "SELECT count(*) FROM writes WHERE name = $1", name).Scan(&n)
			return n, err
		},
		Crash:      func(ctx context.Context, a holdsend.Attempt[pgx.Tx]) error { return crash(ctx, c.aside, a) },
		HoldCommit: func(ctx context.Context, tx pgx.Tx) (func(), error) { return holdCommit(ctx, t, c.url, c.schema, tx) },
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
