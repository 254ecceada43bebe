package holdsend_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// BenchmarkPostgres compares a protected create and a replay with the same create unprotected (BEGIN, INSERT, COMMIT). The
// three take turns in short rounds of one run, because the machine's speed changes more between runs than they differ;
// what is reported is the median of the rounds' throughputs, as a ratio to the unprotected one.
func BenchmarkPostgres(b *testing.B) {
	cluster := pgtest.StartCluster(b, nil) // the shared one does not flush
	for _, clients := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			url := pgtest.Schema(b, cluster.URL())
			pool := pgtest.Pool(b, url, func(c *pgxpool.Config) { c.MaxConns = int32(clients) })
			pgtest.Exec(b, pool, holdsend.PostgresSchema(nil))
			pgtest.Exec(b, pool, "CREATE TABLE notes (text text NOT NULL)")
			store, err := holdsend.NewPostgresStore(pool, nil)
			if err != nil {
				b.Fatal(err)
			}
			ctx := context.Background()
			unprotected := func(int64) error {
				return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, "INSERT INTO notes VALUES ('hello')")
					return err
				})
			}
			handle := func(n int64) error {
				_, err := holdsend.HandleIdempotent(ctx, store, request("item-"+strconv.FormatInt(n, 10)+"-0000"), insertNote)
				return err
			}
			var unique atomic.Int64
			unique.Store(1 << 20)
			create := func(int64) error { return handle(unique.Add(1)) }
			compare(b, clients, []contender{{"unprotected", unprotected}, {"create", create}, {"replay", handle}})
		})
	}
}

// BenchmarkMemory is BenchmarkPostgres on the memory store, against a create in a transaction of the same store.
func BenchmarkMemory(b *testing.B) {
	store := holdsend.NewMemoryStore(nil)
	ctx := context.Background()
	create := func(_ context.Context, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
		tx.OnCommit(func() {})
		return holdsend.Response{Status: 201, Body: []byte("stored")}, nil
	}
	handle := func(n int64) error {
		_, err := holdsend.HandleIdempotent(ctx, store, request("item-"+strconv.FormatInt(n, 10)+"-0000"), create)
		return err
	}
	var unique atomic.Int64
	unique.Store(1 << 20)
	compare(b, 1, []contender{
		{"unprotected", func(int64) error {
			return store.InTx(ctx, func(ctx context.Context, tx *holdsend.MemoryTx) error {
				_, err := create(ctx, tx, holdsend.Incoming{})
				return err
			})
		}},
		{"create", func(int64) error { return handle(unique.Add(1)) }},
		{"replay", handle},
	})
}

type contender struct {
	name string
	do   func(n int64) error
}

// compare lets the contenders take turns, the first being what the others are measured by. Each round of one is 20
// operations a client, numbered from 0.
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
			b.Fatal(*err)
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
	for i, c := range contenders {
		if i == 0 {
			continue
		}
		b.ReportMetric(median(throughput[i])/base, c.name+"/"+contenders[0].name)
	}
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}
