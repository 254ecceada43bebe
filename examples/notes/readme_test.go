//go:build unix

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/holdsend/holdsend-go/examples/internal/shown"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

func TestReadme(t *testing.T) {
	t.Parallel()
	r := shown.Read(t)
	const databaseURL = "postgres://postgres:secret@127.0.0.1:5432/postgres"
	if len(r.Starts) != 2 || strings.Contains(r.Starts[0], "DATABASE_URL") || !strings.Contains(r.Starts[1], "DATABASE_URL='"+databaseURL+"'") {
		t.Fatalf("README.md starts the service on %q, want a file first, then Postgres", r.Starts)
	}
	if len(r.Steps) < 9 {
		t.Fatalf("README.md has %d curls, want at least 9", len(r.Steps))
	}

	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		runSteps(t, r.Steps, startLine(t, r.Starts[0]))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		runSteps(t, r.Steps, startLine(t, strings.Replace(r.Starts[1], databaseURL, pgtest.URL(t), 1)))
	})
	// The same on what go build makes: started directly, without go run.
	t.Run("binary on sqlite", func(t *testing.T) {
		t.Parallel()
		runSteps(t, r.Steps, startBinary(t, ""))
	})
	t.Run("binary on memory", func(t *testing.T) {
		t.Parallel()
		runSteps(t, r.Steps, startBinary(t, "", "-db", ":memory:"))
	})
	t.Run("binary on postgres", func(t *testing.T) {
		t.Parallel()
		runSteps(t, r.Steps, startBinary(t, pgtest.URL(t)))
	})
}

// startLine runs a start command in the root of the repository, as on a machine without a C compiler. All that it adds is a
// free port, since the one that the README uses may be taken, and a file in a directory of its own.
func startLine(t *testing.T, line string) *shown.Process {
	t.Helper()
	// What go run has to compile first takes minutes on a slow machine, and is no part of what the test waits for.
	environment := shown.Environment("CGO_ENABLED=0")
	build := exec.Command("go", "build", "-o", os.DevNull, ".")
	build.Env = environment
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, output)
	}
	command := exec.Command("sh", "-c", line+" -addr 127.0.0.1:0 -db '"+filepath.Join(t.TempDir(), "notes.db")+"'")
	command.Dir = filepath.Join("..", "..")
	command.Env = environment
	return shown.Start(t, command)
}

// runSteps ends with the service's end on Ctrl-C.
func runSteps(t *testing.T, steps []shown.Step, service *shown.Process) {
	shown.Run(t, steps, service)
	service.Signal(syscall.SIGINT)
	select {
	case <-service.Exited:
	case <-t.Context().Done():
	}
	if !strings.Contains(service.Log(), "shutting down") {
		t.Errorf("the service did not shut down on Ctrl-C")
	}
}
