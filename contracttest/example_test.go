package contracttest_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/contracttest"
)

// The harness of a store in SQL writes a row in Write, counts the rows on another connection in Count, and closes the
// connection below the attempt in Crash. That of the memory store does as much with a map.
func ExampleRun() {
	// In a test file of your own this is func TestStore(t *testing.T).
	testStore := func(t *testing.T) {
		contracttest.Run(t, func(t *testing.T) contracttest.Harness[*holdsend.MemoryTx] {
			var mu sync.Mutex
			writes := map[string]int{}
			return contracttest.Harness[*holdsend.MemoryTx]{
				Store: holdsend.NewMemoryStore(&holdsend.MemoryOptions{TakeOverAfter: 100 * time.Millisecond}),
				Write: func(_ context.Context, tx *holdsend.MemoryTx, name string) error {
					tx.OnCommit(func() {
						mu.Lock()
						defer mu.Unlock()
						writes[name]++
					})
					return nil
				},
				Count: func(_ context.Context, name string) (int, error) {
					mu.Lock()
					defer mu.Unlock()
					return writes[name], nil
				},
				// Crash, HoldCommit and StaleClaim are left out: the cases that need them are logged as not run.
			}
		})
	}
	_ = testStore
}
