package sqltest

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/sqlstore"
)

// An interloper opens connections that call it before each statement that changes something.
type interloper struct {
	driver driver.Driver
	dsn    string
	before func(statement string)
}

func (i *interloper) Driver() driver.Driver { return i.driver }

func (i *interloper) Connect(context.Context) (driver.Conn, error) {
	conn, err := i.driver.Open(i.dsn)
	return &watchedConn{Conn: conn, before: i.before}, err
}

type watchedConn struct {
	driver.Conn
	before func(statement string)
}

func (c *watchedConn) ExecContext(ctx context.Context, statement string, args []driver.NamedValue) (driver.Result, error) {
	c.before(statement)
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, statement, args)
}

func (c *watchedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

func (c *watchedConn) BeginTx(ctx context.Context, options driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, options)
}

// What a call saw or claimed is changed by another process before its next statement. It must find that out by the
// statement itself: it may not take the other's record for the one that it saw, nor the other's claim for its own.
func TestSQLiteRecordChangesBetweenTwoStatements(t *testing.T) {
	t.Parallel()
	const abandoned = "INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at) VALUES ('owner-1', 'note.create', '" + key + "', 'claimed', 'f', 'first', 0)"
	for name, c := range map[string]struct {
		standing  string
		statement string // what the change comes before
		change    string
		want      holdsend.State
		claimID   string
	}{
		"another took over and died, before the take-over": {
			abandoned, "claim_id = ?6", "UPDATE holdsend_records SET claim_id = 'other'", holdsend.StateClaimed, "other",
		},
		"it completed and expired, before the take-over": {
			abandoned, "claim_id = ?6", "UPDATE holdsend_records SET state = 'completed', completed_at = 0, expires_at = 1, status = 201, header = '{}', body = x''",
			holdsend.StateCompleted, "first",
		},
		"another took over, before the mark": {
			"", "SET marked = 1", "UPDATE holdsend_records SET claim_id = 'other'", holdsend.StateClaimed, "other",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "test.db")
			aside := openSQLite(t, sqliteDrivers["modernc"], path)
			execute(t, aside, sqlstore.SQLiteSchema(nil)+c.standing)
			changed := false
			db := sql.OpenDB(&interloper{driver: aside.Driver(), dsn: sqliteDSN(path), before: func(statement string) {
				if !changed && strings.Contains(statement, c.statement) {
					changed = true
					execute(t, aside, c.change)
				}
			}})
			t.Cleanup(func() { require.NoError(t, db.Close()) })
			store, err := sqlstore.NewSQLite(db, &sqlstore.Options{TakeOverAfter: time.Millisecond})
			require.NoError(t, err)

			claim := holdsend.Claim{Scope: holdsend.Scope{Owner: "owner-1", Operation: "note.create", Key: key}, Fingerprint: "f"}
			if c.standing != "" {
				claim.Replace, err = store.Find(t.Context(), claim.Scope)
				require.NoError(t, err)
			}
			attempt, record, err := store.Begin(t.Context(), claim)
			require.NoError(t, err)
			require.True(t, changed)
			if attempt != nil {
				_ = attempt.Abort(t.Context())
			}
			require.Nil(t, attempt, "the other's record was replaced, or its claim used")
			require.Equal(t, c.want, record.State)
			require.Equal(t, c.claimID, record.ClaimID)
		})
	}
}

// Create itself makes its claim another's, in its transaction: what it wrote is not stored under a claim that is not its own.
func TestSQLiteClaimLostInCreate(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		store, db := newSQLite(t, driver, nil)
		_, err := holdsend.HandleIdempotent(t.Context(), store, request(key),
			inserting(created, nil, "UPDATE holdsend_records SET claim_id = 'other'"))
		require.ErrorIs(t, err, holdsend.ErrClaimLost)
		requireNotes(t, db, 0)
	})
}
