package sqltest

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/sqlstore"
)

// A duplicate is woken by the end of the attempt in its process. The bubble's clock stands still while the database works,
// so the wait is exactly as long as the create: a look at its own pace would come later.
func testDuplicateIsWoken(t *testing.T, open func(t *testing.T) holdsend.Store[*sql.Tx]) {
	synctest.Test(t, func(t *testing.T) {
		store := open(t)
		started, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			_, err := holdsend.HandleIdempotent(t.Context(), store, request(key), func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				close(started)
				time.Sleep(time.Second)
				return insertNote(ctx, tx, in)
			})
			assert.NoError(t, err)
		}()
		<-started
		start := time.Now()
		req := request(key)
		req.Wait = time.Minute
		answer, err := holdsend.HandleIdempotent(t.Context(), store, req, insertNote)
		require.NoError(t, err)
		require.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
		require.Equal(t, time.Second, time.Since(start))
		<-ended
	})
}

func TestPostgresDuplicateIsWoken(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		_, _, url := newPostgres(t, driver, nil, nil)
		testDuplicateIsWoken(t, func(t *testing.T) holdsend.Store[*sql.Tx] {
			db, err := sql.Open(driver, url)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, db.Close()) })
			// Its claim is never old: the database's clock does not stand still.
			store, err := sqlstore.NewPostgres(db, &sqlstore.Options{TakeOverAfter: time.Hour})
			require.NoError(t, err)
			return store
		})
	})
}

func TestSQLiteDuplicateIsWoken(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		path := filepath.Join(t.TempDir(), "test.db")
		db := openSQLite(t, driver, path)
		execute(t, db, sqlstore.SQLiteSchema(nil)+"CREATE TABLE writes (name TEXT NOT NULL)")
		testDuplicateIsWoken(t, func(t *testing.T) holdsend.Store[*sql.Tx] {
			store, err := sqlstore.NewSQLite(openSQLite(t, driver, path), &sqlstore.Options{TakeOverAfter: time.Hour})
			require.NoError(t, err)
			return store
		})
	})
}
