package holdsend

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go/internal/bounds"
	"github.com/holdsend/holdsend-go/internal/headertext"
	"github.com/holdsend/holdsend-go/internal/postgressql"
)

const (
	defaultTable   = "holdsend_records"
	defaultMaxIdle = time.Minute

	// connectionTries is on how many connections something is tried before the last one's breaking is the error.
	connectionTries = 3
)

// PostgresDB is where a PostgresStore gets its connections: a *pgxpool.Pool is one.
type PostgresDB interface {
	Acquire(ctx context.Context) (*pgxpool.Conn, error)
}

// PostgresOptions configures NewPostgresStore and PostgresSchema. Nil means all defaults.
type PostgresOptions struct {
	// Schema is the table's schema. By default it is found by the connection's search_path, which a create may change for
	// its transaction alone (SET LOCAL): the next claim may be on the same connection.
	Schema string

	Table string // default "holdsend_records"

	// TakeOverAfter is how old a claim that no attempt holds must be before a retry may take it over; default 1 s. A
	// slow create is never robbed, however short this is: it only has to cover the moment between a claim's commit and
	// its lock.
	TakeOverAfter time.Duration

	// StaleClaim is how old a claim that no attempt holds must be before PurgeExpired frees its key; default 24 h.
	StaleClaim time.Duration

	// MaxIdle is how long an attempt may sit idle in its transaction before the database ends it, so that a process
	// that hangs, or a host that vanished, does not hold its keys for ever; default 60 s, at least 1 ms. It also
	// ends a create that works for longer than this without a query. A stricter idle_in_transaction_session_timeout
	// of the role or the database stands.
	MaxIdle time.Duration

	// TxOptions are those of the attempt's transaction; default: the database's. Read-only access, BeginQuery and
	// CommitQuery are refused.
	TxOptions pgx.TxOptions
}

// PostgresStore keeps records in a table beside the data that create writes, on pgx. It needs Postgres 13 or newer,
// PostgresSchema applied, and works in every query mode of pgx and through PgBouncer in transaction mode.
//
// It starts no goroutine and keeps no session state. A create takes one connection for its whole run; a waiting
// duplicate takes none between two looks.
type PostgresStore struct {
	db        PostgresDB
	sql       *postgressql.Statements
	qualified bool     // the table's name carries its schema
	resolved  sync.Map // table oid (int64) to *postgressql.Statements, where it does not
	txOptions pgx.TxOptions

	// pinned is how every statement of the library runs outside the attempt's transaction, whatever the database's default
	// level: under repeatable read, a statement that waited for a commit fails with 40001 instead of seeing it.
	pinned pgx.TxOptions

	beginSQL      string
	beginning     atomic.Int32 // how attempts' transactions begin: one of the values below
	takeOverAfter time.Duration
	staleClaim    time.Duration
	maxIdle       time.Duration
	recent        *recent
	waiters       Waiters
}

// The ways in which an attempt's transaction begins. Which one fits depends on its isolation level, which the database's
// default may decide: the first lock finds that out.
const (
	// chained: by the COMMIT AND CHAIN of the claim, which passes the claim's level on.
	chained = iota

	// begun: by a BEGIN of its own, for any level but serializable.
	begun

	// apart: by a batch of its own that locks the claim by its row. A serializable transaction must not read the table by
	// its index.
	apart
)

var _ Store[pgx.Tx] = (*PostgresStore)(nil)

