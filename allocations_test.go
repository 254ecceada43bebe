package holdsend_test

import (
	"context"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

// How much a request allocates does not depend on the machine, so its growth is seen here rather than in benchmarks. What
// all goroutines allocate is counted: these tests are not parallel.

// usualCost calls f for the numbers from 0 and returns how many allocations a call makes, and of how many bytes. The lower
// quartile leaves out what happens now and then: a map that grows, a pool that is emptied, or drops every fourth thing, as
// pools do under the race detector.
func usualCost(f func(n int)) (allocations, size uint64) {
	var counts, sizes []uint64
	for n := range 31 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f(n)
		runtime.ReadMemStats(&after)
		counts = append(counts, after.Mallocs-before.Mallocs)
		sizes = append(sizes, after.TotalAlloc-before.TotalAlloc)
	}
	slices.Sort(counts)
	slices.Sort(sizes)
	return counts[len(counts)/4], sizes[len(sizes)/4]
}

// layerCost is usualCost of requests with that body to handler: each another one, or all retries of the first.
func layerCost(handler http.Handler, body []byte, areRetries bool) (allocations, size uint64) {
	send := func(n int) {
		handler.ServeHTTP(&discard{http.Header{}}, benchmarkRequest("item:"+strconv.Itoa(1_000_000+n), body))
	}
	if !areRetries {
		return usualCost(send)
	}
	send(0)
	return usualCost(func(int) { send(0) })
}

// The race detector keeps a function from being inlined, which costs a create one allocation: the limits are with it.
func TestAllocationsOfTheLayer(t *testing.T) {
	for name, row := range map[string]struct {
		protect    func(*holdsend.MemoryStore) http.Handler
		areRetries bool
		most       uint64 // allocations more than those of the handler that is protected
	}{
		"Handler, create":    {byHandler, false, 22},
		"Handler, replay":    {byHandler, true, 11},
		"Middleware, create": {byMiddleware, false, 25},
		"Middleware, replay": {byMiddleware, true, 11},
	} {
		bare, _ := layerCost(http.HandlerFunc(bareNote), benchmarkBody, row.areRetries)
		protected, _ := layerCost(row.protect(holdsend.NewMemoryStore(nil)), benchmarkBody, row.areRetries)
		t.Logf("%s: %d allocations, of which the handler alone makes %d", name, protected, bare)
		assert.LessOrEqual(t, protected, bare+row.most, "%s: the handler alone makes %d allocations", name, bare)
	}
}

// The body is in memory once. One of up to 64 KB takes just its size; a longer one grows with what arrives, twice as large
// each time, and so is copied once at the most, counted in bytes.
func TestAllocatedBytesOfABody(t *testing.T) {
	for size, most := range map[int]float64{60 << 10: 1.25, 1 << 20: 2} {
		body := []byte(`"` + strings.Repeat("x", size-2) + `"`)
		for name, protect := range map[string]func(*holdsend.MemoryStore) http.Handler{"Handler": byHandler, "Middleware": byMiddleware} {
			for _, areRetries := range []bool{false, true} {
				_, bare := layerCost(http.HandlerFunc(bareNote), body, areRetries)
				_, protected := layerCost(protect(holdsend.NewMemoryStore(nil)), body, areRetries)
				times := float64(protected-bare) / float64(size)
				assert.Less(t, times, most, "%s, %d bytes, retries: %t", name, size, areRetries)
			}
		}
	}
}

// It is a tenth more than was measured that a create and a replay may make: pgx's own are among them.
func TestAllocationsOnPostgres(t *testing.T) {
	b := newBed(t, nil, nil)
	send := func(key string) func() {
		return func() {
			_, err := holdsend.HandleIdempotent(context.Background(), b.store, request(key), insertNote)
			require.NoError(t, err)
		}
	}
	for range 10 { // statements get prepared, connections opened
		send("item-0000")()
	}
	create, _ := usualCost(func(n int) { send("item-" + strconv.Itoa(10_000+n))() })
	known, _ := usualCost(func(int) { send("item-0000")() })
	elsewhere, err := holdsend.NewPostgresStore(b.pool, nil)
	require.NoError(t, err)
	b.store = elsewhere
	replay, _ := usualCost(func(int) { send("item-0000")() })
	t.Logf("a create makes %d allocations, a replay %d, or %d in another process", create, known, replay)
	assert.LessOrEqual(t, create, uint64(157))
	assert.LessOrEqual(t, known, uint64(110))
	assert.LessOrEqual(t, replay, uint64(161))
}
