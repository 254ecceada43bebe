// Package pgtest gives tests a real Postgres. Only tests import it.
//
// The server is the one that HOLDSEND_TEST_DATABASE names (a connection URL), or else a throwaway cluster made from the
// binaries on this machine: one per test process, started when the first test asks, and gone with the process, however
// it ends. Each test works in a schema of its own, so tests run in parallel:
//
//	url := pgtest.URL(t)           // a fresh schema, dropped when t ends
//	pool := pgtest.Pool(t, url, nil) // on that schema, closed when t ends
//
// A test that restarts its server, or counts what the whole server does, asks for a cluster of its own: [StartCluster].
package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Variable names the environment variable with the connection URL of a Postgres to test on. Its role must be allowed to
// create schemas in its database.
const Variable = "HOLDSEND_TEST_DATABASE"

const howToGetOne = `install Postgres's server binaries (Debian and Ubuntu: apt-get install postgresql; macOS: brew install postgresql@17),
or set ` + Variable + ` to the connection URL of a database whose role may create schemas,
or, where there is only Docker, use "go run ." in internal/dockertest`

// setupTimeout bounds one step of setting up or tearing down: a statement, or a server's start or stop. It is long
// because a machine that runs many packages' tests at once is slow, and short enough to end before go test's own limit.
const setupTimeout = 2 * time.Minute

// server returns the server that this process's tests share. The function itself is the only state that the package
// keeps, because one process must have one cluster: a start takes a second or two.
var server = sync.OnceValues(func() (shared, error) {
	if value := os.Getenv(Variable); value != "" {
		if !strings.HasPrefix(value, "postgres://") && !strings.HasPrefix(value, "postgresql://") {
			return shared{}, errors.New(Variable + " must be a connection URL, such as postgres://user:password@localhost:5432/database")
		}
		return shared{url: value}, nil
	}
	// Nothing here crashes this server or counts its flushes, and a schema for each test costs many: a test that does
	// either starts a cluster of its own, which flushes.
	cluster, err := newCluster(map[string]string{"fsync": "off", "full_page_writes": "off"}, false)
	if err != nil {
		return shared{}, err
	}
	return shared{url: cluster.URL(), cluster: cluster}, nil
})

type shared struct {
	url string
	// cluster is held so that the pipe to its supervisor is not collected as garbage, which would end it. Nobody else
	// ends it: the supervisor does when the process is gone.
	cluster *Cluster
}

// URL returns the connection URL of a fresh schema on the shared server. Every connection made with it has that schema
// as its search_path. When t ends, connections still open are ended and the schema is dropped. Calling it again makes
// another schema.
func URL(t testing.TB) string {
	t.Helper()
	shared, err := server()
	if err != nil {
		t.Fatalf("no Postgres to test on: %v", err)
	}
	return Schema(t, shared.url)
}

// Schema is URL for any server: it makes a fresh schema in the database at serverURL, and returns serverURL with that
// schema as its search_path.
func Schema(t testing.TB, serverURL string) string {
	t.Helper()
	// The name also becomes the application_name, so that what the test leaves open can be found and ended.
	name := "test_" + strings.ToLower(rand.Text()[:16])
	withConnection(t, serverURL, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "create schema "+name)
		return err
	})
	t.Cleanup(func() {
		withConnection(t, serverURL, func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1", name)
			if err != nil {
				return err
			}
			// Ended connections let go of their locks a little later, so the drop may wait; a lock that is kept by
			// something else must fail the test and not hang it.
			if _, err := conn.Exec(ctx, "set lock_timeout = '20s'"); err != nil {
				return err
			}
			_, err = conn.Exec(ctx, "drop schema "+name+" cascade")
			return err
		})
	})
	return With(t, serverURL, "search_path", name, "application_name", name)
}

// With returns a connection URL with parameters set: names and values in turn. A parameter that Postgres knows as a
// setting, such as default_transaction_isolation, is set on each connection; those of pgx, such as
// default_query_exec_mode, are too.
func With(t testing.TB, connectionURL string, namesAndValues ...string) string {
	t.Helper()
	u, err := url.Parse(connectionURL)
	if err != nil {
		t.Fatal("the connection URL is malformed") // the error would show its password
	}
	query, err := url.ParseQuery(strings.ReplaceAll(u.RawQuery, "+", "%2B"))
	if err != nil {
		t.Fatal("the connection URL's parameters are malformed")
	}
	for i := 0; i+1 < len(namesAndValues); i += 2 {
		query.Set(namesAndValues[i], namesAndValues[i+1])
	}
	u.RawQuery = encode(query)
	return u.String()
}

// encode encodes a query as pgx and libpq read it: for them a plus sign is no space.
func encode(query url.Values) string {
	return strings.ReplaceAll(query.Encode(), "+", "%20")
}

// Pool returns a pool of connections to connectionURL, closed when t ends. configure may change its settings; nil leaves
// them alone. Release what you acquired before t ends: closing waits for it, and fails the test if it waits in vain.
func Pool(t testing.TB, connectionURL string, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(connectionURL)
	if err != nil {
		t.Fatal(err)
	}
	if configure != nil {
		configure(config)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			pool.Close()
		}()
		select {
		case <-closed:
		case <-time.After(setupTimeout):
			t.Errorf("the pool cannot be closed: %d connections were never released", pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// A Database runs one statement: *pgxpool.Pool, *pgx.Conn and pgx.Tx are all one.
type Database interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row
}

// Exec runs a statement, or several in one text if there are no arguments, and fails t on an error.
func Exec(t testing.TB, db Database, sql string, arguments ...any) pgconn.CommandTag {
	t.Helper()
	tag, err := db.Exec(context.Background(), sql, arguments...)
	if err != nil {
		t.Fatalf("%v\nin: %s", err, sql)
	}
	return tag
}

// Value returns the one value that a query yields, and fails t on an error or if there is no row.
func Value[T any](t testing.TB, db Database, sql string, arguments ...any) T {
	t.Helper()
	var value T
	if err := db.QueryRow(context.Background(), sql, arguments...).Scan(&value); err != nil {
		t.Fatalf("%v\nin: %s", err, sql)
	}
	return value
}

// withConnection runs do on a connection of its own. It is not a pool's: setting up must work when the test's pool is
// used up or broken.
func withConnection(t testing.TB, connectionURL string, do func(context.Context, *pgx.Conn) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, connectionURL)
	if err != nil {
		t.Fatalf("connect to the test's Postgres: %v", err)
	}
	defer conn.Close(ctx)
	if err := do(ctx, conn); err != nil {
		t.Fatalf("set up or tear down the test's schema: %v", err)
	}
}

// DropInserts makes the records table drop whatever is inserted, silently.
const DropInserts = `CREATE FUNCTION drop_row() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER drop_row BEFORE INSERT ON holdsend_records FOR EACH ROW EXECUTE FUNCTION drop_row()`
