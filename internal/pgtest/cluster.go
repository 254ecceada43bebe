package pgtest

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A Cluster is a Postgres of its own: nothing else runs on it.
type Cluster struct {
	Dir    string // holds the data directory, the log and the sockets
	Socket string // the directory of the unix socket: a host, as libpq and pgx have it
	Port   int    // the port on 127.0.0.1, and in the socket's name; the same after every Start

	server *supervised
}

// Ways to stop a server, as pg_ctl has them.
const (
	Fast      = "fast"      // ends all transactions and shuts down cleanly
	Immediate = "immediate" // a crash: the next start recovers from the write-ahead log
)

// clusterSettings are those of every cluster. What a commit costs is left as it is: fsync stays on, because tests count
// flushes and crash the server.
func clusterSettings() map[string]string {
	return map[string]string{
		"max_connections":  "300",
		"listen_addresses": "", // the unix socket alone, unless a test needs a port
		"log_line_prefix":  "%m [%p] %a ",
		"shared_buffers":   "64MB",
	}
}

// StartCluster starts a cluster for t alone, on a unix socket and on a port of 127.0.0.1, and removes it when t ends.
// settings are server settings, such as {"default_transaction_isolation": "serializable"}; nil adds none. It takes a
// second or two. It needs Postgres's binaries, whatever HOLDSEND_TEST_DATABASE says.
func StartCluster(t testing.TB, settings map[string]string) *Cluster {
	t.Helper()
	cluster, err := newCluster(settings, true)
	if err != nil {
		if os.Getenv(Variable) != "" {
			err = fmt.Errorf("%w\n(this test needs a server of its own, so %s is not enough)", err, Variable)
		}
		t.Fatalf("no Postgres to test on: %v", err)
	}
	t.Cleanup(func() {
		if err := cluster.server.end(); err != nil {
			t.Errorf("end the cluster: %v", err)
		}
	})
	return cluster
}

// URL returns the connection URL through the unix socket, as superuser, without a schema: see Schema.
func (c *Cluster) URL() string {
	return (&url.URL{Scheme: "postgres", User: url.User("postgres"), Path: "/postgres", RawQuery: encode(url.Values{
		"host": {c.Socket}, "port": {strconv.Itoa(c.Port)}, "sslmode": {"disable"},
	})}).String()
}

// TCPURL is URL through the port on 127.0.0.1. The cluster that tests share has none.
func (c *Cluster) TCPURL() string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", c.Port)
}

// Stop stops the server, Fast or Immediate, and returns once it is down. What it kept stays: Start goes on from there.
func (c *Cluster) Stop(t testing.TB, mode string) {
	t.Helper()
	if err := c.server.do("stop " + mode); err != nil {
		t.Fatalf("stop the cluster: %v\n%s", err, c.log())
	}
}

// Start starts the server after Stop, and returns once it takes connections.
func (c *Cluster) Start(t testing.TB) {
	t.Helper()
	if err := c.server.do("start"); err != nil {
		t.Fatalf("start the cluster: %v\n%s", err, c.log())
	}
}

// Crash stops the server with Immediate and starts it again: the start recovers from the write-ahead log.
func (c *Cluster) Crash() error {
	for _, command := range []string{"stop " + Immediate, "start"} {
		if err := c.server.do(command); err != nil {
			return fmt.Errorf("%s: %w\n%s", command, err, c.log())
		}
	}
	return nil
}

func newCluster(settings map[string]string, tcp bool) (*Cluster, error) {
	binaries, err := findBinaries()
	if err != nil {
		return nil, err
	}
	dir, err := makeDir()
	if err != nil {
		return nil, err
	}
	server, err := supervise(dir, clusterScript, binaries, dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	c := &Cluster{Dir: dir, Socket: dir, Port: 5432, server: server}
	if err := c.create(settings, tcp); err != nil {
		err = fmt.Errorf("%w\nwith the binaries in %s\n%s", err, binaries, c.log())
		return nil, errors.Join(err, server.end())
	}
	return c, nil
}

func (c *Cluster) create(settings map[string]string, tcp bool) error {
	if err := c.server.do("initdb"); err != nil {
		return fmt.Errorf("initdb: %w", err)
	}
	all := clusterSettings()
	all["unix_socket_directories"] = c.Socket
	maps.Copy(all, settings)
	if !tcp {
		return c.configureAndStart(all)
	}
	all["listen_addresses"] = "127.0.0.1"
	// A free port may be taken by the time that the server asks for it: then another is tried.
	var err error
	for range 5 {
		if c.Port, err = freePort(); err != nil {
			return err
		}
		if err = c.configureAndStart(all); err == nil {
			return nil
		}
	}
	return err
}

func (c *Cluster) configureAndStart(settings map[string]string) error {
	settings["port"] = strconv.Itoa(c.Port)
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&text, "%s = '%s'\n", name, strings.ReplaceAll(settings[name], "'", "''"))
	}
	// This file adds to what initdb found out about the machine and wrote to postgresql.conf.
	if err := os.WriteFile(filepath.Join(c.Dir, "data", "postgresql.auto.conf"), []byte(text.String()), 0o600); err != nil {
		return err
	}
	if err := c.server.do("start"); err != nil {
		return fmt.Errorf("pg_ctl start: %w", err)
	}
	return nil
}

// log returns the end of what initdb, pg_ctl and the server wrote.
func (c *Cluster) log() string {
	return tail(filepath.Join(c.Dir, "output")) + tail(filepath.Join(c.Dir, "log"))
}

func tail(file string) string {
	const limit = 4000
	text, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	if len(text) > limit {
		text = text[len(text)-limit:]
	}
	return string(text)
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}

// clusterScript obeys one command a line, and answers each with a line. When its input ends, the cluster goes.
const clusterScript = `
binaries=$1 dir=$2
while read -r command argument; do
	case $command in
	initdb) "$binaries/initdb" --pgdata="$dir/data" --username=postgres --auth=trust --encoding=UTF8 --locale=C --no-sync ;;
	start) "$binaries/pg_ctl" start --pgdata="$dir/data" --log="$dir/log" --wait --timeout=100 ;;
	stop) "$binaries/pg_ctl" stop --pgdata="$dir/data" --mode="$argument" --wait --timeout=100 ;;
	esac >>"$dir/output" 2>&1 </dev/null && echo ok || echo failed
done
"$binaries/pg_ctl" stop --pgdata="$dir/data" --mode=immediate --wait >/dev/null 2>&1 </dev/null
rm -rf "$dir"
`

// findBinaries returns the directory with Postgres's server binaries: the first on PATH, else the newest where Debian,
// Red Hat, Homebrew, Postgres.app and EDB's installer put them.
func findBinaries() (string, error) {
	dirs := filepath.SplitList(os.Getenv("PATH"))
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin",
		"/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql*/bin",
		"/usr/local/opt/postgresql*/bin",
		"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
		"/Applications/Postgres.app/Contents/Versions/*/bin",
		"/Library/PostgreSQL/*/bin",
		"/usr/local/pgsql/bin",
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		slices.Reverse(found) // the newest first, as long as versions have two digits
		dirs = append(dirs, found...)
	}
	for _, dir := range dirs {
		if filepath.IsAbs(dir) && isReachable(dir) && isFile(dir, "initdb") && isFile(dir, "pg_ctl") && isFile(dir, "postgres") {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no initdb, pg_ctl and postgres on PATH or where installers put them: %s", howToGetOne)
}

func isFile(dir, name string) bool {
	info, err := os.Stat(filepath.Join(dir, name))
	return err == nil && info.Mode().IsRegular()
}
