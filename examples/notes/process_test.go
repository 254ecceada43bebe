//go:build unix

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go/examples/internal/shown"
	"github.com/holdsend/holdsend-go/internal/pgtest"
	"github.com/jackc/pgx/v5/pgxpool"
)

// binary builds the service once for all tests, with the race detector if they run with it.
var binary = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.Getenv(binaryDirectory), "notes")
	return path, shown.Build(".", path)
})

// binaryDirectory is the environment variable in which TestMain leaves the directory for the binary.
const binaryDirectory = "NOTES_TEST_BINARY_DIRECTORY"

func TestMain(m *testing.M) {
	directory, err := os.MkdirTemp("", "notes-test-")
	if err == nil {
		err = os.Setenv(binaryDirectory, directory)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(directory)
	os.Exit(code)
}

// startBinary starts the service on a free port, on Postgres unless databaseURL is empty. Else it keeps its data in a
// directory of its own, or where more arguments say.
func startBinary(t *testing.T, databaseURL string, more ...string) *shown.Process {
	t.Helper()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(path, append([]string{"-addr", "127.0.0.1:0"}, more...)...)
	command.Dir = t.TempDir()
	command.Env = shown.Environment("DATABASE_URL=" + databaseURL)
	return shown.Start(t, command)
}

// wantRefusing waits until the service takes no more connections.
func wantRefusing(t *testing.T, p *shown.Process) {
	t.Helper()
	eventually(t, "the service stops listening", func() bool {
		connection, err := net.Dial("tcp", strings.TrimPrefix(p.URL, "http://"))
		if err == nil {
			connection.Close()
		}
		return err != nil
	})
}

func eventually(t *testing.T, what string, isSo func() bool) {
	t.Helper()
	deadline := time.Now().Add(shown.Patience)
	for !isSo() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain until %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// blockNotes keeps every create of a note waiting in its INSERT, until release is called.
func blockNotes(t *testing.T, pool *pgxpool.Pool) (release func()) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release = func() { _ = tx.Rollback(context.Background()) }
	t.Cleanup(release)
	pgtest.Exec(t, tx, `LOCK TABLE notes IN EXCLUSIVE MODE`)
	return release
}

func wantBlocked(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	eventually(t, "a create waits in its INSERT", func() bool {
		return pgtest.Value[bool](t, pool, `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'notes'::regclass AND NOT granted)`)
	})
}

var keyed = []string{headerDemoUser, "ada", "Idempotency-Key", "note-0001"}

func TestShutdownFinishesARunningCreate(t *testing.T) {
	t.Parallel()
	for name, signal := range map[string]syscall.Signal{"SIGTERM": syscall.SIGTERM, "SIGINT": syscall.SIGINT} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			databaseURL := pgtest.URL(t)
			pool := pgtest.Pool(t, databaseURL, nil)
			service := startBinary(t, databaseURL)
			release := blockNotes(t, pool)

			created := make(chan answer, 1)
			go func() {
				a, err := trySend(context.Background(), "POST", service.URL+"/api/notes", `{"text":"in time"}`, keyed...)
				if err != nil {
					t.Error(err)
				}
				created <- a
			}()
			wantBlocked(t, pool)
			service.Signal(signal)
			wantRefusing(t, service)
			release()
			first := <-created
			first.wantFirst(t)
			service.WantExit(t, 0)

			again := startBinary(t, databaseURL)
			send(t, "POST", again.URL+"/api/notes", `{"text":"in time"}`, keyed...).wantReplay(t, first)
		})
	}
}

