package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/bounds"
	"github.com/holdsend/holdsend-go/internal/postgressql"
)

// connectionTries is on how many connections something is tried before the last one's breaking is the error. Broken ones are
// what a pool holds after the database restarted.
const connectionTries = 3

// PostgresStore keeps records in a table beside the data that create writes, on any driver of database/sql whose errors
// have a method SQLState, as those of pgx's stdlib and of lib/pq do. It gives the guarantees of holdsend.PostgresStore, on
// the same table with the same SQL: both may be used on one database.
//
// database/sql cannot send two statements at once, so a create with one INSERT takes six round trips (claim, BEGIN, lock,
// INSERT, completion, COMMIT) where holdsend.PostgresStore and an unprotected transaction take three; a replay takes one.
// lib/pq doubles those of statements with parameters. Two more come with each statement of the library where the
// database's default is not read committed. If you have a choice, use pgx.
//
// It starts no goroutine of its own and keeps no session state. A create takes one connection for its whole run; a waiting
// duplicate takes none between two looks. A create must leave no goroutine behind that still uses the transaction: as with
// any *sql.Tx, the end of it waits for that call. Where the network falls silent, lib/pq waits as long as the operating
// system does; pgx's driver ends with the context.
type PostgresStore struct {
	db        *sql.DB
	o         Options
	sql       *postgressql.Statements
	resolved  sync.Map     // table oid (int64) to *postgressql.Statements, where Options.Schema is empty
	committed atomic.Int32 // whether the default level is read committed: one of the values below
	waiters   holdsend.Waiters
}

const (
	levelUnknown = iota
	levelReadCommitted
	levelOther
)

var _ holdsend.Store[*sql.Tx] = (*PostgresStore)(nil)

// NewPostgres returns a store on db, which stays the caller's to close. It does not touch the database. It returns an
// error if an option is out of bounds.
func NewPostgres(db *sql.DB, o *Options) (*PostgresStore, error) {
	if db == nil {
		return nil, errors.New("holdsend: NewPostgres needs a *sql.DB")
	}
	filled, err := withDefaults(o)
	if err != nil {
		return nil, err
	}
	if o != nil && o.BusyTimeout != 0 {
		return nil, errors.New("holdsend: Options.BusyTimeout is for SQLite: leave it out for Postgres")
	}
	if filled.TxOptions.ReadOnly {
		return nil, errors.New("holdsend: Options.TxOptions must not be read-only: a create writes")
	}
	filled.MaxIdle = min(filled.MaxIdle, 24*24*time.Hour) // the setting is an int32 of milliseconds
	table := quoted(filled.Table)
	if filled.Schema != "" {
		table = quoted(filled.Schema) + "." + table
	}
	return &PostgresStore{db: db, o: filled, sql: postgressql.For(table)}, nil
}

// Waiters returns where this process's duplicates wait: see [holdsend.Waiters].
func (s *PostgresStore) Waiters() *holdsend.Waiters { return &s.waiters }

// PostgresSchema returns the SQL that creates the table: that of holdsend.PostgresSchema. Run it at every start of a
// service. Of the options it reads Schema and Table.
func PostgresSchema(o *Options) string {
	if o == nil {
		o = &Options{}
	}
	return holdsend.PostgresSchema(&holdsend.PostgresOptions{Schema: o.Schema, Table: o.Table})
}

// Begin implements [holdsend.Store], in three round trips.
func (s *PostgresStore) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[*sql.Tx], *holdsend.Record, error) {
	if err := checkScope(c.Scope); err != nil {
		return nil, nil, err
	}
	for try := 1; ; try++ {
		conn, err := s.acquire(ctx)
		if err != nil {
			return nil, nil, err
		}
		a := &postgresAttempt{store: s, sql: s.sql, conn: conn, scope: c.Scope, claimID: newClaimID()}
		standing, err := s.begin(ctx, a, c)
		if err == nil && standing == nil {
			return a, nil, nil
		}
		if err == nil {
			_ = conn.Close()
			record, err := standing.record(c.Scope, sameTime) // one that is damaged is no fault of the connection
			return nil, record, err
		}
		a.destroy()
		if a.sent { // the claim may have been committed, but create did not run: give the key back
			freeCtx, cancel := detached(ctx)
			_ = s.free(freeCtx, a)
			cancel()
		}
		if !isBroken(err) || try == connectionTries || ctx.Err() != nil {
			return nil, nil, explainPostgres(err)
		}
	}
}

