package main

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// measureVacuum compares how soon autovacuum comes, on tables whose records expire as fast as others are created. Autovacuum
// is on for the table whose turn it is.
func measureVacuum(b *bench) []table {
	const clients = 4
	passes, length, records := 3, 20*b.setting.round, min(b.setting.records, 200_000)
	if b.setting.quick {
		passes = 1
	}
	t := table{rows: [][]string{{"scale factor", "creates", "vacuums", "dead row versions at most", "table and indexes, times as large"}}}
	outer := b.setting
	b.within(func(b *bench) {
		b.setting = outer
		b.cluster = pgtest.StartCluster(b, map[string]string{
			"checkpoint_timeout": "1h", "max_wal_size": "16GB", "shared_buffers": "16MB",
			"autovacuum_naptime": "1s", // a minute's work in a second
		})
		type contestant struct {
			grown
			factor  string
			rates   []float64
			dead    int64
			initial int64
		}
		var all []*contestant
		for _, factor := range []string{"0.2", "0.05", "0.02", "0.005"} {
			c := &contestant{grown: b.grow(records, clients), factor: factor}
			c.initial = pgtest.Value[int64](b, c.pool, "SELECT pg_total_relation_size('holdsend_records')")
			pgtest.Exec(b, c.pool, "ALTER TABLE holdsend_records SET (autovacuum_enabled = false, autovacuum_vacuum_scale_factor = "+factor+")")
			all = append(all, c)
		}
		var made atomic.Int64
		for range passes {
			for _, c := range all {
				pgtest.Exec(b, c.pool, "ALTER TABLE holdsend_records SET (autovacuum_enabled = true)")
				create := contender{"create", func(int64) error {
					n := made.Add(1)
					if n%500 == 0 {
						if _, err := c.store.PurgeExpired(b.ctx); err != nil {
							return err
						}
						c.dead = max(c.dead, pgtest.Value[int64](b, c.pool, "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = 'holdsend_records'::regclass"))
					}
					request := requestOf(generatedOwner(n%records), key(n))
					request.CompletedTTL = 100 * time.Millisecond
					_, err := holdsend.HandleIdempotent[pgx.Tx](b.ctx, c.store, request, createNote)
					return err
				}}
				c.rates = append(c.rates, b.round(create, clients, length, new(atomic.Int64)))
				pgtest.Exec(b, c.pool, "ALTER TABLE holdsend_records SET (autovacuum_enabled = false)")
			}
		}
		for _, c := range all {
			vacuums := pgtest.Value[int64](b, c.pool, "SELECT autovacuum_count FROM pg_stat_user_tables WHERE relid = 'holdsend_records'::regclass")
			size := pgtest.Value[int64](b, c.pool, "SELECT pg_total_relation_size('holdsend_records')")
			t.add(c.factor, ratios(c.rates, all[0].rates).String(), strconv.FormatInt(vacuums, 10), strconv.FormatInt(c.dead, 10),
				number(float64(size)/float64(c.initial)))
		}
	})
	t.note("Tables of %d records that stay, and %d times %s of creates by %d clients whose records expire at once and are purged. "+
		"The scale factor is autovacuum_vacuum_scale_factor, 0.2 by default; creates are a rate, as a ratio to that of the default; "+
		"autovacuum looks once a second. The sizes are those at the end, over those before.", records, passes, length, clients)
	return []table{t}
}
