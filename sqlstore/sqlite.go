package sqlstore

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/bounds"
	"github.com/holdsend/holdsend-go/internal/rest"
)

const (
	// The pauses between two tries to get the write lock. SQLite itself polls for it too, but would keep a duplicate from
	// looking whether it has an answer by now.
	busyPauseFirst = time.Millisecond
	busyPauseMost  = 20 * time.Millisecond

	// takeOverWait is how long Begin tries to get the write lock for taking a claim over. The claim's own attempt may be
	// what holds the lock, and Begin does not wait for that; but among busy writers a single try would seldom succeed.
	takeOverWait = 100 * time.Millisecond

	// purgeWait is how long PurgeExpired tries to get the write lock for each batch.
	purgeWait = 500 * time.Millisecond
)

// ErrBusy is returned when the write lock of an SQLite database could not be had within Options.BusyTimeout. Nothing was
// stored: retry with the same key. holdsend.ErrorAnswer makes it a 503 with Retry-After.
var ErrBusy error = busyError{}

type busyError struct{}

func (busyError) Error() string {
	return "holdsend: the SQLite database was busy with other writers for too long, and nothing was stored: retry with the same key"
}

// SQLState is that of a transaction that met another one and may be tried again.
func (busyError) SQLState() string { return "40001" }

// isBusy knows SQLITE_BUSY by SQLite's own text, which every driver hands on.
func isBusy(err error) bool {
	return err != nil && strings.Contains(err.Error(), "database is locked")
}

// SQLiteStore keeps records in a table beside the data that create writes, in one SQLite file in WAL mode. Several
// processes of one machine may share the file. It needs SQLite 3.42 or newer and SQLiteSchema applied.
//
// SQLite has one writer at a time. A create holds the write lock from its begin to its end, so creates run one after the
// other, whatever their keys; keep them short. A duplicate is answered without waiting for the writer. Who waits for the
// lock holds no connection meanwhile, and gets ErrBusy after Options.BusyTimeout.
//
// What a crash of the machine leaves is what PRAGMA synchronous says, which is yours: FULL keeps every create that was
// answered; NORMAL, which is faster, may lose the last ones, each with its record. The claim alone is committed with
// NORMAL at most: losing it loses no write. A crash of the process loses nothing either way.
//
// SQLite itself rolls a transaction back when a statement of it is interrupted, as when its context ends. A create that
// ignores that error and answers 2xx gets ErrTxEnded, and its key is free. But what it wrote after the rollback was committed
// on its own, and nothing can undo it: return every error of the database.
//
// It starts no goroutine. A create takes one connection for its whole run.
type SQLiteStore struct {
	db      *sql.DB
	o       Options
	sql     *sqliteStatements
	waiters holdsend.Waiters
}

var _ holdsend.Store[*sql.Tx] = (*SQLiteStore)(nil)

// NewSQLite returns a store on db, which stays the caller's to close. It looks at two of its connections, and returns an
// error that says what to write if they are not in WAL mode on a file, with a busy timeout. An in-memory database and
// cache=shared are refused, because writers block readers there: use a file, in tests one in a temporary directory, or
// holdsend.NewMemoryStore.
func NewSQLite(db *sql.DB, o *Options) (*SQLiteStore, error) {
	if db == nil {
		return nil, errors.New("holdsend: NewSQLite needs a *sql.DB")
	}
	if o != nil && (o.Schema != "" || o.MaxIdle != 0 || o.TxOptions != sql.TxOptions{}) {
		return nil, errors.New("holdsend: Options.Schema, MaxIdle and TxOptions are for Postgres: leave them out for SQLite")
	}
	filled, err := withDefaults(o)
	if err != nil {
		return nil, err
	}
	if db.Stats().MaxOpenConnections == 1 {
		return nil, errors.New("holdsend: a pool of one connection makes a duplicate wait for the running create: leave out SetMaxOpenConns, or allow at least 2")
	}
	if err := checkSQLite(db); err != nil {
		return nil, err
	}
	return &SQLiteStore{db: db, o: filled, sql: sqliteStatementsFor(filled.Table)}, nil
}

