package holdsend_test

import (
	"context"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
	"github.com/holdsend/holdsend-go/internal/postgressql"
)

// A driver prepares a statement once for a connection, maybe while the table is empty, and Postgres keeps its plan. So
// what is right for ten million records must be chosen for none, and the other way round.
func TestPostgresPlans(t *testing.T) {
	t.Parallel()
	url := pgtest.Schema(t, pgtest.URL(t))
	pool := pgtest.Pool(t, url, nil)
	pgtest.Exec(t, pool, holdsend.PostgresSchema(nil))
	purges := map[string]string{"PurgeRecords": "expires_at_idx", "PurgeClaims": "claimed_at_idx"}

	check := func(t *testing.T) {
		conn, err := pool.Acquire(context.Background())
		require.NoError(t, err)
		defer conn.Release()
		pgtest.Exec(t, conn, "SET plan_cache_mode = force_generic_plan")
		statements := reflect.ValueOf(*postgressql.For("holdsend_records"))
		for i := range statements.NumField() {
			name, sql := statements.Type().Field(i).Name, statements.Field(i).String()
			switch name {
			case "Now", "ForgetBatch", "ForgetNext", "ForgetOne": // read no table, or walk over an owner's records
				continue
			}
			parameters := 0
			for _, found := range regexp.MustCompile(`\$(\d+)`).FindAllStringSubmatch(sql, -1) {
				var number int
				_, _ = fmt.Sscan(found[1], &number)
				parameters = max(parameters, number)
			}
			arguments := ""
			if parameters > 0 {
				arguments = "(NULL" + strings.Repeat(", NULL", parameters-1) + ")"
			}
			pgtest.Exec(t, conn, "PREPARE "+name+" AS "+sql)
			plan := explain(t, conn, "EXECUTE "+name+arguments)
			pgtest.Exec(t, conn, "DEALLOCATE "+name)

			for _, scan := range regexp.MustCompile(`Seq Scan on holdsend_records|(?:using|on) (\w+_idx\d*|\w+_pkey)|Tid Scan`).FindAllString(plan, -1) {
				index := scan[strings.LastIndex(scan, " ")+1:]
				switch {
				case scan == "Tid Scan", index == "holdsend_records_pkey":
				case name == "Tombstone" && strings.HasSuffix(index, "resource_ref_idx"):
				case purges[name] != "" && strings.HasSuffix(index, purges[name]):
				default:
					t.Errorf("%s must find its rows by their scope, and uses %s:\n%s", name, scan, plan)
				}
			}
		}
	}
	t.Run("new table", check)
	pgtest.Exec(t, pool, `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at, completed_at, expires_at, resource_ref)
		SELECT 'owner ' || n % 10, 'note.create', 'item-' || n, 'completed', 'hs1:', gen_random_uuid(), now(), now(), now() + n * interval '1 s', n
		FROM generate_series(1, 20000) n; ANALYZE holdsend_records`)
	t.Run("analyzed", check)
	pgtest.Exec(t, pool, "DELETE FROM holdsend_records WHERE key <> 'item-1'")
	t.Run("before the next vacuum", check)
}

// A batch reads its own rows, however many others a plan for their real number would rather read along.
func TestPostgresPlansOfBatches(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.Schema(t, pgtest.URL(t)), nil)
	pgtest.Exec(t, pool, holdsend.PostgresSchema(nil))
	pgtest.Exec(t, pool, `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at, completed_at, expires_at)
		SELECT 'ada', 'note.create', 'item-' || n, 'completed', 'hs1:', gen_random_uuid(), now(), now(), now() - n * interval '1 s'
		FROM generate_series(1, 20000) n;
		INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at)
		SELECT 'ada', 'note.create', 'claim-' || n, 'claimed', 'hs1:', gen_random_uuid(), now() - n * interval '1 s'
		FROM generate_series(1, 20000) n; ANALYZE holdsend_records`)
	conn, err := pool.Acquire(context.Background())
	require.NoError(t, err)
	defer conn.Release()
	pgtest.Exec(t, conn, "SET plan_cache_mode = force_custom_plan")
	sql := postgressql.For("holdsend_records")
	for name, batch := range map[string]struct{ sql, arguments string }{
		"PurgeRecords": {sql.PurgeRecords, "('-infinity')"},
		"PurgeClaims":  {sql.PurgeClaims, "('-infinity', 1)"},
		"ForgetBatch":  {sql.ForgetBatch, "('ada', 'infinity', '', '')"},
	} {
		pgtest.Exec(t, conn, "PREPARE "+name+" AS "+batch.sql)
		plan := explain(t, conn, "EXECUTE "+name+batch.arguments)
		require.NotContains(t, plan, "Seq Scan", name)
		require.Contains(t, plan, "Tid Scan", name)
	}
}

func explain(t *testing.T, conn *pgxpool.Conn, sql string) string {
	rows, err := conn.Query(context.Background(), "EXPLAIN (COSTS OFF) "+sql)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return strings.Join(lines, "\n")
}

// The last word on one claim a scope is the table's: two that look at the same moment both find it empty.
func TestPostgresTableHasOneRowAScope(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil, nil)
	const claim = `INSERT INTO holdsend_records (owner, operation, key, state, fingerprint, claim_id, claimed_at)
		VALUES ('ada', 'note.create', 'abc-12345', 'claimed', 'hs1:00', gen_random_uuid(), now())`
	pgtest.Exec(t, b.aside, claim)
	_, err := b.aside.Exec(t.Context(), claim)
	require.ErrorContains(t, err, "23505")
}