// NewPostgresStore returns a store on db, which stays the caller's to close. It does not touch the database. It returns an
// error if an option is out of bounds.
func NewPostgresStore(db PostgresDB, o *PostgresOptions) (*PostgresStore, error) {
	if pool, ok := db.(*pgxpool.Pool); db == nil || ok && pool == nil {
		return nil, errors.New("holdsend: NewPostgresStore needs a pool")
	}
	if o == nil {
		o = &PostgresOptions{}
	}
	for name, value := range map[string]string{"Schema": o.Schema, "Table": o.Table} {
		// Postgres would cut a longer name, silently.
		if len(value) > 63 || !utf8.ValidString(value) || strings.IndexByte(value, 0) >= 0 {
			return nil, fmt.Errorf("holdsend: PostgresOptions.%s must be at most 63 bytes of UTF-8 without a NUL", name)
		}
	}
	for name, value := range map[string]time.Duration{"TakeOverAfter": o.TakeOverAfter, "StaleClaim": o.StaleClaim, "MaxIdle": o.MaxIdle} {
		if value < 0 {
			return nil, fmt.Errorf("holdsend: PostgresOptions.%s is negative: use 0 for the default", name)
		}
	}
	if o.MaxIdle > 0 && o.MaxIdle < time.Millisecond {
		return nil, errors.New("holdsend: PostgresOptions.MaxIdle is under 1 ms, the database's unit")
	}
	beginSQL, err := beginStatement(o.TxOptions)
	if err != nil {
		return nil, err
	}
	s := &PostgresStore{
		db:            db,
		sql:           postgressql.For(tableIdentifier(o)),
		qualified:     o.Schema != "",
		txOptions:     o.TxOptions,
		pinned:        pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: o.TxOptions.AccessMode},
		beginSQL:      beginSQL,
		takeOverAfter: orDefault(o.TakeOverAfter, defaultTakeOverAfter),
		staleClaim:    orDefault(o.StaleClaim, defaultStaleClaim),
		maxIdle:       min(orDefault(o.MaxIdle, defaultMaxIdle), 24*24*time.Hour), // the setting is an int32 of milliseconds
		recent:        newRecent(),
	}
	switch o.TxOptions {
	case pgx.TxOptions{}, s.pinned:
	default:
		s.beginning.Store(begun)
	}
	if o.TxOptions.IsoLevel == pgx.Serializable {
		s.beginning.Store(apart)
	}
	return s, nil
}

// Waiters returns where this process's duplicates wait: see [Waiters].
func (s *PostgresStore) Waiters() *Waiters { return &s.waiters }

func orDefault(value, byDefault time.Duration) time.Duration {
	if value == 0 {
		return byDefault
	}
	return value
}

func tableIdentifier(o *PostgresOptions) string {
	table := o.Table
	if table == "" {
		table = defaultTable
	}
	if o.Schema == "" {
		return pgx.Identifier{table}.Sanitize()
	}
	return pgx.Identifier{o.Schema, table}.Sanitize()
}

// beginStatement writes out what pgx would send for o, which it does not export.
func beginStatement(o pgx.TxOptions) (string, error) {
	if o.BeginQuery != "" || o.CommitQuery != "" {
		return "", errors.New("holdsend: TxOptions.BeginQuery and CommitQuery are not supported: the store sends its own BEGIN and COMMIT")
	}
	sql := "begin"
	switch o.IsoLevel {
	case "":
	case pgx.Serializable, pgx.RepeatableRead, pgx.ReadCommitted, pgx.ReadUncommitted:
		sql += " isolation level " + string(o.IsoLevel)
	default:
		return "", errors.New("holdsend: TxOptions.IsoLevel is not one of pgx's levels")
	}
	switch o.AccessMode {
	case "":
	case pgx.ReadWrite:
		sql += " read write"
	default:
		return "", errors.New("holdsend: TxOptions.AccessMode must be empty or read write: a create writes")
	}
	switch o.DeferrableMode {
	case "":
	case pgx.Deferrable, pgx.NotDeferrable:
		sql += " " + string(o.DeferrableMode)
	default:
		return "", errors.New("holdsend: TxOptions.DeferrableMode is not one of pgx's modes")
	}
	return sql, nil
}

//go:embed schema.sql
var schemaSQL string

// PostgresSchema returns the SQL that creates the table: schema.sql with the table's name. Run it at every start of a
// service: it is safe to run again, beside live traffic and many times at once, and locks no table that is complete. It
// creates no schema. Of the options it reads Schema and Table.
func PostgresSchema(o *PostgresOptions) string {
	if o == nil {
		o = &PostgresOptions{}
	}
	table := tableIdentifier(o)
	quote := "$holdsend$"
	for strings.Contains(table, quote) { // a name must not end the block that it stands in
		quote = quote[:len(quote)-1] + "_$"
	}
	return strings.NewReplacer(
		"$holdsend$", quote,
		"'"+defaultTable+"'", postgressql.Literal(table),
		defaultTable, table,
	).Replace(schemaSQL)
}

