package service

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go"
)

// PostgresTables returns the SQL that creates the tables of a Postgres service.
func PostgresTables() string {
	return holdsend.PostgresSchema(nil) +
		strings.ReplaceAll(Tables, "{id}", "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY") +
		fmt.Sprintf("INSERT INTO counters SELECT n, 0 FROM generate_series(0, %d) n ON CONFLICT DO NOTHING;", counters-1)
}

const counters = 8

// fillFor is how long Fill holds what it takes.
const fillFor = 300 * time.Millisecond

// RunPostgres serves on a PostgresStore.
func RunPostgres(config Config) error {
	poolConfig, err := pgxpool.ParseConfig(config.Database)
	if err != nil {
		return err
	}
	poolConfig.MaxConns = int32(config.PoolSize)
	pool, err := pgxpool.NewWithConfig(context.Background(), poolConfig)
	if err != nil {
		return err
	}
	store, err := holdsend.NewPostgresStore(pool, &holdsend.PostgresOptions{
		TakeOverAfter: config.TakeOverAfter, StaleClaim: config.StaleClaim, MaxIdle: config.MaxIdle,
		TxOptions: pgx.TxOptions{IsoLevel: pgx.TxIsoLevel(config.Isolation)},
	})
	if err != nil {
		return err
	}
	p := postgres{config: config, pool: pool}
	return Run(config, Database[pgx.Tx]{
		Store: store,
		Insert: func(ctx context.Context, tx pgx.Tx, row Row) (id int64, err error) {
			err = tx.QueryRow(ctx, `INSERT INTO resources (owner, operation, item, text) VALUES ($1, $2, $3, $4) RETURNING id`,
				row.Owner, row.Operation, row.Item, row.Text).Scan(&id)
			return id, err
		},
		Delete: func(ctx context.Context, tx pgx.Tx, id int64) error {
			_, err := tx.Exec(ctx, `DELETE FROM resources WHERE id = $1`, id)
			return err
		},
		Count:    count,
		Backends: p.backends,
		SQLState: sqlState,
		Fill:     p.fill,
		Make: map[string]func(context.Context, pgx.Tx) error{
			MakeStatementTimeout: makeStatementTimeout,
			MakeIdleTimeout:      makeIdleTimeout,
			MakeLockTimeout:      p.makeLockTimeout,
			MakeDeadlock:         p.makeDeadlock,
			MakeSerialization:    p.makeSerialization,
		},
	})
}

// count reads one counter and adds to two, in an order that others do not keep to: under Serializable it meets others,
// and now and then it is one side of a deadlock.
func count(ctx context.Context, tx pgx.Tx) error {
	for range 2 {
		if _, err := tx.Exec(ctx, `UPDATE counters SET value = value + 1 WHERE id = $1`, rand.N(counters)); err != nil {
			return err
		}
	}
	return nil
}

func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	if pgconn.Timeout(err) || errors.Is(err, context.Canceled) {
		return ""
	}
	if strings.Contains(err.Error(), "conn") || strings.Contains(err.Error(), "EOF") {
		return "connection lost"
	}
	return ""
}

type postgres struct {
	config Config
	pool   *pgxpool.Pool
}

func (p postgres) backends(ctx context.Context, tx pgx.Tx) (told, server uint32) {
	told = tx.Conn().PgConn().PID()
	if !p.config.Pooled {
		return told, told
	}
	_ = tx.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&server) // 0: the harness sees that there is nothing to strike
	return told, server
}

func (p postgres) fill() {
	ctx, cancel := context.WithTimeout(context.Background(), fillFor)
	defer cancel()
	for {
		conn, err := p.pool.Acquire(ctx)
		if err != nil {
			return
		}
		defer conn.Release()
	}
}

// The faults that a create makes with its database.
const (
	MakeStatementTimeout = "statement_timeout"
	MakeLockTimeout      = "lock_timeout"
	MakeIdleTimeout      = "idle_in_transaction_session_timeout"
	MakeDeadlock         = "deadlock"
	MakeSerialization    = "serialization failure"
)

func makeStatementTimeout(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `SET LOCAL statement_timeout = '20ms'`)
	if err == nil {
		_, err = tx.Exec(ctx, `SELECT pg_sleep(5)`)
	}
	return err
}

func makeIdleTimeout(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = '20ms'`); err != nil {
		return err
	}
	time.Sleep(200 * time.Millisecond)
	_, err := tx.Exec(ctx, `SELECT 1`)
	return err
}

// beside opens a transaction beside the attempt's, on a connection of its own.
func (p postgres) beside(ctx context.Context, do func(tx pgx.Tx) error) error {
	conn, err := pgx.Connect(ctx, p.config.Database)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return err
	}
	return do(tx)
}

const addOne = `UPDATE counters SET value = value + 1 WHERE id = $1`

func (p postgres) makeLockTimeout(ctx context.Context, tx pgx.Tx) error {
	return p.beside(ctx, func(other pgx.Tx) error {
		if _, err := other.Exec(ctx, addOne, 0); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '20ms'`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, addOne, 0)
		return err
	})
}

// makeDeadlock makes the attempt's transaction the one that finds the deadlock, and so its victim.
func (p postgres) makeDeadlock(ctx context.Context, tx pgx.Tx) error {
	a, b := rand.N(counters/2), counters/2+rand.N(counters/2)
	return p.beside(ctx, func(other pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL deadlock_timeout = '20ms'`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, addOne, a); err != nil {
			return err
		}
		if _, err := other.Exec(ctx, `SET LOCAL deadlock_timeout = '10s'`); err != nil {
			return err
		}
		if _, err := other.Exec(ctx, addOne, b); err != nil {
			return err
		}
		crossed := make(chan error, 1)
		go func() {
			_, err := other.Exec(ctx, addOne, a)
			crossed <- err
		}()
		time.Sleep(20 * time.Millisecond) // else the create may be first, and is not the one that closes the circle
		_, err := tx.Exec(ctx, addOne, b)
		<-crossed // whoever was the victim has let its locks go
		return err
	})
}

// makeSerialization changes a row after the attempt's transaction has taken its snapshot.
func (p postgres) makeSerialization(ctx context.Context, tx pgx.Tx) error {
	n := rand.N(counters)
	if _, err := tx.Exec(ctx, `SELECT value FROM counters WHERE id = $1`, n); err != nil {
		return err
	}
	err := p.beside(ctx, func(other pgx.Tx) error {
		if _, err := other.Exec(ctx, addOne, n); err != nil {
			return err
		}
		return other.Commit(ctx)
	})
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, addOne, n)
	return err
}
