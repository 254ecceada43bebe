package holdsend_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

// readVectors returns the rows of a file of testdata/http, one JSON object a line.
func readVectors[Row any](t *testing.T, name string) []Row {
	t.Helper()
	text, err := os.ReadFile("testdata/http/" + name)
	require.NoError(t, err)
	var rows []Row
	for line := range strings.Lines(string(text)) {
		decoder := json.NewDecoder(strings.NewReader(line))
		decoder.DisallowUnknownFields()
		var row Row
		require.NoError(t, decoder.Decode(&row), line)
		rows = append(rows, row)
	}
	require.NotEmpty(t, rows)
	return rows
}

// A claimRecorder is a memory store that remembers the claims it was asked for.
type claimRecorder struct {
	*holdsend.MemoryStore
	claims []holdsend.Claim
}

func newClaimRecorder() *claimRecorder {
	return &claimRecorder{MemoryStore: holdsend.NewMemoryStore(nil)}
}

func (s *claimRecorder) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[*holdsend.MemoryTx], *holdsend.Record, error) {
	s.claims = append(s.claims, c)
	return s.MemoryStore.Begin(ctx, c)
}

// Records outlive releases: the default operation of a request must never change.
func TestDefaultOperationIsFrozen(t *testing.T) {
	t.Parallel()
	type row struct{ Name, Method, Pattern, Target, Operation string }
	for _, row := range readVectors[row](t, "operation.jsonl") {
		t.Run(row.Name, func(t *testing.T) {
			t.Parallel()
			store := newClaimRecorder()
			target, err := url.ParseRequestURI(row.Target)
			require.NoError(t, err)
			r := &http.Request{Method: row.Method, URL: target, Pattern: row.Pattern, Header: keyed("abc-12345")}
			response := serve(holdsend.Handler(store, ownerAda, created, nil), r)
			require.Equal(t, http.StatusCreated, response.StatusCode)
			require.Len(t, store.claims, 1)
			assert.Equal(t, row.Operation, store.claims[0].Scope.Operation)
		})
	}
}

// The pattern is the one that net/http's own mux matched, method and all.
func TestDefaultOperationInAMux(t *testing.T) {
	t.Parallel()
	for pattern, operation := range map[string]string{
		"POST /notes/{id}":             "POST /notes/{id}",
		"/notes/{id}":                  "POST /notes/{id}",
		"POST notes.example/notes/":    "POST notes.example/notes/",
		"POST   /notes/{rest...}":      "POST /notes/{rest...}",
		"notes.example/notes/{id}":     "POST notes.example/notes/{id}",
		"POST\tnotes.example/{all...}": "POST notes.example/{all...}",
	} {
		store := newClaimRecorder()
		mux := http.NewServeMux()
		mux.Handle(pattern, holdsend.Handler(store, ownerAda, created, nil))
		r := newRequest(http.MethodPost, "http://notes.example/notes/7", "", keyed("abc-12345"))
		require.Equal(t, http.StatusCreated, serve(mux, r).StatusCode, pattern)
		assert.Equal(t, operation, store.claims[0].Scope.Operation, pattern)
	}
}

// Around a mux there is no pattern yet, so that the path names the operation.
func TestDefaultOperationAroundAMux(t *testing.T) {
	t.Parallel()
	store := newClaimRecorder()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /notes/{id}", func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "7", r.PathValue("id"))
	})
	r := newRequest(http.MethodPost, "http://notes.example/notes/7", "", keyed("abc-12345"))
	require.Equal(t, http.StatusOK, serve(holdsend.Middleware(store, ownerAda, nil)(mux), r).StatusCode)
	assert.Equal(t, "POST /notes/7", store.claims[0].Scope.Operation)
}

func TestDefaultOperationTooLong(t *testing.T) {
	t.Parallel()
	longest := "/" + strings.Repeat("a", 255-len("POST /"))
	for path, want := range map[string]int{longest: http.StatusCreated, longest + "a": http.StatusRequestURITooLong} {
		for _, header := range []http.Header{keyed("abc-12345"), nil} {
			store := newClaimRecorder()
			r := newRequest(http.MethodPost, "http://notes.example"+path, "", header)
			response := serve(holdsend.Handler(store, ownerAda, created, nil), r)
			assert.Equal(t, want, response.StatusCode)
			if want != http.StatusCreated {
				requireProblem(t, response, want, "uri_too_long")
				assert.Empty(t, store.claims)
			}
		}
	}
}

// Records outlive releases: the default content of a request must never change.
func TestDefaultContentIsFrozen(t *testing.T) {
	t.Parallel()
	type row struct {
		Name, Method, Target string
		Header               http.Header
		Body                 string
		BodyBase64           string `json:"body_base64"`
		Content              string // canonical JSON
		Fingerprint          string // of Content, for operation note.create
		Malformed            bool   // 400 content_invalid instead
	}
	for _, row := range readVectors[row](t, "content.jsonl") {
		body := []byte(row.Body)
		if row.BodyBase64 != "" {
			var err error
			body, err = base64.StdEncoding.DecodeString(row.BodyBase64)
			require.NoError(t, err)
		}
		t.Run(row.Name, func(t *testing.T) {
			t.Parallel()
			target, err := url.ParseRequestURI(row.Target)
			require.NoError(t, err)
			send := func(store holdsend.Store[*holdsend.MemoryTx], header http.Header) (*http.Response, string) {
				var got string
				handler := holdsend.Handler(store, ownerAda, func(r *http.Request, _ *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
					text, err := io.ReadAll(r.Body)
					got = string(text)
					return holdsend.Response{Status: http.StatusCreated}, err
				}, &holdsend.MiddlewareOptions{Operation: func(*http.Request) string { return "note.create" }})
				return serve(handler, &http.Request{
					Method: row.Method, URL: target, Header: header,
					Body: io.NopCloser(bytes.NewReader(body)), ContentLength: -1,
				}), got
			}

			store := newClaimRecorder()
			header := row.Header.Clone()
			header.Set("Idempotency-Key", "abc-12345")
			response, got := send(store, header)
			if row.Malformed {
				requireProblem(t, response, http.StatusBadRequest, "content_invalid")
				assert.Empty(t, store.claims)
				// Only what is compared must be well-formed.
				response, got = send(store, row.Header)
				assert.Equal(t, http.StatusCreated, response.StatusCode)
				assert.Equal(t, string(body), got)
				return
			}
			require.Equal(t, http.StatusCreated, response.StatusCode)
			assert.Equal(t, string(body), got, "the body is handed on whole")
			require.Len(t, store.claims, 1)
			assert.Equal(t, row.Fingerprint, store.claims[0].Fingerprint)
			fingerprint, err := holdsend.Fingerprint("note.create", json.RawMessage(row.Content))
			require.NoError(t, err)
			assert.Equal(t, fingerprint, row.Fingerprint, "the vector itself")
		})
	}
}
