package holdsend_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/contracttest"
)

// TestMemoryStoreContract holds the memory store to the contract of every store.
func TestMemoryStoreContract(t *testing.T) {
	t.Parallel()
	contracttest.Run(t, func(t *testing.T) contracttest.Harness[*holdsend.MemoryTx] {
		var mu sync.Mutex
		counts := map[string]int{}
		return contracttest.Harness[*holdsend.MemoryTx]{
			Store: holdsend.NewMemoryStore(&holdsend.MemoryOptions{
				TakeOverAfter: 50 * time.Millisecond,
				StaleClaim:    100 * time.Millisecond,
			}),
			Write: func(_ context.Context, tx *holdsend.MemoryTx, name string) error {
				tx.OnCommit(func() {
					mu.Lock()
					defer mu.Unlock()
					counts[name]++
				})
				return nil
			},
			Count: func(_ context.Context, name string) (int, error) {
				mu.Lock()
				defer mu.Unlock()
				return counts[name], nil
			},
			Crash: func(_ context.Context, a holdsend.Attempt[*holdsend.MemoryTx]) error {
				holdsend.CrashMemoryAttempt(a)
				return nil
			},
			HoldCommit: func(_ context.Context, tx *holdsend.MemoryTx) (func(), error) {
				held := make(chan struct{})
				tx.OnCommit(func() { <-held })
				return sync.OnceFunc(func() { close(held) }), nil
			},
			StaleClaim: 100 * time.Millisecond,
		}
	})
}
