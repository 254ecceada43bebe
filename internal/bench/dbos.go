package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/dbos-inc/dbos-transact-golang/dbos"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go/internal/pgtest"
)

const dbosNote = "*DBOS* is DBOS Transact for Go: a workflow with the key as its ID, with the note written by `RunAsTransaction`, on a " +
	"data source that is also its system database, which is its cheapest arrangement."

// withDBOS stores the note in a transaction of a workflow.
func withDBOS(b *bench, pool *pgxpool.Pool) way {
	schema := pgtest.Value[string](b, pool, "SELECT current_schema()")
	c, err := dbos.NewContext(b.ctx, dbos.Config{
		AppName: "notes", SystemDBPool: pool, DatabaseSchema: schema, ApplicationVersion: "1",
		Logger: slog.New(slog.DiscardHandler),
	})
	b.check(err)
	source, err := dbos.NewDataSource(c, pool, dbos.WithDataSourceSchema(schema))
	b.check(err)
	workflow := func(c dbos.Context, owner string) (string, error) {
		return dbos.RunAsTransaction(c, source, func(ctx context.Context, tx dbos.Tx) (string, error) {
			var id int64
			if err := tx.QueryRow(ctx, insertNote, owner, noteText).Scan(&id); err != nil {
				return "", err
			}
			return string(answer(id)), nil
		})
	}
	dbos.RegisterWorkflow(c, workflow, dbos.WithWorkflowName(operation))
	b.check(dbos.Launch(c))
	b.Cleanup(func() {
		if err := dbos.Shutdown(c, 10*time.Second); err != nil {
			b.Errorf("shut DBOS down: %v", err)
		}
	})
	handle := func(key string) error {
		running, err := dbos.RunWorkflow(c, workflow, owner, dbos.WithWorkflowID(key))
		if err != nil {
			return err
		}
		_, err = running.GetResult()
		return err
	}
	return way{create: handle, replay: handle}
}
