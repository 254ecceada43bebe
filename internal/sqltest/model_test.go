package sqltest

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/contracttest"
	"github.com/holdsend/holdsend-go/internal/model"
	"github.com/holdsend/holdsend-go/sqlstore"
)

// Each store has a file of its own: a sequence holds the write lock between two steps.
func TestSQLiteFollowsTheModel(t *testing.T) {
	t.Parallel()
	var stores []contracttest.Harness[*sql.Tx]
	for range 8 {
		store, db := newSQLite(t, sqliteDrivers["modernc"], &sqlstore.Options{TakeOverAfter: 50 * time.Millisecond, StaleClaim: 100 * time.Millisecond})
		stores = append(stores, contracttest.Harness[*sql.Tx]{
			Store:        store,
			SingleWriter: true,
			Write: func(ctx context.Context, tx *sql.Tx, name string) error {
				_, err := tx.ExecContext(ctx, "INSERT INTO writes VALUES (?)", name)
				return err
			},
			Count: func(ctx context.Context, name string) (n int, err error) {
				err = db.QueryRowContext(ctx, "SELECT count(*) FROM writes WHERE name = ?", name).Scan(&n)
				return n, err
			},
			Crash: func(ctx context.Context, a holdsend.Attempt[*sql.Tx]) error {
				_, err := a.Tx().ExecContext(ctx, "ROLLBACK")
				return err
			},
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	explored, err := model.Explore(ctx, stores, model.Options{Depth: 4, Sequences: 64, Length: 25, Seed: rand.Uint64()})
	require.NoError(t, err)
	t.Logf("%d sequences, %d steps", explored.Sequences, explored.Steps)
}

// The last word on one claim a scope is the table's: two that look at the same moment both find it empty.
func TestSQLiteTableHasOneRowAScope(t *testing.T) {
	t.Parallel()
	_, db := newSQLite(t, sqliteDrivers["modernc"], nil)
	const claim = `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at)
		VALUES ('ada', 'note.create', 'abc-12345', 'claimed', 'hs1:00', ?, 0)`
	execute(t, db, claim, "first")
	_, err := db.Exec(claim, "second")
	require.Error(t, err)
}
