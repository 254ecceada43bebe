package holdsend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go/internal/headertext"
	"github.com/holdsend/holdsend-go/internal/postgressql"
)

var (
	errTxFailed   = errors.New("holdsend: a statement of create failed and its error was ignored: return the error, or run what may fail in a transaction nested by tx.Begin")
	errRolledBack = fmt.Errorf("holdsend: create rolled its transaction back, so nothing was stored: %w", ErrTxEnded)
	errRowsOpen   = errors.New("holdsend: create returned with rows still open: read them to the end or close them")
)

// postgresAttempt holds a connection with an open transaction, which holds the lock on the claim's row.
type postgresAttempt struct {
	store   *PostgresStore
	sql     *postgressql.Statements // with the table's schema, once locked
	conn    *pgxpool.Conn           // nil once let go
	tx      pgx.Tx
	use     txUse
	scope   Scope
	claimID string

	// What the lock returned.
	row          string // the ctid of the claim
	xid          string // the transaction
	table        int64  // the table's oid
	defaultLevel string // the database's isolation level

	ended   bool // by Complete or Abort
	settled bool // nothing is left for Abort to do
	warning error
}

var _ Warner = (*postgresAttempt)(nil)

func (a *postgresAttempt) scanLock(row pgx.Row) error {
	return row.Scan(&a.row, &a.xid, &a.table, &a.defaultLevel, nil)
}

// Tx implements [Attempt].
func (a *postgresAttempt) Tx() pgx.Tx { return a.tx }

// Warning implements [Warner].
func (a *postgresAttempt) Warning() error { return a.warning }

// Complete implements [Attempt]. The guarded update and COMMIT are one round trip.
func (a *postgresAttempt) Complete(ctx context.Context, c Completion) error {
	if a.ended {
		return errAttemptEnded
	}
	a.ended = true
	unfit := a.closeTx()
	answer, err := completionArguments(c)
	if err != nil {
		return err
	}
	sent := false
	if err = unfit; err == nil {
		sent, err = a.commit(ctx, answer)
	}
	switch {
	case err == nil:
		a.store.recent.add(a.scope)
		a.finish(ctx)
		return nil
	case errors.Is(err, ErrClaimLost):
		a.finish(ctx)
		return err
	case sent && !commitLost(err):
		return err // the server's own answer to COMMIT: rolled back
	}
	return a.findOut(ctx, answer, sent, err)
}

// commit sends the guarded update and COMMIT, which only arrives if the update was done or its answer is lost.
func (a *postgresAttempt) commit(ctx context.Context, answer []any) (sent bool, err error) {
	b := &pgx.Batch{}
	b.Queue(a.sql.Complete, append([]any{a.row, a.claimID, a.xid}, answer...)...)
	b.Queue("commit")
	results := a.conn.SendBatch(ctx, b)
	_, err = results.Exec() // the guard's error is all that it has to say
	sent = err == nil || commitLost(err)
	var tag pgconn.CommandTag
	if err == nil {
		tag, err = results.Exec()
	}
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	switch {
	case err == nil && tag.String() == "COMMIT":
		return sent, nil
	case err == nil:
		return sent, errTxFailed
	case guardFailed(err, postgressql.GuardLost):
		return sent, ErrClaimLost
	case guardFailed(err, postgressql.GuardEnded):
		return sent, ErrTxEnded
	case commitLost(err):
		return sent, fmt.Errorf("holdsend: the connection was lost at the commit: %w", err)
	}
	return sent, err
}

// closeTx ends create's use of the transaction, and finds what makes it unfit to commit.
func (a *postgresAttempt) closeTx() error {
	if a.conn == nil { // given up before
		return errTxInUse
	}
	inUse, ended := a.use.close(a.interrupt)
	if !ended {
		// The goroutine that create left behind may hold the connection for ever: the pool gets another instead.
		a.conn.Hijack()
		a.conn = nil
	}
	if inUse {
		return errTxInUse
	}
	conn := a.conn.Conn()
	switch {
	case conn.IsClosed():
		return errors.New("holdsend: the connection of the attempt was lost before its commit")
	case conn.PgConn().IsBusy():
		return errRowsOpen
	case conn.PgConn().TxStatus() == 'E':
		return errTxFailed
	case conn.PgConn().TxStatus() == 'I':
		return ErrTxEnded
	}
	return nil
}

// interrupt makes a call that another goroutine has under way fail, by closing the socket under it.
func (a *postgresAttempt) interrupt() { _ = a.conn.Conn().PgConn().Conn().Close() }

