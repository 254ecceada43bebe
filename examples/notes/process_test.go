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
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go/internal/pgtest"
	"github.com/jackc/pgx/v5/pgxpool"
)

// patience is how long a test waits for what must happen. It is long, for slow machines: no test measures with it.
const patience = time.Minute

// binary builds the service once for all tests, with the race detector if they run with it.
var binary = sync.OnceValues(func() (string, error) {
	path := filepath.Join(os.Getenv(binaryDirectory), "notes")
	arguments := []string{"build", "-o", path}
	if info, ok := debug.ReadBuildInfo(); ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		arguments = append(arguments, "-race")
	}
	if output, err := exec.Command("go", append(arguments, ".")...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, output)
	}
	return path, nil
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

// A process is a running service.
type process struct {
	command *exec.Cmd
	url     string // http://127.0.0.1:port
	log     *lockedBuffer
	exited  chan struct{} // closed once it has ended, with its log complete
}

// startBinary starts the service on a free port, on Postgres unless databaseURL is empty. Else it keeps its data in a
// directory of its own, or where more arguments say.
func startBinary(t *testing.T, databaseURL string, more ...string) *process {
	t.Helper()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(path, append([]string{"-addr", "127.0.0.1:0"}, more...)...)
	command.Dir = t.TempDir()
	command.Env = environment("DATABASE_URL=" + databaseURL)
	return start(t, command)
}

// environment is the test's own without DATABASE_URL, which belongs to whoever runs the tests, and with more.
func environment(more ...string) []string {
	own := slices.DeleteFunc(os.Environ(), func(variable string) bool { return strings.HasPrefix(variable, "DATABASE_URL=") })
	return append(own, more...)
}

// start starts a service and waits until it listens. It has a process group of its own, because go run and sh stand
// between it and the test; whatever is left of the group when t ends is killed.
func start(t *testing.T, command *exec.Cmd) *process {
	t.Helper()
	stderr, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	command.Stderr, command.Stdout = w, w
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = command.Start()
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{command: command, log: &lockedBuffer{}, exited: make(chan struct{})}
	listening := make(chan string, 1)
	go func() {
		defer close(p.exited)
		defer command.Wait() // after the log has ended; the test asks for its state
		defer stderr.Close()
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			fmt.Fprintln(p.log, lines.Text())
			if _, after, ok := strings.Cut(lines.Text(), " msg=listening url="); ok {
				url, _, _ := strings.Cut(after, " ")
				listening <- url
			}
		}
	}()
	t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.exited
		if t.Failed() {
			t.Logf("the service's log:\n%s", p.log)
		}
	})
	select {
	case p.url = <-listening:
	case <-p.exited:
		t.Fatalf("the service ended before it listened: %v", command.ProcessState)
	case <-time.After(patience):
		t.Fatal("the service does not listen")
	}
	return p
}

func (p *process) signal(signal syscall.Signal) { _ = syscall.Kill(-p.command.Process.Pid, signal) }

// kill ends the service as a crash would.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.exited
}

// wantExit waits for the end of the service.
func (p *process) wantExit(t *testing.T, code int) {
	t.Helper()
	select {
	case <-p.exited:
		if got := p.command.ProcessState.ExitCode(); got != code {
			t.Errorf("the service ended with code %d, want %d", got, code)
		}
	case <-time.After(patience):
		t.Fatal("the service does not end")
	}
}

// wantRefusing waits until the service takes no more connections.
func (p *process) wantRefusing(t *testing.T) {
	t.Helper()
	eventually(t, "the service stops listening", func() bool {
		connection, err := net.Dial("tcp", strings.TrimPrefix(p.url, "http://"))
		if err == nil {
			connection.Close()
		}
		return err != nil
	})
}

func eventually(t *testing.T, what string, isSo func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
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
				a, err := trySend(context.Background(), "POST", service.url+"/api/notes", `{"text":"in time"}`, keyed...)
				if err != nil {
					t.Error(err)
				}
				created <- a
			}()
			wantBlocked(t, pool)
			service.signal(signal)
			service.wantRefusing(t)
			release()
			first := <-created
			first.wantFirst(t)
			service.wantExit(t, 0)

			again := startBinary(t, databaseURL)
			send(t, "POST", again.url+"/api/notes", `{"text":"in time"}`, keyed...).wantReplay(t, first)
		})
	}
}

// The memory backend has no create that takes long, but a client may take long to send one.
func TestShutdownFinishesARequestThatIsStillSent(t *testing.T) {
	t.Parallel()
	service := startBinary(t, "", "-db", ":memory:")
	connection, err := net.Dial("tcp", strings.TrimPrefix(service.url, "http://"))
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
	service.signal(syscall.SIGTERM)
	service.wantRefusing(t)
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
	service.wantExit(t, 0)
}

func TestRetryAfterACrashGetsTheOriginalAnswer(t *testing.T) {
	t.Parallel()
	databaseURL := pgtest.URL(t)
	service := startBinary(t, databaseURL)
	note := send(t, "POST", service.url+"/api/notes", `{"text":"once"}`, keyed...).wantFirst(t)
	message := send(t, "POST", service.url+"/api/emergency-messages", `{"text":"help"}`, keyed...).wantFirst(t)
	service.kill()

	again := startBinary(t, databaseURL)
	send(t, "POST", again.url+"/api/notes", `{"text":"once"}`, keyed...).wantReplay(t, note)
	send(t, "POST", again.url+"/api/emergency-messages", `{"text":"help"}`, keyed...).wantReplay(t, message)
	wantTexts(t, listed(t, again.url, "ada", notes), "once")
	wantTexts(t, listed(t, again.url, "ada", emergencyMessages), "help")
}

// The same on a file, which is where a service started without a word keeps its data.
func TestRetryAfterACrashGetsTheOriginalAnswerFromTheFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "my notes?#%.db") // any name
	service := startBinary(t, "", "-db", file)
	note := send(t, "POST", service.url+"/api/notes", `{"text":"once"}`, keyed...).wantFirst(t)
	service.kill()

	again := startBinary(t, "", "-db", file)
	send(t, "POST", again.url+"/api/notes", `{"text":"once"}`, keyed...).wantReplay(t, note)
	wantTexts(t, listed(t, again.url, "ada", notes), "once")
	again.kill()

	if _, err := os.Stat(file); err != nil {
		t.Fatal(err)
	}
	forgetful := startBinary(t, "", "-db", ":memory:")
	send(t, "POST", forgetful.url+"/api/notes", `{"text":"once"}`, keyed...).wantFirst(t)
}

func TestRetryAfterACrashInTheMiddleOfACreate(t *testing.T) {
	t.Parallel()
	databaseURL := pgtest.URL(t)
	pool := pgtest.Pool(t, databaseURL, nil)
	service := startBinary(t, databaseURL)
	release := blockNotes(t, pool)
	failed := make(chan error, 1)
	go func() {
		_, err := trySend(context.Background(), "POST", service.url+"/api/notes", `{"text":"once"}`, keyed...)
		failed <- err
	}()
	wantBlocked(t, pool)
	service.kill()
	if err := <-failed; err == nil {
		t.Fatal("the create was answered by a service that was killed in the middle of it")
	}
	release()

	again := startBinary(t, databaseURL)
	retry(t, "POST", again.url+"/api/notes", `{"text":"once"}`, keyed...).wantFirst(t)
	wantTexts(t, listed(t, again.url, "ada", notes), "once")
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
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			command := exec.CommandContext(ctx, path, test.arguments...)
			command.Env = environment("DATABASE_URL=" + test.databaseURL)
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
