package holdsend_test

import (
	"bytes"
	"io"
	"net/http"
	"net/url"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go"
)

// The benchmarks of the HTTP layer print what a protected request costs over the same handler unprotected, on the memory
// store: extra-ns/op, extra-allocs/op, and extra-ns-without-gc/op, where the garbage collector runs off the clock.

const benchmarkAnswer = `{"id":"9b0c","text":"a note"}`

// benchmarkBody is a JSON body of 200 bytes.
var benchmarkBody = []byte(`{"text":"` + strings.Repeat("x", 157) + `","place":{"lat":52.5,"lon":13.4}}`)

var notesURL = &url.URL{Path: "/notes"}

// A discard is the least that an http.ResponseWriter can be.
type discard struct{ header http.Header }

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
func (d *discard) WriteHeader(int)             {}

func bareNote(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, benchmarkAnswer)
}

// byHandler and byMiddleware protect bareNote.
func byHandler(store *holdsend.MemoryStore) http.Handler {
	return holdsend.Handler(store, ownerAda, func(r *http.Request, tx *holdsend.MemoryTx, in holdsend.Incoming) (holdsend.Response, error) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return holdsend.Response{}, err
		}
		return holdsend.Response{
			Status: http.StatusCreated,
			Header: http.Header{"Content-Type": {"application/json"}},
			Body:   []byte(benchmarkAnswer),
		}, nil
	}, nil)
}

func byMiddleware(store *holdsend.MemoryStore) http.Handler {
	return holdsend.Middleware(store, ownerAda, nil)(http.HandlerFunc(bareNote))
}

func BenchmarkHandler(b *testing.B)    { benchmarkLayer(b, byHandler) }
func BenchmarkMiddleware(b *testing.B) { benchmarkLayer(b, byMiddleware) }

func benchmarkLayer(b *testing.B, protect func(*holdsend.MemoryStore) http.Handler) {
	if len(benchmarkBody) != 200 {
		b.Fatalf("the body has %d bytes", len(benchmarkBody))
	}
	compare := func(key func(i int) string) func(*testing.B) {
		return func(b *testing.B) {
			var handler http.Handler
			protected := func(i int) http.Handler {
				if i%10_000 == 0 { // a store that grows on and on would measure the garbage collector
					handler = protect(holdsend.NewMemoryStore(nil))
				}
				return handler
			}
			bare := func(int) http.Handler { return http.HandlerFunc(bareNote) }
			difference := func(collect bool) (took time.Duration, allocations float64) {
				bareTook, bareAllocations := benchmarkRequests(b.N, key, bare, collect)
				took, allocations = benchmarkRequests(b.N, key, protected, collect)
				return took - bareTook, allocations - bareAllocations
			}
			took, allocations := difference(true)
			b.ReportMetric(float64(took)/float64(b.N), "extra-ns/op")
			b.ReportMetric(allocations/float64(b.N), "extra-allocs/op")
			took, _ = difference(false)
			b.ReportMetric(float64(took)/float64(b.N), "extra-ns-without-gc/op")
			b.ReportMetric(0, "ns/op") // of all of that together, which says nothing
		}
	}
	b.Run("create", compare(func(i int) string { return "bench:" + strconv.Itoa(1_000_000+i) }))
	b.Run("replay", compare(func(int) string { return "bench:1000000" + strconv.Itoa(0) }))
}

// benchmarkRequests sends n requests and returns the time and the allocations that they took. Unless collect is set, the
// garbage collector runs between them, while the clock stands still.
func benchmarkRequests(n int, key func(i int) string, handler func(i int) http.Handler, collect bool) (took time.Duration, allocations float64) {
	if !collect {
		defer debug.SetGCPercent(debug.SetGCPercent(-1))
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	for i := range n {
		if !collect && i%1_000 == 0 {
			took += time.Since(start)
			runtime.GC()
			start = time.Now()
		}
		handler(i).ServeHTTP(&discard{http.Header{}}, benchmarkRequest(key(i), benchmarkBody))
	}
	took += time.Since(start)
	runtime.ReadMemStats(&after)
	return took, float64(after.Mallocs - before.Mallocs)
}

func benchmarkRequest(key string, body []byte) *http.Request {
	return &http.Request{
		Method: http.MethodPost, URL: notesURL, Pattern: "POST /notes",
		Header:        http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": {key}},
		ContentLength: int64(len(body)),
		Body:          io.NopCloser(bytes.NewReader(body)),
	}
}

func ownerAda(*http.Request) (string, error) { return "ada", nil }
