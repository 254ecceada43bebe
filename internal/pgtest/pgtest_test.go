package pgtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if how := os.Getenv("PGTEST_DIE"); how != "" {
		die(how)
	}
	goleak.VerifyTestMain(m)
}

func TestURLIsAFreshSchemaEachTime(t *testing.T) {
	t.Parallel()
	first, second := Pool(t, URL(t), nil), Pool(t, URL(t), nil)
	Exec(t, first, "create table note (text text)")
	Exec(t, second, "create table note (text text)")
	Exec(t, first, "insert into note values ($1)", "hello")
	assert.Equal(t, 1, Value[int](t, first, "select count(*) from note"))
	assert.Equal(t, 0, Value[int](t, second, "select count(*) from note"))
}

func TestTheSchemaIsDroppedThoughATransactionWasLeftOpen(t *testing.T) {
	t.Parallel()
	var schema string
	t.Run("inner", func(t *testing.T) {
		connectionURL := URL(t)
		conn, err := pgx.Connect(t.Context(), connectionURL)
		require.NoError(t, err)
		schema = Value[string](t, conn, "select current_schema()::text")
		Exec(t, conn, "create table note (text text)")
		Exec(t, conn, "begin; insert into note values ('left open')")
	})
	pool := Pool(t, URL(t), nil)
	assert.Equal(t, 0, Value[int](t, pool, "select count(*) from pg_namespace where nspname = $1", schema))
}

func TestWithSetsParameters(t *testing.T) {
	t.Parallel()
	pool := Pool(t, With(t, URL(t), "default_transaction_isolation", "repeatable read"), func(c *pgxpool.Config) {
		c.MaxConns = 1
	})
	assert.EqualValues(t, 1, pool.Config().MaxConns)
	assert.Equal(t, "repeatable read", Value[string](t, pool, "show transaction_isolation"))
}

func TestAClusterOfOnesOwn(t *testing.T) {
	t.Parallel()
	var dir string
	t.Run("inner", func(t *testing.T) {
		cluster := StartCluster(t, map[string]string{"default_transaction_isolation": "serializable"})
		dir = cluster.Dir
		for _, connectionURL := range []string{cluster.URL(), cluster.TCPURL()} {
			conn, err := pgx.Connect(t.Context(), connectionURL)
			require.NoError(t, err)
			assert.Equal(t, "serializable", Value[string](t, conn, "show transaction_isolation"))
			assert.Equal(t, "on", Value[string](t, conn, "show fsync"))
			require.NoError(t, conn.Close(t.Context()))
		}
		conn, err := pgx.Connect(t.Context(), cluster.URL())
		require.NoError(t, err)
		Exec(t, conn, "create table note (text text); insert into note values ('committed')")
		Exec(t, conn, "begin; insert into note values ('not committed')")
		for _, stop := range []func(){
			func() { cluster.Stop(t, Immediate); cluster.Start(t) },
			func() { cluster.Stop(t, Fast); cluster.Start(t) },
			func() { require.NoError(t, cluster.Crash()) },
		} {
			stop()
			require.Error(t, conn.Ping(t.Context()), "the connection outlived the server")
			conn, err = pgx.Connect(t.Context(), cluster.TCPURL())
			require.NoError(t, err, "the port is not the same after Start")
			assert.Equal(t, 1, Value[int](t, conn, "select count(*) from note"))
		}
		require.NoError(t, conn.Close(t.Context()))
	})
	_, err := os.Stat(dir)
	assert.ErrorIs(t, err, os.ErrNotExist, "the cluster's directory is left")
}

func TestABadSettingIsAnErrorWithTheServersLog(t *testing.T) {
	t.Parallel()
	_, err := newCluster(map[string]string{"no_such_setting": "1"}, false)
	require.ErrorContains(t, err, "no_such_setting")
}

func TestPgBouncerPoolsByTransaction(t *testing.T) {
	t.Parallel()
	connectionURL := URL(t)
	direct := Pool(t, connectionURL, nil)
	Exec(t, direct, "create table note (text text)")
	pooledURL := PgBouncer(t, connectionURL, map[string]string{"default_pool_size": "1"})

	// Two clients share one server connection, which only transaction mode allows.
	first, err := pgx.Connect(t.Context(), With(t, pooledURL, "default_query_exec_mode", "exec"))
	require.NoError(t, err)
	second, err := pgx.Connect(t.Context(), With(t, pooledURL, "default_query_exec_mode", "simple_protocol"))
	require.NoError(t, err)
	assert.Equal(t,
		Value[int](t, first, "select pg_backend_pid()"),
		Value[int](t, second, "select pg_backend_pid()"))
	Exec(t, first, "insert into note values ($1)", "in the schema of the URL")
	assert.Equal(t, 1, Value[int](t, direct, "select count(*) from note"))
	require.NoError(t, first.Close(t.Context()))
	require.NoError(t, second.Close(t.Context()))
}

