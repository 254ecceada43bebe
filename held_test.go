package holdsend_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

// Under Middleware a handler's answer is, header for header and byte for byte, what net/http makes of it without; and so
// is its replay.
func TestMiddlewareAnswersAsNetHTTPDoes(t *testing.T) {
	t.Parallel()
	for name, handler := range map[string]http.HandlerFunc{
		"nothing":        func(w http.ResponseWriter, r *http.Request) {},
		"a header alone": func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Location", "/notes/1") },
		"a status alone": func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusAccepted) },
		"a body alone":   func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "a note") },
		"an empty write": func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(nil) },
		"all": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.Header().Add("Link", "<a>")
			w.Header().Add("Link", "<b>")
			w.WriteHeader(http.StatusCreated)
			_, _ = fmt.Fprintf(w, `{"id":%d}`, 1)
			_, _ = w.Write([]byte("\n"))
		},
		"a second status": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusCreated)
			w.WriteHeader(http.StatusInternalServerError)
		},
		"a status after the body": func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "a note")
			w.WriteHeader(http.StatusInternalServerError)
		},
		"a header after the status": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Changed", "before")
			w.Header().Add("X-Added", "before")
			w.Header().Set("X-Deleted", "before")
			w.WriteHeader(http.StatusCreated)
			w.Header().Set("X-Late", "1")
			w.Header().Set("X-Changed", "after")
			w.Header().Add("X-Added", "after")
			w.Header().Del("X-Deleted")
			w.Header().Set("Content-Type", "text/late")
			_, _ = io.WriteString(w, "a note")
		},
		"a header after the body": func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "a note")
			w.Header().Set("X-Late", "1")
		},
		"a type that is sniffed": func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "<!DOCTYPE html><p>") },
		"a type that is sniffed from several writes": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusCreated)
			for _, part := range []string{"<!DOC", "TYPE ", "html><p>"} {
				_, _ = io.WriteString(w, part)
			}
		},
		"a type that is sniffed from binary": func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write(append([]byte("\x89PNG\r\n\x1a\n"), make([]byte, 1000)...))
		},
		"a type that is text for its first 512 bytes": func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, strings.Repeat("a", 512)+"\x00\x01")
		},
		"no type wanted": func(w http.ResponseWriter, r *http.Request) {
			w.Header()["Content-Type"] = nil
			_, _ = io.WriteString(w, "<!DOCTYPE html>")
		},
		"an encoded body": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "br")
			_, _ = io.WriteString(w, "<!DOCTYPE html>")
		},
		"no content": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusNoContent)
			_, err := io.WriteString(w, "a note")
			assert.ErrorIs(t, err, http.ErrBodyNotAllowed)
			_, err = w.Write([]byte("a note"))
			assert.ErrorIs(t, err, http.ErrBodyNotAllowed)
		},
		"its length declared": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "6")
			_, _ = io.WriteString(w, "a note")
		},
		"a redirect":    func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/notes/1", http.StatusSeeOther) },
		"an error":      func(w http.ResponseWriter, r *http.Request) { http.Error(w, "no such note", http.StatusNotFound) },
		"a large body":  func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, strings.Repeat("x", 100_000)) },
		"a copied body": func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, strings.NewReader("a note")) },
		"an informational answer": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", "<a>")
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "a note")
		},
		"a declared trailer": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusCreated)
			w.Header().Set(http.TrailerPrefix+"X-Sum", "1")
		},
		"a trailer before the status": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set(http.TrailerPrefix+"X-Sum", "1")
			_, _ = io.WriteString(w, "a note")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bare := newServer(t, handler)
			protected := newServer(t, holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(handler))
			for _, server := range []*httptest.Server{bare, protected} {
				server.Client().CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			}
			want := post(t, bare, "/notes", "{}", nil)
			wantBody := bodyOf(t, want)
			same := func(got *http.Response) {
				t.Helper()
				assert.Equal(t, want.StatusCode, got.StatusCode)
				assert.Equal(t, wantBody, bodyOf(t, got))
				for _, header := range []http.Header{want.Header, got.Header} {
					header.Del("Date")
					// net/http does not count a large body, and a replay says that it is one.
					header.Del("Content-Length")
					header.Del(holdsend.HeaderReplayed)
				}
				assert.Equal(t, want.Header, got.Header)
				assert.Empty(t, got.Trailer)
			}
			same(post(t, protected, "/notes", "{}", keyed("abc-12345")))
			again := post(t, protected, "/notes", "{}", keyed("abc-12345"))
			if want.StatusCode < 300 {
				assert.Equal(t, "true", again.Header.Get(holdsend.HeaderReplayed))
			}
			same(again)
			same(post(t, protected, "/notes", "{}", nil))
		})
	}
}