// begin claims c.Scope for a and opens its transaction, or returns the record that stands there.
func (s *PostgresStore) begin(ctx context.Context, a *postgresAttempt, c holdsend.Claim) (*recordRow[time.Time], error) {
	races := 0
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		claimSQL, args := s.sql.ClaimOrFind, []any{
			c.Scope.Owner, c.Scope.Operation, c.Scope.Key, a.claimID, c.Fingerprint, s.o.TakeOverAfter.Microseconds(),
		}
		if c.Replace != nil {
			claimSQL, args = s.sql.ReplaceOrFind, append(args, c.Replace.ClaimID, string(c.Replace.State))
		}
		var won *string
		var row recordRow[time.Time]
		a.sent = true
		err := s.query(ctx, a.conn, append([]any{&won}, row.targets()...), claimSQL, args...)
		if errors.Is(err, sql.ErrNoRows) || c.Replace != nil && sqlState(err) == postgressql.LockNotAvailable {
			// Neither won nor lost: another claim came in between, or what was to be replaced is gone.
			c.Replace, a.sent = nil, false
			if races++; races == postgressql.MostRaces {
				return nil, postgressql.ErrHidden
			}
			continue
		}
		if sqlState(err) == "25006" { // read-only: nothing can be claimed, but what is completed can be replayed
			findErr := s.query(ctx, a.conn, row.targets(), s.sql.Find,
				c.Scope.Owner, c.Scope.Operation, c.Scope.Key, s.o.TakeOverAfter.Microseconds())
			if findErr == nil && *row.state != string(holdsend.StateClaimed) && !*row.expired {
				a.sent = false
				return &row, nil
			}
		}
		if err != nil {
			return nil, err
		}
		if won == nil {
			a.sent = false
			return &row, nil
		}

		// The transaction outlives ctx, so it begins on a context of its own: database/sql rolls back when that ends.
		txCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		stop := context.AfterFunc(ctx, cancel) // while Begin lasts
		a.cancel = cancel
		a.tx, err = a.conn.BeginTx(txCtx, &s.o.TxOptions)
		var defaultLevel, idle string
		if err == nil {
			// By its row: under Serializable the table must not be read by its index, and it is no dearer elsewhere.
			err = a.tx.QueryRowContext(txCtx, s.sql.LockByRow, *won, a.claimID, s.o.MaxIdle.Milliseconds()).
				Scan(&a.row, &a.xid, &a.table, &defaultLevel, &idle)
		}
		if err == nil {
			s.committed.Store(levelOf(defaultLevel)) // somebody may change it while the service runs
		}
		if err == nil {
			err = s.qualify(txCtx, a)
		}
		if !stop() && err == nil {
			err = ctx.Err()
		}
		switch {
		case err == nil:
			return nil, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case a.tx == nil:
			return nil, err
		case errors.Is(err, sql.ErrNoRows) || sqlState(err) == "40001":
			// The claim was lost between its commit and its lock: forgotten, purged or taken over. Create has not run,
			// so this is no error: start over, with a claim that nobody has seen.
			endCtx, cancelEnd := detached(ctx)
			err := a.rollback(endCtx)
			cancelEnd()
			if err != nil {
				return nil, err
			}
			cancel()
			a.tx, c.Replace, a.claimID, a.xid = nil, nil, newClaimID(), ""
		default:
			return nil, err
		}
	}
}

func sameTime(t time.Time) time.Time { return t }

// qualify gives a the statements that name the table with its schema, so that a search_path which create sets changes
// nothing. The name is looked up once for each table.
func (s *PostgresStore) qualify(ctx context.Context, a *postgresAttempt) error {
	if s.o.Schema != "" {
		return nil
	}
	if known, ok := s.resolved.Load(a.table); ok {
		a.sql = known.(*postgressql.Statements)
		return nil
	}
	var name string
	if err := a.tx.QueryRowContext(ctx, postgressql.TableName, a.table).Scan(&name); err != nil {
		return err
	}
	a.sql = postgressql.For(name)
	s.resolved.Store(a.table, a.sql)
	return nil
}

// InTx implements [holdsend.Store].
func (s *PostgresStore) InTx(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	var a *postgresAttempt
	var err error
	for try := 1; ; try++ {
		if a, err = s.open(ctx); err == nil {
			break
		}
		if !isBroken(err) || try == connectionTries || ctx.Err() != nil {
			return explainPostgres(err)
		}
	}
	defer a.destroy() // on every path that does not end well, a panic of fn's among them
	err = fn(ctx, a.tx)
	endCtx, cancelEnd := detached(ctx)
	defer cancelEnd()
	if err != nil {
		if a.rollback(endCtx) == nil {
			a.release()
		}
		return err
	}
	// A create that ended the transaction is found out before the COMMIT, by the transaction's id.
	var now string
	err = a.tx.QueryRowContext(endCtx, postgressql.TransactionID).Scan(&now)
	switch {
	case errors.Is(err, sql.ErrTxDone) || err == nil && now != a.xid:
		return holdsend.ErrTxEnded
	case sqlState(err) == "25P02":
		return errTxFailed
	case err != nil:
		return explainBroken(err)
	}
	defer context.AfterFunc(endCtx, a.cancel)()
	switch err := a.tx.Commit(); {
	case err == nil:
		a.release()
		return nil
	case isRolledBack(err):
		return err
	default:
		return fmt.Errorf("%w: %w", holdsend.ErrOutcomeUnknown, err)
	}
}