func TestPgBouncerIsRestarted(t *testing.T) {
	t.Parallel()
	bouncer := StartPgBouncer(t, URL(t), nil)
	pooledURL := With(t, bouncer.URL, "default_query_exec_mode", "exec")
	before, err := pgx.Connect(t.Context(), pooledURL)
	require.NoError(t, err)
	require.NoError(t, bouncer.Restart())
	require.Error(t, before.Ping(t.Context()), "the connection outlived PgBouncer")
	after, err := pgx.Connect(t.Context(), pooledURL)
	require.NoError(t, err)
	assert.Equal(t, 1, Value[int](t, after, "select 1"))
	require.NoError(t, after.Close(t.Context()))
}

func TestPgBouncersSettingsAreQuoted(t *testing.T) {
	t.Parallel()
	pooledURL := PgBouncer(t, With(t, URL(t), "application_name", "it's 'quoted'"), nil)
	conn, err := pgx.Connect(t.Context(), With(t, pooledURL, "default_query_exec_mode", "exec"))
	require.NoError(t, err)
	assert.Equal(t, "it's 'quoted'", Value[string](t, conn, "show application_name"))
	require.NoError(t, conn.Close(t.Context()))
}

func TestABadPgBouncerSettingIsAnErrorWithItsLog(t *testing.T) {
	t.Parallel()
	_, _, err := startPgBouncer("postgres://localhost/x", map[string]string{"pool_mode": "no_such_mode"})
	require.ErrorContains(t, err, "no_such_mode")
}

// die is the main function of a test process that starts servers and ends without tidying up.
func die(how string) {
	cluster, err := newCluster(nil, false)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	_, bouncer, err := startPgBouncer(cluster.URL(), nil)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(cluster.Dir)
	fmt.Println(bouncer.command.Dir)
	switch how {
	case "panic":
		panic("as a test might")
	case "exit":
		os.Exit(0)
	case "in a start":
		if err := cluster.server.do("stop fast"); err != nil {
			panic(err)
		}
		fmt.Fprintln(cluster.server.input, "start")
		fallthrough
	default:
		fmt.Println("ready")
		select {} // until it is killed
	}
}

func TestServersEndWithTheProcess(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	for _, how := range []string{"exit", "panic", "kill", "in a start"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), setupTimeout)
			defer cancel()
			process := exec.CommandContext(ctx, self)
			process.Env = append(os.Environ(), "PGTEST_DIE="+how)
			output, err := process.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, process.Start())
			lines := bufio.NewScanner(output)
			var dirs []string
			for lines.Scan() {
				if lines.Text() == "ready" {
					require.NoError(t, process.Process.Kill())
					break
				}
				dirs = append(dirs, lines.Text())
			}
			_ = process.Wait() // it dies on purpose
			require.Len(t, dirs, 2)
			for _, dir := range dirs {
				require.True(t, filepath.IsAbs(dir), dir)
				eventually(t, dir+" is left", func() bool {
					_, err := os.Stat(dir)
					return errors.Is(err, os.ErrNotExist)
				})
				eventually(t, "a server of "+dir+" still runs", func() bool { return !runs(t, dir) })
			}
		})
	}
}

// runs reports that a process names dir in its command line. Linux shows that in /proc, where ps may be missing.
func runs(t *testing.T, dir string) bool {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	if len(files) == 0 {
		output, err := exec.CommandContext(t.Context(), "ps", "-A", "-o", "args").Output()
		require.NoError(t, err)
		return strings.Contains(string(output), dir)
	}
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(line), dir) { // an error: it has ended meanwhile
			return true
		}
	}
	return false
}

func eventually(t *testing.T, otherwise string, condition func() bool) {
	t.Helper()
	retry := time.NewTicker(10 * time.Millisecond)
	defer retry.Stop()
	for deadline := time.Now().Add(setupTimeout); !condition(); <-retry.C {
		if time.Now().After(deadline) {
			t.Fatal(otherwise)
		}
	}
}

func TestTheVariableNamesTheServer(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	run := func(connectionURL string) (string, error) {
		process := exec.CommandContext(t.Context(), self, "-test.run=^TestURLIsAFreshSchemaEachTime$")
		process.Env = append(os.Environ(), Variable+"="+connectionURL)
		output, err := process.CombinedOutput()
		return string(output), err
	}

	cluster := StartCluster(t, map[string]string{"log_statement": "ddl"})
	output, err := run(cluster.TCPURL())
	require.NoError(t, err, output)
	assert.Contains(t, cluster.log(), "create table note", "the test ran elsewhere")
	conn, err := pgx.Connect(t.Context(), cluster.URL())
	require.NoError(t, err)
	assert.Equal(t, 0, Value[int](t, conn, "select count(*) from pg_namespace where nspname like 'test%'"))
	require.NoError(t, conn.Close(t.Context()))

	output, err = run("host=localhost")
	require.Error(t, err)
	assert.Contains(t, output, Variable+" must be a connection URL")
}

func TestWithoutBinariesItSaysHowToGetThem(t *testing.T) {
	// Not parallel: it changes the environment, and where installers put things cannot be hidden from a test. So the
	// text alone is checked.
	t.Setenv("PATH", "")
	if _, err := findBinaries(); err != nil {
		assert.ErrorContains(t, err, "apt-get install postgresql")
	}
	assert.Contains(t, howToGetOne, Variable)
	assert.Contains(t, howToGetOne, "internal/dockertest")
}