// A trailer is no header, and must not become one in the record.
func TestMiddlewareKeepsNoTrailers(t *testing.T) {
	t.Parallel()
	attempt := &fakeAttempt{}
	handler := holdsend.Middleware(holding(attempt), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("X-Kept", "1")
		w.Header().Set(http.TrailerPrefix+"X-Sum", "1")
		_, _ = io.WriteString(w, "a note")
		w.Header().Set("X-Sum", "1")
	}))
	require.Equal(t, http.StatusOK, serve(handler, newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345"))).StatusCode)
	assert.Equal(t, http.Header{"X-Kept": {"1"}, "Content-Type": {"text/plain; charset=utf-8"}}, attempt.completion.Response.Header)
}

// What net/http takes for a handler's fault is one here, too, and its key is free.
func TestMiddlewareStatusThatIsNone(t *testing.T) {
	t.Parallel()
	for _, status := range []int{-1, 0, 1, 99, 101, 600, 999, 1000} {
		store := holdsend.NewMemoryStore(nil)
		commits := 0
		handler := holdsend.Middleware(store, ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			tx, err := holdsend.TxFromContext[*holdsend.MemoryTx](r.Context())
			assert.NoError(t, err)
			tx.OnCommit(func() { commits++ })
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "a note")
			w.WriteHeader(http.StatusCreated)
		}))
		for _, header := range []http.Header{keyed("abc-12345"), nil} {
			requireProblem(t, serve(handler, newRequest(http.MethodPost, "/notes", "{}", header)), http.StatusInternalServerError, "internal")
		}
		assert.Zero(t, commits)
		_, err := store.Find(t.Context(), holdsend.Scope{Owner: "ada", Operation: "POST /notes", Key: "abc-12345"})
		assert.ErrorIs(t, err, holdsend.ErrNotFound, status)
	}
}

// Nothing can slip past the commit: neither by an interface nor through http.ResponseController.
func TestMiddlewareWriterHasNoWayOut(t *testing.T) {
	t.Parallel()
	handler := holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, flusher := w.(http.Flusher)
		_, errorFlusher := w.(interface{ FlushError() error })
		_, hijacker := w.(http.Hijacker)
		_, readerFrom := w.(io.ReaderFrom)
		_, pusher := w.(http.Pusher)
		_, unwrapper := w.(interface{ Unwrap() http.ResponseWriter })
		assert.Equal(t, [6]bool{}, [6]bool{flusher, errorFlusher, hijacker, readerFrom, pusher, unwrapper})
		controller := http.NewResponseController(w)
		assert.ErrorIs(t, controller.Flush(), http.ErrNotSupported)
		_, _, err := controller.Hijack()
		assert.ErrorIs(t, err, http.ErrNotSupported)
		assert.ErrorIs(t, controller.SetWriteDeadline(time.Time{}), http.ErrNotSupported)
		assert.ErrorIs(t, controller.EnableFullDuplex(), http.ErrNotSupported)
	}))
	server := newServer(t, handler)
	assert.Equal(t, http.StatusOK, post(t, server, "/notes", "{}", keyed("abc-12345")).StatusCode)
}

// A gatedStore completes when it is told to.
type gatedStore struct {
	*holdsend.MemoryStore
	before func()
	err    error // what Complete returns instead of completing
}

func (s gatedStore) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[*holdsend.MemoryTx], *holdsend.Record, error) {
	attempt, record, err := s.MemoryStore.Begin(ctx, c)
	if attempt != nil {
		attempt = gatedAttempt{attempt, s}
	}
	return attempt, record, err
}

