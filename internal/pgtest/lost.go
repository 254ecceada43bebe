package pgtest

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Unflushed are settings of a cluster in which nothing but a commit flushes the write-ahead log.
func Unflushed() map[string]string {
	return map[string]string{
		"autovacuum": "off", "wal_writer_delay": "10s", "checkpoint_timeout": "1h", "bgwriter_lru_maxpages": "0",
	}
}

// BeforeLock is a pgx tracer that does something before a statement that locks a claim is sent, if none that makes one
// travels along.
type BeforeLock func()

func (do BeforeLock) before(sql string) {
	if strings.Contains(sql, "FOR NO KEY UPDATE") {
		do()
	}
}

// TraceBatchStart implements pgx.BatchTracer.
func (do BeforeLock) TraceBatchStart(ctx context.Context, _ *pgx.Conn, start pgx.TraceBatchStartData) context.Context {
	for _, query := range start.Batch.QueuedQueries {
		if strings.Contains(query.SQL, "INSERT") {
			return ctx
		}
	}
	for _, query := range start.Batch.QueuedQueries {
		do.before(query.SQL)
	}
	return ctx
}

// TraceQueryStart implements pgx.QueryTracer.
func (do BeforeLock) TraceQueryStart(ctx context.Context, _ *pgx.Conn, start pgx.TraceQueryStartData) context.Context {
	do.before(start.SQL)
	return ctx
}

func (BeforeLock) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (BeforeLock) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
func (BeforeLock) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}

// LoseTransaction crashes a cluster with the settings of Unflushed, starts it again, and has another transaction commit that
// gets the id of the one that was lost. The one claim in the table must survive. aside is a pool on the cluster.
func (c *Cluster) LoseTransaction(t testing.TB, aside *pgxpool.Pool, lost int64) {
	t.Helper()
	c.Stop(t, "immediate")
	c.Start(t)
	aside.Reset()
	if Value[int](t, aside, "SELECT count(*) FROM holdsend_records WHERE state = 'claimed'") != 1 {
		t.Fatal("the claim did not survive the crash, so this shows nothing")
	}
	for Value[int64](t, aside, "SELECT pg_current_xact_id()::text::bigint") < lost {
	}
	if Value[string](t, aside, "SELECT pg_xact_status($1::bigint::text::xid8)", lost) != "committed" {
		t.Fatal("the transaction's id was not given again, so this shows nothing")
	}
}
