package main

import (
	"context"
	"crypto/md5"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

const ownerRecords = 1000 // an owner has that many

// generate writes n completed records, numbered from first, as creates would have left them: owners and keys in no order.
// ttl is when they expire, as an SQL expression.
const generate = `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at,
	completed_at, expires_at, status, header, body)
SELECT $3 || md5('owner' || n / 1000), 'note.create', md5('key' || n), 'completed',
	'hs1:' || md5('a' || n) || md5('b' || n), md5('claim' || n)::uuid, now() - interval '1 day', now() - interval '1 day',
	$4::timestamptz, 201, '{"Content-Type":["application/json"]}', ('{"id":' || n || '}')::bytea
FROM generate_series($1::bigint, $1::bigint + $2::bigint - 1) AS n`

// generatedOwner and generatedScope are what generate has written for number n.
func generatedOwner(n int64) string { return md5Of("owner", n/ownerRecords) }

func generatedScope(n int64) holdsend.Scope {
	return holdsend.Scope{Owner: generatedOwner(n), Operation: operation, Key: md5Of("key", n)}
}

func md5Of(what string, n int64) string {
	return fmt.Sprintf("%x", md5.Sum([]byte(what+strconv.FormatInt(n, 10))))
}

// A grown is a table with many records.
type grown struct {
	records int64
	pool    *pgxpool.Pool
	store   *holdsend.PostgresStore
}

// grow makes a table with n records. It is filled before it has its indexes, which is what a restored one is like.
func (b *bench) grow(n int64, clients int) grown {
	g := grown{records: n, pool: b.pool(b.place(), clients+extraConnections)}
	pgtest.Exec(b, g.pool, holdsend.PostgresSchema(nil))
	pgtest.Exec(b, g.pool, "ALTER TABLE holdsend_records DROP CONSTRAINT holdsend_records_pkey")
	pgtest.Exec(b, g.pool, generate, 0, n, "", nil)
	pgtest.Exec(b, g.pool, "ALTER TABLE holdsend_records ADD PRIMARY KEY (owner, operation, key)")
	pgtest.Exec(b, g.pool, "VACUUM (ANALYZE) holdsend_records")
	var err error
	g.store, err = holdsend.NewPostgresStore(g.pool, nil)
	b.check(err)
	return g
}

// sizes are those that are compared, the smallest first.
func (b *bench) sizes() (sizes []int64) {
	for n := int64(1e4); n <= b.setting.records; n *= 10 {
		if n != 1e5 || b.setting.records == 1e5 {
			sizes = append(sizes, n)
		}
	}
	return sizes
}

// measureScale compares tables of all sizes, in turns.
func measureScale(b *bench) []table {
	const clients = 4
	growth := table{title: "Growth", rows: [][]string{{"records", "creates", "replays", "purge", "forget", "table and indexes, bytes a record"}}}
	var tables []grown
	var creates, replays []contender
	for _, n := range b.sizes() {
		g := b.grow(n, clients)
		tables = append(tables, g)
		creates = append(creates, contender{"create", func(n int64) error {
			// An owner among those that are there, so that each create meets a page of the index at random.
			return handle(b.ctx, g.store, generatedOwner(rand.Int64N(g.records)), key(n), holdsend.OutcomeCreated)
		}})
		replays = append(replays, contender{"replay", func(int64) error { return b.readAgain(g) }})
	}
	var bytes []string
	for _, g := range tables {
		size := pgtest.Value[int64](b, g.pool, "SELECT pg_total_relation_size('holdsend_records')")
		bytes = append(bytes, number(float64(size)/float64(g.records)))
	}
	createRates, replayRates := b.alternate(clients, creates), b.alternate(clients, replays)
	purges, forgets := make([][]float64, len(tables)), make([][]float64, len(tables))
	for round := range min(b.setting.rounds, 5) {
		for i, g := range tables {
			purge, forget := b.erase(g, round)
			purges[i], forgets[i] = append(purges[i], purge), append(forgets[i], forget)
		}
	}
	for i, g := range tables {
		growth.add(power(g.records), ratios(createRates[i], createRates[0]).String(), ratios(replayRates[i], replayRates[0]).String(),
			ratios(purges[i], purges[0]).String(), ratios(forgets[i], forgets[0]).String(), bytes[i])
	}
	growth.note("Rates as a ratio to the smallest table's: medians over rounds, and the quartiles, with %d clients. A purge "+
		"deletes 5,000 expired records, a forget an owner with %d. Replays are of records chosen at random.", clients, ownerRecords)
	return []table{growth, b.storage(), b.purgeBesideTraffic(clients)}
}

// readAgain reads a generated record at random, by Find: a replay would compare its fingerprint, which is made up.
func (b *bench) readAgain(g grown) error {
	record, err := g.store.Find(b.ctx, generatedScope(rand.Int64N(g.records)))
	if err == nil && record.State != holdsend.StateCompleted {
		err = fmt.Errorf("a generated record is %s", record.State)
	}
	return err
}

// erase returns how many records a second a purge and a forget delete.
func (b *bench) erase(g grown, round int) (purge, forget float64) {
	const expired = 5000
	first := int64(1e12) + int64(round)*1e6
	pgtest.Exec(b, g.pool, generate, first, expired, "expired", time.Now().Add(-time.Hour))
	start := time.Now()
	purged, err := g.store.PurgeExpired(b.ctx)
	b.check(err)
	purge = float64(purged.Records) / time.Since(start).Seconds()
	if purged.Records != expired {
		b.Fatalf("purged %d records", purged.Records)
	}

	first += 500_000
	pgtest.Exec(b, g.pool, generate, first, ownerRecords, "forgotten", nil)
	start = time.Now()
	forgotten, err := g.store.ForgetOwner(b.ctx, "forgotten"+generatedOwner(first))
	b.check(err)
	if forgotten != ownerRecords {
		b.Fatalf("forgot %d records", forgotten)
	}
	return purge, float64(forgotten) / time.Since(start).Seconds()
}

func power(n int64) string {
	zeros := 0
	for ; n%10 == 0; n /= 10 {
		zeros++
	}
	return fmt.Sprintf("10^%d", zeros)
}

// storage tells what a record takes with short and long owners, in a table that has its indexes from the start.
func (b *bench) storage() table {
	n := min(b.setting.records, 100_000)
	t := table{title: "Bytes a record", rows: [][]string{{"owner", "table", "primary key", "other indexes", "total"}}}
	for _, o := range []struct {
		name   string
		prefix int // before the 32 characters of the owner proper
	}{{"32 bytes", 0}, {"64 bytes", 32}, {"255 bytes", 223}} {
		b.within(func(b *bench) {
			pool := b.pool(b.place(), 1)
			pgtest.Exec(b, pool, holdsend.PostgresSchema(nil))
			pgtest.Exec(b, pool, generate, 0, n, fmt.Sprintf("%0*d", o.prefix, 0)[:o.prefix], nil)
			pgtest.Exec(b, pool, "VACUUM (ANALYZE) holdsend_records")
			size := func(sql string) float64 { return float64(pgtest.Value[int64](b, pool, "SELECT "+sql)) / float64(n) }
			records, primary := size("pg_table_size('holdsend_records')"), size("pg_relation_size('holdsend_records_pkey')")
			total := size("pg_total_relation_size('holdsend_records')")
			t.add(o.name, number(records), number(primary), number(total-records-primary), number(total))
		})
	}
	t.note("%d records with an operation of 11 bytes, a key of 32, an answer of about 12, one header, no expiry and no "+
		"resource ref, the keys in no order.", n)
	return t
}

// purgeBesideTraffic purges a table of expired records, and tells what creates keep of their rate meanwhile.
func (b *bench) purgeBesideTraffic(clients int) table {
	n := min(b.setting.records, 1e6)
	t := table{title: "Purge beside live traffic", rows: [][]string{{"expired records", "creates keep"}}}
	b.within(func(b *bench) {
		g := b.grow(0, clients)
		pgtest.Exec(b, g.pool, generate, 0, n, "", time.Now().Add(-time.Hour))
		pgtest.Exec(b, g.pool, "VACUUM (ANALYZE) holdsend_records")
		live := contender{"create", func(n int64) error { return handle(b.ctx, g.store, owner, key(n), holdsend.OutcomeCreated) }}
		var next atomic.Int64
		b.round(live, clients, b.setting.round, &next)
		var calm, beside []float64
		for range 4 {
			calm = append(calm, b.round(live, clients, b.setting.round, &next))
		}
		ended := make(chan error, 1)
		ctx, cancel := context.WithCancel(b.ctx)
		defer cancel()
		go func() {
			purged, err := g.store.PurgeExpired(ctx)
			if err == nil && purged.Records != n {
				err = fmt.Errorf("purged %d records", purged.Records)
			}
			ended <- err
		}()
		for purging := true; purging; {
			beside = append(beside, b.round(live, clients, b.setting.round/2, &next))
			select {
			case err := <-ended:
				b.check(err)
				purging = false
			default:
			}
		}
		for range 4 {
			calm = append(calm, b.round(live, clients, b.setting.round, &next))
		}
		base := spreadOf(calm).median
		for i := range beside {
			beside[i] /= base
		}
		t.add(strconv.FormatInt(n, 10), spreadOf(beside).String())
	})
	t.note("%d clients create while one PurgeExpired runs: their rate over that without it, before and after.", clients)
	return t
}

// measureFillfactor compares settings of the table after the same creates, and what completion costs because the index of
// claims has the state in its condition: no such update can be HOT.
func measureFillfactor(b *bench) []table {
	const clients = 8
	n, fillfactors := int64(1500), []int{100, 90, 80, 50}
	if b.setting.quick {
		n, fillfactors = 400, []int{100, 50}
	}
	t := table{rows: [][]string{{"fillfactor", "index on claims", "HOT updates", "WAL, bytes a create", "table, bytes a record", "indexes, bytes a record", "after churn, times as large"}}}
	for _, index := range []bool{true, false} {
		for _, fillfactor := range fillfactors {
			b.within(func(b *bench) {
				pool := b.pool(b.place(), clients+extraConnections)
				pgtest.Exec(b, pool, holdsend.PostgresSchema(nil))
				pgtest.Exec(b, pool, fmt.Sprintf("ALTER TABLE holdsend_records SET (fillfactor = %d)", fillfactor))
				if !index {
					pgtest.Exec(b, pool, "DROP INDEX holdsend_records_claimed_at_idx")
				}
				store, err := holdsend.NewPostgresStore(pool, nil)
				b.check(err)
				var made int64
				fill := func(ttl time.Duration) {
					start := made
					made += n
					b.times(start, n, clients, func(key string) error {
						request := requestOf(owner, key)
						request.CompletedTTL = ttl
						_, err := holdsend.HandleIdempotent(b.ctx, store, request, createNote)
						return err
					})
				}
				size := func(of string) float64 { return float64(pgtest.Value[int64](b, pool, "SELECT "+of)) }
				wal := size("(pg_current_wal_insert_lsn() - '0/0')::bigint")
				fill(time.Millisecond)
				wal = size("(pg_current_wal_insert_lsn() - '0/0')::bigint") - wal
				pool.Reset() // a backend reports what it did when it ends
				deadline := time.Now().Add(30 * time.Second)
				for pgtest.Value[int64](b, pool, "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relid = 'holdsend_records'::regclass") < n {
					if time.Now().After(deadline) {
						b.Fatal("the statistics do not arrive")
					}
					pgtest.Exec(b, pool, "SELECT pg_sleep(0.05)")
				}
				hot := pgtest.Value[float64](b, pool, `SELECT n_tup_hot_upd::float8 / n_tup_upd FROM pg_stat_user_tables
					WHERE relid = 'holdsend_records'::regclass`)
				records, indexes := size("pg_table_size('holdsend_records')"), size("pg_indexes_size('holdsend_records')")
				for range 4 {
					_, err := store.PurgeExpired(b.ctx)
					b.check(err)
					pgtest.Exec(b, pool, "VACUUM holdsend_records")
					fill(time.Millisecond)
				}
				churned := size("pg_total_relation_size('holdsend_records')") / (records + indexes)
				t.add(strconv.Itoa(fillfactor), map[bool]string{true: "yes", false: "no"}[index], fmt.Sprintf("%.0f %%", 100*hot),
					number(wal/float64(n)), number(records/float64(n)), number(indexes/float64(n)), number(churned))
			})
		}
	}
	t.note("%d creates by %d clients with an expiry. Churn is four times a purge, a vacuum and as many creates again. The "+
		"index on claims is that of PurgeExpired.", n, clients)
	return []table{t}
}
