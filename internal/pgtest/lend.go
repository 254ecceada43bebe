package pgtest

import (
	"sync"
	"testing"
)

// Lend returns a function that lends what make makes to one test at a time: what a test has given back is lent again. It
// is for what costs more than a test does, as a connection to Postgres often does: tables with pools on them.
//
// When the borrower ends, clean must leave it as if it were new; what a failed test had is not lent again. Make runs in
// the borrower's goroutine, and what it makes must outlive the borrower.
func Lend[T any](make func() T, clean func(t testing.TB, lent T)) func(t testing.TB) T {
	var mu sync.Mutex
	var free []T
	return func(t testing.TB) T {
		mu.Lock()
		var lent T
		isMade := len(free) > 0
		if isMade {
			lent, free = free[len(free)-1], free[:len(free)-1]
		}
		mu.Unlock()
		if !isMade {
			lent = make()
		}
		t.Cleanup(func() {
			if t.Failed() {
				return
			}
			clean(t, lent)
			if !t.Failed() {
				mu.Lock()
				defer mu.Unlock()
				free = append(free, lent)
			}
		})
		return lent
	}
}

// Empty deletes all rows of tables, once no transaction has touched them that is still open: one that is kept open fails t.
func Empty(t testing.TB, db Database, tables string) {
	t.Helper()
	Exec(t, db, `DO $$
		DECLARE
			name text;
		BEGIN
			SET LOCAL lock_timeout = '20s';
			FOREACH name IN ARRAY '{`+tables+`}'::text[] LOOP
				EXECUTE format('LOCK TABLE %I', name);
				EXECUTE format('DELETE FROM %I', name);
			END LOOP;
		END $$`)
}
