package main

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
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

// The contract on a table made by the recipe, under the level at which a claim is found by its row alone, which is unique
// in its partition only. (The levels below find it by its scope, as in a plain table.)
func TestPartitionedTableKeepsTheContract(t *testing.T) {
	lend := pgtest.Lend(func() *partitionedTables { return newPartitionedTables(t) },
		func(t testing.TB, p *partitionedTables) { pgtest.Empty(t, p.aside, "holdsend_records, writes, holds") })
	contracttest.Run(t, func(t *testing.T) contracttest.Harness[pgx.Tx] { return lend(t).harness(t) })
}

// The recipe has the columns of schema.sql, and PostgresSchema gives it the same indexes.
func TestPartitionedTableIsLikeThePlainOne(t *testing.T) {
	t.Parallel()
	describe := func(recipe string) []string {
		pool := pgtest.Pool(t, pgtest.URL(t), nil)
		pgtest.Exec(t, pool, recipe+holdsend.PostgresSchema(nil))
		pgtest.Exec(t, pool, holdsend.PostgresSchema(nil)) // again
		rows, err := pool.Query(t.Context(), `
			SELECT attname || ' ' || format_type(atttypid, atttypmod) || ' ' || attnotnull || ' ' || attcollation::regcollation
				FROM pg_attribute WHERE attrelid = 'holdsend_records'::regclass AND attnum > 0
			UNION ALL SELECT regexp_replace(pg_get_indexdef(indexrelid), '.* USING', '') FROM pg_index
				WHERE indrelid = 'holdsend_records'::regclass
			UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'holdsend_records'::regclass
			ORDER BY 1`)
		require.NoError(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return lines
	}
	require.Equal(t, describe(""), describe(partitionedSQL))
}

// The document shows the recipe that is tested.
func TestDocumentShowsTheRecipe(t *testing.T) {
	document, err := os.ReadFile("../../docs/performance.md")
	require.NoError(t, err)
	require.True(t, strings.Contains(string(document), "```sql\n"+partitionedSQL+"```\n"), "docs/performance.md must quote partitioned.sql")
	for _, p := range parts() {
		require.Contains(t, string(document), "<!-- bench:"+p.name+" -->\n")
	}
}

// Creates of many owners spread over the partitions.
func TestPartitionsAreUsed(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), nil)
	pgtest.Exec(t, pool, partitionedSQL+holdsend.PostgresSchema(nil)+notesTable)
	store, err := holdsend.NewPostgresStore(pool, nil)
	require.NoError(t, err)
	for n := range int64(100) {
		require.NoError(t, handle(t.Context(), store, strconv.FormatInt(n, 10), key(n), holdsend.OutcomeCreated))
		require.NoError(t, handle(t.Context(), store, strconv.FormatInt(n, 10), key(n), holdsend.OutcomeReplayed))
	}
	require.Greater(t, pgtest.Value[int](t, pool, "SELECT count(DISTINCT tableoid) FROM holdsend_records"), 8)
}

// Rows of different partitions have the same ctid. What was completed by one owner must not go with what another's purge or
// erasure finds.
func TestPartitionsAreErasedRowByRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), nil)
	pgtest.Exec(t, pool, partitionedSQL+holdsend.PostgresSchema(nil))
	// Each owner is in turn expired, kept and an unfinished claim, so that any ctid is each of these in some partition.
	pgtest.Exec(t, pool, `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at, completed_at, expires_at)
		SELECT owner, 'note.create', 'item-' || n, CASE kind WHEN 2 THEN 'claimed' ELSE 'completed' END, 'hs1:', gen_random_uuid(),
			now() - interval '2 days', CASE WHEN kind < 2 THEN now() END, CASE kind WHEN 0 THEN now() WHEN 1 THEN now() + interval '1 day' END
		FROM generate_series(1, 20) n, generate_series(1, 60) owner, LATERAL (SELECT (owner + n) % 3) AS k (kind)`)
	store, err := holdsend.NewPostgresStore(pool, nil)
	require.NoError(t, err)
	purged, err := store.PurgeExpired(t.Context())
	require.NoError(t, err)
	require.Equal(t, holdsend.Purged{Records: 400, Claims: 400}, purged)
	kept := func() (kept int) {
		return pgtest.Value[int](t, pool, "SELECT count(*) FROM holdsend_records WHERE state = 'completed' AND expires_at > now()")
	}
	require.Equal(t, 400, kept())
	forgotten, err := store.ForgetOwner(t.Context(), "7")
	require.NoError(t, err)
	require.Equal(t, 400-int(forgotten), kept())
	require.Equal(t, 400-int(forgotten), pgtest.Value[int](t, pool, "SELECT count(*) FROM holdsend_records"))
	require.Positive(t, forgotten)
}

// partitionedTables are the tables that a case of the contract needs, and the pools on them. Cases use them one after the
// other.
type partitionedTables struct {
	url         string
	aside, pool *pgxpool.Pool
}

func newPartitionedTables(t *testing.T) *partitionedTables {
	url := pgtest.URL(t)
	aside := pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 3 })
	pgtest.Exec(t, aside, partitionedSQL+holdsend.PostgresSchema(nil))
	// A commit that has begun waits in the trigger, for whoever holds the lock named in the row.
	pgtest.Exec(t, aside, `
		CREATE TABLE writes (name text NOT NULL);
		CREATE TABLE holds (lock bigint NOT NULL);
		CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN PERFORM pg_advisory_xact_lock(NEW.lock); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON holds DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION wait()`)
	pool := pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 8 })
	return &partitionedTables{url: url, aside: aside, pool: pool}
}

// harness is for one case: its store is new.
func (p *partitionedTables) harness(t *testing.T) contracttest.Harness[pgx.Tx] {
	const stale = 300 * time.Millisecond
	store, err := holdsend.NewPostgresStore(p.pool, &holdsend.PostgresOptions{
		TakeOverAfter: 100 * time.Millisecond, StaleClaim: stale, TxOptions: pgx.TxOptions{IsoLevel: pgx.Serializable},
	})
	require.NoError(t, err)
	return contracttest.Harness[pgx.Tx]{
		Store:      store,
		StaleClaim: stale,
		Write: func(ctx context.Context, tx pgx.Tx, name string) error {
			_, err := tx.Exec(ctx, "INSERT INTO writes VALUES ($1)", name)
			return err
		},
		Count: func(ctx context.Context, name string) (n int, err error) {
			err = p.aside.QueryRow(ctx, "SELECT count(*) FROM writes WHERE name = $1", name).Scan(&n)
			return n, err
		},
		Crash:      func(ctx context.Context, a holdsend.Attempt[pgx.Tx]) error { return crash(ctx, p.aside, a) },
		HoldCommit: func(ctx context.Context, tx pgx.Tx) (func(), error) { return holdCommit(ctx, t, p.url, tx) },
	}
}

// crash closes the attempt's socket without a word, and returns when the server has noticed.
func crash(ctx context.Context, aside *pgxpool.Pool, a holdsend.Attempt[pgx.Tx]) error {
	pid := a.Tx().Conn().PgConn().PID()
	_ = a.Tx().Conn().PgConn().Conn().Close()
	for {
		var gone bool
		err := aside.QueryRow(ctx, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid).Scan(&gone)
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

func holdCommit(ctx context.Context, t *testing.T, url string, tx pgx.Tx) (func(), error) {
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
	_, err = tx.Exec(ctx, "INSERT INTO holds VALUES ("+strconv.FormatInt(lock, 10)+")")
	return release, err
}
