package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/postgressql"
)

var errTxFailed = errors.New("holdsend: a statement of create failed and its error was ignored: return the error, or set a SAVEPOINT before what may fail")

var errRolledBack = fmt.Errorf("holdsend: create rolled its transaction back, so nothing was stored: %w", holdsend.ErrTxEnded)

// postgresAttempt holds a connection with an open transaction, which holds the lock on the claim's row.
type postgresAttempt struct {
	store   *PostgresStore
	sql     *postgressql.Statements // with the table's schema, once locked
	conn    *sql.Conn               // nil once let go
	tx      *sql.Tx                 // nil until begun
	cancel  context.CancelFunc      // ends the context of tx, and with it what hangs
	scope   holdsend.Scope
	claimID string
	sent    bool // the claim may have been committed

	// What the lock returned.
	row   string // the ctid of the claim
	xid   string // the transaction
	table int64  // the table's oid

	ended   bool // by Complete or Abort
	settled bool // nothing is left for Abort to do
	warning error
}

var _ holdsend.Warner = (*postgresAttempt)(nil)

// Tx implements [holdsend.Attempt].
func (a *postgresAttempt) Tx() *sql.Tx { return a.tx }

// Warning implements [holdsend.Warner].
func (a *postgresAttempt) Warning() error { return a.warning }

// Complete implements [holdsend.Attempt], in two round trips.
func (a *postgresAttempt) Complete(ctx context.Context, c holdsend.Completion) error {
	if a.ended {
		return errAttemptEnded
	}
	a.ended = true
	text, err := textOf(c)
	if err != nil {
		return err
	}
	var ttl *int64
	if text.ttl > 0 {
		microseconds := max(text.ttl.Microseconds(), 1)
		ttl = &microseconds
	}
	answer := []any{ttl, text.status, text.header, text.body, text.ref}

	sent, err := a.commit(ctx, answer)
	switch {
	case err == nil:
		a.settled = true
		a.release()
		return nil
	case errors.Is(err, holdsend.ErrClaimLost):
		a.settled = true
		a.destroy()
		return err
	case sent && isRolledBack(err):
		return err // the server's own answer to COMMIT
	}
	return a.findOut(ctx, answer, sent, err)
}

// commit sends the guarded update, then COMMIT.
func (a *postgresAttempt) commit(ctx context.Context, answer []any) (sent bool, err error) {
	var one int
	err = a.tx.QueryRowContext(ctx, a.sql.Complete, append([]any{a.row, a.claimID, a.xid}, answer...)...).Scan(&one)
	switch {
	case errors.Is(err, sql.ErrTxDone) || isGuard(err, postgressql.GuardEnded):
		return false, holdsend.ErrTxEnded
	case isGuard(err, postgressql.GuardLost):
		return false, holdsend.ErrClaimLost
	case sqlState(err) == "25P02":
		return false, errTxFailed
	case err != nil:
		return false, explainBroken(err)
	}
	// Commit takes no context: where ctx ends, that of the transaction does. (lib/pq does not listen to it by then.)
	stop := context.AfterFunc(ctx, a.cancel)
	err = a.tx.Commit()
	stop()
	if err == nil || isRolledBack(err) {
		return true, err
	}
	return true, fmt.Errorf("holdsend: the connection was lost at the commit: %w", err)
}

// explainBroken adds the fix to an error of a connection on which create ran. What drivers say of rows that are left open, they
// say of a lost connection too.
func explainBroken(err error) error {
	if !isBroken(err) {
		return err
	}
	return fmt.Errorf("holdsend: the transaction of create could not be committed, because rows were left open (read them to the end or close them), or the connection was lost: %w", err)
}

// isGuard reports whether err is the failure of a guard of the completing statement, which quotes it.
func isGuard(err error, guard string) bool {
	return err != nil && sqlState(err) == "22P02" && strings.Contains(err.Error(), guard)
}