// Waiters returns where this process's duplicates wait: see [holdsend.Waiters].
func (s *SQLiteStore) Waiters() *holdsend.Waiters { return &s.waiters }

const sqliteDSN = "file:notes.db?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL) with modernc.org/sqlite and ncruces/go-sqlite3, file:notes.db?_busy_timeout=5000&_journal_mode=WAL with mattn/go-sqlite3"

// checkTimeout bounds what NewSQLite asks. A driver that compiles SQLite first takes seconds on a busy machine.
const checkTimeout = time.Minute

// checkSQLite looks at two connections at once: a PRAGMA that was sent by Exec instead of being part of the data source
// name holds on one connection alone.
func checkSQLite(db *sql.DB) error {
	ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
	defer cancel()
	var conns [2]*sql.Conn
	for i := range conns {
		conn, err := db.Conn(ctx)
		if err != nil {
			return fmt.Errorf("holdsend: open the SQLite database: %w", err)
		}
		defer conn.Close()
		conns[i] = conn
		var version, file, mode string
		var major, minor, busyTimeout, queryOnly int
		if err := conn.QueryRowContext(ctx, "SELECT sqlite_version()").Scan(&version); err != nil {
			return fmt.Errorf("holdsend: NewSQLite needs an SQLite database: %w", err)
		}
		if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil || major < 3 || major == 3 && minor < 42 {
			return fmt.Errorf("holdsend: the driver's SQLite is version %s: 3.42 or newer is needed, update the driver", version)
		}
		for query, target := range map[string]any{
			"SELECT file FROM pragma_database_list WHERE name = 'main'": &file,
			"PRAGMA journal_mode": &mode,
			"PRAGMA busy_timeout": &busyTimeout,
			"PRAGMA query_only":   &queryOnly,
		} {
			if err := conn.QueryRowContext(ctx, query).Scan(target); err != nil {
				return fmt.Errorf("holdsend: look at the SQLite database: %w", err)
			}
		}
		switch {
		case file == "":
			return errors.New("holdsend: an in-memory SQLite database cannot keep records, for its writers block its readers: use a file, in tests one in a temporary directory, or holdsend.NewMemoryStore")
		case mode != "wal":
			return fmt.Errorf("holdsend: the SQLite database has journal mode %s, and WAL is needed, so that readers do not wait for the writer. Write it in the data source name: %s", mode, sqliteDSN)
		case busyTimeout <= 0:
			return fmt.Errorf("holdsend: a connection to the SQLite database has no busy timeout. Write it in the data source name, so that each has: %s", sqliteDSN)
		case queryOnly != 0:
			return errors.New("holdsend: the SQLite database is opened for reading only (PRAGMA query_only)")
		}
	}
	shared, err := shareCache(ctx, conns[0], conns[1])
	if err != nil {
		return fmt.Errorf("holdsend: look at the SQLite database: %w", err)
	}
	if shared {
		return errors.New("holdsend: the SQLite database is opened with cache=shared, where writers block readers: leave it out of the data source name")
	}
	return nil
}

// shareCache reports whether two connections have one cache. No PRAGMA says so; but a cache has one size.
func shareCache(ctx context.Context, a, b *sql.Conn) (bool, error) {
	var sizeA, sizeB, sizeThen int
	if err := a.QueryRowContext(ctx, "PRAGMA cache_size").Scan(&sizeA); err != nil {
		return false, err
	}
	if err := b.QueryRowContext(ctx, "PRAGMA cache_size").Scan(&sizeB); err != nil {
		return false, err
	}
	if _, err := a.ExecContext(ctx, fmt.Sprintf("PRAGMA cache_size = %d", sizeB+1)); err != nil {
		return false, err
	}
	err := b.QueryRowContext(ctx, "PRAGMA cache_size").Scan(&sizeThen)
	_, resetErr := a.ExecContext(ctx, fmt.Sprintf("PRAGMA cache_size = %d", sizeA))
	return sizeThen != sizeB, errors.Join(err, resetErr)
}

