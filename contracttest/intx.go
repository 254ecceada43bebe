package contracttest

import (
	"context"
	"errors"
	"runtime"
)

// errOwn is an error of the caller's own, which must come back as it is.
var errOwn = errors.New("contracttest: an error of the caller's own")

// contextKey is for a value that a context must keep.
type contextKey struct{}

// inTxCases has the rules for InTx.
func inTxCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "InTxCommits",
			rule: "InTx commits if its function returns nil, and not before",
			run: func(b *bench[Tx]) {
				ctx := context.WithValue(b.context(), contextKey{}, "kept")
				err := b.Store.InTx(ctx, func(ctx context.Context, tx Tx) error {
					if ctx.Value(contextKey{}) != "kept" {
						b.breaks("the function's context has not the values of InTx's")
					}
					err := b.Write(ctx, tx, "unkeyed")
					b.wrote("unkeyed", 0)
					return err
				})
				if err != nil {
					b.broken("InTx: %v", err)
				}
				b.wrote("unkeyed", 1)
			},
		},
		{
			name: "InTxRollsBackOnError",
			rule: "InTx rolls back if its function returns an error, and returns that error as it is",
			run: func(b *bench[Tx]) {
				err := b.Store.InTx(b.context(), func(ctx context.Context, tx Tx) error {
					if err := b.Write(ctx, tx, "failed"); err != nil {
						b.breaks("Harness.Write: %v", err)
					}
					return errOwn
				})
				if err != errOwn { // not errors.Is: as it is
					b.broken("InTx returned %v", err)
				}
				b.wrote("failed", 0)
			},
		},
		{
			name: "InTxRollsBackOnPanic",
			rule: "InTx rolls back if its function panics, and the panic goes on",
			run: func(b *bench[Tx]) {
				func() {
					defer func() {
						if r := recover(); r != any(errOwn) {
							b.breaks("recovered %v, want the function's own panic", r)
						}
					}()
					err := b.Store.InTx(b.context(), func(ctx context.Context, tx Tx) error {
						if err := b.Write(ctx, tx, "panicked"); err != nil {
							b.breaks("Harness.Write: %v", err)
						}
						panic(errOwn)
					})
					b.breaks("InTx returned %v", err)
				}()
				b.wrote("panicked", 0)
				b.stillWorks()
			},
		},
		{
			name: "InTxRollsBackWhenItsGoroutineEnds",
			rule: "InTx rolls back if its function ends its goroutine, and holds nothing any more",
			run: func(b *bench[Tx]) {
				b.promptly("InTx in a goroutine that ends", func(ctx context.Context) {
					_ = b.Store.InTx(ctx, func(ctx context.Context, tx Tx) error {
						if err := b.Write(ctx, tx, "exited"); err != nil {
							b.breaks("Harness.Write: %v", err)
						}
						runtime.Goexit()
						return nil
					})
				})
				b.wrote("exited", 0)
				b.stillWorks()
			},
		},
		{
			name: "InTxOnEndedContext",
			rule: "InTx on a context that has ended returns an error and commits nothing",
			run: func(b *bench[Tx]) {
				err := b.Store.InTx(b.endedContext(), func(_ context.Context, tx Tx) error {
					return b.Write(b.context(), tx, "ended")
				})
				if err == nil {
					b.broken("InTx returned nil")
				}
				b.wrote("ended", 0)
			},
		},
		{
			name: "InTxCommitOutlivesItsContext",
			rule: "the commit of InTx does not depend on its context once the function returned nil",
			run: func(b *bench[Tx]) {
				ctx, cancel := context.WithCancel(b.context())
				defer cancel()
				err := b.Store.InTx(ctx, func(ctx context.Context, tx Tx) error {
					err := b.Write(ctx, tx, "outlives")
					cancel()
					return err
				})
				if err != nil {
					b.broken("InTx: %v", err)
				}
				b.wrote("outlives", 1)
			},
		},
	}
}

// stillWorks checks that a transaction can be had and committed.
func (b *bench[Tx]) stillWorks() {
	b.t.Helper()
	before := b.count("still works")
	err := b.Store.InTx(b.context(), func(ctx context.Context, tx Tx) error { return b.Write(ctx, tx, "still works") })
	if err != nil {
		b.broken("the next InTx: %v", err)
	}
	b.wrote("still works", before+1)
}
