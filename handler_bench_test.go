package holdsend_test

import (
	"bytes"
	"io"
	"net/http"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdsend/holdsend-go"
)

// The benchmarks of the HTTP layer print what a protected request costs over the same handler unprotected, on the memory
// store: extra-ns/op and extra-allocs/op.

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
			b.ReportAllocs()
			bare, bareAllocs := benchmarkRequests(b.N, key, func(int) http.Handler { return http.HandlerFunc(bareNote) })
			var handler http.Handler
			b.ResetTimer()
			protected, protectedAllocs := benchmarkRequests(b.N, key, func(i int) http.Handler {
				if i%10_000 == 0 { // a store that grows on and on would measure the garbage collector
					handler = protect(holdsend.NewMemoryStore(nil))
				}
				return handler
			})
			b.StopTimer()
			b.ReportMetric(float64(protected-bare)/float64(b.N), "extra-ns/op")
			b.ReportMetric((protectedAllocs-bareAllocs)/float64(b.N), "extra-allocs/op")
		}
	}
	b.Run("create", compare(func(i int) string { return "bench:" + strconv.Itoa(1_000_000+i) }))
	b.Run("replay", compare(func(int) string { return "bench:1000000" + strconv.Itoa(0) }))
}

// benchmarkRequests sends n requests and returns the time and the allocations that they took.
func benchmarkRequests(n int, key func(i int) string, handler func(i int) http.Handler) (time.Duration, float64) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	for i := range n {
		handler(i).ServeHTTP(&discard{http.Header{}}, benchmarkRequest(key(i), benchmarkBody))
	}
	took := time.Since(start)
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
