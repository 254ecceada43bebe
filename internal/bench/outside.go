package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// A bench runs one measurement. It stands in for a testing.TB, which the packages that start servers ask for: what fails
// ends the measurement, and what is to be cleaned up is when it ends. Its other methods are not there.
type bench struct {
	testing.TB
	ctx     context.Context
	setting setting

	mu       sync.Mutex
	cleanups []func()
	errors   []error
	cluster  *pgtest.Cluster
}

// outsideTests runs do with a bench, and cleans up after it. It returns what failed.
func outsideTests(ctx context.Context, do func(*bench)) error {
	b := &bench{ctx: ctx}
	finished := make(chan struct{})
	go func() { // FailNow ends the goroutine
		defer close(finished)
		defer b.cleanUp()
		do(b)
	}()
	<-finished
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.errors) > 0 {
		return b.errors[0]
	}
	return nil
}

// within runs do and cleans up what do left to be cleaned up.
func (b *bench) within(do func(*bench)) {
	inner := &bench{ctx: b.ctx, setting: b.setting, cluster: b.server()}
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		defer inner.cleanUp()
		do(inner)
	}()
	<-finished
	if len(inner.errors) > 0 {
		b.Fatal(inner.errors[0])
	}
}

func (b *bench) cleanUp() {
	for {
		b.mu.Lock()
		if len(b.cleanups) == 0 {
			b.mu.Unlock()
			return
		}
		last := len(b.cleanups) - 1
		cleanup := b.cleanups[last]
		b.cleanups = slices.Delete(b.cleanups, last, last+1)
		b.mu.Unlock()
		cleanup()
	}
}

// Cleanup implements [testing.TB], as do the methods below.
func (b *bench) Cleanup(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cleanups = append(b.cleanups, f)
}

func (b *bench) Helper()                  {}
func (b *bench) Context() context.Context { return b.ctx }

func (b *bench) Errorf(format string, arguments ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.errors = append(b.errors, fmt.Errorf(format, arguments...))
}

func (b *bench) Fatalf(format string, arguments ...any) {
	b.Errorf(format, arguments...)
	runtime.Goexit()
}

func (b *bench) Fatal(arguments ...any) { b.Fatalf("%s", fmt.Sprint(arguments...)) }

func (b *bench) Logf(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", arguments...)
}

// check ends the measurement on an error.
func (b *bench) check(err error) {
	if err != nil {
		b.Fatal(err)
	}
}

// server returns the cluster on which most parts run. It flushes, as a service's would. Its checkpoints are far apart, so
// that none lands in the round of one contender alone. Its shared buffers are few, for a process of the server pays dearly for
// the first touch of each: one that has run for a while has touched all. All else is as Postgres has it.
func (b *bench) server() *pgtest.Cluster {
	if b.cluster == nil {
		b.cluster = pgtest.StartCluster(b, map[string]string{"checkpoint_timeout": "1h", "max_wal_size": "16GB", "shared_buffers": "16MB"})
	}
	return b.cluster
}

// version names the server.
func (b *bench) version() (name string) {
	b.within(func(b *bench) {
		name = "Postgres " + pgtest.Value[string](b, b.pool(b.server().URL(), 1), "SHOW server_version")
	})
	return name
}

// pool returns a pool of n connections. A create takes one for its whole run, so n is the number of clients, or more.
func (b *bench) pool(url string, n int) *pgxpool.Pool {
	return pgtest.Pool(b, url, func(c *pgxpool.Config) { c.MaxConns = int32(n) })
}
