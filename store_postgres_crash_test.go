package holdsend_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// A crash loses an attempt, but not its claim, and afterwards gives the id of the attempt's transaction to another one, which
// commits. The attempt must not take that for its own: nothing was stored, and the key is free.
func TestPostgresCrashGivesTheTransactionsIDAgain(t *testing.T) {
	t.Parallel()
	cluster := pgtest.StartCluster(t, pgtest.Unflushed())
	for name, create := range map[string]func(err error) (holdsend.Response, error){
		"create fails":           func(err error) (holdsend.Response, error) { return holdsend.Response{}, err },
		"create ignores it":      func(error) (holdsend.Response, error) { return holdsend.Response{Status: 201}, nil },
		"create refuses":         func(error) (holdsend.Response, error) { return holdsend.Response{Status: 422}, nil },
		"create does not notice": nil,
	} {
		t.Run(name, func(t *testing.T) {
			url := pgtest.Schema(t, cluster.URL())
			var b *bed
			flush := pgtest.BeforeLock(func() { pgtest.Exec(t, b.aside, "INSERT INTO notes VALUES ('a commit flushes the claim')") })
			// Under serializable the claim is locked in a round trip of its own.
			b = newBedOn(t, url, url, &holdsend.PostgresOptions{TxOptions: pgx.TxOptions{IsoLevel: pgx.Serializable}},
				func(c *pgxpool.Config) { c.ConnConfig.Tracer = flush })

			_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				response, err := insertNote(ctx, tx, in)
				require.NoError(t, err)
				var lost int64
				require.NoError(t, tx.QueryRow(ctx, "SELECT pg_current_xact_id()::text::bigint").Scan(&lost))
				cluster.LoseTransaction(t, b.aside, lost)
				if create == nil {
					return response, nil
				}
				_, err = tx.Exec(ctx, "SELECT 1")
				require.Error(t, err)
				return create(err)
			})
			if name != "create refuses" {
				require.Error(t, err)
				assert.NotErrorIs(t, err, holdsend.ErrOutcomeUnknown)
			}
			b.requireFree(key)
			again, err := b.send(key, insertNote)
			require.NoError(t, err)
			require.Equal(t, holdsend.OutcomeCreated, again.Outcome)
		})
	}
}