//go:embed sqlite.sql
var sqliteSchema string

// SQLiteSchema returns the SQL that creates the table: sqlite.sql with the table's name. Run it at every start of a
// service: it is safe to run again, also by many processes at once. Of the options it reads Table.
func SQLiteSchema(o *Options) string {
	table := defaultTable
	if o != nil && o.Table != "" {
		table = o.Table
	}
	return strings.NewReplacer(
		defaultTable+"_resource", quoted(table+"_resource"),
		defaultTable+"_expiry", quoted(table+"_expiry"),
		defaultTable+"_claims", quoted(table+"_claims"),
		defaultTable, quoted(table),
	).Replace(sqliteSchema)
}

// Begin implements [holdsend.Store]. It waits for the write lock where it needs it, up to Options.BusyTimeout; a duplicate
// does not need it. Taking a claim over tries for 100 ms.
func (s *SQLiteStore) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[*sql.Tx], *holdsend.Record, error) {
	if err := checkScope(c.Scope); err != nil {
		return nil, nil, err
	}
	a := &sqliteAttempt{store: s, scope: c.Scope, claimID: newClaimID()}
	var record *holdsend.Record
	var takeOverUntil time.Time
	err := s.whenFree(ctx, s.o.BusyTimeout, func(conn *sqliteConn) (err error) {
		record, err = s.begin(conn, a, c)
		if isBusy(err) && record != nil && record.State == holdsend.StateClaimed {
			// The lock that is held may be that of the claim's own attempt.
			switch {
			case takeOverUntil.IsZero():
				takeOverUntil = time.Now().Add(takeOverWait)
			case time.Now().After(takeOverUntil):
				return nil
			}
		}
		return err
	})
	switch {
	case a.tx != nil:
		return a, nil, nil
	case err == nil, errors.Is(err, ErrBusy) && !a.claimed && record != nil && record.State == holdsend.StateClaimed:
		return nil, record, nil
	}
	if a.claimed { // create did not run: give the key back
		freeCtx, cancel := detached(ctx)
		defer cancel()
		_ = s.free(freeCtx, a)
	}
	return nil, nil, explain(err, "SQLiteSchema")
}

// begin claims c.Scope for a, unless a has a claim from an earlier try, and opens its transaction; or returns the record
// that stands there. With an error that isBusy the record, if there is one, is what it could not replace.
func (s *SQLiteStore) begin(conn *sqliteConn, a *sqliteAttempt, c holdsend.Claim) (*holdsend.Record, error) {
	for {
		for !a.claimed {
			record, err := s.find(conn.Conn, c.Scope)
			if err != nil && !errors.Is(err, sql.ErrNoRows) {
				return nil, err
			}
			if record != nil && !isReplaceable(record, c.Replace) {
				return record, nil
			}
			if err := conn.hurry(true); err != nil {
				return nil, err
			}
			args := []any{c.Scope.Owner, c.Scope.Operation, c.Scope.Key, a.claimID, c.Fingerprint}
			statement := s.sql.claim
			if record != nil {
				statement = s.sql.replace
				args = append(args, c.Replace.ClaimID, string(c.Replace.State), s.o.TakeOverAfter.Milliseconds())
			}
			rows, err := conn.exec(statement, args...)
			if err != nil {
				return record, err
			}
			a.claimed = rows == 1 // if not, another one was faster: look again
		}

		if err := conn.hurry(false); err != nil {
			return nil, err
		}
		tx, err := conn.begin()
		if err != nil {
			return nil, err
		}
		marked, err := tx.Exec(s.sql.mark, a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID)
		if err != nil {
			return nil, errors.Join(err, conn.rollback(tx))
		}
		if rows, err := marked.RowsAffected(); err != nil || rows != 1 {
			// The claim was lost before its lock: forgotten, purged or taken over. Create has not run, so this is no
			// error: start over, with a claim that nobody has seen.
			a.claimed, a.claimID, c.Replace = false, newClaimID(), nil
			if err := errors.Join(err, conn.rollback(tx)); err != nil {
				return nil, err
			}
			continue
		}
		if _, err := tx.Exec("SAVEPOINT " + a.savepoint()); err != nil {
			return nil, errors.Join(err, conn.rollback(tx))
		}
		if err := conn.calm(); err != nil {
			return nil, errors.Join(err, conn.rollback(tx))
		}
		a.conn, a.tx = conn.keep(), tx
		return nil, nil
	}
}

