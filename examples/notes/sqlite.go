package main

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"time"

	"github.com/holdsend/holdsend-go/sqlstore"
	_ "modernc.org/sqlite" // SQLite in Go: no C compiler, no server
)

// openSQLite returns a backend that keeps entries and records in one file, which it creates.
func openSQLite(ctx context.Context, path string, logger *slog.Logger) (*backend, error) {
	// WAL: readers do not wait for the writer. FULL: what was answered outlives a power cut.
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+
		"?_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	if err != nil {
		return nil, err
	}
	var store *sqlstore.SQLiteStore
	for _, statements := range []string{sqlstore.SQLiteSchema(nil), sqliteSchema} {
		if err == nil {
			_, err = db.ExecContext(ctx, statements)
		}
	}
	if err == nil {
		store, err = sqlstore.NewSQLite(db, nil)
	}
	if err != nil {
		_ = db.Close()
		return nil, fmt.Errorf("opening the database %s: %w", path, err)
	}
	return &backend{
		name:    "sqlite",
		handler: newHandler(store, sqliteEntries{db}, logger),
		purge:   store.PurgeExpired,
		close:   func() { _ = db.Close() },
	}, nil
}

// AUTOINCREMENT: an id is never used again. Times are microseconds since 1970.
const sqliteSchema = `
CREATE TABLE IF NOT EXISTS notes (
	id          INTEGER PRIMARY KEY AUTOINCREMENT,
	owner       TEXT NOT NULL,
	text        TEXT NOT NULL,
	written_at  INTEGER,                                      -- by the author's clock; null: not known
	received_at INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS notes_owner ON notes (owner, id);

CREATE TABLE IF NOT EXISTS emergency_messages (
	id          INTEGER PRIMARY KEY AUTOINCREMENT,
	owner       TEXT NOT NULL,
	text        TEXT NOT NULL,
	written_at  INTEGER,
	received_at INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS emergency_messages_owner ON emergency_messages (owner, id);
`

// sqliteEntries writes in the transaction of the store. The only thing ever put into its SQL is the name of a collection,
// which is a constant.
type sqliteEntries struct{ db *sql.DB }

func (s sqliteEntries) add(ctx context.Context, tx *sql.Tx, c collection, owner string, e entry) (entry, error) {
	var writtenAt *int64
	if e.WrittenAt != nil {
		microseconds := e.WrittenAt.UnixMicro()
		writtenAt = &microseconds
	}
	return scanSQLite(tx.QueryRowContext(ctx, `
		INSERT INTO `+string(c)+` (owner, text, written_at, received_at)
		VALUES (?, ?, ?, ?)
		RETURNING id, text, written_at, received_at`, owner, e.Text, writtenAt, time.Now().UnixMicro()))
}

func (s sqliteEntries) remove(ctx context.Context, tx *sql.Tx, c collection, owner string, id int64) (bool, error) {
	result, err := tx.ExecContext(ctx, `DELETE FROM `+string(c)+` WHERE owner = ? AND id = ?`, owner, id)
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	return rows > 0, err
}

func (s sqliteEntries) list(ctx context.Context, c collection, owner string) ([]entry, error) {
	rows, err := s.db.QueryContext(ctx, `
		SELECT id, text, written_at, received_at
		FROM `+string(c)+`
		WHERE owner = ?
		ORDER BY id DESC
		LIMIT ?`, owner, listLimit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	list := []entry{}
	for rows.Next() {
		e, err := scanSQLite(rows)
		if err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	slices.Reverse(list)
	return list, rows.Err()
}

func scanSQLite(row interface{ Scan(...any) error }) (entry, error) {
	var e entry
	var writtenAt *int64
	var receivedAt int64
	err := row.Scan(&e.ID, &e.Text, &writtenAt, &receivedAt)
	e.ReceivedAt = time.UnixMicro(receivedAt).UTC()
	if writtenAt != nil {
		written := time.UnixMicro(*writtenAt).UTC()
		e.WrittenAt = &written
	}
	return e, err
}