// open opens a transaction that belongs to no record.
func (s *PostgresStore) open(ctx context.Context) (*postgresAttempt, error) {
	conn, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	txCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel) // while this lasts
	a := &postgresAttempt{store: s, conn: conn, cancel: cancel}
	if a.tx, err = conn.BeginTx(txCtx, &s.o.TxOptions); err == nil {
		err = a.tx.QueryRowContext(txCtx, postgressql.TransactionID).Scan(&a.xid)
	}
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		a.destroy()
		return nil, err
	}
	return a, nil
}

// Find implements [holdsend.Store].
func (s *PostgresStore) Find(ctx context.Context, scope holdsend.Scope) (*holdsend.Record, error) {
	if err := checkScope(scope); err != nil {
		return nil, err
	}
	var row recordRow[time.Time]
	err := s.withConn(ctx, func(conn *sql.Conn) error {
		return s.query(ctx, conn, row.targets(), s.sql.Find, scope.Owner, scope.Operation, scope.Key, s.o.TakeOverAfter.Microseconds())
	})
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, holdsend.ErrNotFound
	case err != nil:
		return nil, explainPostgres(err)
	}
	return row.record(scope, sameTime)
}

// TombstoneResource implements [holdsend.Store]. tx is any transaction on the database.
func (s *PostgresStore) TombstoneResource(ctx context.Context, tx *sql.Tx, r holdsend.Resource) (int64, error) {
	if err := checkResource(r); err != nil {
		return 0, err
	}
	result, err := tx.ExecContext(ctx, s.sql.Tombstone, r.Owner, r.Operation, r.Ref)
	if err != nil {
		return 0, explainPostgres(err)
	}
	return result.RowsAffected()
}

// ForgetOwner implements [holdsend.Store]. It deletes in batches of 1,000, each a transaction, then what is held by living
// attempts one by one.
func (s *PostgresStore) ForgetOwner(ctx context.Context, owner string) (forgotten int64, err error) {
	if err := bounds.Required("owner", owner); err != nil {
		return 0, err
	}
	conn, err := s.acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Close()

	var called time.Time // by the database's clock: a record younger than this is not ours to forget
	if err := s.query(ctx, conn, []any{&called}, s.sql.Now); err != nil {
		return 0, explainPostgres(err)
	}
	var operation, key string
	for {
		var count int64
		err := s.query(ctx, conn, []any{&operation, &key, &count}, s.sql.ForgetBatch, owner, called, operation, key)
		if errors.Is(err, sql.ErrNoRows) {
			break
		}
		if err != nil {
			return forgotten, explainPostgres(err)
		}
		forgotten += count
	}
	operation, key = "", ""
	for {
		err := s.query(ctx, conn, []any{&operation, &key}, s.sql.ForgetNext, owner, called, operation, key)
		if errors.Is(err, sql.ErrNoRows) {
			return forgotten, nil
		}
		if err != nil {
			return forgotten, explainPostgres(err)
		}
		err = inReadCommitted(ctx, conn, func(tx *sql.Tx) error {
			result, err := tx.ExecContext(ctx, s.sql.ForgetOne, owner, called, operation, key)
			if err != nil {
				return err
			}
			rows, err := result.RowsAffected()
			forgotten += rows
			return err
		})
		if err != nil {
			return forgotten, explainPostgres(err)
		}
	}
}

// PurgeExpired implements [holdsend.Store]. It deletes in batches of 1,000, each a transaction, and rests after each for
// twice as long as it took, a second at most, without a connection.
func (s *PostgresStore) PurgeExpired(ctx context.Context) (holdsend.Purged, error) {
	var purged holdsend.Purged
	var err error
	purged.Records, purged.Claims, err = s.sql.Purge(ctx, s.o.StaleClaim, func(statement string, args ...any) (count int64, last *time.Time, took time.Duration, err error) {
		conn, err := s.acquire(ctx)
		if err != nil {
			return 0, nil, 0, err
		}
		defer conn.Close()
		began := time.Now()
		err = s.query(ctx, conn, []any{&count, &last}, statement, args...)
		return count, last, time.Since(began), err
	}, sqlState)
	if err != nil {
		return purged, explainPostgres(err)
	}
	return purged, nil
}

