package sqltest

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

const key = "key-00000001"

func request(key string) holdsend.Request {
	return holdsend.Request{
		Owner:     "owner-1",
		Operation: "note.create",
		Header:    http.Header{holdsend.HeaderIdempotencyKey: {key}},
		Content:   json.RawMessage(`{"text":"hello"}`),
		Wait:      -1,
	}
}

var created = holdsend.Response{Status: 201, Body: []byte("created")}

type createFunc = holdsend.CreateFunc[*sql.Tx]

// insertNote is a create that does as it should.
func insertNote(ctx context.Context, tx *sql.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
	_, err := tx.ExecContext(ctx, "INSERT INTO writes VALUES ('note')")
	return created, err
}

// inserting writes a note and then does steps, each a function or a statement.
func inserting(answer holdsend.Response, end error, steps ...any) createFunc {
	return func(ctx context.Context, tx *sql.Tx, in holdsend.Incoming) (holdsend.Response, error) {
		if _, err := insertNote(ctx, tx, in); err != nil {
			return answer, err
		}
		for _, step := range steps {
			var err error
			switch step := step.(type) {
			case string:
				_, err = tx.ExecContext(ctx, step)
			case func(*sql.Tx) error:
				err = step(tx)
			}
			if err != nil {
				return answer, err
			}
		}
		return answer, end
	}
}

// A create that ends its own transaction is found out: what it committed is never left with a free key.
func testCreateEndsItsTransaction(t *testing.T, store holdsend.Store[*sql.Tx], db *sql.DB) {
	errOwn := errors.New("too late")
	for name, c := range map[string]struct {
		create createFunc
		notes  int
		state  holdsend.State // "": the key is free
		err    bool
	}{
		"Commit":                          {inserting(created, nil, (*sql.Tx).Commit), 1, holdsend.StateCompleted, false},
		"Rollback":                        {inserting(created, nil, (*sql.Tx).Rollback), 0, "", true},
		"Commit, then an error":           {inserting(created, errOwn, (*sql.Tx).Commit), 1, holdsend.StateClaimed, true},
		"Commit, then 404":                {inserting(holdsend.Response{Status: 404}, nil, (*sql.Tx).Commit), 1, holdsend.StateClaimed, true},
		"Rollback, then 404":              {inserting(holdsend.Response{Status: 404}, nil, (*sql.Tx).Rollback), 0, "", false},
		"raw COMMIT":                      {inserting(created, nil, "COMMIT"), 1, holdsend.StateCompleted, false},
		"raw COMMIT and BEGIN":            {inserting(created, nil, "COMMIT", "BEGIN"), 1, holdsend.StateCompleted, false},
		"raw COMMIT, BEGIN and a write":   {inserting(created, nil, "COMMIT", "BEGIN", "INSERT INTO writes VALUES ('undone')"), 1, holdsend.StateCompleted, false},
		"raw ROLLBACK":                    {inserting(created, nil, "ROLLBACK"), 0, "", true},
		"raw ROLLBACK and BEGIN":          {inserting(created, nil, "ROLLBACK", "BEGIN"), 0, "", true},
		"raw COMMIT, then an error":       {inserting(created, errOwn, "COMMIT"), 1, holdsend.StateClaimed, true},
		"raw COMMIT and BEGIN, then 404":  {inserting(holdsend.Response{Status: 404}, nil, "COMMIT", "BEGIN"), 1, holdsend.StateClaimed, true},
		"raw ROLLBACK, then 404":          {inserting(holdsend.Response{Status: 404}, nil, "ROLLBACK"), 0, "", false},
		"a savepoint of its own":          {inserting(created, nil, "SAVEPOINT own", "INSERT INTO writes VALUES ('undone')", "ROLLBACK TO SAVEPOINT own"), 1, holdsend.StateCompleted, false},
		"a savepoint of its own, and 404": {inserting(holdsend.Response{Status: 404}, nil, "SAVEPOINT own"), 0, "", false},
	} {
		t.Run(name, func(t *testing.T) { // one after the other: they count in one table
			execute(t, db, "DELETE FROM writes")
			var event holdsend.Event
			req := request("key-" + http.CanonicalHeaderKey("x") + "-" + keyOf(name))
			req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
			_, err := holdsend.HandleIdempotent(t.Context(), store, req, c.create)
			if c.err {
				require.Error(t, err)
			} else {
				require.NoError(t, err)
			}
			ends := c.notes == 1 && name != "a savepoint of its own" || name[:1] == "R" && c.err || name[:5] == "raw R" && c.err
			require.Equal(t, ends, errors.Is(event.Err, holdsend.ErrTxEnded), "Event.Err: %v", event.Err)
			requireNotes(t, db, c.notes)
			record, err := store.Find(t.Context(), holdsend.Scope{Owner: req.Owner, Operation: req.Operation, Key: req.Header.Get(holdsend.HeaderIdempotencyKey)})
			if c.state == "" {
				require.ErrorIs(t, err, holdsend.ErrNotFound)
			} else {
				require.NoError(t, err)
				require.Equal(t, c.state, record.State)
				require.False(t, record.Abandoned)
			}
			// The retry writes no second note where there is one.
			_, _ = holdsend.HandleIdempotent(t.Context(), store, req, insertNote)
			requireNotes(t, db, 1)
		})
	}
}

func keyOf(name string) string {
	key := []byte(name)
	for i, b := range key {
		if b == ' ' || b == ',' {
			key[i] = '-'
		}
	}
	return string(key)
}

func requireNotes(t *testing.T, db *sql.DB, want int) {
	t.Helper()
	var notes int
	require.NoError(t, db.QueryRow("SELECT count(*) FROM writes").Scan(&notes))
	require.Equal(t, want, notes)
}

// Without a key there is no record to complete, so all that can be done is to say so.
func testInTxEnded(t *testing.T, store holdsend.Store[*sql.Tx]) {
	for _, step := range []any{(*sql.Tx).Commit, (*sql.Tx).Rollback, "COMMIT", "ROLLBACK"} {
		err := store.InTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			_, err := inserting(created, nil, step)(ctx, tx, holdsend.Incoming{})
			return err
		})
		require.ErrorIs(t, err, holdsend.ErrTxEnded)
	}
}

func TestSQLiteCreateEndsItsTransaction(t *testing.T) {
	t.Parallel()
	eachSQLite(t, func(t *testing.T, driver string) {
		store, db := newSQLite(t, driver, nil)
		testCreateEndsItsTransaction(t, store, db)
		testInTxEnded(t, store)
	})
}

func TestPostgresCreateEndsItsTransaction(t *testing.T) {
	t.Parallel()
	eachPostgres(t, func(t *testing.T, driver string) {
		store, db, _ := newPostgres(t, driver, nil, nil)
		testCreateEndsItsTransaction(t, store, db)
		testInTxEnded(t, store)
	})
}
