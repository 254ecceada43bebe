// Notes is the reference service of HoldSend for Go: a small JSON API whose creates happen once, however often a client
// sends them. Start it from the root of the repository with
//
//	go -C examples run ./notes
//
// It keeps everything in an SQLite file, notes.db, or in Postgres if DATABASE_URL is set. README.md shows what it answers.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/holdsend/holdsend-go"
)

const (
	// requestTimeout bounds the work on one request, from the end of its headers. It leaves room for a slow body, and
	// the last two leave room for it and for the 5 s within which the library commits an answer or frees a key.
	requestTimeout  = 15 * time.Second
	readTimeout     = 10 * time.Second // headers and body
	writeTimeout    = 30 * time.Second // from the end of the headers to the end of the answer, reading the body included
	shutdownTimeout = 25 * time.Second

	purgeInterval = time.Hour
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := run(ctx, os.Args[1:], os.Getenv, os.Stderr)
	if err != nil && !errors.Is(err, flag.ErrHelp) { // the help is printed already
		fmt.Fprintln(os.Stderr, "notes:", err)
		os.Exit(1)
	}
}

// A backend is an opened store and what is served from it. The type of its transactions ends here, so that run is the
// same for all.
type backend struct {
	name    string
	handler http.Handler
	purge   func(context.Context) (holdsend.Purged, error)
	close   func()
}

// open picks the backend.
func open(ctx context.Context, path string, getenv func(string) string, logger *slog.Logger) (*backend, error) {
	if url := getenv("DATABASE_URL"); url != "" {
		return openPostgres(ctx, url, logger)
	}
	if path == ":memory:" {
		return openMemory(logger), nil
	}
	return openSQLite(ctx, path, logger)
}

// run serves until ctx ends, then lets the requests in flight finish.
func run(ctx context.Context, args []string, getenv func(string) string, stderr io.Writer) error {
	flags := flag.NewFlagSet("notes", flag.ContinueOnError)
	flags.SetOutput(stderr)
	addr := flags.String("addr", "127.0.0.1:8080", "address to listen on")
	path := flags.String("db", "notes.db", "SQLite file to keep everything in, unless DATABASE_URL names a Postgres; :memory: keeps nothing")
	origins := flags.String("origins", "http://localhost:*,http://127.0.0.1:*", "web pages that may call the API, separated by commas")
	if err := flags.Parse(args); err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(stderr, nil))

	backend, err := open(ctx, *path, getenv, logger)
	if err != nil {
		return err
	}
	defer backend.close()

	listener, err := net.Listen("tcp", *addr)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler:           withCORS(strings.Split(*origins, ","), withTimeout(requestTimeout, backend.handler)),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}

	purgeCtx, stopPurging := context.WithCancel(ctx)
	purging := make(chan struct{})
	go func() {
		defer close(purging)
		purgeEvery(purgeCtx, purgeInterval, backend.purge, logger)
	}()
	defer func() { stopPurging(); <-purging }() // before the backend closes

	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	logger.Warn("the " + headerDemoUser + " header is a demo sign-in that anyone can forge: put your own in place of demoUser")
	logger.Info("listening", "url", "http://"+listener.Addr().String(), "store", backend.name)

	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	logger.Info("shutting down: waiting for the requests in flight")
	// Not from ctx, which has ended. A create that is cut off here all the same loses nothing: the client's retry with
	// the same key runs it, or gets its answer.
	shutdownCtx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	if err := server.Shutdown(shutdownCtx); err != nil {
		_ = server.Close()
		return fmt.Errorf("some requests did not finish within %s: %w", shutdownTimeout, err)
	}
	return nil
}

// purgeEvery purges now, because a service that restarts often would else never do it, and then once an interval. Any
// number of processes may purge the same database.
func purgeEvery(ctx context.Context, interval time.Duration, purge func(context.Context) (holdsend.Purged, error), logger *slog.Logger) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		switch purged, err := purge(ctx); {
		case ctx.Err() != nil:
			return
		case err != nil:
			logger.Error("purge failed, and will be tried again", "error", err) // what was purged by then stays purged
		default:
			logger.Info("purged", "records", purged.Records, "claims", purged.Claims)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}
