package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// What every contender does: it stores a note, and answers with its id. The body of the request is 200 bytes of JSON.
const (
	notesTable = `CREATE TABLE notes (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, owner text NOT NULL, text text NOT NULL)`
	insertNote = `INSERT INTO notes (owner, text) VALUES ($1, $2) RETURNING id`

	owner     = "6f1e2a4c-9a0b-4f4e-8d47-0c5a3c1b2d3e"
	operation = "note.create"
	noteText  = "Buy milk, and bread, and cheese if there is any."
)

var body = []byte(`{"text":"` + noteText + `","place":{"lat":52.516,"lon":13.377},"tags":["` + strings.Repeat("x", 200-106) + `"]}`)

// key is that of number n, as long as a UUID: Fiber's middleware takes no other.
func key(n int64) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }

func answer(id int64) []byte { return []byte(`{"id":` + strconv.FormatInt(id, 10) + `}`) }

// place makes a schema with the notes in it, and returns the connection URL that leads there.
func (b *bench) place() (url string) {
	url = pgtest.Schema(b, b.server().TCPURL())
	conn, err := pgx.Connect(b.ctx, url)
	b.check(err)
	defer func() { _ = conn.Close(context.Background()) }()
	pgtest.Exec(b, conn, notesTable)
	return url
}

// extraConnections is what a contender's pool has beyond one for each client: DBOS listens on one of its own.
const extraConnections = 4

// A way is one way to protect a create, set up on a pool of its own.
type way struct {
	create func(key string) error
	replay func(key string) error // of a key that was created before; nil: create it again
}

// A maker sets a way up. It is asked for a pool at a URL and makes its tables there.
type maker struct {
	name string
	make func(b *bench, pool *pgxpool.Pool) way
}

// makers are the ways in the order of the tables. The first is what the others are measured by.
func makers() []maker {
	return []maker{
		{"unprotected", unprotected},
		{"holdsend", protected},
		{"its statements alone", alone},
		{"by hand", byHand},
		{"Fiber", withFiber},
		{"DBOS", withDBOS},
	}
}

// replayers are makers, and a replay that comes to another process.
func replayers() []maker { return slices.Insert(makers(), 2, maker{"holdsend elsewhere", elsewhere}) }

// unprotected is what a service does that has no protection, and a read of the note by its primary key.
func unprotected(b *bench, pool *pgxpool.Pool) way {
	return way{
		create: func(string) error {
			_, err := storeNote(b.ctx, pool, owner)
			return err
		},
		replay: func(string) error {
			var text string
			return pool.QueryRow(b.ctx, `SELECT text FROM notes WHERE id = $1`, 1).Scan(&text)
		},
	}
}

// storeNote is BEGIN, INSERT and COMMIT, a round trip each.
func storeNote(ctx context.Context, pool *pgxpool.Pool, owner string) (id int64, err error) {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if err := tx.QueryRow(ctx, insertNote, owner, noteText).Scan(&id); err != nil {
		return 0, err
	}
	return id, tx.Commit(ctx)
}

// protected is HandleIdempotent on the Postgres store. A retry comes to the process that has created.
func protected(b *bench, pool *pgxpool.Pool) way {
	store := b.store(pool)
	return way{create: b.handles(store, owner, holdsend.OutcomeCreated), replay: b.handles(store, owner, holdsend.OutcomeReplayed)}
}

// elsewhere is protected, but a retry comes to another process. Its records are in the same table, and another owner's.
func elsewhere(b *bench, pool *pgxpool.Pool) way {
	const owner = owner + ".elsewhere"
	return way{
		create: b.handles(b.store(pool), owner, holdsend.OutcomeCreated),
		replay: b.handles(b.store(pool), owner, holdsend.OutcomeReplayed),
	}
}

func (b *bench) store(pool *pgxpool.Pool) *holdsend.PostgresStore {
	pgtest.Exec(b, pool, holdsend.PostgresSchema(nil))
	store, err := holdsend.NewPostgresStore(pool, nil)
	b.check(err)
	return store
}

func (b *bench) handles(store holdsend.Store[pgx.Tx], owner string, want holdsend.Outcome) func(key string) error {
	return func(key string) error { return handle(b.ctx, store, owner, key, want) }
}

func handle(ctx context.Context, store holdsend.Store[pgx.Tx], owner, key string, want holdsend.Outcome) error {
	got, err := holdsend.HandleIdempotent(ctx, store, requestOf(owner, key), createNote)
	if err == nil && got.Outcome != want {
		return fmt.Errorf("the outcome is %s, not %s", got.Outcome, want)
	}
	return err
}

func requestOf(owner, key string) holdsend.Request {
	return holdsend.Request{
		Owner: owner, Operation: operation,
		Header:  http.Header{holdsend.HeaderIdempotencyKey: {key}},
		Content: json.RawMessage(body),
	}
}

func createNote(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
	var id int64
	if err := tx.QueryRow(ctx, insertNote, owner, noteText).Scan(&id); err != nil {
		return holdsend.Response{}, err
	}
	return holdsend.Response{
		Status: http.StatusCreated,
		Header: http.Header{"Content-Type": {"application/json"}},
		Body:   answer(id),
	}, nil
}