func isReplaceable(standing, seen *holdsend.Record) bool {
	return seen != nil && standing.ClaimID == seen.ClaimID && standing.State == seen.State && (standing.Expired || standing.Abandoned)
}

// find returns sql.ErrNoRows where no record stands.
func (s *SQLiteStore) find(conn *sql.Conn, scope holdsend.Scope) (*holdsend.Record, error) {
	var row recordRow[int64]
	err := conn.QueryRowContext(context.Background(), s.sql.find,
		scope.Owner, scope.Operation, scope.Key, s.o.TakeOverAfter.Milliseconds()).Scan(row.targets()...)
	if err != nil {
		return nil, err
	}
	return row.record(scope, time.UnixMilli)
}

// InTx implements [holdsend.Store]. The transaction has the write lock from its begin.
func (s *SQLiteStore) InTx(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) (err error) {
	var tx *sql.Tx
	var conn *sql.Conn
	savepoint := quoted("holdsend " + newClaimID())
	err = s.whenFree(ctx, s.o.BusyTimeout, func(c *sqliteConn) error {
		if err := c.hurry(false); err != nil {
			return err
		}
		opened, err := c.begin()
		if err != nil {
			return err
		}
		if _, err = opened.Exec(s.sql.lock); err == nil {
			_, err = opened.Exec("SAVEPOINT " + savepoint)
		}
		if err == nil {
			err = c.calm()
		}
		if err != nil {
			return errors.Join(err, c.rollback(opened))
		}
		tx, conn = opened, c.keep()
		return nil
	})
	if err != nil {
		return explain(err, "SQLiteSchema")
	}
	clean := false
	defer func() { // on every path, a panic of fn's among them
		if !clean && tx.Rollback() != nil {
			discard(conn)
			return
		}
		_ = conn.Close()
	}()
	if err := fn(ctx, tx); err != nil {
		return err
	}
	if _, err := tx.Exec("RELEASE " + savepoint); isRowsOpen(err) {
		return errRowsOpen
	} else if err != nil {
		return fmt.Errorf("%w: %w", holdsend.ErrTxEnded, err)
	}
	switch err := tx.Commit(); {
	case err == nil:
		clean = true
		return nil
	case strings.Contains(err.Error(), "constraint failed"): // a deferred one
		return err
	default:
		return fmt.Errorf("%w: %w", holdsend.ErrOutcomeUnknown, err)
	}
}

// Find implements [holdsend.Store].
func (s *SQLiteStore) Find(ctx context.Context, scope holdsend.Scope) (*holdsend.Record, error) {
	if err := checkScope(scope); err != nil {
		return nil, err
	}
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("holdsend: get a connection: %w", err)
	}
	defer conn.Close()
	record, err := s.find(conn, scope)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, holdsend.ErrNotFound
	}
	return record, explain(err, "SQLiteSchema")
}

// TombstoneResource implements [holdsend.Store]. tx is any transaction on the database. If it read before this, and another
// writer committed since, SQLite refuses it (SQLITE_BUSY): begin it IMMEDIATE, or use InTx, whose transactions are.
func (s *SQLiteStore) TombstoneResource(ctx context.Context, tx *sql.Tx, r holdsend.Resource) (int64, error) {
	if err := checkResource(r); err != nil {
		return 0, err
	}
	result, err := tx.ExecContext(ctx, s.sql.tombstone, r.Owner, r.Operation, r.Ref)
	if err != nil {
		return 0, explain(err, "SQLiteSchema")
	}
	return result.RowsAffected()
}