// findOut returns the truth about an attempt that did not commit for sure, for the reason in cause; sent: COMMIT may have
// arrived. It is never sent again. Create may have committed by itself before: then its 2xx completes the record, since a
// freed key would double the write.
func (a *postgresAttempt) findOut(ctx context.Context, answer []any, sent bool, cause error) error {
	a.destroy() // create may have left anything on it, and a backend that still waits for COMMIT gets to know that nobody does
	claim := []any{a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID}
	ask := func(ctx context.Context, targets []any, statement string, more ...any) error {
		return a.store.withConn(ctx, func(conn *sql.Conn) error {
			ctx, cancel := context.WithTimeout(ctx, postgressql.AskTimeout)
			defer cancel()
			return a.store.query(ctx, conn, targets, statement, slices.Concat(claim, more)...)
		})
	}
	fate, err := postgressql.FindOut(ctx, func(ctx context.Context) (state, how string, err error) {
		err = ask(ctx, []any{&state, &how}, a.sql.Outcome, a.xid)
		if err == nil && state == "" && sent { // what may have been committed is judged by its record alone
			err = sql.ErrNoRows
		}
		return state, how, err
	}, func(ctx context.Context) error {
		var completed bool
		return ask(ctx, []any{&completed}, a.sql.Settle, answer...)
	})
	switch fate {
	case postgressql.NotStored:
		if cause == holdsend.ErrTxEnded {
			return errRolledBack
		}
		return fmt.Errorf("holdsend: nothing was stored: %w", cause)
	case postgressql.Kept: // by Abort
		return fmt.Errorf("holdsend: create committed its transaction, and its record could not be completed: %w: %w", holdsend.ErrTxEnded, err)
	}
	a.settled = true
	if fate == postgressql.Unknown { // the key is kept
		return fmt.Errorf("%w: %w", holdsend.ErrOutcomeUnknown, errors.Join(cause, err))
	}
	if !sent {
		a.warning = fmt.Errorf("holdsend: create committed its transaction, and the record was completed afterwards: %w", holdsend.ErrTxEnded)
	}
	return nil
}

// Abort implements [holdsend.Attempt].
func (a *postgresAttempt) Abort(ctx context.Context) error {
	a.ended = true
	if a.settled {
		return nil
	}
	a.settled = true
	if a.conn != nil {
		if a.rollback(ctx) == nil {
			how, err := a.store.freeOn(ctx, a.conn, a)
			if err == nil {
				a.release()
				return postgressql.FreeError(how, nil, holdsend.ErrTxEnded)
			}
		}
		a.destroy()
	}
	return a.store.free(ctx, a)
}

// rollback waits for the database until ctx ends.
func (a *postgresAttempt) rollback(ctx context.Context) error {
	// Where create left rows open, a driver refuses a statement at once. Rollback would read them to their end, however many
	// are still to come.
	if _, err := a.tx.ExecContext(ctx, ";"); errors.Is(err, sql.ErrTxDone) {
		return nil
	} else if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, a.cancel)()
	return a.tx.Rollback()
}

// release returns the connection to the pool, its transaction over.
func (a *postgresAttempt) release() {
	if a.conn == nil {
		return
	}
	a.cancel()
	_ = a.conn.Close()
	a.conn = nil
}

// destroy closes the connection, and with it rolls back what is still open.
func (a *postgresAttempt) destroy() {
	if a.conn == nil {
		return
	}
	// pgx reads rows that create left open to their end before it rolls back, however many are still to come; and for the
	// driver on a pgxpool.Pool, to close a connection is to give it back as it is. So pgx's own connection is closed first.
	_ = a.conn.Raw(func(conn any) error {
		if c, ok := conn.(interface{ Conn() *pgx.Conn }); ok {
			ctx, cancel := detached(context.Background())
			defer cancel()
			if pgConn := c.Conn().PgConn(); pgConn.IsBusy() && !pgConn.IsClosed() {
				_ = pgConn.CancelRequest(ctx)
			}
			_ = c.Conn().Close(ctx)
		}
		return nil // an error would have Raw wait for the transaction
	})
	if a.cancel != nil {
		a.cancel() // the rollback then waits for no answer
	}
	if a.tx != nil {
		_ = a.tx.Rollback()
	}
	discard(a.conn)
	a.conn = nil
}