// Begin implements [Store]. Claim, BEGIN and lock are one round trip; two under Serializable. Where a record stands, it is
// two, or one if this process has completed the record lately.
func (s *PostgresStore) Begin(ctx context.Context, c Claim) (Attempt[pgx.Tx], *Record, error) {
	if err := checkScope(c.Scope); err != nil {
		return nil, nil, err
	}
	for try := 1; ; try++ {
		conn, err := s.acquire(ctx)
		if err != nil {
			return nil, nil, err
		}
		a := &postgresAttempt{store: s, sql: s.sql, conn: conn, scope: c.Scope, claimID: newClaimID()}
		record, err := s.begin(ctx, a, c)
		if err == nil && record == nil {
			return a, nil, nil
		}
		broken := conn.Conn().IsClosed()
		a.letGo(ctx)
		if record != nil {
			return nil, record, nil
		}
		// The claim was committed before the error, or may have been. Create did not run: give the key back. The next try
		// would meet the claim, and take it for another's.
		if a.row != "" || broken && !pgconn.SafeToRetry(err) {
			freeCtx, cancel := detached(ctx)
			_ = s.free(freeCtx, a, s.withConn)
			cancel()
		}
		if broken && try < connectionTries && ctx.Err() == nil {
			continue
		}
		return nil, nil, explain(err)
	}
}

// begin claims c.Scope for a and opens its transaction, or returns the record that stands there.
func (s *PostgresStore) begin(ctx context.Context, a *postgresAttempt, c Claim) (*Record, error) {
	if c.Replace == nil && s.recent.has(c.Scope) {
		if record, err := s.standing(ctx, a); !errors.Is(err, pgx.ErrNoRows) {
			return record, err
		}
	}
	races := 0
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		lockArgs := []any{c.Scope.Owner, c.Scope.Operation, c.Scope.Key, a.claimID, s.maxIdle.Milliseconds()}
		claimSQL, args := a.sql.Claim, append(lockArgs[:4:4], c.Fingerprint)
		if c.Replace != nil {
			claimSQL = a.sql.Replace
			args = append(args, s.takeOverAfter.Microseconds(), c.Replace.ClaimID, string(c.Replace.State))
		}
		beginning := s.beginning.Load()

		b := &pgx.Batch{}
		b.BeginTx(s.pinned)
		b.Queue(claimSQL, args...)
		// Nobody sees the claim before it is committed.
		if beginning == chained {
			b.Queue("commit and chain")
		} else {
			b.Queue("commit")
		}
		if beginning == begun {
			b.Queue(s.beginSQL)
		}
		if beginning != apart {
			b.Queue(a.sql.LockByScope, lockArgs...)
		}
		results := a.conn.SendBatch(ctx, b)
		a.tx = results.Tx()
		_, err := results.Exec() // begin
		if err == nil {
			rows, _ := results.Query() // an error is in rows too
			a.row, err = scanText(rows)
		}
		if err == nil {
			_, err = results.Exec() // commit
		}
		locked := err
		if a.row != "" && err == nil && beginning != apart {
			if beginning == begun {
				_, locked = results.Exec()
			}
			if locked == nil {
				locked = a.scanLock(results.QueryRow())
			}
		}
		if closeErr := results.Close(); locked == nil {
			locked = closeErr
		}
		if a.row == "" && err == nil {
			err = locked
		}
		// a.tx is a transaction that is open on the server or, on any path but winning, must not stay so.
		if c.Replace != nil && sqlState(err) == postgressql.LockNotAvailable {
			if err := undo(ctx, a.conn, nil); err != nil {
				return nil, err
			}
			c.Replace = nil // another has taken its place
			continue
		}
		if err != nil {
			err = undo(ctx, a.conn, err)
			if sqlState(err) == "25006" { // read-only: nothing can be claimed, but what is completed can be replayed
				if record, findErr := s.standing(ctx, a); findErr == nil && record.State != StateClaimed && !record.Expired {
					return record, nil
				}
			}
			return nil, err
		}
		if a.row == "" {
			record, err := s.standing(ctx, a)
			if !errors.Is(err, pgx.ErrNoRows) {
				return record, err
			}
			c.Replace = nil // what stood there, or was to be replaced, is gone
			if races++; races == postgressql.MostRaces {
				return nil, postgressql.ErrHidden
			}
			continue
		}

		if fitting := s.fitting(beginning, a); locked == nil && fitting != beginning {
			s.beginning.Store(fitting)
			if err := undo(ctx, a.conn, nil); err != nil {
				return nil, err
			}
			beginning = apart // which fits every level
		}
		if beginning == apart {
			locked = s.lockApart(ctx, a)
		}
		switch {
		case locked == nil:
			if err := s.qualify(ctx, a); err != nil {
				return nil, undo(ctx, a.conn, err)
			}
			a.tx = &postgresTx{tx: a.tx, use: &a.use}
			return nil, nil
		case errors.Is(locked, pgx.ErrNoRows) || sqlState(locked) == "40001":
			// The claim was lost between its commit and its lock: forgotten, purged or taken over. Create has not run,
			// so this is no error: start over, with a claim that nobody has seen.
			if err := undo(ctx, a.conn, nil); err != nil {
				return nil, err
			}
			c.Replace, a.claimID, a.row = nil, newClaimID(), ""
		default:
			return nil, undo(ctx, a.conn, locked)
		}
	}
}

