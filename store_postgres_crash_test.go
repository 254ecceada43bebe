package holdsend_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// onLock does something before the statement that locks a claim is sent.
type onLock struct{ do func() }

func (o onLock) TraceBatchStart(ctx context.Context, _ *pgx.Conn, start pgx.TraceBatchStartData) context.Context {
	for _, query := range start.Batch.QueuedQueries {
		if strings.Contains(query.SQL, "FOR NO KEY UPDATE") && !strings.Contains(query.SQL, "INSERT") {
			o.do()
		}
	}
	return ctx
}

func (o onLock) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (o onLock) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
func (o onLock) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
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
		"create refuses":         func(error) (holdsend.Response, error) { return holdsend.Response{Status: 422}, nil },
		"create does not notice": nil,
	} {
		t.Run(name, func(t *testing.T) {
			url := pgtest.Schema(t, cluster.URL())
			var b *bed
			flush := onLock{func() { pgtest.Exec(t, b.aside, "INSERT INTO notes VALUES ('a commit flushes the claim')") }}
			// Under serializable the claim is locked in a round trip of its own.
			b = newBedOn(t, url, url, &holdsend.PostgresOptions{TxOptions: pgx.TxOptions{IsoLevel: pgx.Serializable}},
				func(c *pgxpool.Config) { c.ConnConfig.Tracer = flush })

			_, err := b.send(key, func(ctx context.Context, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				response, err := insertNote(ctx, tx, in)
				require.NoError(t, err)
				var lost uint64
				require.NoError(t, tx.QueryRow(ctx, "SELECT pg_current_xact_id()::text::bigint").Scan(&lost))
				cluster.Stop(t, "immediate")
				cluster.Start(t)
				b.aside.Reset()
				require.Equal(t, 1, pgtest.Value[int](t, b.aside, "SELECT count(*) FROM holdsend_records WHERE state = 'claimed'"),
					"the claim must have survived, or this shows nothing")
				for pgtest.Value[uint64](t, b.aside, "SELECT pg_current_xact_id()::text::bigint") < lost {
				}
				require.Equal(t, "committed", pgtest.Value[string](t, b.aside, "SELECT pg_xact_status($1::bigint::text::xid8)", int64(lost)),
					"the transaction's id must have been given again, or this shows nothing")
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
