//go:build unix

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// readme is what README.md tells a newcomer to type, and what it says they will see.
type readme struct {
	starts []string // the commands that start the service: on a file, on Postgres
	steps  []step
}

type step struct{ command, answer string }

// readReadme fails on a block that no test would run or compare: each sh block is a start or a curl, and each curl is
// followed by an http block.
func readReadme(t *testing.T) readme {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var r readme
	waiting := false // for the answer to the last command
	for _, block := range regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		language, content := block[1], block[2]
		isCurl := strings.HasPrefix(content, "curl -i ")
		switch {
		case waiting != (language == "http"):
			t.Fatalf("README.md: a curl must be followed by its answer, and nothing else by one; at:\n%s", content)
		case language == "http":
			r.steps[len(r.steps)-1].answer = content
			waiting = false
		case language == "sh" && isCurl && strings.Count(content, "curl ") == 1:
			r.steps = append(r.steps, step{command: content})
			waiting = true
		case language == "sh" && strings.HasSuffix(content, "go -C examples run ./notes\n"):
			r.starts = append(r.starts, strings.TrimSpace(content))
		default:
			t.Fatalf("README.md has a block that this test cannot run:\n%s", content)
		}
	}
	if waiting || len(r.starts) != 2 || len(r.steps) < 9 {
		t.Fatalf("README.md has %d commands that start the service and %d curls, want 2 and at least 9, each with its answer", len(r.starts), len(r.steps))
	}
	return r
}

func TestReadme(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("curl"); err != nil {
		t.Fatal("this test runs the curl commands of README.md: install curl (Debian and Ubuntu: apt-get install curl)")
	}
	r := readReadme(t)
	const databaseURL = "postgres://postgres:secret@127.0.0.1:5432/postgres"
	if strings.Contains(r.starts[0], "DATABASE_URL") || !strings.Contains(r.starts[1], "DATABASE_URL='"+databaseURL+"'") {
		t.Fatalf("README.md starts the service on %q, want a file first, then Postgres", r.starts)
	}

	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		service := startLine(t, r.starts[0])
		runSteps(t, r.steps, service)
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		service := startLine(t, strings.Replace(r.starts[1], databaseURL, pgtest.URL(t), 1))
		runSteps(t, r.steps, service)
	})
	// The same on what go build makes: started directly, without go run.
	t.Run("binary on sqlite", func(t *testing.T) {
		t.Parallel()
		runSteps(t, r.steps, startBinary(t, ""))
	})
	t.Run("binary on memory", func(t *testing.T) {
		t.Parallel()
		runSteps(t, r.steps, startBinary(t, "", "-db", ":memory:"))
	})
	t.Run("binary on postgres", func(t *testing.T) {
		t.Parallel()
		runSteps(t, r.steps, startBinary(t, pgtest.URL(t)))
	})
}

// startLine runs a start command in the root of the repository. All that it adds is a free port, since the one that the
// README uses may be taken, and a file in a directory of its own.
func startLine(t *testing.T, line string) *process {
	t.Helper()
	// What go run has to compile first takes minutes on a slow machine, and is no part of what the test waits for.
	if output, err := exec.Command("go", "build", "-o", os.DevNull, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, output)
	}
	command := exec.Command("sh", "-c", line+" -addr 127.0.0.1:0 -db '"+filepath.Join(t.TempDir(), "notes.db")+"'")
	command.Dir = filepath.Join("..", "..")
	command.Env = environment()
	return start(t, command)
}

// runSteps runs the curl commands as they stand, and ends with the service's end on Ctrl-C.
func runSteps(t *testing.T, steps []step, service *process) {
	// curl reads its configuration from here: it leads the README's address to the service's.
	home := t.TempDir()
	connectTo := fmt.Sprintf("connect-to = \"127.0.0.1:8080:%s\"\n", strings.TrimPrefix(service.url, "http://"))
	if err := os.WriteFile(filepath.Join(home, ".curlrc"), []byte(connectTo), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, step := range steps {
		command := exec.CommandContext(t.Context(), "sh", "-c", step.command)
		command.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "CURL_HOME=" + home} // no proxy
		var stderr bytes.Buffer
		command.Stderr = &stderr
		output, err := command.Output()
		if err != nil {
			t.Fatalf("%v\n%s\n%s", err, step.command, stderr.String())
		}
		compare(t, step, string(output))
	}
	service.signal(syscall.SIGINT)
	select {
	case <-service.exited:
	case <-t.Context().Done():
	}
	if log := service.log.String(); !strings.Contains(log, "shutting down") {
		t.Errorf("the service did not shut down on Ctrl-C")
	}
}

// compare compares the status line, the body, and the headers that README.md shows. Idempotent-Replayed must be shown
// if it is there. Times differ, so each counts as any time; null is not a time.
func compare(t *testing.T, step step, output string) {
	t.Helper()
	want, got := parseAnswer(t, step.answer), parseAnswer(t, output)
	if got.status != want.status {
		t.Errorf("got %q, README.md has %q, for:\n%s", got.status, want.status, step.command)
	}
	want.header.Add("Idempotent-Replayed", "")
	for name := range want.header {
		if got.header.Get(name) != want.header.Get(name) {
			t.Errorf("got %s %q, README.md has %q, for:\n%s", name, got.header.Get(name), want.header.Get(name), step.command)
		}
	}
	times := regexp.MustCompile(`"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"`)
	if times.ReplaceAllString(got.body, "TIME") != times.ReplaceAllString(want.body, "TIME") {
		t.Errorf("got\n%s\nREADME.md has\n%s\nfor:\n%s", got.body, want.body, step.command)
	}
}

type shownAnswer struct {
	status string // the whole line
	header http.Header
	body   string
}

func parseAnswer(t *testing.T, text string) shownAnswer {
	t.Helper()
	// A README has no carriage returns, and no empty line after the headers where there is no body.
	head, body, _ := strings.Cut(strings.ReplaceAll(text, "\r\n", "\n"), "\n\n")
	reader := bufio.NewReader(strings.NewReader(strings.TrimRight(head, "\n") + "\n\n"))
	status, err := reader.ReadString('\n')
	if err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	rest, err := io.ReadAll(reader)
	if err != nil {
		t.Fatal(err)
	}
	header := http.Header{}
	for line := range strings.Lines(string(rest)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			header.Add(name, value)
		}
	}
	return shownAnswer{strings.TrimSpace(status), header, strings.TrimSpace(body)}
}
