package main

import (
	"context"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go/internal/pgproxy"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// What one operation costs, whatever the machine: counts, not times.
type cost struct {
	wal, flushes           float64
	statements, roundTrips float64
	allocations, allocated float64
}

// measureCosts counts what one client's operations cost, on a server where nobody else writes or flushes.
func measureCosts(b *bench) []table {
	outer := b.setting
	var tables []table
	b.within(func(b *bench) {
		b.setting = outer
		b.cluster = pgtest.StartCluster(b, map[string]string{
			"autovacuum": "off", "wal_writer_delay": "10s", "checkpoint_timeout": "1h", "max_wal_size": "16GB",
			"bgwriter_lru_maxpages": "0", "wal_level": "minimal", "max_wal_senders": "0", "shared_buffers": "16MB",
		})
		for _, replayed := range []bool{false, true} {
			name, makers := "create", makers()
			if replayed {
				name, makers = "replay", replayers()
			}
			t := table{title: "One " + name, rows: [][]string{{
				"", "WAL, bytes", "flushes", "statements", "round trips", "allocations", "allocated, bytes", "client CPU", "server CPU",
			}}}
			var contenders []contender
			var costs []cost
			b.within(func(b *bench) {
				for _, m := range makers {
					c, found := b.countCost(m, replayed)
					contenders, costs = append(contenders, c), append(costs, found)
				}
				client, server := b.cpu(contenders)
				for i, c := range contenders {
					found := costs[i]
					t.add(c.name, number(found.wal), number(found.flushes), number(found.statements), number(found.roundTrips),
						number(found.allocations), number(found.allocated), client[i].String(), server[i].String())
				}
			})
			t.note("CPU is a ratio to the first line: the median of %d rounds, and the quartiles.", b.setting.rounds)
			tables = append(tables, t)
		}
	})
	return tables
}

// countCost counts n operations through a proxy, and as many without it.
func (b *bench) countCost(m maker, replayed bool) (c contender, found cost) {
	const n, keys = 100, 20
	operations := func(b *bench, url string) (contender, *pgxpool.Pool) {
		pool := b.pool(url, 1+extraConnections)
		w := m.make(b, pool)
		if !replayed {
			return contender{m.name, func(n int64) error { return w.create(key(n)) }}, pool
		}
		b.times(0, keys, extraConnections, w.create)
		for range 2 { // the first read of a page may tidy it up, which is logged
			for k := range int64(keys) {
				b.check(w.replay(key(k)))
			}
		}
		return contender{m.name, func(n int64) error { return w.replay(key(n % keys)) }}, pool
	}
	repeat := func(c contender, from, n int64) {
		for i := range n {
			b.check(c.do(from + i))
		}
	}

	b.within(func(b *bench) {
		url := b.place()
		proxy := pgproxy.Start(b, url)
		c, _ := operations(b, proxy.URL())
		repeat(c, 0, keys) // statements get prepared
		proxy.Reset()
		repeat(c, keys, n)
		found.roundTrips = float64(proxy.RoundTrips()) / n
		for _, batch := range proxy.Batches() {
			found.statements += float64(len(batch.SQL)) / n
		}
	})

	url := b.place()
	c, pool := operations(b, url)
	repeat(c, 0, keys)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	repeat(c, keys, n)
	runtime.ReadMemStats(&after)
	found.allocations = float64(after.Mallocs-before.Mallocs) / n
	found.allocated = float64(after.TotalAlloc-before.TotalAlloc) / n

	flushes, wal := b.written(pool)
	repeat(c, keys+n, n)
	flushesAfter, walAfter := b.written(pool)
	found.flushes, found.wal = float64(flushesAfter-flushes)/n, float64(walAfter-wal)/n
	do := c.do
	c.do = func(i int64) error { return do(keys + n + n + i) }
	return c, found
}

// written tells how often the server has flushed, and how much WAL there is. A backend reports its flushes at the latest
// when it ends.
func (b *bench) written(pool *pgxpool.Pool) (flushes, bytes int64) {
	conn, err := pgx.Connect(b.ctx, b.server().URL())
	b.check(err)
	defer func() { _ = conn.Close(context.Background()) }()
	now := pgtest.Value[time.Time](b, conn, "SELECT clock_timestamp()")
	pool.Reset()
	// DBOS keeps a connection to listen on, which flushes nothing; and one that sits idle for 10 s reports too.
	for deadline := time.Now().Add(12 * time.Second); time.Now().Before(deadline); {
		left := pgtest.Value[int32](b, conn, `SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'
			AND application_name = $1 AND backend_start < $2`, pool.Config().ConnConfig.RuntimeParams["application_name"], now)
		if left <= pool.Stat().AcquiredConns() {
			break
		}
	}
	sql := "SELECT wal_sync FROM pg_stat_wal" // new in 14
	if pgtest.Value[int](b, conn, "SELECT current_setting('server_version_num')::int") >= 180000 {
		sql = "SELECT sum(fsyncs)::bigint FROM pg_stat_io WHERE object = 'wal'"
	}
	return pgtest.Value[int64](b, conn, sql), pgtest.Value[int64](b, conn, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")
}

// cpu lets the contenders take turns, and returns what each costs this process and the server, as ratios to the first.
func (b *bench) cpu(contenders []contender) (client, server []spread) {
	const n = 100
	conn, err := pgx.Connect(b.ctx, b.server().URL())
	b.check(err)
	defer func() { _ = conn.Close(context.Background()) }()
	clients, servers := make([][]float64, len(contenders)), make([][]float64, len(contenders))
	for round := range b.setting.rounds {
		for i, c := range contenders {
			for warm := range int64(20) { // connections open again
				b.check(c.do(int64(round)*(n+20) + warm))
			}
			serverBefore, clientBefore := b.serverCPU(conn), processCPU()
			for k := range int64(n) {
				b.check(c.do(int64(round)*(n+20) + 20 + k))
			}
			clientAfter, serverAfter := processCPU(), b.serverCPU(conn)
			clients[i] = append(clients[i], float64(clientAfter-clientBefore))
			servers[i] = append(servers[i], float64(serverAfter-serverBefore))
		}
	}
	for i := range contenders {
		client, server = append(client, ratios(clients[i], clients[0])), append(server, ratios(servers[i], servers[0]))
	}
	return client, server
}

// serverCPU is the time that the server's processes have had.
func (b *bench) serverCPU(conn *pgx.Conn) (total time.Duration) {
	rows, err := conn.Query(b.ctx, "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
	b.check(err)
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	b.check(err)
	for _, pid := range pids {
		total += cpuOf(pid)
	}
	return total
}
