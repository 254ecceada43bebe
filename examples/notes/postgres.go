package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// openPostgres returns a backend that keeps entries and records in one database.
func openPostgres(ctx context.Context, url string, logger *slog.Logger) (*backend, error) {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return nil, err
	}
	store, err := holdsend.NewPostgresStore(pool, nil)
	if err == nil {
		err = createTables(ctx, pool)
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return &backend{
		name:    "postgres",
		handler: newHandler(store, postgresEntries{pool}, logger),
		purge:   store.PurgeExpired,
		close:   pool.Close,
	}, nil
}

// createTables may run at every start, of many processes at once.
func createTables(ctx context.Context, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for _, statements := range []string{holdsend.PostgresSchema(nil), postgresSchema} {
		if _, err := pool.Exec(ctx, statements); err != nil {
			return fmt.Errorf("creating the tables: %w", err)
		}
	}
	return nil
}

// postgresSchema is sent as one query without arguments, which Postgres runs as one transaction. It waits its turn on a
// lock of its own, because two simultaneous CREATE TABLE IF NOT EXISTS can fail with a duplicate.
//
// The primary keys lead with the owner, so that they also serve the lists; ids are unique in the table all the same.
const postgresSchema = `
SELECT pg_advisory_xact_lock(hashtext('holdsend-go/examples/notes'));

CREATE TABLE IF NOT EXISTS notes (
	owner       text COLLATE "C" NOT NULL,
	id          bigint GENERATED ALWAYS AS IDENTITY,
	text        text NOT NULL,
	written_at  timestamptz,                                      -- by the author's clock; null: not known
	received_at timestamptz NOT NULL DEFAULT statement_timestamp(),
	PRIMARY KEY (owner, id)
);

CREATE TABLE IF NOT EXISTS emergency_messages (
	owner       text COLLATE "C" NOT NULL,
	id          bigint GENERATED ALWAYS AS IDENTITY,
	text        text NOT NULL,
	written_at  timestamptz,
	received_at timestamptz NOT NULL DEFAULT statement_timestamp(),
	PRIMARY KEY (owner, id)
);
`

// postgresEntries writes in the transaction of the store. The only thing ever put into its SQL is the name of a
// collection, which is a constant.
type postgresEntries struct{ pool *pgxpool.Pool }

func (p postgresEntries) add(ctx context.Context, tx pgx.Tx, c collection, owner string, e entry) (entry, error) {
	rows, err := tx.Query(ctx, `
		INSERT INTO `+string(c)+` (owner, text, written_at)
		VALUES ($1, $2, $3)
		RETURNING id, text, written_at, received_at`, owner, e.Text, e.WrittenAt)
	if err != nil {
		return entry{}, err
	}
	return pgx.CollectExactlyOneRow(rows, scanEntry)
}

func (p postgresEntries) remove(ctx context.Context, tx pgx.Tx, c collection, owner string, id int64) (bool, error) {
	tag, err := tx.Exec(ctx, `DELETE FROM `+string(c)+` WHERE owner = $1 AND id = $2`, owner, id)
	return tag.RowsAffected() > 0, err
}

func (p postgresEntries) list(ctx context.Context, c collection, owner string) ([]entry, error) {
	rows, err := p.pool.Query(ctx, `
		SELECT id, text, written_at, received_at
		FROM `+string(c)+`
		WHERE owner = $1
		ORDER BY id DESC
		LIMIT $2`, owner, listLimit)
	if err != nil {
		return nil, err
	}
	list, err := pgx.CollectRows(rows, scanEntry)
	slices.Reverse(list)
	return list, err
}

func scanEntry(row pgx.CollectableRow) (entry, error) {
	var e entry
	err := row.Scan(&e.ID, &e.Text, &e.WrittenAt, &e.ReceivedAt)
	e.ReceivedAt = e.ReceivedAt.UTC()
	if e.WrittenAt != nil {
		*e.WrittenAt = e.WrittenAt.UTC()
	}
	return e, err
}
