package main

import (
	_ "embed"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// partitionedSQL is the recipe of docs/performance.md.
//
//go:embed partitioned.sql
var partitionedSQL string

// partitioned is the store on a partitioned table.
func partitioned(b *bench, pool *pgxpool.Pool) way {
	pgtest.Exec(b, pool, partitionedSQL)
	return protected(b, pool)
}

// measurePartitions compares the partitioned table with the plain one.
func measurePartitions(b *bench) (tables []table) {
	b.within(func(b *bench) {
		b.setting.delays = []time.Duration{0}
		for _, replays := range []bool{false, true} {
			t := b.everywhere("the plain table", func(b *bench, url string, clients int) []contender {
				contenders := b.creates
				if replays {
					contenders = b.replays
				}
				all := contenders(url, clients, []maker{{"plain", protected}})
				all = append(all, contenders(b.place(), clients, []maker{{"16 partitions", partitioned}})...)
				generic := pgtest.With(b, b.place(), "plan_cache_mode", "force_generic_plan")
				return append(all, contenders(generic, clients, []maker{{"16 partitions, generic plans", partitioned}})...)
			})
			t.note("Postgres plans a prepared statement on partitions anew each time, unless `plan_cache_mode` is `force_generic_plan`.")
			t.title = map[bool]string{false: "Creates", true: "Replays"}[replays]
			tables = append(tables, t)
		}
	})
	return tables
}
