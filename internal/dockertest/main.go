// Command dockertest runs the tests on a Postgres in Docker, for those who have nothing else:
//
//	cd internal/dockertest && go run . [go test flags]
//
// It starts the server, sets HOLDSEND_TEST_DATABASE, and runs test.sh with the same arguments. It is a module of its own
// so that nobody who uses the library gets what testcontainers requires. Tests that restart their server or put
// PgBouncer before it still need those programs, and fail without.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

const image = "postgres:17-alpine"

func main() {
	err := run()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		os.Exit(1) // test.sh has said why
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dockertest:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	script, err := filepath.Abs("../../test.sh")
	if err != nil {
		return err
	}
	if _, err := os.Stat(script); err != nil {
		return errors.New("it must be run in its own directory, internal/dockertest")
	}

	if err := findDocker(ctx); err != nil {
		return fmt.Errorf("no Docker to run Postgres in (%w): start Docker, or install Postgres, or set HOLDSEND_TEST_DATABASE to the URL of one", err)
	}
	container, err := postgres.Run(ctx, image,
		postgres.WithDatabase("holdsend"), postgres.WithUsername("holdsend"), postgres.WithPassword("holdsend"),
		testcontainers.WithCmdArgs("-c", "max_connections=300"),
		postgres.BasicWaitStrategies())
	defer func() { err = errors.Join(err, testcontainers.TerminateContainer(container)) }()
	if err != nil {
		return fmt.Errorf("start %s: %w", image, err)
	}
	url, err := container.ConnectionString(ctx, "sslmode=disable")
	if err != nil {
		return err
	}

	test := exec.CommandContext(ctx, script, os.Args[1:]...)
	test.Env = append(os.Environ(), "HOLDSEND_TEST_DATABASE="+url)
	test.Stdin, test.Stdout, test.Stderr = os.Stdin, os.Stdout, os.Stderr
	test.Cancel = func() error { return test.Process.Signal(os.Interrupt) } // the container is needed until it has ended
	return test.Run()
}

// findDocker returns an error if no Docker answers. Testcontainers panics where it finds none.
func findDocker(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return err
	}
	defer provider.Close()
	return provider.Health(ctx)
}
