package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdsend/holdsend-go/internal/chaos/service"
	"github.com/holdsend/holdsend-go/internal/pgproxy"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// The worlds.
const (
	worldPostgres     = "Postgres, Read Committed"
	worldSerializable = "Postgres, Serializable"
	worldPgBouncer    = "Postgres behind PgBouncer"
	worldClocks       = "Postgres, the services' clocks an hour apart"
	worldSQLite       = "SQLite"
)

const (
	maxIdle       = time.Second
	takeOverAfter = 100 * time.Millisecond
	staleClaim    = 200 * time.Millisecond
)

// A world is a database, what stands before it, and the program that serves from it.
type world struct {
	name     string
	program  string // of a service
	config   service.Config
	poolSize []int           // of each service
	clock    []time.Duration // by how much each service's clock is wrong

	// Postgres.
	cluster *pgtest.Cluster
	bouncer *pgtest.Bouncer
	proxy   *pgproxy.Proxy

	// SQLite.
	directory string
	file      string
}

// buildTimeout bounds the build of a service. Where its dependencies are not built yet, it takes minutes on a busy machine.
const buildTimeout = 6 * time.Minute

// serviceProgram returns the program that serves in a world, building it where it is not this one.
func serviceProgram(t testing.TB, world string) string {
	ctx, cancel := context.WithTimeout(t.Context(), buildTimeout)
	defer cancel()
	switch world {
	case worldClocks:
		return buildWithClock(ctx, t, t.TempDir())
	case worldSQLite:
		program := filepath.Join(t.TempDir(), "chaosservice")
		build := exec.CommandContext(ctx, "go", "build", "-o", program, "./chaosservice")
		build.Dir, build.Env = sqliteModule(ctx, t), append(os.Environ(), "CGO_ENABLED=0") // as README.md builds a service on SQLite
		if output, err := runBuild(build); err != nil {
			t.Fatalf("build the service on SQLite, within %v: %v\n%s", buildTimeout, err, output)
		}
		return program
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// runBuild runs a build and returns its output. The compilers that a killed build leaves behind hold nobody up.
func runBuild(build *exec.Cmd) ([]byte, error) {
	build.WaitDelay = time.Second
	return build.CombinedOutput()
}

// openWorld starts what a world needs. t ends it.
func openWorld(t testing.TB, name, program, bug string) *world {
	w := &world{name: name, program: program, config: service.Config{
		TakeOverAfter: takeOverAfter, StaleClaim: staleClaim, MaxIdle: maxIdle, Bug: bug,
	}}
	if name == worldSQLite {
		w.poolSize, w.clock = []int{4, 8}, make([]time.Duration, 2)
		w.directory = t.TempDir()
		return w
	}
	w.poolSize = []int{2, 8, 4} // the first is soon empty
	w.clock = make([]time.Duration, len(w.poolSize))
	w.cluster = pgtest.StartCluster(t, map[string]string{"deadlock_timeout": "100ms"})
	url := pgtest.With(t, w.cluster.URL(), "application_name", "chaos")
	switch name {
	case worldSerializable:
		w.config.Isolation, w.config.Contend = "serializable", true
	case worldClocks:
		w.clock = []time.Duration{-time.Hour, 0, time.Hour}
	case worldPgBouncer:
		w.bouncer = pgtest.StartPgBouncer(t, url, map[string]string{"default_pool_size": "10"})
		w.config.Pooled = true
		url = pgtest.With(t, w.bouncer.URL, "default_query_exec_mode", "exec")
	}
	w.proxy = pgproxy.Start(t, url)
	w.config.Database = w.proxy.URL()
	return w
}

// sqliteModule returns the directory of the module that has SQLite's drivers.
func sqliteModule(ctx context.Context, t testing.TB) string {
	output, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		t.Fatalf("run this in the module: %v", err)
	}
	return filepath.Join(string(bytes.TrimSpace(output)), "internal", "sqltest")
}

// start starts the service of one slot.
func (w *world) start(slot int) (*process, error) {
	config := w.config
	config.PoolSize = w.poolSize[slot]
	return startProcess(slot, w.program, config, w.clock[slot])
}

// database is what admin works on.
type database interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row
}

const (
	adminName = "chaos-admin"

	// ofServices is the condition on pg_stat_activity for what services have open.
	ofServices = `backend_type = 'client backend' AND application_name <> '` + adminName + `'`

	adminTimeout = 20 * time.Second
)

// admin does something on a connection past all that stands before the database. It waits for a database that restarts.
func (w *world) admin(ctx context.Context, do func(context.Context, database) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), adminTimeout)
	defer cancel()
	config, err := pgx.ParseConfig(w.cluster.URL())
	if err != nil {
		return err
	}
	config.RuntimeParams["application_name"] = adminName
	config.RuntimeParams["default_transaction_read_only"] = "off"
	for {
		conn, err := pgx.ConnectConfig(ctx, config)
		if err == nil {
			defer conn.Close(ctx)
			return do(ctx, conn)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// empty makes the tables of the next round.
func (w *world) empty(ctx context.Context, round int) error {
	if w.cluster == nil {
		w.file = filepath.Join(w.directory, fmt.Sprintf("round-%d.db", round))
		w.config.Database = w.file
		return nil
	}
	return w.admin(ctx, func(ctx context.Context, db database) error {
		_, err := db.Exec(ctx, "DROP TABLE IF EXISTS holdsend_records, resources, counters;"+service.PostgresTables())
		return err
	})
}

// rows returns what the database holds once all services are dead and it has ended what they had sent.
func (w *world) rows(ctx context.Context) (rows []service.Row, err error) {
	if w.cluster == nil {
		ctx, cancel := context.WithTimeout(ctx, adminTimeout)
		defer cancel()
		output, err := exec.CommandContext(ctx, w.program, "-dump", w.file).Output()
		if err != nil {
			return nil, fmt.Errorf("read the rows of SQLite: %w", err)
		}
		return rows, json.Unmarshal(output, &rows)
	}
	err = w.admin(ctx, func(ctx context.Context, db database) error {
		for busy := true; busy; {
			err := db.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE "+ofServices+" AND state <> 'idle')").Scan(&busy)
			if err != nil {
				return fmt.Errorf("wait for the last transactions: %w", err)
			}
			if busy {
				time.Sleep(20 * time.Millisecond)
			}
		}
		found, err := db.Query(ctx, "SELECT id, owner, operation, item, text FROM resources")
		if err != nil {
			return err
		}
		rows, err = pgx.CollectRows(found, pgx.RowToStructByPos[service.Row])
		return err
	})
	return rows, err
}
