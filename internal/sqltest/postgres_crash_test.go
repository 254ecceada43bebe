package sqltest

import (
	"context"
	"database/sql"
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

// A crash loses an attempt, but not its claim, and afterwards gives the id of the attempt's transaction to another one, which
// commits. The attempt must not take that for its own: nothing was stored, and the key is free.
func TestPostgresCrashGivesTheTransactionsIDAgain(t *testing.T) {
	t.Parallel()
	cluster := pgtest.StartCluster(t, pgtest.Unflushed())
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
			config.Tracer = pgtest.BeforeLock(func() { pgtest.Exec(t, aside, "INSERT INTO writes VALUES ('a commit flushes the claim')") })
			db := stdlib.OpenDB(*config)
			t.Cleanup(func() { _ = db.Close() })
			store, err := sqlstore.NewPostgres(db, nil)
			require.NoError(t, err)

			_, err = holdsend.HandleIdempotent(t.Context(), store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				response, err := insertNote(ctx, tx, in)
				require.NoError(t, err)
				var lost int64
				require.NoError(t, tx.QueryRow("SELECT pg_current_xact_id()::text::bigint").Scan(&lost))
				cluster.LoseTransaction(t, aside, lost)
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
