package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/gofiber/fiber/v3"
	"github.com/gofiber/fiber/v3/middleware/idempotency"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/valyala/fasthttp"

	"github.com/holdsend/holdsend-go/internal/pgtest"
)

const fiberNote = "*Fiber* is the idempotency middleware of gofiber/fiber v3, called without a socket, with its default lock, which " +
	"is one process's own. Its storage is one of ours, with the table and the statements of gofiber/storage's Postgres " +
	"driver, because the module proxy did not serve that driver (github.com/gofiber/storage/postgres/v3). The note is " +
	"written in a transaction of its own: what the middleware stores is not part of it."

// withFiber stores the note in a handler behind Fiber's middleware.
func withFiber(b *bench, pool *pgxpool.Pool) way {
	pgtest.Exec(b, pool, `CREATE TABLE fiber_storage (k text PRIMARY KEY, v bytea NOT NULL, e bigint NOT NULL DEFAULT 0);
		CREATE INDEX ON fiber_storage (e)`)
	app := fiber.New()
	app.Use(idempotency.New(idempotency.Config{Storage: fiberStorage{pool}}))
	app.Post("/notes", func(c fiber.Ctx) error {
		id, err := storeNote(b.ctx, pool, owner)
		if err != nil {
			return err
		}
		return c.Status(http.StatusCreated).Type("json").Send(answer(id))
	})
	handler := app.Handler()
	handle := func(key string) error {
		var request fasthttp.Request
		request.Header.SetMethod(http.MethodPost)
		request.SetRequestURI("/notes")
		request.Header.SetContentType("application/json")
		request.Header.Set("X-Idempotency-Key", key)
		request.SetBody(body)
		var c fasthttp.RequestCtx
		c.Init(&request, nil, nil)
		handler(&c)
		if c.Response.StatusCode() != http.StatusCreated {
			return fmt.Errorf("the status is %d: %s", c.Response.StatusCode(), c.Response.Body())
		}
		return nil
	}
	return way{create: handle, replay: handle}
}

// fiberStorage is a [fiber.Storage] with the statements of Fiber's driver for Postgres.
type fiberStorage struct{ pool *pgxpool.Pool }

var _ fiber.Storage = fiberStorage{}

func (s fiberStorage) GetWithContext(_ context.Context, key string) (value []byte, err error) {
	var expires int64
	err = s.pool.QueryRow(context.Background(), `SELECT v, e FROM fiber_storage WHERE k = $1`, key).Scan(&value, &expires)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && expires != 0 && expires <= time.Now().Unix() {
		return nil, nil
	}
	return value, err
}

func (s fiberStorage) SetWithContext(_ context.Context, key string, value []byte, lifetime time.Duration) error {
	_, err := s.pool.Exec(context.Background(), `INSERT INTO fiber_storage (k, v, e) VALUES ($1, $2, $3)
		ON CONFLICT (k) DO UPDATE SET v = $4, e = $5`,
		key, value, time.Now().Add(lifetime).Unix(), value, time.Now().Add(lifetime).Unix())
	return err
}

func (s fiberStorage) Get(key string) ([]byte, error) {
	return s.GetWithContext(context.Background(), key)
}

func (s fiberStorage) Set(key string, value []byte, lifetime time.Duration) error {
	return s.SetWithContext(context.Background(), key, value, lifetime)
}

// The middleware calls none of these.
func (fiberStorage) DeleteWithContext(context.Context, string) error { return errors.ErrUnsupported }
func (fiberStorage) Delete(string) error                             { return errors.ErrUnsupported }
func (fiberStorage) ResetWithContext(context.Context) error          { return errors.ErrUnsupported }
func (fiberStorage) Reset() error                                    { return errors.ErrUnsupported }
func (fiberStorage) Close() error                                    { return nil }