// standing returns the record that the claim of a lost to, and ends what was begun for a win, in one round trip.
// pgx.ErrNoRows: it is gone.
func (s *PostgresStore) standing(ctx context.Context, a *postgresAttempt) (*Record, error) {
	var record *Record
	scan := func(row pgx.Row) (err error) {
		record, err = scanRecord(row, a.scope)
		return err
	}
	args := []any{a.scope.Owner, a.scope.Operation, a.scope.Key, s.takeOverAfter.Microseconds()}
	var err error
	if a.conn.Conn().PgConn().TxStatus() == 'I' {
		err = s.query(ctx, a.conn, scan, a.sql.Find, args...)
	} else {
		b := &pgx.Batch{}
		b.Queue(a.sql.Find, args...)
		b.Queue("rollback")
		results := a.conn.SendBatch(ctx, b)
		err = scan(results.QueryRow())
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
		err = undo(ctx, a.conn, err)
	}
	if err != nil {
		return nil, err
	}
	return record, nil
}

// fitting returns how the transaction of an attempt begins, where that of a began as beginning says.
func (s *PostgresStore) fitting(beginning int32, a *postgresAttempt) int32 {
	level := s.txOptions.IsoLevel
	if level == "" {
		level = pgx.TxIsoLevel(a.defaultLevel)
	}
	switch level {
	case pgx.Serializable:
		return apart
	case pgx.ReadCommitted:
		return beginning
	}
	return max(beginning, begun)
}

// lockApart begins the attempt's transaction and locks the claim by its row.
func (s *PostgresStore) lockApart(ctx context.Context, a *postgresAttempt) error {
	b := &pgx.Batch{}
	b.BeginTx(s.txOptions)
	b.Queue(a.sql.LockByRow, a.row, a.claimID, s.maxIdle.Milliseconds())
	results := a.conn.SendBatch(ctx, b)
	a.tx = results.Tx()
	_, err := results.Exec()
	if err == nil {
		err = a.scanLock(results.QueryRow())
	}
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	return err
}

// qualify gives a the statements that name the table with its schema, so that a search_path which create sets changes
// nothing. The name is looked up once for each table.
func (s *PostgresStore) qualify(ctx context.Context, a *postgresAttempt) error {
	if s.qualified {
		return nil
	}
	if sql, ok := s.resolved.Load(a.table); ok {
		a.sql = sql.(*postgressql.Statements)
		return nil
	}
	var name string
	if err := a.conn.QueryRow(ctx, postgressql.TableName, a.table).Scan(&name); err != nil {
		return err
	}
	a.sql = postgressql.For(name)
	s.resolved.Store(a.table, a.sql)
	return nil
}