// byHand is the design that most teams write: a table of keys, a claim that is committed so that others see it, and the
// answer stored in the transaction of the note. It compares content, but judges no age and takes nothing over.
func byHand(b *bench, pool *pgxpool.Pool) way {
	pgtest.Exec(b, pool, `CREATE TABLE idempotency_keys (
		owner text NOT NULL, operation text NOT NULL, key text NOT NULL, request_hash text NOT NULL,
		locked_at timestamptz NOT NULL DEFAULT now(), finished_at timestamptz, status int, header jsonb, body bytea,
		PRIMARY KEY (owner, operation, key))`)
	ctx := b.ctx
	handle := func(key string) (created bool, err error) {
		sum := sha256.Sum256(body)
		hash := hex.EncodeToString(sum[:])
		tag, err := pool.Exec(ctx, `INSERT INTO idempotency_keys (owner, operation, key, request_hash) VALUES ($1, $2, $3, $4)
			ON CONFLICT DO NOTHING`, owner, operation, key, hash)
		if err != nil {
			return false, err
		}
		if tag.RowsAffected() == 0 {
			var stored string
			var status *int
			var header, answer []byte
			err := pool.QueryRow(ctx, `SELECT request_hash, status, header, body FROM idempotency_keys
				WHERE owner = $1 AND operation = $2 AND key = $3`, owner, operation, key).Scan(&stored, &status, &header, &answer)
			if err == nil && (stored != hash || status == nil) {
				err = errors.New("a conflict, or still in progress")
			}
			return false, err
		}
		tx, err := pool.Begin(ctx)
		if err != nil {
			return false, err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		var id int64
		if err := tx.QueryRow(ctx, insertNote, owner, noteText).Scan(&id); err != nil {
			return false, err
		}
		if _, err := tx.Exec(ctx, `UPDATE idempotency_keys SET finished_at = now(), status = $4, header = $5, body = $6
			WHERE owner = $1 AND operation = $2 AND key = $3`, owner, operation, key,
			http.StatusCreated, `{"Content-Type":["application/json"]}`, answer(id)); err != nil {
			return false, err
		}
		return true, tx.Commit(ctx)
	}
	return way{create: expect(handle, true), replay: expect(handle, false)}
}

// expect makes sure that a contender did what is measured.
func expect(handle func(key string) (created bool, err error), want bool) func(string) error {
	return func(key string) error {
		created, err := handle(key)
		if err == nil && created != want {
			return fmt.Errorf("created is %t, not %t", created, want)
		}
		return err
	}
}

// creates returns the ways to create at url as contenders, each on a pool of its own.
func (b *bench) creates(url string, clients int, makers []maker) []contender {
	var all []contender
	for _, m := range makers {
		w := m.make(b, b.pool(url, clients+extraConnections))
		all = append(all, contender{m.name, func(n int64) error { return w.create(key(n)) }})
	}
	return all
}

// replays is creates for keys that were created before.
func (b *bench) replays(url string, clients int, makers []maker) []contender {
	const keys = 200
	var all []contender
	for _, m := range makers {
		w := m.make(b, b.pool(url, clients+extraConnections))
		b.times(0, keys, extraConnections, w.create)
		all = append(all, contender{m.name, func(n int64) error { return w.replay(key(n % keys)) }})
	}
	return all
}

// times calls create with the keys of n numbers from first, by as many clients at once.
func (b *bench) times(first, n int64, clients int, create func(key string) error) {
	var done atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, clients)
	for i := range errs {
		all.Go(func() {
			for k := done.Add(1) - 1; k < n && errs[i] == nil && b.ctx.Err() == nil; k = done.Add(1) - 1 {
				errs[i] = create(key(first + k))
			}
		})
	}
	all.Wait()
	b.check(errors.Join(append(errs, b.ctx.Err())...))
}

// everywhere measures contenders at each number of clients and each delay, and reports their ratios to the first.
func (b *bench) everywhere(base string, make func(b *bench, url string, clients int) []contender) table {
	t := table{rows: [][]string{{"clients", "added delay"}}}
	for _, delay := range b.setting.delays {
		for _, clients := range b.setting.clients {
			b.within(func(b *bench) {
				contenders := make(b, b.delayed(b.place(), delay), clients)
				rates := b.alternate(clients, contenders)
				if len(t.rows[0]) == 2 {
					for _, c := range contenders[1:] {
						t.rows[0] = append(t.rows[0], c.name)
					}
				}
				row := []string{strconv.Itoa(clients), millis(delay)}
				for i := range contenders[1:] {
					row = append(row, ratios(rates[i+1], rates[0]).String())
				}
				t.add(row...)
			})
		}
	}
	t.note("Throughput as a ratio to %s: the median of %d rounds of %s, and the quartiles.", base, b.setting.rounds, b.setting.round)
	return t
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%g ms", float64(d)/float64(time.Millisecond))
}

func measureCreates(b *bench) []table {
	t := b.everywhere("the same create unprotected (`BEGIN`, `INSERT … RETURNING`, `COMMIT`)", func(b *bench, url string, clients int) []contender {
		return b.creates(url, clients, makers())
	})
	t.note("%s", fiberNote)
	t.note("%s", dbosNote)
	return []table{t}
}

func measureReplays(b *bench) []table {
	return []table{b.everywhere("a bare `SELECT` by primary key", func(b *bench, url string, clients int) []contender {
		return b.replays(url, clients, replayers())
	})}
}

// measureMixes takes every twentieth operation for a replay of an earlier key.
func measureMixes(b *bench) []table {
	return []table{b.everywhere("the same mix unprotected (a `SELECT` by primary key for a replay)", func(b *bench, url string, clients int) []contender {
		var all []contender
		for _, m := range []maker{{"unprotected", unprotected}, {"holdsend", protected}, {"by hand", byHand}} {
			w := m.make(b, b.pool(url, clients+extraConnections))
			b.check(w.create(key(0)))
			all = append(all, contender{m.name, func(n int64) error {
				if n%20 == 0 {
					return w.replay(key(0))
				}
				return w.create(key(n))
			}})
		}
		return all
	})}
}