// query runs one statement that returns a row, in a transaction of its own at read committed, whatever the database's
// default: under repeatable read, a statement that waited for a commit fails with 40001 instead of seeing it. Where that
// is the default anyway, the statement travels alone.
func (s *PostgresStore) query(ctx context.Context, conn *sql.Conn, targets []any, statement string, args ...any) error {
	if s.committed.Load() == levelUnknown {
		var level string
		if err := conn.QueryRowContext(ctx, postgressql.DefaultIsolation).Scan(&level); err != nil {
			return err
		}
		s.committed.Store(levelOf(level))
	}
	if s.committed.Load() == levelReadCommitted {
		return conn.QueryRowContext(ctx, statement, args...).Scan(targets...)
	}
	return inReadCommitted(ctx, conn, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, statement, args...).Scan(targets...)
	})
}

func levelOf(name string) int32 {
	if name == "read committed" {
		return levelReadCommitted
	}
	return levelOther
}

// inReadCommitted commits also where a statement returned no row. COMMIT goes apart, so that a call which ended with its
// context leaves nothing on its way.
func inReadCommitted(ctx context.Context, conn *sql.Conn, fn func(*sql.Tx) error) error {
	tx, err := conn.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	err = fn(tx)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		_ = tx.Rollback()
		return err
	}
	if commitErr := tx.Commit(); commitErr != nil {
		return commitErr
	}
	return err
}

// free gives the key of a back on another connection. If create committed a's transaction itself, the claim is kept for good
// and the error is ErrTxEnded.
func (s *PostgresStore) free(ctx context.Context, a *postgresAttempt) error {
	var how string
	err := s.withConn(ctx, func(conn *sql.Conn) (err error) {
		how, err = s.freeOn(ctx, conn, a)
		return err
	})
	return postgressql.FreeError(how, err, holdsend.ErrTxEnded)
}

// freeOn waits for the database to end a's transaction, and returns how it ended.
func (s *PostgresStore) freeOn(ctx context.Context, conn *sql.Conn, a *postgresAttempt) (how string, err error) {
	var xid *string // NULL: create did not run
	if a.xid != "" {
		xid = &a.xid
	}
	err = postgressql.Judge(ctx, func() (string, error) {
		err := s.query(ctx, conn, []any{&how}, a.sql.Free, a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID, xid)
		return how, err
	})
	return how, err
}

// withConn runs do on a connection of the pool, and again on another if the first one was broken. Do must be something that
// may be done twice.
func (s *PostgresStore) withConn(ctx context.Context, do func(*sql.Conn) error) error {
	for try := 1; ; try++ {
		conn, err := s.acquire(ctx)
		if err != nil {
			return err
		}
		err = do(conn)
		if !isBroken(err) {
			_ = conn.Close()
			return err
		}
		discard(conn)
		if try == connectionTries || ctx.Err() != nil {
			return err
		}
	}
}

func (s *PostgresStore) acquire(ctx context.Context) (*sql.Conn, error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("holdsend: get a connection: %w", err)
	}
	return conn, nil
}

// sqlState returns the SQLSTATE of a driver's error, or nothing.
func sqlState(err error) string {
	var sqlError interface{ SQLState() string }
	if errors.As(err, &sqlError) {
		return sqlError.SQLState()
	}
	return ""
}

// isBroken reports whether err, of a statement, says that its connection is good for nothing more: the driver's own error,
// one that the server ends a connection with, or a statement that somebody deallocated behind the driver's back.
func isBroken(err error) bool {
	if err == nil || errors.Is(err, sql.ErrNoRows) || errors.Is(err, sql.ErrTxDone) {
		return false
	}
	state := sqlState(err)
	return state == "" || strings.HasPrefix(state, "08") || strings.HasPrefix(state, "57P") || state == "26000"
}

// isRolledBack reports whether err, from COMMIT, proves a rollback: a constraint, an exception of a trigger or a
// serialization failure, which Postgres never raises but by an ERROR. Of other states a driver's error does not say whether
// the server had to go (FATAL, PANIC), and then a commit may be there all the same.
func isRolledBack(err error) bool {
	state := sqlState(err)
	return strings.HasPrefix(state, "23") || strings.HasPrefix(state, "P0") || strings.HasPrefix(state, "40") && state != "40003"
}

// explainPostgres adds the fix to errors that a wrong set-up gives.
func explainPostgres(err error) error { return postgressql.Explain(sqlState(err), "Options", err) }