// The memory backend has no create that takes long, but a client may take long to send one.
func TestShutdownFinishesARequestThatIsStillSent(t *testing.T) {
	t.Parallel()
	service := startBinary(t, "", "-db", ":memory:")
	connection, err := net.Dial("tcp", strings.TrimPrefix(service.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	// The server says 100 Continue when the handler begins to read the body: from then on the request is in flight.
	fmt.Fprintf(connection, "POST /api/notes HTTP/1.1\r\nHost: notes\r\nX-Demo-User: ada\r\nIdempotency-Key: note-0001\r\n"+
		"Expect: 100-continue\r\nContent-Length: 18\r\n\r\n")
	lines := bufio.NewReader(connection)
	for _, want := range []string{"HTTP/1.1 100 Continue\r\n", "\r\n"} {
		if got, err := lines.ReadString('\n'); got != want {
			t.Fatalf("got %q %v, want %q", got, err, want)
		}
	}
	service.Signal(syscall.SIGTERM)
	wantRefusing(t, service)
	fmt.Fprint(connection, `{"text":"in time"}`)
	response, err := http.ReadResponse(lines, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	answer{response.StatusCode, response.Header, string(body)}.wantFirst(t)
	service.WantExit(t, 0)
}

func TestRetryAfterACrashGetsTheOriginalAnswer(t *testing.T) {
	t.Parallel()
	databaseURL := pgtest.URL(t)
	service := startBinary(t, databaseURL)
	note := send(t, "POST", service.URL+"/api/notes", `{"text":"once"}`, keyed...).wantFirst(t)
	message := send(t, "POST", service.URL+"/api/emergency-messages", `{"text":"help"}`, keyed...).wantFirst(t)
	service.Kill()

	again := startBinary(t, databaseURL)
	send(t, "POST", again.URL+"/api/notes", `{"text":"once"}`, keyed...).wantReplay(t, note)
	send(t, "POST", again.URL+"/api/emergency-messages", `{"text":"help"}`, keyed...).wantReplay(t, message)
	wantTexts(t, listed(t, again.URL, "ada", notes), "once")
	wantTexts(t, listed(t, again.URL, "ada", emergencyMessages), "help")
}

// The same on a file, which is where a service started without a word keeps its data.
func TestRetryAfterACrashGetsTheOriginalAnswerFromTheFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "my notes?#%.db") // any name
	service := startBinary(t, "", "-db", file)
	note := send(t, "POST", service.URL+"/api/notes", `{"text":"once"}`, keyed...).wantFirst(t)
	service.Kill()

	again := startBinary(t, "", "-db", file)
	send(t, "POST", again.URL+"/api/notes", `{"text":"once"}`, keyed...).wantReplay(t, note)
	wantTexts(t, listed(t, again.URL, "ada", notes), "once")
	again.Kill()

	if _, err := os.Stat(file); err != nil {
		t.Fatal(err)
	}
	forgetful := startBinary(t, "", "-db", ":memory:")
	send(t, "POST", forgetful.URL+"/api/notes", `{"text":"once"}`, keyed...).wantFirst(t)
}

func TestRetryAfterACrashInTheMiddleOfACreate(t *testing.T) {
	t.Parallel()
	databaseURL := pgtest.URL(t)
	pool := pgtest.Pool(t, databaseURL, nil)
	service := startBinary(t, databaseURL)
	release := blockNotes(t, pool)
	failed := make(chan error, 1)
	go func() {
		_, err := trySend(context.Background(), "POST", service.URL+"/api/notes", `{"text":"once"}`, keyed...)
		failed <- err
	}()
	wantBlocked(t, pool)
	service.Kill()
	if err := <-failed; err == nil {
		t.Fatal("the create was answered by a service that was killed in the middle of it")
	}
	release()

	again := startBinary(t, databaseURL)
	retry(t, "POST", again.URL+"/api/notes", `{"text":"once"}`, keyed...).wantFirst(t)
	wantTexts(t, listed(t, again.URL, "ada", notes), "once")
}

func TestServiceThatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() }) // after the subtests, which run in parallel
	for name, test := range map[string]struct {
		databaseURL string
		arguments   []string
		want        string
	}{
		"address taken":    {"", []string{"-addr", taken.Addr().String()}, "address already in use"},
		"no database":      {"postgres://ada:hushhush@127.0.0.1:1/notes", nil, "connect"},
		"bad DATABASE_URL": {"postgres://ada:hushhush@127.0.0.1:port/notes", nil, "cannot parse"},
		"no directory":     {"", []string{"-db", filepath.Join(t.TempDir(), "none", "notes.db")}, "opening the database"},
		"unknown flag":     {"", []string{"-adr"}, "flag provided but not defined: -adr"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), shown.Patience)
			defer cancel()
			command := exec.CommandContext(ctx, path, test.arguments...)
			command.Env = shown.Environment("DATABASE_URL=" + test.databaseURL)
			output, err := command.CombinedOutput()
			if command.ProcessState == nil || command.ProcessState.ExitCode() != 1 {
				t.Fatalf("ended with %v, want code 1: %s", err, output)
			}
			if !strings.Contains(string(output), test.want) || strings.Contains(string(output), "hushhush") {
				t.Errorf("it says %s, want %q and no password", output, test.want)
			}
		})
	}
}