// undo rolls back the transaction that conn may be in, so that it can be used again, and returns err. Without err, a
// rollback that fails is the error.
func undo(ctx context.Context, conn *pgxpool.Conn, err error) error {
	if conn.Conn().IsClosed() || conn.Conn().PgConn().TxStatus() == 'I' {
		return err
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	if _, rollbackErr := conn.Exec(ctx, "rollback"); rollbackErr != nil && err == nil {
		return rollbackErr
	}
	return err
}

// InTx implements [Store].
func (s *PostgresStore) InTx(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	conn, err := s.acquire(ctx)
	if err != nil {
		return err
	}
	a := &postgresAttempt{store: s, conn: conn}
	defer func() { // on every path, a panic of fn's among them
		_ = a.closeTx()
		if a.conn != nil {
			_ = undo(ctx, a.conn, nil)
		}
		a.letGo(ctx)
	}()
	tx, err := conn.BeginTx(ctx, s.txOptions)
	if err != nil {
		return explain(err)
	}
	if err := fn(ctx, &postgresTx{tx: tx, use: &a.use}); err != nil {
		return err
	}

	if err := a.closeTx(); err != nil {
		return err
	}
	commitCtx, cancel := detached(ctx)
	defer cancel()
	tag, err := conn.Exec(commitCtx, "commit")
	switch {
	case err == nil && tag.String() == "COMMIT":
		return nil
	case err == nil:
		return errTxFailed
	case commitLost(err):
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
	return err
}

// Find implements [Store].
func (s *PostgresStore) Find(ctx context.Context, scope Scope) (*Record, error) {
	if err := checkScope(scope); err != nil {
		return nil, err
	}
	var record *Record
	err := s.withConn(ctx, func(conn *pgxpool.Conn) error {
		return s.query(ctx, conn, func(row pgx.Row) (err error) {
			record, err = scanRecord(row, scope)
			return err
		}, s.sql.Find, scope.Owner, scope.Operation, scope.Key, s.takeOverAfter.Microseconds())
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, explain(err)
	}
	return record, nil
}

// TombstoneResource implements [Store]. tx is any transaction on the database, such as one of the caller's own pool.
func (s *PostgresStore) TombstoneResource(ctx context.Context, tx pgx.Tx, r Resource) (int64, error) {
	if err := checkResource(r); err != nil {
		return 0, err
	}
	tag, err := tx.Exec(ctx, s.sql.Tombstone, r.Owner, r.Operation, r.Ref)
	if err != nil {
		return 0, explain(err)
	}
	return tag.RowsAffected(), nil
}

// ForgetOwner implements [Store]. It deletes in batches of 1,000, each a transaction, then what is held by living attempts
// one by one.
func (s *PostgresStore) ForgetOwner(ctx context.Context, owner string) (int64, error) {
	if err := bounds.Required("owner", owner); err != nil {
		return 0, err
	}
	conn, err := s.acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release()

	var called time.Time // by the database's clock: a record younger than this is not ours to forget
	if err := s.query(ctx, conn, func(row pgx.Row) error { return row.Scan(&called) }, s.sql.Now); err != nil {
		return 0, explain(err)
	}
	var forgotten int64
	var operation, key string
	for {
		var count int64
		err := s.query(ctx, conn, func(row pgx.Row) error { return row.Scan(&operation, &key, &count) },
			s.sql.ForgetBatch, owner, called, operation, key)
		if errors.Is(err, pgx.ErrNoRows) {
			break
		}
		if err != nil {
			return forgotten, explain(err)
		}
		forgotten += count
	}
	operation, key = "", ""
	for {
		err := s.query(ctx, conn, func(row pgx.Row) error { return row.Scan(&operation, &key) },
			s.sql.ForgetNext, owner, called, operation, key)
		if errors.Is(err, pgx.ErrNoRows) {
			return forgotten, nil
		}
		if err != nil {
			return forgotten, explain(err)
		}
		count, err := s.forgetOne(ctx, conn, owner, called, operation, key)
		if err != nil {
			return forgotten, explain(err)
		}
		forgotten += count
	}
}

// PurgeExpired implements [Store]. It deletes in batches of 1,000, each a transaction, and rests after each for twice as
// long as it took, a second at most, without a connection.
func (s *PostgresStore) PurgeExpired(ctx context.Context) (Purged, error) {
	var purged Purged
	var err error
	purged.Records, purged.Claims, err = s.sql.Purge(ctx, s.staleClaim, func(sql string, args ...any) (count int64, last *time.Time, took time.Duration, err error) {
		conn, err := s.acquire(ctx)
		if err != nil {
			return 0, nil, 0, err
		}
		defer conn.Release()
		began := time.Now()
		err = s.query(ctx, conn, func(row pgx.Row) error { return row.Scan(&count, &last) }, sql, args...)
		return count, last, time.Since(began), err
	}, sqlState)
	if err != nil {
		return purged, explain(err)
	}
	return purged, nil
}

// query runs one statement that returns a row, in a transaction of its own at the pinned level, in one round trip.
func (s *PostgresStore) query(ctx context.Context, conn *pgxpool.Conn, scan func(pgx.Row) error, sql string, args ...any) error {
	b := &pgx.Batch{}
	b.BeginTx(s.pinned)
	b.Queue(sql, args...)
	b.Queue("commit")
	results := conn.SendBatch(ctx, b)
	_, err := results.Exec()
	if err == nil {
		err = scan(results.QueryRow())
	}
	if err == nil || errors.Is(err, pgx.ErrNoRows) {
		if _, commitErr := results.Exec(); commitErr != nil {
			err = commitErr
		}
	}
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	return undo(ctx, conn, err)
}

// forgetOne deletes one record, waiting for its attempt. COMMIT goes apart: if it travelled with the DELETE, a call that
// ended with its context would leave both on their way, to delete the record whenever the attempt ends.
func (s *PostgresStore) forgetOne(ctx context.Context, conn *pgxpool.Conn, args ...any) (int64, error) {
	tx, err := conn.BeginTx(ctx, s.pinned)
	if err != nil {
		return 0, err
	}
	tag, err := tx.Exec(ctx, s.sql.ForgetOne, args...)
	if err == nil {
		err = tx.Commit(ctx)
	}
	return tag.RowsAffected(), undo(ctx, conn, err)
}

// free gives a's key back on a connection that withConn finds, once the database has ended a's transaction. If create
// committed that itself, the claim is kept for good and the error is ErrTxEnded.
func (s *PostgresStore) free(ctx context.Context, a *postgresAttempt, withConn func(context.Context, func(*pgxpool.Conn) error) error) error {
	var xid *string // NULL: create did not run
	if a.xid != "" {
		xid = &a.xid
	}
	var how string
	err := withConn(ctx, func(conn *pgxpool.Conn) error {
		return postgressql.Judge(ctx, func() (string, error) {
			err := s.query(ctx, conn, func(row pgx.Row) error { return row.Scan(&how) },
				a.sql.Free, a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID, xid)
			return how, err
		})
	})
	return postgressql.FreeError(how, err, ErrTxEnded)
}

// withConn runs do on a connection of the pool, and again on another if the first one was broken, which is what a pool
// holds after the database restarted. Do must be something that may be done twice.
func (s *PostgresStore) withConn(ctx context.Context, do func(*pgxpool.Conn) error) error {
	for try := 1; ; try++ {
		conn, err := s.acquire(ctx)
		if err != nil {
			return err
		}
		err = do(conn)
		broken := conn.Conn().IsClosed()
		conn.Release()
		if err == nil || !broken || try == connectionTries || ctx.Err() != nil {
			return err
		}
	}
}

// acquire takes a connection from the pool.
func (s *PostgresStore) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	conn, err := s.db.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("holdsend: get a connection: %w", err)
	}
	return conn, nil
}

// explain adds the fix to errors that a wrong set-up gives.
func explain(err error) error { return postgressql.Explain(sqlState(err), "PostgresOptions", err) }

func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// commitLost reports whether err, from a round trip that carried COMMIT, leaves open what became of it. Only an ERROR from
// the server proves a rollback (and not of class 08, which a pooler makes up, nor 40003, which means just that), or an
// error from before anything was sent.
func commitLost(err error) bool {
	if pgconn.SafeToRetry(err) {
		return false
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return true
	}
	return pgErr.SeverityUnlocalized != "ERROR" || strings.HasPrefix(pgErr.Code, "08") || pgErr.Code == "40003"
}

// newClaimID returns a random UUID (version 4).
func newClaimID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program if the system has no randomness
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	var text [36]byte
	hex.Encode(text[:8], b[:4])
	hex.Encode(text[9:13], b[4:6])
	hex.Encode(text[14:18], b[6:8])
	hex.Encode(text[19:23], b[8:10])
	hex.Encode(text[24:], b[10:])
	text[8], text[13], text[18], text[23] = '-', '-', '-', '-'
	return string(text[:])
}

