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
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// PgBouncer starts a PgBouncer in transaction mode before the database at connectionURL, and returns the connection URL
// through it. It is ended when t ends. settings are PgBouncer's, such as {"pool_mode": "session", "default_pool_size":
// "5"}; nil adds none.
//
// Settings in connectionURL, such as the search_path that URL and Schema put there, are set on each of PgBouncer's
// connections to the server, because PgBouncer would not pass them on.
func PgBouncer(t testing.TB, connectionURL string, settings map[string]string) string {
	t.Helper()
	return StartPgBouncer(t, connectionURL, settings).URL
}

// A Bouncer is a PgBouncer that a test restarts.
type Bouncer struct {
	URL string // the connection URL through it

	server *supervised
}

// StartPgBouncer is PgBouncer for a test that restarts it.
func StartPgBouncer(t testing.TB, connectionURL string, settings map[string]string) *Bouncer {
	t.Helper()
	pooledURL, server, err := startPgBouncer(connectionURL, settings)
	if err != nil {
		t.Fatalf("start PgBouncer: %v", err)
	}
	t.Cleanup(func() {
		if err := server.end(); err != nil {
			t.Errorf("end PgBouncer: %v", err)
		}
	})
	return &Bouncer{URL: pooledURL, server: server}
}

// Restart kills PgBouncer, with all its connections, and starts it again. It returns once it listens.
func (b *Bouncer) Restart() error {
	if err := b.server.do("start"); err != nil {
		return err
	}
	return waitForSocket(bouncerSocket(b.server.command.Dir))
}

const bouncerPort = 6432 // only part of the socket's name

func bouncerSocket(dir string) string {
	return filepath.Join(dir, ".s.PGSQL."+strconv.Itoa(bouncerPort))
}

func startPgBouncer(connectionURL string, settings map[string]string) (string, *supervised, error) {
	binary, err := findPgBouncer()
	if err != nil {
		return "", nil, err
	}
	config, err := pgconn.ParseConfig(connectionURL)
	if err != nil {
		return "", nil, err
	}
	dir, err := makeDir()
	if err != nil {
		return "", nil, err
	}
	file := filepath.Join(dir, "pgbouncer.ini")
	// The directory is closed to others, so the file may be open to the user whom PgBouncer runs as.
	if err := os.WriteFile(file, []byte(pgBouncerFile(config, settings, dir, bouncerPort)), 0o644); err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	socket := bouncerSocket(dir)
	server, err := supervise(dir, pgBouncerScript, binary, dir, socket)
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := server.do("start"); err != nil {
		err = fmt.Errorf("%w\n%s", err, tail(filepath.Join(dir, "output")))
		return "", nil, errors.Join(err, server.end())
	}
	if err := waitForSocket(socket); err != nil {
		return "", nil, errors.Join(err, server.end())
	}
	query := url.Values{"host": {dir}, "port": {strconv.Itoa(bouncerPort)}, "sslmode": {"disable"}}
	if name := config.RuntimeParams["application_name"]; name != "" {
		query.Set("application_name", name)
	}
	pooled := url.URL{Scheme: "postgres", User: url.User(config.User), Path: "/pooled", RawQuery: encode(query)}
	return pooled.String(), server, nil
}

func pgBouncerFile(config *pgconn.Config, settings map[string]string, dir string, port int) string {
	var onConnect []string
	for _, name := range slices.Sorted(maps.Keys(config.RuntimeParams)) {
		value := strings.ReplaceAll(config.RuntimeParams[name], "'", "''")
		onConnect = append(onConnect, fmt.Sprintf("select set_config('%s', '%s', false)", name, value))
	}
	var text strings.Builder
	fmt.Fprintln(&text, "[databases]")
	fmt.Fprint(&text, "pooled =")
	for _, pair := range [][2]string{
		{"host", config.Host}, {"port", strconv.Itoa(int(config.Port))}, {"dbname", config.Database},
		{"user", config.User}, {"password", config.Password}, {"connect_query", strings.Join(onConnect, "; ")},
	} {
		if pair[1] != "" {
			fmt.Fprintf(&text, " %s='%s'", pair[0], strings.ReplaceAll(pair[1], "'", "''"))
		}
	}
	all := map[string]string{
		"pool_mode":       "transaction",
		"auth_type":       "any", // whoever can reach the socket is the user above
		"listen_addr":     "",
		"listen_port":     strconv.Itoa(port),
		"unix_socket_dir": dir,
		"max_client_conn": "300",
	}
	maps.Copy(all, settings)
	fmt.Fprintln(&text, "\n[pgbouncer]")
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&text, "%s = %s\n", name, all[name])
	}
	return text.String()
}

// pgBouncerScript starts PgBouncer at each line, after killing the one that runs, and answers once its socket is there.
// When its input ends, PgBouncer goes, the hard way: the signals for the soft ones differ between its versions.
const pgBouncerScript = `
binary=$1 dir=$2 socket=$3
pid=
end() {
	[ -z "$pid" ] && return
	kill -KILL $pid 2>/dev/null
	wait $pid 2>/dev/null
	rm -f "$socket"
}
while read -r _; do
	end
	"$binary" "$dir/pgbouncer.ini" >"$dir/output" 2>&1 </dev/null &
	pid=$!
	while [ ! -S "$socket" ] && kill -0 $pid 2>/dev/null; do sleep 0.02; done
	[ -S "$socket" ] && echo ok || echo failed
done
end
rm -rf "$dir"
`

func findPgBouncer() (string, error) {
	dirs := filepath.SplitList(os.Getenv("PATH"))
	// Debian has it where only root's PATH looks.
	dirs = append(dirs, "/usr/sbin", "/usr/local/bin", "/opt/homebrew/bin", "/home/linuxbrew/.linuxbrew/bin")
	for _, dir := range dirs {
		if filepath.IsAbs(dir) && isReachable(dir) && isFile(dir, "pgbouncer") {
			return filepath.Join(dir, "pgbouncer"), nil
		}
	}
	return "", errors.New("no pgbouncer on PATH: install it (Debian and Ubuntu: apt-get install pgbouncer; macOS: brew install pgbouncer)")
}

// waitForSocket waits until a server listens on a socket that exists: it is bound first.
func waitForSocket(path string) error {
	retry := time.NewTicker(5 * time.Millisecond)
	defer retry.Stop()
	for deadline := time.Now().Add(setupTimeout); ; <-retry.C {
		conn, err := net.Dial("unix", path)
		if err == nil {
			return conn.Close()
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(deadline) {
			return err
		}
	}
}
