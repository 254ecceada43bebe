package sqltest

import (
	"context"
	"database/sql"
	"net/url"
	"path/filepath"
	"testing"
	"time"

	_ "github.com/ncruces/go-sqlite3/driver"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/contracttest"
	"github.com/holdsend/holdsend-go/sqlstore"
)

// sqliteDrivers has the names under which the drivers register.
var sqliteDrivers = map[string]string{"modernc": "sqlite", "ncruces": "sqlite3"}

// eachSQLite runs a test on every driver.
func eachSQLite(t *testing.T, test func(t *testing.T, driver string)) {
	for name, driver := range sqliteDrivers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, driver)
		})
	}
}

// sqliteDSN names a file that any driver here opens as a store needs it. It waits for long: many tests write at once.
func sqliteDSN(path string) string {
	return "file:" + (&url.URL{Path: path}).EscapedPath() + "?_pragma=busy_timeout(60000)&_pragma=journal_mode(WAL)"
}

func openSQLite(t testing.TB, driver, path string) *sql.DB {
	db, err := sql.Open(driver, sqliteDSN(path))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

// newSQLite opens a fresh file with the tables of the tests, and a store on it. The store waits for writers as long as the
// file does, unless told otherwise.
func newSQLite(t testing.TB, driver string, o *sqlstore.Options) (*sqlstore.SQLiteStore, *sql.DB) {
	var filled sqlstore.Options
	if o != nil {
		filled = *o
	}
	if filled.BusyTimeout == 0 {
		filled.BusyTimeout = time.Minute
	}
	o = &filled
	db := openSQLite(t, driver, filepath.Join(t.TempDir(), "test.db"))
	execute(t, db, sqlstore.SQLiteSchema(o))
	execute(t, db, "CREATE TABLE writes (name TEXT NOT NULL)")
	store, err := sqlstore.NewSQLite(db, o)
	require.NoError(t, err)
	return store, db
}

func execute(t testing.TB, db *sql.DB, statement string, args ...any) {
	t.Helper()
	_, err := db.Exec(statement, args...)
	require.NoError(t, err)
}

func TestSQLiteKeepsTheContract(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		contracttest.Run(t, func(t *testing.T) contracttest.Harness[*sql.Tx] { return sqliteHarness(t, driver) })
	})
}

func sqliteHarness(t testing.TB, driver string) contracttest.Harness[*sql.Tx] {
	o := &sqlstore.Options{TakeOverAfter: 100 * time.Millisecond, StaleClaim: 300 * time.Millisecond}
	store, db := newSQLite(t, driver, o)
	return contracttest.Harness[*sql.Tx]{
		Store:        store,
		SingleWriter: true,
		StaleClaim:   o.StaleClaim,
		Write: func(ctx context.Context, tx *sql.Tx, name string) error {
			_, err := tx.ExecContext(ctx, "INSERT INTO writes VALUES (?)", name)
			return err
		},
		Count: func(ctx context.Context, name string) (n int, err error) {
			err = db.QueryRowContext(ctx, "SELECT count(*) FROM writes WHERE name = ?", name).Scan(&n)
			return n, err
		},
		// What the death of the process leaves: the transaction is gone, and the store was not told.
		Crash: func(ctx context.Context, a holdsend.Attempt[*sql.Tx]) error {
			_, err := a.Tx().ExecContext(ctx, "ROLLBACK")
			return err
		},
	}
}
