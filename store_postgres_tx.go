package holdsend

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

var (
	errTxNotYours = errors.New("holdsend: create must not end the transaction it was handed: return a 2xx response to commit, and anything else to roll back")
	errTxInUse    = errors.New("holdsend: the transaction is in use by another goroutine: create must use it from one at a time")
)

// postgresTx is the transaction that create gets: a pgx.Tx that refuses Commit and Rollback, for the store ends it, and
// refuses everything once it ended. After a COMMIT in a batch pgx's own transaction does not know that it is closed, so
// without this a transaction that leaked from create would write into the next borrower's.
//
// What reaches around it (Conn, LargeObjects, rows not yet read) must not be kept.
type postgresTx struct {
	tx     pgx.Tx
	use    *txUse
	nested bool // a savepoint: that is create's own to end
}

var _ pgx.Tx = (*postgresTx)(nil)

// txUse is shared by a transaction and its nested ones. pgx.Conn is not safe for concurrent use: one call at a time.
type txUse struct {
	calling sync.Mutex // held during each call
	closed  atomic.Bool
}

func (t *postgresTx) enter() error {
	if !t.use.calling.TryLock() {
		return errTxInUse
	}
	if t.use.closed.Load() {
		t.use.calling.Unlock()
		return pgx.ErrTxClosed
	}
	return nil
}

func (t *postgresTx) leave() { t.use.calling.Unlock() }

// close ends all use of the transaction. If another goroutine is inside a call, that is create's bug: interrupt is called,
// which must make the call end. It reports whether that had to be done, and whether the call has ended: one that waits
// for something else than the database (CopyFrom for its source) may never.
func (u *txUse) close(interrupt func()) (inUse, ended bool) {
	u.closed.Store(true)
	if u.calling.TryLock() {
		u.calling.Unlock()
		return false, true
	}
	interrupt()
	deadline := time.Now().Add(interruptTimeout)
	for time.Now().Before(deadline) {
		if u.calling.TryLock() {
			u.calling.Unlock()
			return true, true
		}
		time.Sleep(time.Millisecond)
	}
	return true, false
}

// interruptTimeout is how long a call whose socket was closed gets to notice.
const interruptTimeout = time.Second

func (t *postgresTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.enter(); err != nil {
		return nil, err
	}
	defer t.leave()
	nested, err := t.tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &postgresTx{tx: nested, use: t.use, nested: true}, nil
}

func (t *postgresTx) Commit(ctx context.Context) error {
	if err := t.enter(); err != nil {
		return err
	}
	defer t.leave()
	if !t.nested {
		return errTxNotYours
	}
	return t.tx.Commit(ctx)
}

func (t *postgresTx) Rollback(ctx context.Context) error {
	if err := t.enter(); err != nil {
		return err
	}
	defer t.leave()
	if !t.nested {
		return errTxNotYours
	}
	return t.tx.Rollback(ctx)
}

func (t *postgresTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if err := t.enter(); err != nil {
		return 0, err
	}
	defer t.leave()
	return t.tx.CopyFrom(ctx, table, columns, rows)
}

func (t *postgresTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := t.enter(); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	defer t.leave()
	return t.tx.SendBatch(ctx, b)
}

func (t *postgresTx) LargeObjects() pgx.LargeObjects { return t.tx.LargeObjects() }

func (t *postgresTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.enter(); err != nil {
		return nil, err
	}
	defer t.leave()
	return t.tx.Prepare(ctx, name, sql)
}

func (t *postgresTx) Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error) {
	if err := t.enter(); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer t.leave()
	return t.tx.Exec(ctx, sql, arguments...)
}

func (t *postgresTx) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if err := t.enter(); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).Query() // pgx's way to have rows that report err
	}
	defer t.leave()
	return t.tx.Query(ctx, sql, arguments...)
}

func (t *postgresTx) QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row {
	if err := t.enter(); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).QueryRow()
	}
	defer t.leave()
	return t.tx.QueryRow(ctx, sql, arguments...)
}

func (t *postgresTx) Conn() *pgx.Conn { return t.tx.Conn() }