// ForgetOwner implements [holdsend.Store]. It deletes in batches of 1,000, each a transaction. It waits for the write lock
// as long as ctx lets it, so for the attempts of every owner.
func (s *SQLiteStore) ForgetOwner(ctx context.Context, owner string) (int64, error) {
	if err := bounds.Required("owner", owner); err != nil {
		return 0, err
	}
	var called int64 // by SQLite's clock: a record younger than this is not ours to forget
	if err := s.db.QueryRowContext(ctx, s.sql.now).Scan(&called); err != nil {
		return 0, err
	}
	return s.inBatches(ctx, forEver, s.sql.forget, owner, called)
}

// PurgeExpired implements [holdsend.Store]. It deletes in batches of 1,000, each a transaction, and lets others write for
// twice as long as each took, a second at most. Where others hold the write lock for longer than half a second it leaves
// what is left to its next call.
func (s *SQLiteStore) PurgeExpired(ctx context.Context) (holdsend.Purged, error) {
	records, err := s.inBatches(ctx, purgeWait, s.sql.purgeRecords)
	purged := holdsend.Purged{Records: records}
	if err == nil {
		purged.Claims, err = s.inBatches(ctx, purgeWait, s.sql.purgeClaims, s.o.StaleClaim.Milliseconds())
	}
	if errors.Is(err, ErrBusy) && ctx.Err() == nil {
		err = nil
	}
	return purged, err
}

// inBatches runs a deleting statement until it deletes nothing any more, and rests in between.
func (s *SQLiteStore) inBatches(ctx context.Context, limit time.Duration, statement string, args ...any) (deleted int64, err error) {
	for {
		var rows int64
		var began time.Time
		err := s.whenFree(ctx, limit, func(conn *sqliteConn) (err error) {
			began = time.Now()
			if err = conn.hurry(false); err == nil {
				rows, err = conn.exec(statement, args...)
			}
			return err
		})
		if err != nil || rows == 0 {
			return deleted, explain(err, "SQLiteSchema")
		}
		deleted += rows
		rest.After(ctx, time.Since(began))
	}
}

// free gives a's key back, outside of its transaction. If create committed that itself, the claim is kept for good and the
// error is ErrTxEnded.
func (s *SQLiteStore) free(ctx context.Context, a *sqliteAttempt) error {
	err := s.whenFree(ctx, s.o.BusyTimeout, func(conn *sqliteConn) error {
		state, marked, err := a.look(conn.Conn)
		switch {
		case errors.Is(err, sql.ErrNoRows) || err == nil && state != holdsend.StateClaimed:
			return nil // taken over, forgotten or purged: there is nothing to free, and so nothing to wait for
		case err != nil:
			return err
		case marked:
			return errKept
		}
		if err := conn.hurry(true); err != nil {
			return err
		}
		_, err = conn.exec(s.sql.free, a.scope.Owner, a.scope.Operation, a.scope.Key, a.claimID, 0)
		return err
	})
	if err != nil && !errors.Is(err, holdsend.ErrTxEnded) {
		return fmt.Errorf("holdsend: free the key of a failed attempt (a retry takes it over): %w", err)
	}
	return err
}

var errKept = fmt.Errorf("holdsend: create committed its transaction and then gave no 2xx to store, so its key stays claimed until ForgetOwner: %w", holdsend.ErrTxEnded)

const forEver = time.Duration(-1)

