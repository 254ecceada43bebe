package main

import (
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// alone is the protocol of the Postgres store with nothing around it: the same three round trips on the same table, each
// statement as short as it can be. It compares no content, judges no age, finds out nothing about a lost answer, and has no
// guard, so nobody could use it. What it keeps of an unprotected create is the most that the store can.
func alone(b *bench, pool *pgxpool.Pool) way {
	pgtest.Exec(b, pool, holdsend.PostgresSchema(nil))
	const (
		operation = operation + ".alone" // the store's own records are in the same table

		claim = `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at)
			SELECT $1, $2, $3, 'claimed', $4, $5, now() FROM set_config('synchronous_commit', 'off', true)
			ON CONFLICT (owner, operation, key) DO NOTHING`
		lock = `SELECT ctid::text FROM holdsend_records WHERE owner = $1 AND operation = $2 AND key = $3 AND state = 'claimed'
			FOR NO KEY UPDATE`
		complete = `UPDATE holdsend_records SET state = 'completed', completed_at = now(), status = $2, header = $3, body = $4
			WHERE ctid = $1::text::tid`
		find    = `SELECT fingerprint, status, header, body FROM holdsend_records WHERE owner = $1 AND operation = $2 AND key = $3`
		claimID = "00000000-0000-4000-8000-000000000000"
	)
	ctx := b.ctx
	fingerprint, err := holdsend.Fingerprint(operation, body)
	b.check(err)
	handle := func(key string) (created bool, err error) {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return false, err
		}
		defer conn.Release()
		batch := &pgx.Batch{}
		batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		batch.Queue(claim, owner, operation, key, fingerprint, claimID)
		batch.Queue("commit and chain")
		batch.Queue(lock, owner, operation, key)
		results := conn.SendBatch(ctx, batch)
		tx := results.Tx()
		_, err = results.Exec()
		if err != nil {
			return false, errors.Join(err, results.Close())
		}
		tag, err := results.Exec()
		if err != nil {
			return false, errors.Join(err, results.Close())
		}
		created = tag.RowsAffected() == 1
		_, err = results.Exec()
		var row string
		if created && err == nil {
			err = results.QueryRow().Scan(&row)
		}
		if err = errors.Join(err, results.Close()); err != nil {
			return false, err
		}

		batch = &pgx.Batch{}
		if !created {
			var stored, header string
			var status int
			var answer []byte
			batch.Queue(find, owner, operation, key).QueryRow(func(row pgx.Row) error {
				return row.Scan(&stored, &status, &header, &answer)
			})
			batch.Queue("rollback")
			return false, conn.SendBatch(ctx, batch).Close()
		}
		var id int64
		if err := tx.QueryRow(ctx, insertNote, owner, noteText).Scan(&id); err != nil {
			return false, err
		}
		batch.Queue(complete, row, http.StatusCreated, `{"Content-Type":["application/json"]}`, answer(id))
		batch.Queue("commit")
		return true, conn.SendBatch(ctx, batch).Close()
	}
	return way{create: expect(handle, true), replay: expect(handle, false)}
}