type gatedAttempt struct {
	holdsend.Attempt[*holdsend.MemoryTx]
	store gatedStore
}

func (a gatedAttempt) Complete(ctx context.Context, c holdsend.Completion) error {
	a.store.before()
	if a.store.err != nil {
		return a.store.err
	}
	return a.Attempt.Complete(ctx, c)
}

// No byte of an answer leaves before its transaction has committed.
func TestMiddlewareHoldsTheAnswerBack(t *testing.T) {
	t.Parallel()
	completing, complete := make(chan struct{}), make(chan struct{})
	store := gatedStore{MemoryStore: holdsend.NewMemoryStore(nil), before: func() { close(completing); <-complete }}
	server := newServer(t, holdsend.Middleware(store, ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Set("Location", "/notes/1")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, strings.Repeat("x", 100_000)) // more than any buffer between
	})))
	connection := sendRaw(t, server, rawPost("Idempotency-Key: abc-12345\r\nContent-Length: 2\r\n\r\n{}"))
	arrived := make(chan string, 1)
	go func() {
		buffer := make([]byte, 12)
		_, _ = io.ReadFull(connection, buffer)
		arrived <- string(buffer)
	}()
	receive(t, completing, "Complete")
	select {
	case text := <-arrived:
		t.Errorf("%q arrived before the commit", text)
	case <-time.After(50 * time.Millisecond): // a byte on its way has that long to show a fault; no byte is no fault
	}
	close(complete)
	assert.Equal(t, "HTTP/1.1 201", receive(t, arrived, "the answer"))
}

// The answer of a write that was rolled back reaches nobody.
func TestMiddlewareDropsTheAnswerOfALostWrite(t *testing.T) {
	t.Parallel()
	for code, lost := range map[string]error{"claim_lost": holdsend.ErrClaimLost, "outcome_unknown": holdsend.ErrOutcomeUnknown} {
		store := gatedStore{MemoryStore: holdsend.NewMemoryStore(nil), before: func() {}, err: lost}
		handler := holdsend.Middleware(store, ownerAda, &holdsend.MiddlewareOptions{MaxResponseBytes: 3})(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "/notes/1")
			w.Header().Set("Set-Cookie", "a=1")
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "a note")
		}))
		response := serve(handler, newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345")))
		assert.NotContains(t, response.Header, "Location")
		assert.NotContains(t, response.Header, "Set-Cookie")
		requireProblem(t, response, http.StatusServiceUnavailable, code)
	}
}

// What a handler outside has set stays, unless the wrapped one sets it too.
func TestMiddlewareInsideOtherMiddleware(t *testing.T) {
	t.Parallel()
	inner := holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Empty(t, w.Header(), "or the outer headers would be kept in the record")
		w.Header().Set("X-Both", "inner")
		w.WriteHeader(http.StatusCreated)
	}))
	number := 0
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		number++
		w.Header().Set("X-Request-Id", fmt.Sprint(number))
		w.Header().Set("X-Both", "outer")
		inner.ServeHTTP(w, r)
	})
	for _, id := range []string{"1", "2"} {
		response := serve(handler, newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345")))
		assert.Equal(t, id, response.Header.Get("X-Request-Id"))
		assert.Equal(t, []string{"inner"}, response.Header.Values("X-Both"))
	}
}

// A pipelined second request is answered after a first whose body was read whole.
func TestMiddlewareKeepsTheConnection(t *testing.T) {
	t.Parallel()
	server := newServer(t, holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {})))
	one := rawPost("Idempotency-Key: abc-12345\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
	var connection net.Conn = sendRaw(t, server, one+one)
	reader := bufio.NewReader(connection)
	for _, replayed := range []string{"", "true"} {
		response, err := http.ReadResponse(reader, nil)
		require.NoError(t, err)
		assert.Equal(t, http.StatusOK, response.StatusCode)
		assert.Equal(t, replayed, response.Header.Get(holdsend.HeaderReplayed))
		require.Empty(t, bodyOf(t, response))
	}
}
