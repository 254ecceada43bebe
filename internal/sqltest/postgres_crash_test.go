package sqltest

import (
	"context"
	"database/sql"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
	"github.com/holdsend/holdsend-go/sqlstore"
)

// onLock does something before the statement that locks a claim is sent.
type onLock struct{ do func() }

func (o onLock) TraceQueryStart(ctx context.Context, _ *pgx.Conn, start pgx.TraceQueryStartData) context.Context {
	if strings.Contains(start.SQL, "FOR NO KEY UPDATE") {
		o.do()
	}
	return ctx
}

func (o onLock) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A crash loses an attempt, but not its claim, and afterwards gives the id of the attempt's transaction to another one, which
// commits. The attempt must not take that for its own: nothing was stored, and the key is free.
func TestPostgresCrashGivesTheTransactionsIDAgain(t *testing.T) {
	t.Parallel()
	cluster := pgtest.StartCluster(t, map[string]string{ // nothing but a commit may flush
		"autovacuum": "off", "wal_writer_delay": "10s", "checkpoint_timeout": "1h", "bgwriter_lru_maxpages": "0",
	})
	for name, create := range map[string]func(err error) (holdsend.Response, error){
		"create fails":           func(err error) (holdsend.Response, error) { return holdsend.Response{}, err },
		"create ignores it":      func(error) (holdsend.Response, error) { return holdsend.Response{Status: 201}, nil },
		"create does not notice": nil,
	} {
		t.Run(name, func(t *testing.T) {
			url := pgtest.Schema(t, cluster.URL())
			aside := pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 2 })
			pgtest.Exec(t, aside, sqlstore.PostgresSchema(nil))
			pgtest.Exec(t, aside, "CREATE TABLE writes (name text NOT NULL)")
			config, err := pgx.ParseConfig(url)
			require.NoError(t, err)
			config.Tracer = onLock{func() { pgtest.Exec(t, aside, "INSERT INTO writes VALUES ('a commit flushes the claim')") }}
			db := stdlib.OpenDB(*config)
			t.Cleanup(func() { _ = db.Close() })
			store, err := sqlstore.NewPostgres(db, nil)
			require.NoError(t, err)

			_, err = holdsend.HandleIdempotent(t.Context(), store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				response, err := insertNote(ctx, tx, in)
				require.NoError(t, err)
				var lost int64
				require.NoError(t, tx.QueryRow("SELECT pg_current_xact_id()::text::bigint").Scan(&lost))
				cluster.Stop(t, "immediate")
				cluster.Start(t)
				aside.Reset()
				require.Equal(t, 1, pgtest.Value[int](t, aside, "SELECT count(*) FROM holdsend_records WHERE state = 'claimed'"),
					"the claim must have survived, or this shows nothing")
				for pgtest.Value[int64](t, aside, "SELECT pg_current_xact_id()::text::bigint") < lost {
				}
				require.Equal(t, "committed", pgtest.Value[string](t, aside, "SELECT pg_xact_status($1::bigint::text::xid8)", lost),
					"the transaction's id must have been given again, or this shows nothing")
				if create == nil {
					return response, nil
				}
				_, err = tx.Exec("SELECT 1")
				require.Error(t, err)
				return create(err)
			})
			require.Error(t, err)
			assert.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
			_, err = store.Find(t.Context(), holdsend.Scope{Owner: "owner-1", Operation: "note.create", Key: key})
			require.ErrorIs(t, err, holdsend.ErrNotFound, "the key must be free after a create that failed")
			again, err := holdsend.HandleIdempotent(t.Context(), store, request(key), insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeCreated, again.Outcome)
		})
	}
}