// scanText reads the one value, a text, of at most one row, and closes rows. No row is the empty text.
func scanText(rows pgx.Rows) (text string, err error) {
	if rows.Next() {
		text = string(rows.RawValues()[0])
	}
	rows.Close()
	return text, rows.Err()
}

// scanRecord reads the columns of a record.
func scanRecord(row pgx.Row, scope Scope) (*Record, error) {
	var header, ref *string
	var status *int16
	r := &Record{Scope: scope}
	err := row.Scan(&r.State, &r.Fingerprint, &r.ClaimID, &r.ClaimedAt, &r.CompletedAt, &r.ExpiresAt,
		&status, &header, &r.Response.Body, &ref, &r.Expired, &r.Abandoned)
	if err != nil {
		return nil, err
	}
	r.ClaimedAt, r.CompletedAt, r.ExpiresAt = r.ClaimedAt.UTC(), utc(r.CompletedAt), utc(r.ExpiresAt)
	if r.State == StateCompleted {
		if status == nil || header == nil || r.Response.Body == nil {
			return nil, errors.New("holdsend: a completed record has no answer stored: it needs repair by hand")
		}
		r.Response.Status = int(*status)
		if r.Response.Header, err = headertext.Decode(*header); err != nil {
			return nil, err
		}
		if ref != nil {
			r.Response.ResourceRef = *ref
		}
	}
	return r, nil
}

func utc(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	u := t.UTC()
	return &u
}
