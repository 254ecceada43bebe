package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
)

// program is the testing.TB of a run outside of go test: what the harness and the packages that start its servers call.
type program struct {
	testing.TB // nil: everything that is called is below
	cleanups   []func()
	failed     bool
}

func (*program) Helper() {}

func (p *program) Context() context.Context { return context.Background() }

func (p *program) Cleanup(f func()) { p.cleanups = append(p.cleanups, f) }

func (p *program) TempDir() string {
	dir, err := os.MkdirTemp("", "holdsend-chaos-")
	if err != nil {
		p.Fatal(err)
	}
	p.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func (p *program) Log(args ...any) { fmt.Println(args...) }

func (p *program) Logf(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func (p *program) Errorf(format string, args ...any) {
	p.failed = true
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}

func (p *program) Fatal(args ...any) {
	fmt.Fprintln(os.Stderr, args...)
	p.end()
	os.Exit(1)
}

func (p *program) Fatalf(format string, args ...any) { p.Fatal(fmt.Sprintf(format, args...)) }

// end runs what was to be cleaned up, the last first.
func (p *program) end() {
	for _, cleanup := range slices.Backward(p.cleanups) {
		cleanup()
	}
	p.cleanups = nil
}
