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
				plain, divided := []maker{{"plain", protected}}, []maker{{"16 partitions", partitioned}}
				if replays {
					return append(b.replays(url, clients, plain), b.replays(b.place(), clients, divided)...)
				}
				return append(b.creates(url, clients, plain), b.creates(b.place(), clients, divided)...)
			})
			t.title = map[bool]string{false: "Creates", true: "Replays"}[replays]
			tables = append(tables, t)
		}
	})
	return tables
}