// whenFree runs step until it returns an error that is not SQLITE_BUSY, at most for limit. Between two tries it holds no
// connection.
func (s *SQLiteStore) whenFree(ctx context.Context, limit time.Duration, step func(conn *sqliteConn) error) error {
	if limit != forEver {
		var cancel context.CancelFunc
		ctx, cancel = withLimit(ctx, limit)
		defer cancel()
	}
	for pause := busyPauseFirst; ; pause = min(pause*2, busyPauseMost) {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		pooled, err := s.db.Conn(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("holdsend: get a connection: %w", err)
		}
		conn := &sqliteConn{Conn: pooled}
		err = step(conn)
		conn.letGo()
		if !isBusy(err) {
			return err
		}
		timer := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// withLimit is context.WithTimeout with ErrBusy as its cause, unless ctx ends first.
func withLimit(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, limit, ErrBusy)
}

// A sqliteConn is a connection for one try. Its statements do not end with the caller's context: they do not wait, and
// SQLite rolls a whole transaction back if one of its statements is interrupted.
type sqliteConn struct {
	*sql.Conn                // nil once kept
	busyTimeout, synchronous int
	hurried, relaxed         bool
}

// hurry makes the connection fail at once where others hold the write lock; the caller looks again, and pauses. With
// relaxed, what it commits need not be flushed, and what is committed later flushes it too. Settings are the connection's,
// not the transaction's: letGo and calm put them back.
func (c *sqliteConn) hurry(relaxed bool) error {
	ctx := context.Background()
	if !c.hurried {
		err := c.QueryRowContext(ctx, "SELECT timeout, synchronous FROM pragma_busy_timeout, pragma_synchronous").Scan(&c.busyTimeout, &c.synchronous)
		if err != nil {
			return err
		}
		c.hurried = true
		if _, err := c.ExecContext(ctx, "PRAGMA busy_timeout = 0"); err != nil {
			return err
		}
	}
	const normal = 1
	if relaxed == c.relaxed || c.synchronous <= normal {
		return nil
	}
	level := c.synchronous
	if relaxed {
		level = normal
	}
	if _, err := c.ExecContext(ctx, fmt.Sprintf("PRAGMA synchronous = %d", level)); err != nil {
		return err
	}
	c.relaxed = relaxed
	return nil
}

// calm ends the hurry. In a transaction, synchronous must be back already: SQLite does not let it change there.
func (c *sqliteConn) calm() error {
	if !c.hurried {
		return nil
	}
	if c.relaxed {
		if err := c.hurry(false); err != nil {
			return err
		}
	}
	_, err := c.ExecContext(context.Background(), fmt.Sprintf("PRAGMA busy_timeout = %d", c.busyTimeout))
	if err == nil {
		c.hurried = false
	}
	return err
}

func (c *sqliteConn) exec(statement string, args ...any) (int64, error) {
	result, err := c.ExecContext(context.Background(), statement, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// begin opens a transaction, which takes the write lock with its first statement, if that writes.
func (c *sqliteConn) begin() (*sql.Tx, error) {
	return c.BeginTx(context.Background(), nil) // a context that ends would roll it back
}

// rollback returns an error only where the connection is left in the transaction.
func (c *sqliteConn) rollback(tx *sql.Tx) error {
	err := tx.Rollback()
	if err != nil {
		discard(c.Conn)
		c.Conn = nil
	}
	return err
}

// keep takes the connection out of the try's hands.
func (c *sqliteConn) keep() *sql.Conn {
	kept := c.Conn
	c.Conn = nil
	return kept
}

func (c *sqliteConn) letGo() {
	switch {
	case c.Conn == nil:
	case c.calm() != nil:
		discard(c.Conn)
	default:
		_ = c.Close()
	}
}

// explain adds the fix to errors that a wrong set-up gives.
func explain(err error, schema string) error {
	switch {
	case err == nil:
		return nil
	case strings.Contains(err.Error(), "no such table"):
		return fmt.Errorf("holdsend: the records table was not found: run %s, or set Options.Table: %w", schema, err)
	case strings.Contains(err.Error(), "no such column"), strings.Contains(err.Error(), "has no column"):
		return fmt.Errorf("holdsend: the records table lacks a column: run %s of this version: %w", schema, err)
	case strings.Contains(err.Error(), "attempt to write a readonly database"):
		return fmt.Errorf("holdsend: the SQLite file and its directory must be writable by this process: %w", err)
	}
	return err
}
