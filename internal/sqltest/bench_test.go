package sqltest

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
	"github.com/holdsend/holdsend-go/sqlstore"
)

// BenchmarkSQLite compares a protected create and a replay with the same create unprotected, on one file.
func BenchmarkSQLite(b *testing.B) {
	for name, driver := range sqliteDrivers {
		for _, synchronous := range []string{"NORMAL", "FULL"} {
			for _, clients := range []int{1, 8} {
				b.Run(fmt.Sprintf("%s/synchronous=%s/clients=%d", name, synchronous, clients), func(b *testing.B) {
					db, err := sql.Open(driver, sqliteDSN(filepath.Join(b.TempDir(), "bench.db"))+"&_txlock=immediate&_pragma=synchronous("+synchronous+")")
					require.NoError(b, err)
					b.Cleanup(func() { db.Close() })
					db.SetMaxIdleConns(2 * clients)
					execute(b, db, sqlstore.SQLiteSchema(nil)+"CREATE TABLE writes (name TEXT NOT NULL)")
					store, err := sqlstore.NewSQLite(db, nil)
					require.NoError(b, err)
					unprotected := func(int64) error { return insertUnprotected(db) }
					create, replay := contenders(store, insertNote)
					compare(b, clients, []contender{{"unprotected", unprotected}, {"create", create}, {"replay", replay}})
				})
			}
		}
	}
}

// BenchmarkPostgres compares this package's store on pgx's driver with the one on pgx itself, and both with an unprotected
// create.
func BenchmarkPostgres(b *testing.B) {
	for _, clients := range []int{1, 8} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			store, db, url := newPostgres(b, "pgx", nil, nil)
			db.SetMaxIdleConns(8)
			pool := pgtest.Pool(b, url, func(c *pgxpool.Config) { c.MaxConns = 8 })
			native, err := holdsend.NewPostgresStore(pool, nil)
			require.NoError(b, err)
			create, replay := contenders(store, insertNote)
			nativeCreate, nativeReplay := contenders(native, func(ctx context.Context, tx pgx.Tx, _ holdsend.Incoming) (holdsend.Response, error) {
				_, err := tx.Exec(ctx, "INSERT INTO writes VALUES ('note')")
				return created, err
			})
			compare(b, clients, []contender{
				{"unprotected", func(int64) error { return insertUnprotected(db) }},
				{"create", create}, {"replay", replay}, {"pgx-create", nativeCreate}, {"pgx-replay", nativeReplay},
			})
		})
	}
}

func insertUnprotected(db *sql.DB) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	if _, err := tx.Exec("INSERT INTO writes VALUES ('note')"); err != nil {
		return err
	}
	return tx.Commit()
}

// contenders returns a create with a new key each time, and one with a key for each number.
func contenders[Tx any](store holdsend.Store[Tx], create holdsend.CreateFunc[Tx]) (fresh, replay func(int64) error) {
	var unique atomic.Int64
	handle := func(key string) error {
		req := request(key)
		req.Wait = 0
		_, err := holdsend.HandleIdempotent(context.Background(), store, req, create)
		return err
	}
	kind := fmt.Sprintf("%T", store)
	kind = map[bool]string{true: "native", false: "sql"}[kind == "*holdsend.PostgresStore"]
	return func(int64) error { return handle(fmt.Sprintf("fresh-%s-%d", kind, unique.Add(1))) },
		func(n int64) error { return handle(fmt.Sprintf("replay-%s-%d", kind, n)) }
}

type contender struct {
	name string
	do   func(n int64) error
}

// compare lets the contenders take turns in short rounds, the first being what the others are measured by, and reports
// the median of their throughputs as a ratio to its: the machine's speed changes more between runs than they differ.
func compare(b *testing.B, clients int, contenders []contender) {
	const operations = 20
	round := func(c contender) float64 {
		var failed atomic.Pointer[error]
		var all sync.WaitGroup
		start := time.Now()
		for client := range clients {
			all.Go(func() {
				for i := range operations {
					if err := c.do(int64(client*operations + i)); err != nil {
						failed.Store(&err)
						return
					}
				}
			})
		}
		all.Wait()
		if err := failed.Load(); err != nil {
			b.Fatalf("%s: %v", c.name, *err)
		}
		return float64(clients*operations) / time.Since(start).Seconds()
	}
	throughput := make([][]float64, len(contenders))
	for _, c := range contenders { // statements get prepared, connections opened
		round(c)
	}
	for b.Loop() {
		for i, c := range contenders {
			throughput[i] = append(throughput[i], round(c))
		}
	}
	base := median(throughput[0])
	b.ReportMetric(0, "ns/op") // a round is no operation
	for i, c := range contenders[1:] {
		b.ReportMetric(median(throughput[i+1])/base, c.name+"/"+contenders[0].name)
	}
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}