// completionArguments are the last five parameters of Complete and Settle.
func completionArguments(c Completion) ([]any, error) {
	header, err := headertext.Encode(c.Response.Header)
	if err != nil {
		return nil, err
	}
	var ttl *int64
	if c.TTL > 0 {
		microseconds := max(c.TTL.Microseconds(), 1)
		ttl = &microseconds
	}
	var ref *string
	if c.Response.ResourceRef != "" {
		ref = &c.Response.ResourceRef
	}
	body := c.Response.Body
	if body == nil {
		body = []byte{}
	}
	return []any{ttl, int64(c.Response.Status), header, body, ref}, nil
}

func guardFailed(err error, guard string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "22P02" && strings.Contains(pgErr.Message, guard)
}

// findOut returns the truth about an attempt that did not commit for sure, for the reason in cause; sent: COMMIT may have
// arrived. It is never sent again. Create may have committed by itself before: then its 2xx completes the record, since a
// freed key would double the write.
func (a *postgresAttempt) findOut(ctx context.Context, answer []any, sent bool, cause error) error {
	claim := []any{a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID}
	ask := func(ctx context.Context, targets []any, sql string, more ...any) error {
		return a.withConn(ctx, func(conn *pgxpool.Conn) error {
			ctx, cancel := context.WithTimeout(ctx, postgressql.AskTimeout)
			defer cancel()
			return a.store.query(ctx, conn, func(row pgx.Row) error { return row.Scan(targets...) }, sql, slices.Concat(claim, more)...)
		})
	}
	fate, err := postgressql.FindOut(ctx, func(ctx context.Context) (state, how string, err error) {
		err = ask(ctx, []any{&state, &how}, a.sql.Outcome, a.xid)
		if err == nil && state == "" && sent { // what may have been committed is judged by its record alone
			err = pgx.ErrNoRows
		}
		return state, how, err
	}, func(ctx context.Context) error {
		var completed bool
		return ask(ctx, []any{&completed}, a.sql.Settle, answer...)
	})
	switch fate {
	case postgressql.NotStored:
		if cause == ErrTxEnded {
			return errRolledBack
		}
		return fmt.Errorf("holdsend: nothing was stored: %w", cause)
	case postgressql.Kept: // by Abort
		return fmt.Errorf("holdsend: create committed its transaction, and its record could not be completed: %w: %w", ErrTxEnded, err)
	}
	a.finish(ctx)
	if fate == postgressql.Unknown { // the key is kept
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, errors.Join(cause, err))
	}
	if !sent {
		a.warning = fmt.Errorf("holdsend: create committed its transaction, and the record was completed afterwards: %w", ErrTxEnded)
	}
	return nil
}

// withConn runs do on the attempt's own connection, its transaction rolled back, or on another if that is lost or do fails
// on it: create may have deallocated what was prepared there (DISCARD ALL), or have set another role.
func (a *postgresAttempt) withConn(ctx context.Context, do func(*pgxpool.Conn) error) error {
	if a.conn != nil {
		conn := a.conn.Conn()
		if !conn.IsClosed() && !conn.PgConn().IsBusy() && undo(ctx, a.conn, nil) == nil {
			if do(a.conn) == nil {
				return nil
			}
			_ = conn.Close(ctx)
		}
		a.letGo(ctx)
	}
	return a.store.withConn(ctx, do)
}

// Abort implements [Attempt].
func (a *postgresAttempt) Abort(ctx context.Context) error {
	if a.settled {
		return nil
	}
	if !a.ended {
		a.ended = true
		_ = a.closeTx()
	}
	a.settled = true
	defer a.letGo(ctx)
	return a.store.free(ctx, a, a.withConn)
}

// finish lets the connection go after Complete, with nothing left to do for Abort.
func (a *postgresAttempt) finish(ctx context.Context) {
	a.settled = true
	if a.conn != nil {
		_ = undo(ctx, a.conn, nil) // a failed transaction must be rolled back before its connection is released
	}
	a.letGo(ctx)
}

// letGo returns the connection to the pool, or closes it if it is in a state that nobody else should get it in.
func (a *postgresAttempt) letGo(ctx context.Context) {
	if a.conn == nil {
		return
	}
	conn := a.conn.Conn()
	if conn.PgConn().IsBusy() || conn.PgConn().TxStatus() != 'I' {
		closeCtx, cancel := detached(ctx)
		if conn.PgConn().IsBusy() && !conn.IsClosed() { // it does not notice that nobody reads until it has something to send
			_ = conn.PgConn().CancelRequest(closeCtx)
		}
		_ = conn.Close(closeCtx)
		cancel()
	}
	a.conn.Release()
	a.conn = nil
}
