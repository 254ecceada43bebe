package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/holdsend/holdsend-go"
)

// sqliteAttempt holds a connection in a transaction, which holds the write lock of the database. Inside of it stands a
// savepoint: it ends with the transaction, so where it is gone, create has ended the transaction.
type sqliteAttempt struct {
	store   *SQLiteStore
	conn    *sql.Conn // nil once let go
	tx      *sql.Tx
	scope   holdsend.Scope
	claimID string
	claimed bool // the claim was committed

	ended   bool // by Complete or Abort
	settled bool // nothing is left for Abort to do
	warning error
}

var _ holdsend.Warner = (*sqliteAttempt)(nil)

// savepoint is the name of the attempt's savepoint, which no create gives to one of its own.
func (a *sqliteAttempt) savepoint() string { return quoted("holdsend " + a.claimID) }

// Tx implements [holdsend.Attempt].
func (a *sqliteAttempt) Tx() *sql.Tx { return a.tx }

// Warning implements [holdsend.Warner].
func (a *sqliteAttempt) Warning() error { return a.warning }

// Complete implements [holdsend.Attempt]. It does not depend on ctx: nothing of it waits for others.
func (a *sqliteAttempt) Complete(ctx context.Context, c holdsend.Completion) error {
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
		milliseconds := max(text.ttl.Milliseconds(), 1)
		ttl = &milliseconds
	}
	args := []any{a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID, ttl, text.status, text.header, text.body, text.ref}

	if _, err := a.tx.Exec("RELEASE " + a.savepoint()); isRowsOpen(err) {
		return errRowsOpen
	} else if err != nil {
		return a.settle(ctx, args, err)
	}
	result, err := a.tx.Exec(a.store.sql.complete, args...)
	if err != nil {
		return err
	}
	rows, err := result.RowsAffected()
	if err != nil {
		return err
	}
	if rows != 1 {
		a.settled = true
		a.end()
		return holdsend.ErrClaimLost
	}
	if err := a.tx.Commit(); err != nil {
		return a.findOut(ctx, err)
	}
	a.settled = true
	_ = a.conn.Close()
	a.conn = nil
	return nil
}

var errRowsOpen = errors.New("holdsend: create returned with rows of a writing statement still open, so nothing was stored: read them to the end or close them")

// isRowsOpen knows by SQLite's own text that a savepoint is still there but cannot be released: a writing statement has rows
// left.
func isRowsOpen(err error) bool {
	return err != nil && strings.Contains(err.Error(), "SQL statements in progress")
}

// look returns the state of the attempt's claim, and whether it is marked, as conn sees it.
func (a *sqliteAttempt) look(conn *sql.Conn) (state holdsend.State, marked bool, err error) {
	err = conn.QueryRowContext(context.Background(), a.store.sql.own,
		a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID).Scan(&state, &marked)
	return state, marked, err
}

// settle handles a transaction that create had ended, or SQLite itself for create's sake: it rolls back a transaction whose
// statement is interrupted, or finds the disk full. If it was committed, create's 2xx completes the record: a freed key
// would double the write.
func (a *sqliteAttempt) settle(ctx context.Context, args []any, gone error) error {
	a.end()
	how := fmt.Errorf("holdsend: the transaction of create was rolled back before its end, so nothing was stored: return every error of the database: %w: %w", holdsend.ErrTxEnded, gone)
	err := a.store.whenFree(context.WithoutCancel(ctx), a.store.o.BusyTimeout, func(conn *sqliteConn) error {
		state, marked, err := a.look(conn.Conn)
		if err != nil {
			return err
		}
		if state == holdsend.StateClaimed && !marked {
			return how
		}
		if err := conn.hurry(false); err != nil {
			return err
		}
		rows, err := conn.exec(a.store.sql.settle, args...)
		if err == nil && rows != 1 {
			err = sql.ErrNoRows
		}
		return err
	})
	switch {
	case err == how:
		return how
	case err == nil:
		a.settled = true
		a.warning = fmt.Errorf("holdsend: create committed its transaction, and the record was completed afterwards: %w", holdsend.ErrTxEnded)
		return nil
	}
	// The claim went to another or is gone; or it is committed and marked, so that nobody takes it over.
	a.settled = true
	return fmt.Errorf("%w: %w: %w", holdsend.ErrOutcomeUnknown, holdsend.ErrTxEnded, err)
}

// findOut returns the truth about a COMMIT that failed.
func (a *sqliteAttempt) findOut(ctx context.Context, failed error) error {
	a.end() // whatever is still open is rolled back, before anybody looks
	var state holdsend.State
	err := a.store.whenFree(context.WithoutCancel(ctx), a.store.o.BusyTimeout, func(conn *sqliteConn) (err error) {
		state, _, err = a.look(conn.Conn)
		return err
	})
	switch {
	case err != nil:
		a.settled = true
		return fmt.Errorf("%w: %w", holdsend.ErrOutcomeUnknown, errors.Join(failed, err))
	case state == holdsend.StateClaimed:
		return fmt.Errorf("holdsend: the commit failed, and nothing was stored: %w", failed)
	}
	a.settled = true // completed, or gone since, under this claim id
	return nil
}

// Abort implements [holdsend.Attempt]. Going back to the savepoint undoes what create wrote, and the key is freed in the
// transaction that still holds the lock: there is nothing to wait for, and no moment at which a half of it is visible.
func (a *sqliteAttempt) Abort(ctx context.Context) error {
	a.ended = true
	if a.settled {
		return nil
	}
	a.settled = true
	if a.conn != nil && a.undo() == nil {
		_ = a.conn.Close()
		a.conn = nil
		return nil
	}
	a.end()
	freeCtx, cancel := detached(ctx)
	defer cancel()
	return a.store.free(freeCtx, a)
}

func (a *sqliteAttempt) undo() error {
	if _, err := a.tx.Exec("ROLLBACK TO " + a.savepoint()); err != nil {
		return err
	}
	if _, err := a.tx.Exec(a.store.sql.free, a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID, 1); err != nil {
		return err
	}
	return a.tx.Commit()
}

// end rolls back whatever is still open on the attempt's connection, and closes it: create may have left anything there.
func (a *sqliteAttempt) end() {
	if a.conn == nil {
		return
	}
	_ = a.tx.Rollback()
	discard(a.conn)
	a.conn = nil
}
