package holdsend_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

// patience is how long a test waits for what must happen. It decides nothing when all is well.
const patience = 20 * time.Second

func keyed(key string) http.Header { return http.Header{"Idempotency-Key": {key}} }

func newRequest(method, target, body string, header http.Header) *http.Request {
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	for name, values := range header {
		r.Header[name] = values
	}
	return r
}

// serve answers r without a network.
func serve(h http.Handler, r *http.Request) *http.Response {
	recorder := httptest.NewRecorder()
	h.ServeHTTP(recorder, r)
	return recorder.Result()
}

func created(*http.Request, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
	return holdsend.Response{Status: http.StatusCreated}, nil
}

// ownerHeader reads the owner from a header that anybody could forge.
func ownerHeader(r *http.Request) (string, error) { return r.Header.Get("X-Owner"), nil }

func newServer(t *testing.T, h http.Handler) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // panics and second statuses are what some tests are about
	server.Start()
	t.Cleanup(server.Close)
	return server
}

// post sends a JSON body over the network. The response's body is read already.
func post(t *testing.T, server *httptest.Server, path, body string, header http.Header) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+path, strings.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	for name, values := range header {
		r.Header[name] = values
	}
	response, err := server.Client().Do(r)
	require.NoError(t, err)
	return readAll(t, response)
}

func readAll(t *testing.T, response *http.Response) *http.Response {
	t.Helper()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	response.Body = io.NopCloser(bytes.NewReader(body))
	return response
}

func bodyOf(t *testing.T, response *http.Response) string {
	t.Helper()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return string(body)
}

// requireProblem requires that the response is a problem document of that status and code.
func requireProblem(t *testing.T, response *http.Response, status int, code string) {
	t.Helper()
	body := bodyOf(t, response)
	require.Equal(t, status, response.StatusCode, body)
	assert.Equal(t, "application/problem+json", response.Header.Get("Content-Type"))
	var problem struct {
		Type, Title, Detail, Code string
		Status                    int
	}
	require.NoError(t, json.Unmarshal([]byte(body), &problem), body)
	assert.Equal(t, code, problem.Code)
	assert.Equal(t, status, problem.Status)
	assert.Equal(t, "about:blank", problem.Type)
	assert.Equal(t, http.StatusText(status), problem.Title)
	assert.NotEmpty(t, problem.Detail)
	assert.Empty(t, response.Header.Get(holdsend.HeaderReplayed))
}

// receive waits for what a test needs from another goroutine.
func receive[T any](t *testing.T, channel <-chan T, what string) T {
	t.Helper()
	select {
	case value := <-channel:
		return value
	case <-time.After(patience):
		require.FailNow(t, "waited in vain for "+what)
		panic("unreachable")
	}
}

// notes is a create that counts its runs, and its commits.
type notes struct{ runs, commits atomic.Int64 }

func (n *notes) create(r *http.Request, tx *holdsend.MemoryTx, in holdsend.Incoming) (holdsend.Response, error) {
	run := n.runs.Add(1)
	tx.OnCommit(func() { n.commits.Add(1) })
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return holdsend.Response{}, err
	}
	return holdsend.JSON(http.StatusCreated, map[string]any{"id": run, "body": string(body), "key": in.Key})
}

func (n *notes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tx, err := holdsend.TxFromContext[*holdsend.MemoryTx](r.Context())
	if err != nil {
		panic(err)
	}
	in, _ := holdsend.IncomingFromContext(r.Context())
	response, err := n.create(r, tx, in)
	if err != nil {
		panic(err)
	}
	holdsend.Answer{Status: response.Status, Header: response.Header, Body: response.Body}.ServeHTTP(w, r)
}

// bothLayers runs a test for Handler and for Middleware, which must do the same.
func bothLayers(t *testing.T, test func(t *testing.T, protect protector)) {
	t.Helper()
	t.Run("Handler", func(t *testing.T) {
		t.Parallel()
		test(t, func(store holdsend.Store[*holdsend.MemoryTx], owner holdsend.OwnerFunc, n *notes, o *holdsend.MiddlewareOptions) http.Handler {
			return holdsend.Handler(store, owner, n.create, o)
		})
	})
	t.Run("Middleware", func(t *testing.T) {
		t.Parallel()
		test(t, func(store holdsend.Store[*holdsend.MemoryTx], owner holdsend.OwnerFunc, n *notes, o *holdsend.MiddlewareOptions) http.Handler {
			return holdsend.Middleware(store, owner, o)(n)
		})
	})
}

type protector func(holdsend.Store[*holdsend.MemoryTx], holdsend.OwnerFunc, *notes, *holdsend.MiddlewareOptions) http.Handler

// A tap gives some bytes, as a client does that then goes silent, and knows how much it was asked for at a time.
type tap struct{ left, asked int }

func (r *tap) Read(p []byte) (int, error) {
	r.asked = max(r.asked, len(p))
	if r.left == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n := min(len(p), r.left)
	r.left -= n
	return n, nil
}

func (r *tap) Close() error { return nil }

// A client gets memory for about as much as it sent, whatever it declares and however much the service would take.
func TestBodyTakesMemoryForWhatWasSent(t *testing.T) {
	t.Parallel()
	h := holdsend.Handler(holdsend.NewMemoryStore(nil), ownerHeader, created, &holdsend.MiddlewareOptions{MaxBodyBytes: math.MaxInt64})
	const sent = 1 << 20
	for _, declared := range []int64{math.MaxInt64, math.MaxInt64 - 1, 1 << 45, 8 * sent, -1} {
		body := &tap{left: sent}
		r := newRequest(http.MethodPost, "/notes", "", keyed("abc-12345"))
		r.Header.Set("X-Owner", "ada")
		r.ContentLength, r.Body = declared, body
		requireProblem(t, serve(h, r), http.StatusBadRequest, "body_unreadable")
		assert.LessOrEqual(t, body.asked, 2*sent, "%d bytes were declared", declared)
	}
}

func TestLayerCreatesOnceAndReplays(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		var n notes
		server := newServer(t, protect(holdsend.NewMemoryStore(nil), ownerAda, &n, nil))
		first := post(t, server, "/notes", `{"text":"a","n":1}`, keyed("abc-12345"))
		require.Equal(t, http.StatusCreated, first.StatusCode)
		assert.Equal(t, "application/json", first.Header.Get("Content-Type"))
		assert.Empty(t, first.Header.Get(holdsend.HeaderReplayed))
		want := bodyOf(t, first)
		assert.Contains(t, want, `"key":"abc-12345"`)

		// The IETF draft's quoted key is the same key, and other spelling of the content the same content.
		for _, key := range []string{"abc-12345", `"abc-12345"`} {
			again := post(t, server, "/notes", ` {"n":1.0, "text":"\u0061"}`, keyed(key))
			assert.Equal(t, http.StatusCreated, again.StatusCode)
			assert.Equal(t, "true", again.Header.Get(holdsend.HeaderReplayed))
			assert.Equal(t, "application/json", again.Header.Get("Content-Type"))
			assert.Equal(t, want, bodyOf(t, again))
		}

		// The key stands for that content, path and query alone.
		requireProblem(t, post(t, server, "/notes", `{"text":"b"}`, keyed("abc-12345")), http.StatusConflict, "key_conflict")
		requireProblem(t, post(t, server, "/notes?a=1", `{"text":"a","n":1}`, keyed("abc-12345")), http.StatusConflict, "key_conflict")
		assert.EqualValues(t, 1, n.runs.Load())
		assert.EqualValues(t, 1, n.commits.Load())

		// No key, no protection.
		for range 2 {
			response := post(t, server, "/notes", `{"text":"a"}`, nil)
			assert.Equal(t, http.StatusCreated, response.StatusCode)
			assert.Contains(t, bodyOf(t, response), `"key":""`)
		}
		assert.EqualValues(t, 3, n.commits.Load())
	})
}

func TestLayerManyAtOnce(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		var n notes
		server := newServer(t, protect(holdsend.NewMemoryStore(nil), ownerAda, &n, &holdsend.MiddlewareOptions{Wait: patience}))
		server.Client().Transport.(*http.Transport).MaxIdleConnsPerHost = 64
		bodies := make([]string, 64)
		var group sync.WaitGroup
		for i := range bodies {
			group.Go(func() { bodies[i] = bodyOf(t, post(t, server, "/notes", `{}`, keyed("abc-12345"))) })
		}
		group.Wait()
		for _, body := range bodies {
			assert.Equal(t, bodies[0], body)
		}
		assert.EqualValues(t, 1, n.runs.Load())
		assert.EqualValues(t, 1, n.commits.Load())
	})
}

func TestLayerAsksTheOwnerFirst(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		for name, owner := range map[string]holdsend.OwnerFunc{
			"an error":              func(*http.Request) (string, error) { return "", errors.New("secret: no session") },
			"an error and an owner": func(*http.Request) (string, error) { return "ada", errors.New("secret: expired") },
			"nobody":                func(*http.Request) (string, error) { return "", nil },
		} {
			var n notes
			store := newClaimRecorder()
			handler := protect(store, owner, &n, &holdsend.MiddlewareOptions{
				Operation: func(*http.Request) string { t.Error(name + ": Operation was asked"); return "x" },
				OnError:   func(http.ResponseWriter, *http.Request, error) { t.Error(name + ": OnError was called") },
			})
			// Even a bad key and a bad path are nobody's business.
			for _, header := range []http.Header{keyed("abc-12345"), keyed(""), nil} {
				r := newRequest(http.MethodPost, "/"+strings.Repeat("a", 300), "{}", header)
				body := &countingReader{reader: r.Body}
				r.Body = body
				response := serve(handler, r)
				requireProblem(t, response, http.StatusUnauthorized, "unauthenticated")
				assert.Zero(t, body.reads, "the body of somebody unknown is not read")
			}
			assert.Empty(t, store.claims)
			assert.Zero(t, n.runs.Load())
		}
	})
}

type countingReader struct {
	reader io.ReadCloser
	reads  int
}

func (c *countingReader) Read(p []byte) (int, error) { c.reads++; return c.reader.Read(p) }
func (c *countingReader) Close() error               { return c.reader.Close() }

func TestLayerOwnerIsIllFormed(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		for name, owner := range map[string]string{
			"256 bytes": strings.Repeat("a", 256),
			"not UTF-8": "a\xff",
			"a NUL":     "a\x00",
		} {
			var n notes
			var reported []error
			store := newClaimRecorder()
			handler := protect(store, func(*http.Request) (string, error) { return owner, nil }, &n, &holdsend.MiddlewareOptions{
				OnError: func(w http.ResponseWriter, r *http.Request, err error) {
					reported = append(reported, err)
					w.WriteHeader(http.StatusTeapot)
				},
			})
			for _, header := range []http.Header{keyed("abc-12345"), nil} {
				assert.Equal(t, http.StatusTeapot, serve(handler, newRequest(http.MethodPost, "/notes", "{}", header)).StatusCode, name)
			}
			require.Len(t, reported, 2, name)
			assert.ErrorContains(t, reported[0], "Request.Owner", name)
			assert.NotContains(t, reported[0].Error(), owner, name)
			assert.Empty(t, store.claims, name)
			assert.Zero(t, n.runs.Load(), name)
		}
	})
}

func TestLayerNeverReplaysToAnotherOwner(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		var n notes
		server := newServer(t, protect(holdsend.NewMemoryStore(nil), ownerHeader, &n, nil))
		header := func(owner string) http.Header {
			return http.Header{"Idempotency-Key": {"abc-12345"}, "X-Owner": {owner}}
		}
		ada := bodyOf(t, post(t, server, "/notes", `{}`, header("ada")))
		bob := post(t, server, "/notes", `{}`, header("bob"))
		assert.Equal(t, http.StatusCreated, bob.StatusCode)
		assert.Empty(t, bob.Header.Get(holdsend.HeaderReplayed))
		assert.NotEqual(t, ada, bodyOf(t, bob))
		// Owners that look alike are not the same.
		for _, owner := range []string{"Ada", "adа", "ada/", "ad", "ad%61"} {
			response := post(t, server, "/notes", `{}`, header(owner))
			assert.Empty(t, response.Header.Get(holdsend.HeaderReplayed), owner)
			assert.NotEqual(t, ada, bodyOf(t, response), owner)
		}
	})
}

func TestMiddlewareLetsReadsPass(t *testing.T) {
	t.Parallel()
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace} {
		store := newClaimRecorder()
		var gotW http.ResponseWriter
		var gotR *http.Request
		handler := holdsend.Middleware(store, func(*http.Request) (string, error) {
			t.Error(method + ": the owner was asked")
			return "", nil
		}, &holdsend.MiddlewareOptions{RequireKey: true})(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			gotW, gotR = w, r
			_, err := holdsend.TxFromContext[*holdsend.MemoryTx](r.Context())
			assert.Error(t, err)
		}))
		w, r := httptest.NewRecorder(), newRequest(method, "/notes", "", keyed(""))
		handler.ServeHTTP(w, r)
		assert.Same(t, w, gotW, "untouched")
		assert.Same(t, r, gotR, "untouched")
		assert.Empty(t, store.claims)
	}
	// Other methods are writes, also those that nobody has heard of.
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodConnect, "COPY", "get"} {
		store := newClaimRecorder()
		handler := holdsend.Middleware(store, ownerAda, nil)(new(notes))
		assert.Equal(t, http.StatusCreated, serve(handler, newRequest(method, "/notes", "", keyed("abc-12345"))).StatusCode, method)
		assert.Len(t, store.claims, 1, method)
	}
}

func TestHandlerIsACreateWhateverTheMethod(t *testing.T) {
	t.Parallel()
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodPost, http.MethodDelete} {
		store := newClaimRecorder()
		handler := holdsend.Handler(store, ownerAda, created, &holdsend.MiddlewareOptions{RequireKey: true})
		requireProblem(t, serve(handler, newRequest(method, "/notes", "", nil)), http.StatusBadRequest, "key_required")
		assert.Equal(t, http.StatusCreated, serve(handler, newRequest(method, "/notes", "", keyed("abc-12345"))).StatusCode, method)
		assert.Len(t, store.claims, 1, method)
	}
}

func TestLayerIsPutTogetherWrongly(t *testing.T) {
	t.Parallel()
	store := holdsend.NewMemoryStore(nil)
	var noStore holdsend.Store[*holdsend.MemoryTx]
	for want, build := range map[string]func(){
		"Handler needs a store":              func() { holdsend.Handler(noStore, ownerAda, created, nil) },
		"Handler needs an owner function":    func() { holdsend.Handler(store, nil, created, nil) },
		"Handler needs a create function":    func() { holdsend.Handler(store, ownerAda, nil, nil) },
		"Middleware needs a store":           func() { holdsend.Middleware(noStore, ownerAda, nil) },
		"Middleware needs an owner function": func() { holdsend.Middleware(store, nil, nil) },
		"Middleware needs a handler to wrap": func() { holdsend.Middleware(store, ownerAda, nil)(nil) },
		"Middleware cannot use a negative MaxBodyBytes": func() {
			holdsend.Middleware(store, ownerAda, &holdsend.MiddlewareOptions{MaxBodyBytes: -1})
		},
		"Handler cannot use a negative": func() {
			holdsend.Handler(store, ownerAda, created, &holdsend.MiddlewareOptions{MaxResponseBytes: -1})
		},
		"Handler cannot use a negative MaxBodyBytes, MaxResponseBytes or CompletedTTL": func() {
			holdsend.Handler(store, ownerAda, created, &holdsend.MiddlewareOptions{CompletedTTL: -1})
		},
	} {
		func() {
			defer func() {
				text, _ := recover().(string)
				assert.Contains(t, text, "holdsend: "+want)
			}()
			build()
		}()
	}
}

func TestLayerBodyTooLarge(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		const most = 10
		var n notes
		store := newClaimRecorder()
		server := newServer(t, protect(store, ownerAda, &n, &holdsend.MiddlewareOptions{MaxBodyBytes: most}))
		for _, isKeyed := range []bool{true, false} {
			for _, size := range []int{most - 1, most, most + 1, 70_000} {
				for _, length := range []int64{int64(size), -1} { // declared, and in chunks
					body := strings.Repeat(" ", size-2) + "{}"
					r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/notes", io.NopCloser(strings.NewReader(body)))
					require.NoError(t, err)
					r.ContentLength = length
					if isKeyed {
						r.Header.Set("Idempotency-Key", fmt.Sprintf("a-key:%d:%d", size, length))
					}
					r.Header.Set("Content-Type", "application/json")
					response, err := server.Client().Do(r)
					require.NoError(t, err)
					response = readAll(t, response)
					if size > most {
						requireProblem(t, response, http.StatusRequestEntityTooLarge, "body_too_large")
						continue
					}
					require.Equal(t, http.StatusCreated, response.StatusCode)
					var got struct{ Body string }
					require.NoError(t, json.NewDecoder(response.Body).Decode(&got))
					require.Equal(t, body, got.Body)
				}
			}
		}
		assert.EqualValues(t, 8, n.commits.Load())
		assert.Len(t, store.claims, 4)
	})
}

// The limit is 1 MiB where none is set.
func TestLayerBodyTooLargeByDefault(t *testing.T) {
	t.Parallel()
	handler := holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, created, nil)
	send := func(size int) *http.Response {
		r := newRequest(http.MethodPost, "/notes", strings.Repeat("x", size), keyed("abc-12345"))
		r.ContentLength = -1
		return serve(handler, r)
	}
	requireProblem(t, send(1<<20+1), http.StatusRequestEntityTooLarge, "body_too_large")
	assert.Equal(t, http.StatusCreated, send(1<<20).StatusCode)
}

// A body that says that it is too large is refused before the client has sent it.
func TestLayerBodyTooLargeByItsLength(t *testing.T) {
	t.Parallel()
	handler := holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, created, nil)
	r := newRequest(http.MethodPost, "/notes", "", keyed("abc-12345"))
	body := &countingReader{reader: r.Body}
	r.Body, r.ContentLength = body, 1<<20+1
	requireProblem(t, serve(handler, r), http.StatusRequestEntityTooLarge, "body_too_large")
	assert.Zero(t, body.reads)
}

// A limit that was set outside is a limit too.
func TestLayerBodyTooLargeForAnOuterLimit(t *testing.T) {
	t.Parallel()
	store := newClaimRecorder()
	handler := http.MaxBytesHandler(holdsend.Handler(store, ownerAda, created, nil), 3)
	requireProblem(t, serve(handler, newRequest(http.MethodPost, "/notes", "{}  ", keyed("abc-12345"))), http.StatusRequestEntityTooLarge, "body_too_large")
	assert.Empty(t, store.claims)
}

// sendRaw sends bytes as they are and returns the connection.
func sendRaw(t *testing.T, server *httptest.Server, text string) net.Conn {
	t.Helper()
	connection, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = connection.Close() })
	require.NoError(t, connection.SetDeadline(time.Now().Add(patience)))
	_, err = io.WriteString(connection, text)
	require.NoError(t, err)
	return connection
}

func rawPost(rest string) string {
	return "POST /notes HTTP/1.1\r\nHost: notes.example\r\nContent-Type: application/json\r\n" + rest
}

func TestLayerBodyUnreadable(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		for name, text := range map[string]string{
			"cut short":           "Content-Length: 100\r\n\r\n{}",
			"chunks cut short":    "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
			"one chunk cut short": "Transfer-Encoding: chunked\r\n\r\n64\r\n{}",
			"no chunks":           "Transfer-Encoding: chunked\r\n\r\n{}\r\n\r\n",
		} {
			for _, key := range []string{"Idempotency-Key: abc-12345\r\n", ""} {
				var n notes
				store := newClaimRecorder()
				server := newServer(t, protect(store, ownerAda, &n, nil))
				connection := sendRaw(t, server, rawPost(key+text))
				require.NoError(t, connection.(*net.TCPConn).CloseWrite(), name)
				response, err := http.ReadResponse(bufio.NewReader(connection), nil)
				require.NoError(t, err, name)
				requireProblem(t, response, http.StatusBadRequest, "body_unreadable")
				assert.Empty(t, store.claims, name)
				assert.Zero(t, n.runs.Load(), name)
			}
		}
	})
}

// A client that leaves amid its body has sent nothing.
func TestLayerClientLeavesAmidItsBody(t *testing.T) {
	t.Parallel()
	store := newClaimRecorder()
	answered := make(chan int, 1)
	inner := holdsend.Handler(store, ownerAda, created, nil)
	server := newServer(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		recorder := httptest.NewRecorder()
		inner.ServeHTTP(recorder, r)
		answered <- recorder.Code
	}))
	connection := sendRaw(t, server, rawPost("Idempotency-Key: abc-12345\r\nContent-Length: 100\r\n\r\n{"))
	require.NoError(t, connection.Close())
	assert.Equal(t, http.StatusBadRequest, receive(t, answered, "the answer"))
	assert.Empty(t, store.claims)
}

// A body that something outside has read would make all requests the same.
func TestLayerBodyTaken(t *testing.T) {
	t.Parallel()
	store := newClaimRecorder()
	var reported error
	inner := holdsend.Handler(store, ownerAda, created, &holdsend.MiddlewareOptions{
		OnError: func(w http.ResponseWriter, r *http.Request, err error) {
			reported = err
			holdsend.ErrorAnswer(err).ServeHTTP(w, r)
		},
	})
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.NoError(t, r.ParseForm())
		inner.ServeHTTP(w, r)
	})
	r := newRequest(http.MethodPost, "/notes", "text=a", keyed("abc-12345"))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	requireProblem(t, serve(handler, r), http.StatusInternalServerError, "internal")
	assert.ErrorContains(t, reported, "read before")
	assert.Empty(t, store.claims)
}

// Whatever has taken the body before, and whether its length was known: two bodies are not taken for the same.
func TestLayerBodyTakenOverHTTP(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		take      func(r *http.Request)
		isChunked bool
	}{
		"a form of unknown length": {func(r *http.Request) { _ = r.FormValue("_method") }, true},
		"a form of known length":   {func(r *http.Request) { _ = r.FormValue("_method") }, false},
		"http.NoBody in its place": {func(r *http.Request) { _, _ = io.ReadAll(r.Body); r.Body = http.NoBody }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inner := holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(
				http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(201) }))
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				c.take(r)
				inner.ServeHTTP(w, r)
			}))
			t.Cleanup(server.Close)
			for _, text := range []string{"text=one", "text=two"} {
				var body io.Reader = strings.NewReader(text)
				if c.isChunked {
					body = io.MultiReader(body)
				}
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, body)
				require.NoError(t, err)
				r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
				r.Header.Set(holdsend.HeaderIdempotencyKey, "item-0001")
				response, err := server.Client().Do(r)
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				require.Equal(t, http.StatusInternalServerError, response.StatusCode)
			}
		})
	}
}

// A form that does not fit in memory goes to files, which net/http removes at the end of a request. It does not know of the
// request that the library hands on.
func TestLayerRemovesTheFilesOfAForm(t *testing.T) { // not parallel: it sets TMPDIR
	parse := func(r *http.Request) {
		if err := r.ParseMultipartForm(1); err != nil {
			panic(err)
		}
	}
	for name, handler := range map[string]http.Handler{
		"Middleware": holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(
			http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { parse(r); w.WriteHeader(201) })),
		"Handler": holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda,
			func(r *http.Request, _ *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
				parse(r)
				return holdsend.Response{Status: 201}, nil
			}, nil),
		"Content": holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, &holdsend.MiddlewareOptions{
			Content: func(r *http.Request, _ []byte) (any, error) { parse(r); return "the form", nil },
		})(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(201) })),
	} {
		t.Run(name, func(t *testing.T) {
			directory := t.TempDir()
			t.Setenv("TMPDIR", directory)
			var body bytes.Buffer
			form := multipart.NewWriter(&body)
			part, err := form.CreateFormFile("photo", "photo.png")
			require.NoError(t, err)
			_, err = part.Write(make([]byte, 500<<10))
			require.NoError(t, err)
			require.NoError(t, form.Close())
			r := newRequest(http.MethodPost, "/notes", body.String(), keyed("abc-12345"))
			r.Header.Set("Content-Type", form.FormDataContentType())
			require.Equal(t, 201, serve(handler, r).StatusCode)
			files, err := os.ReadDir(directory)
			require.NoError(t, err)
			require.Empty(t, files)
		})
	}
}

func TestLayerHandsTheBodyOn(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, r *http.Request, want string) {
		assert.EqualValues(t, len(want), r.ContentLength)
		assert.Empty(t, r.TransferEncoding)
		got, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		assert.Equal(t, want, string(got))
		assert.NoError(t, r.Body.Close())
	}
	var want string
	runs := 0
	handlers := map[string]http.Handler{
		"Handler": holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, func(r *http.Request, _ *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
			runs++
			check(t, r, want)
			return holdsend.Response{Status: 201}, nil
		}, nil),
		"Middleware": holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			runs++
			check(t, r, want)
		})),
	}
	for name, handler := range handlers {
		server := newServer(t, handler)
		for i, size := range []int{0, 1, 511, 512, 513, 64 << 10, 64<<10 + 1, 300_000} {
			want = strings.Repeat("x", size)
			for _, length := range []int64{int64(size), -1} {
				for _, header := range []http.Header{keyed(fmt.Sprintf("a-key:%d:%d", i, length)), {}} {
					header.Set("Content-Type", "text/plain")
					r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, io.NopCloser(strings.NewReader(want)))
					require.NoError(t, err)
					r.ContentLength, r.Header = length, header
					response, err := server.Client().Do(r)
					require.NoError(t, err, name)
					readAll(t, response)
				}
			}
		}
	}
	assert.Equal(t, 2*8*4, runs)
}

// A request that was built by hand may have no body at all.
func TestLayerNoBody(t *testing.T) {
	t.Parallel()
	r := newRequest(http.MethodPost, "/notes", "", keyed("abc-12345"))
	r.Body = nil
	handler := holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, func(r *http.Request, _ *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
		body, err := io.ReadAll(r.Body)
		assert.Empty(t, body)
		return holdsend.Response{Status: 201}, err
	}, nil)
	assert.Equal(t, http.StatusCreated, serve(handler, r).StatusCode)
}

// Forms can be parsed by create as ever, and a new boundary is no new content.
func TestLayerForms(t *testing.T) {
	t.Parallel()
	var texts []string
	server := newServer(t, holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, func(r *http.Request, _ *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
		file, header, err := r.FormFile("photo")
		if err != nil {
			return holdsend.Response{}, err
		}
		photo, err := io.ReadAll(file)
		texts = append(texts, r.FormValue("text")+" "+header.Filename+" "+string(photo))
		return holdsend.Response{Status: http.StatusCreated}, err
	}, nil))
	send := func(text, photo, name string) *http.Response {
		var body bytes.Buffer
		form := multipart.NewWriter(&body) // with a random boundary
		require.NoError(t, form.WriteField("text", text))
		part, err := form.CreateFormFile("photo", name)
		require.NoError(t, err)
		_, err = io.WriteString(part, photo)
		require.NoError(t, err)
		require.NoError(t, form.Close())
		return post(t, server, "/notes", body.String(), http.Header{"Idempotency-Key": {"abc-12345"}, "Content-Type": {form.FormDataContentType()}})
	}
	assert.Equal(t, http.StatusCreated, send("a note", "png", "a.png").StatusCode)
	again := send("a note", "png", "a.png")
	assert.Equal(t, http.StatusCreated, again.StatusCode)
	assert.Equal(t, "true", again.Header.Get(holdsend.HeaderReplayed))
	requireProblem(t, send("another", "png", "a.png"), http.StatusConflict, "key_conflict")
	requireProblem(t, send("a note", "gif", "a.png"), http.StatusConflict, "key_conflict")
	requireProblem(t, send("a note", "png", "b.png"), http.StatusConflict, "key_conflict")
	assert.Equal(t, []string{"a note a.png png"}, texts)
}

func TestLayerContentOption(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		var n notes
		calls := 0
		store := newClaimRecorder()
		handler := protect(store, ownerAda, &n, &holdsend.MiddlewareOptions{
			Operation: func(*http.Request) string { return "note.create" },
			Content: func(r *http.Request, body []byte) (any, error) {
				calls++
				again, err := io.ReadAll(r.Body)
				assert.Equal(t, string(body), string(again), "the body can be read from the request")
				return json.RawMessage(body), err
			},
		})
		response := serve(handler, newRequest(http.MethodPost, "/notes", `{"a":1}`, keyed("abc-12345")))
		require.Equal(t, http.StatusCreated, response.StatusCode)
		assert.Contains(t, bodyOf(t, response), `{\"a\":1}`, "create has the whole body still")
		fingerprint, err := holdsend.Fingerprint("note.create", json.RawMessage(`{"a":1}`))
		require.NoError(t, err)
		assert.Equal(t, fingerprint, store.claims[0].Fingerprint, "the JSON body alone")
		// Path and method are not part of this content.
		response = serve(handler, newRequest(http.MethodPut, "/others?a=1", `{"a":1}`, keyed("abc-12345")))
		assert.Equal(t, "true", response.Header.Get(holdsend.HeaderReplayed))
		requireProblem(t, serve(handler, newRequest(http.MethodPut, "/others", `{"a":`, keyed("abc-12345"))), http.StatusBadRequest, "content_invalid")
		assert.Equal(t, 3, calls)

		// Where nothing is compared, nobody is asked.
		assert.Equal(t, http.StatusCreated, serve(handler, newRequest(http.MethodPost, "/notes", `{`, nil)).StatusCode)
		requireProblem(t, serve(handler, newRequest(http.MethodPost, "/notes", `{`, keyed("short"))), http.StatusBadRequest, "key_invalid")
		assert.Equal(t, 3, calls)
	})
}

func TestLayerContentOptionFails(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		mine := errors.New("mine")
		for name, test := range map[string]struct {
			content any
			err     error
			want    func(t *testing.T, response *http.Response, reported error)
		}{
			"an error": {json.RawMessage("1"), mine, func(t *testing.T, response *http.Response, reported error) {
				requireProblem(t, response, http.StatusInternalServerError, "internal")
				assert.ErrorIs(t, reported, mine)
			}},
			"the client's fault": {nil, fmt.Errorf("no text: %w", holdsend.ErrNotPlainJSON), func(t *testing.T, response *http.Response, reported error) {
				requireProblem(t, response, http.StatusBadRequest, "content_invalid")
				assert.NoError(t, reported)
			}},
			"nothing": {nil, nil, func(t *testing.T, response *http.Response, reported error) {
				requireProblem(t, response, http.StatusInternalServerError, "internal")
				assert.ErrorContains(t, reported, "Request.Content is nil")
			}},
			"no JSON": {make(chan int), nil, func(t *testing.T, response *http.Response, reported error) {
				requireProblem(t, response, http.StatusBadRequest, "content_invalid")
				assert.NoError(t, reported)
			}},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				var n notes
				var reported error
				store := newClaimRecorder()
				handler := protect(store, ownerAda, &n, &holdsend.MiddlewareOptions{
					Content: func(*http.Request, []byte) (any, error) { return test.content, test.err },
					OnError: func(w http.ResponseWriter, r *http.Request, err error) {
						reported = err
						holdsend.ErrorAnswer(err).ServeHTTP(w, r)
					},
				})
				test.want(t, serve(handler, newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345"))), reported)
				assert.Empty(t, store.claims)
				assert.Zero(t, n.runs.Load())
			})
		}
	})
}

func TestLayerKeys(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		good := func(key string) http.Header { return http.Header{"Idempotency-Key": {key}} }
		type test struct {
			header http.Header
			ok     bool
		}
		tests := map[string]test{
			"7 characters":          {good(strings.Repeat("a", 7)), false},
			"8 characters":          {good(strings.Repeat("a", 8)), true},
			"128 characters":        {good(strings.Repeat("a", 128)), true},
			"129 characters":        {good(strings.Repeat("a", 129)), false},
			"quoted 7":              {good(`"` + strings.Repeat("a", 7) + `"`), false},
			"quoted 8":              {good(`"` + strings.Repeat("a", 8) + `"`), true},
			"quoted 128":            {good(`"` + strings.Repeat("a", 128) + `"`), true},
			"quoted 129":            {good(`"` + strings.Repeat("a", 129) + `"`), false},
			"quoted twice":          {good(`""abc-12345""`), false},
			"one quote before":      {good(`"abc-12345`), false},
			"one quote after":       {good(`abc-12345"`), false},
			"one quote alone":       {good(`"`), false},
			"quoted nothing":        {good(`""`), false},
			"empty":                 {good(""), false},
			"no value":              {http.Header{"Idempotency-Key": {}}, true},
			"doubled":               {http.Header{"Idempotency-Key": {"abc-12345", "abc-12345"}}, false},
			"doubled, one empty":    {http.Header{"Idempotency-Key": {"abc-12345", ""}}, false},
			"in another spelling":   {http.Header{"idempotency-key": {"abc-12345"}}, true},
			"doubled in spellings":  {http.Header{"Idempotency-Key": {"abc-12345"}, "idempotency-key": {"abc-12345"}}, false},
			"two keys in one value": {good("abc-12345, abc-12346"), false},
			"with a parameter":      {good(`"abc-12345";a=1`), false},
		}
		const allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-:."
		for c := range 256 {
			tests[fmt.Sprintf("byte %#02x", c)] = test{good("abcd" + string([]byte{byte(c)}) + "efgh"), strings.IndexByte(allowed, byte(c)) >= 0}
		}
		for name, test := range tests {
			var n notes
			store := newClaimRecorder()
			response := serve(protect(store, ownerAda, &n, nil), newRequest(http.MethodPost, "/notes", "{}", test.header))
			if test.ok {
				assert.Equal(t, http.StatusCreated, response.StatusCode, name)
				assert.EqualValues(t, 1, n.commits.Load(), name)
				continue
			}
			requireProblem(t, response, http.StatusBadRequest, "key_invalid")
			assert.Empty(t, store.claims, name)
			assert.Zero(t, n.runs.Load(), name)
		}
	})
}

// What arrives over the network: two header lines, spaces around a value, an empty value.
func TestLayerKeysOverTheNetwork(t *testing.T) {
	t.Parallel()
	server := newServer(t, holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, created, nil))
	for header, want := range map[string]string{
		"Idempotency-Key:   abc-12345  \r\n":                           "",
		"idempotency-KEY: abc-12345\r\n":                               "",
		"Idempotency-Key: abc-12345\r\nidempotency-key: abc-12345\r\n": "key_invalid",
		"Idempotency-Key:\r\n":                                         "key_invalid",
		"Idempotency-Key: \r\nIdempotency-Key: abc-12345\r\n":          "key_invalid",
		"Idempotency-Key: abc\x80-12345\r\n":                           "key_invalid",
		"Idempotency-Key: " + strings.Repeat("a", 100_000) + "\r\n":    "key_invalid",
		"Idempotency-Key: \"abc-12345\"\r\nIdempotency-Key: a\r\n":     "key_invalid",
		"Idempotency-Key: abc-12345, abc-12345\r\n":                    "key_invalid",
	} {
		connection := sendRaw(t, server, rawPost(header+"Content-Length: 2\r\n\r\n{}"))
		response, err := http.ReadResponse(bufio.NewReader(connection), nil)
		require.NoError(t, err)
		if want == "" {
			assert.Equal(t, http.StatusCreated, response.StatusCode, header)
		} else {
			requireProblem(t, response, http.StatusBadRequest, want)
		}
		require.NoError(t, connection.Close())
	}
}

func TestLayerWrittenAt(t *testing.T) {
	t.Parallel()
	now := time.Now().UTC().Truncate(time.Second)
	hourAgo := now.Add(-time.Hour)
	for name, test := range map[string]struct {
		key    string
		values []string
		want   *time.Time
	}{
		"none":            {"abc-12345", nil, nil},
		"good":            {"abc-12345", []string{hourAgo.Format(time.RFC3339)}, &hourAgo},
		"good and no key": {"", []string{hourAgo.Format(time.RFC3339)}, nil},
		"doubled":         {"abc-12345", []string{hourAgo.Format(time.RFC3339), hourAgo.Format(time.RFC3339)}, nil},
		"empty":           {"abc-12345", []string{""}, nil},
		"bad":             {"abc-12345", []string{"yesterday"}, nil},
		"bytes":           {"abc-12345", []string{"\x00\xff"}, nil},
		"too old":         {"abc-12345", []string{now.Add(-31 * 24 * time.Hour).Format(time.RFC3339)}, nil},
		"ahead":           {"abc-12345", []string{now.Add(time.Hour).Format(time.RFC3339)}, nil},
		"long":            {"abc-12345", []string{strings.Repeat("1", 10_000)}, nil},
	} {
		header := http.Header{"Written-At": test.values}
		if test.key != "" {
			header.Set("Idempotency-Key", test.key)
		}
		var got []holdsend.Incoming
		handler := holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, func(_ *http.Request, _ *holdsend.MemoryTx, in holdsend.Incoming) (holdsend.Response, error) {
			got = append(got, in)
			return holdsend.Response{Status: http.StatusCreated}, nil
		}, nil)
		middleware := holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			in, ok := holdsend.IncomingFromContext(r.Context())
			assert.True(t, ok, name)
			got = append(got, in)
			w.WriteHeader(http.StatusCreated)
		}))
		for _, h := range []http.Handler{handler, middleware} {
			require.Equal(t, http.StatusCreated, serve(h, newRequest(http.MethodPost, "/notes", "{}", header)).StatusCode, name)
		}
		require.Len(t, got, 2, name)
		for _, in := range got {
			assert.Equal(t, test.key, in.Key, name)
			if test.want == nil {
				assert.Nil(t, in.WrittenAt, name)
			} else if assert.NotNil(t, in.WrittenAt, name) {
				assert.True(t, test.want.Equal(*in.WrittenAt), name)
			}
		}
	}
}

func TestLayerOptionsArePassedOn(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		now := time.Now()
		var clock atomic.Int64
		store := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: func() time.Time { return now.Add(time.Duration(clock.Load())) }})
		var n notes
		var events []holdsend.Event
		type valueKey struct{}
		handler := protect(store, ownerAda, &n, &holdsend.MiddlewareOptions{
			Operation:    func(r *http.Request) string { return "note.create" },
			RequireKey:   true,
			Wait:         -1,
			CompletedTTL: time.Hour,
			Observe: func(ctx context.Context, e holdsend.Event) {
				assert.Equal(t, "value", ctx.Value(valueKey{}))
				events = append(events, e)
			},
		})
		send := func(header http.Header) *http.Response {
			r := newRequest(http.MethodPost, "/notes", "{}", header)
			return serve(handler, r.WithContext(context.WithValue(r.Context(), valueKey{}, "value")))
		}
		requireProblem(t, send(nil), http.StatusBadRequest, "key_required")
		assert.Equal(t, http.StatusCreated, send(keyed("abc-12345")).StatusCode)
		record, err := store.Find(t.Context(), holdsend.Scope{Owner: "ada", Operation: "note.create", Key: "abc-12345"})
		require.NoError(t, err)
		require.NotNil(t, record.ExpiresAt)
		assert.Equal(t, time.Hour, record.ExpiresAt.Sub(*record.CompletedAt))
		clock.Store(int64(2 * time.Hour))
		assert.Empty(t, send(keyed("abc-12345")).Header.Get(holdsend.HeaderReplayed), "it has expired")

		// Wait: a living attempt is not waited for.
		attempt, _, err := store.Begin(t.Context(), holdsend.Claim{
			Scope:       holdsend.Scope{Owner: "ada", Operation: "note.create", Key: "abc-99999"},
			Fingerprint: record.Fingerprint,
		})
		require.NoError(t, err)
		response := send(keyed("abc-99999"))
		requireProblem(t, response, http.StatusConflict, "in_progress")
		assert.NotEmpty(t, response.Header.Get("Retry-After"))
		require.NoError(t, attempt.Abort(t.Context()))

		var outcomes []holdsend.Outcome
		for _, e := range events {
			outcomes = append(outcomes, e.Outcome)
			assert.Equal(t, "note.create", e.Operation)
		}
		assert.Equal(t, []holdsend.Outcome{"key_required", "created", "created", "in_progress"}, outcomes)
	})
}

func TestLayerOptionsAreCopied(t *testing.T) {
	t.Parallel()
	options := &holdsend.MiddlewareOptions{}
	handler := holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, created, options)
	options.RequireKey = true
	assert.Equal(t, http.StatusCreated, serve(handler, newRequest(http.MethodPost, "/notes", "{}", nil)).StatusCode)
	assert.Zero(t, options.MaxBodyBytes, "the caller's options stay as they are")
}

// failingStore fails to begin.
type failingStore struct {
	*holdsend.MemoryStore
	err error
}

func (s failingStore) Begin(context.Context, holdsend.Claim) (holdsend.Attempt[*holdsend.MemoryTx], *holdsend.Record, error) {
	return nil, nil, s.err
}

func TestLayerErrors(t *testing.T) {
	t.Parallel()
	bothLayers(t, func(t *testing.T, protect protector) {
		for code, test := range map[string]struct {
			err    error
			status int
		}{
			"claim_lost":      {fmt.Errorf("store: %w", holdsend.ErrClaimLost), http.StatusServiceUnavailable},
			"outcome_unknown": {holdsend.ErrOutcomeUnknown, http.StatusServiceUnavailable},
			"internal":        {errors.New("secret"), http.StatusInternalServerError},
		} {
			var n notes
			store := failingStore{holdsend.NewMemoryStore(nil), test.err}
			response := serve(protect(store, ownerAda, &n, nil), newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345")))
			assert.Equal(t, test.status == http.StatusServiceUnavailable, response.Header.Get("Retry-After") != "")
			body := bodyOf(t, response)
			assert.NotContains(t, body, "secret")
			response.Body = io.NopCloser(strings.NewReader(body))
			requireProblem(t, response, test.status, code)

			var reported error
			response = serve(protect(store, ownerAda, &n, &holdsend.MiddlewareOptions{
				OnError: func(w http.ResponseWriter, r *http.Request, err error) {
					reported = err
					assert.Equal(t, "/notes", r.URL.Path)
					assert.Empty(t, w.Header())
					w.WriteHeader(http.StatusTeapot)
				},
			}), newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345")))
			assert.Equal(t, http.StatusTeapot, response.StatusCode)
			assert.ErrorIs(t, reported, test.err)
		}
	})
}

func TestHandlerCreateFails(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	for name, test := range map[string]struct {
		response holdsend.Response
		err      error
		want     int
	}{
		"an error":              {holdsend.Response{Status: 201}, mine, 500},
		"status 0":              {holdsend.Response{}, nil, 500},
		"status 99":             {holdsend.Response{Status: 99}, nil, 500},
		"status 600":            {holdsend.Response{Status: 600}, nil, 500},
		"status 1000":           {holdsend.Response{Status: 1000}, nil, 500},
		"status -1":             {holdsend.Response{Status: -1}, nil, 500},
		"status 101":            {holdsend.Response{Status: 101}, nil, 500},
		"status 404":            {holdsend.Response{Status: 404, Body: []byte("no")}, nil, 404},
		"status 303":            {holdsend.Response{Status: 303, Header: http.Header{"Location": {"/"}}}, nil, 303},
		"status 500":            {holdsend.Response{Status: 500}, nil, 500},
		"a resource ref":        {holdsend.Response{Status: 201, ResourceRef: strings.Repeat("a", 256)}, nil, 500},
		"not UTF-8 in that ref": {holdsend.Response{Status: 201, ResourceRef: "\xff"}, nil, 500},
	} {
		commits := 0
		store := holdsend.NewMemoryStore(nil)
		var reported error
		handler := holdsend.Handler(store, ownerAda, func(_ *http.Request, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
			tx.OnCommit(func() { commits++ })
			return test.response, test.err
		}, &holdsend.MiddlewareOptions{OnError: func(w http.ResponseWriter, r *http.Request, err error) {
			reported = err
			holdsend.ErrorAnswer(err).ServeHTTP(w, r)
		}})
		for _, header := range []http.Header{keyed("abc-12345"), nil} {
			response := serve(handler, newRequest(http.MethodPost, "/notes", "{}", header))
			assert.Equal(t, test.want, response.StatusCode, name)
			if test.err != nil {
				assert.Equal(t, test.err, reported, "create's own error, unchanged")
			}
		}
		assert.Zero(t, commits, name)
		_, err := store.Find(t.Context(), holdsend.Scope{Owner: "ada", Operation: "POST /notes", Key: "abc-12345"})
		assert.ErrorIs(t, err, holdsend.ErrNotFound, "%s: the key is free", name)
	}
}

func TestHandlerNilHeader(t *testing.T) {
	t.Parallel()
	handler := holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, created, nil)
	for _, replayed := range []string{"", "true"} {
		response := serve(handler, newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345")))
		assert.Equal(t, http.StatusCreated, response.StatusCode)
		assert.Equal(t, replayed, response.Header.Get(holdsend.HeaderReplayed))
		assert.Empty(t, bodyOf(t, response))
	}
}

func TestLayerPanicsGoOnUp(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]any{"http.ErrAbortHandler": http.ErrAbortHandler, "another": "boom"} {
		for _, header := range []http.Header{keyed("abc-12345"), nil} {
			commits := 0
			store := holdsend.NewMemoryStore(nil)
			onError := &holdsend.MiddlewareOptions{OnError: func(http.ResponseWriter, *http.Request, error) { t.Error("OnError was called") }}
			for _, handler := range []http.Handler{
				holdsend.Handler(store, ownerAda, func(_ *http.Request, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
					tx.OnCommit(func() { commits++ })
					panic(value)
				}, onError),
				holdsend.Middleware(store, ownerAda, onError)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					tx, err := holdsend.TxFromContext[*holdsend.MemoryTx](r.Context())
					assert.NoError(t, err)
					tx.OnCommit(func() { commits++ })
					w.WriteHeader(http.StatusCreated)
					_, _ = io.WriteString(w, "half an ")
					panic(value)
				})),
			} {
				w := httptest.NewRecorder()
				assert.PanicsWithValue(t, value, func() { handler.ServeHTTP(w, newRequest(http.MethodPost, "/notes", "{}", header)) }, name)
				assert.Empty(t, w.Body.String(), name)
				_, err := store.Find(t.Context(), holdsend.Scope{Owner: "ada", Operation: "POST /notes", Key: "abc-12345"})
				assert.ErrorIs(t, err, holdsend.ErrNotFound, "%s: the key is free", name)
			}
			assert.Zero(t, commits, name)
		}
	}
}

// A client sees the connection break, and its retry creates.
func TestLayerAbortOverTheNetwork(t *testing.T) {
	t.Parallel()
	var runs atomic.Int64
	server := newServer(t, holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusCreated)
		if runs.Add(1) == 1 {
			panic(http.ErrAbortHandler)
		}
	})))
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, strings.NewReader("{}"))
	require.NoError(t, err)
	r.GetBody = nil // or the client retries by itself
	r.Header = keyed("abc-12345")
	_, err = server.Client().Do(r)
	require.Error(t, err)
	response := post(t, server, "/", "{}", keyed("abc-12345"))
	assert.Equal(t, http.StatusCreated, response.StatusCode)
	assert.EqualValues(t, 2, runs.Load())
}

func TestLayerGoexit(t *testing.T) {
	t.Parallel()
	store := holdsend.NewMemoryStore(nil)
	handler := holdsend.Middleware(store, ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusCreated)
		runtime.Goexit()
	}))
	w := httptest.NewRecorder()
	done := make(chan struct{})
	go func() {
		defer close(done)
		handler.ServeHTTP(w, newRequest(http.MethodPost, "/notes", "{}", keyed("abc-12345")))
	}()
	receive(t, done, "the end of the goroutine")
	assert.False(t, w.Flushed)
	_, err := store.Find(t.Context(), holdsend.Scope{Owner: "ada", Operation: "POST /notes", Key: "abc-12345"})
	assert.ErrorIs(t, err, holdsend.ErrNotFound)
}

// A client that leaves while create runs leaves nothing behind, and its retry creates.
func TestLayerClientLeaves(t *testing.T) {
	t.Parallel()
	build := map[string]func(store *holdsend.MemoryStore, body func(ctx context.Context), o *holdsend.MiddlewareOptions) http.Handler{
		"Handler": func(store *holdsend.MemoryStore, body func(context.Context), o *holdsend.MiddlewareOptions) http.Handler {
			return holdsend.Handler(store, ownerAda, func(r *http.Request, _ *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
				body(r.Context())
				return holdsend.Response{Status: http.StatusCreated}, r.Context().Err()
			}, o)
		},
		"Middleware": func(store *holdsend.MemoryStore, body func(context.Context), o *holdsend.MiddlewareOptions) http.Handler {
			return holdsend.Middleware(store, ownerAda, o)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Location", "/notes/1") // a header alone is no answer
				body(r.Context())
			}))
		},
	}
	for name, build := range build {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := holdsend.NewMemoryStore(nil)
			var runs atomic.Int64
			started, reported, events := make(chan struct{}), make(chan error, 1), make(chan holdsend.Event, 2)
			server := newServer(t, build(store, func(ctx context.Context) {
				if runs.Add(1) == 1 {
					close(started)
					<-ctx.Done()
				}
			}, &holdsend.MiddlewareOptions{
				OnError: func(w http.ResponseWriter, r *http.Request, err error) {
					holdsend.ErrorAnswer(err).ServeHTTP(w, r)
					reported <- err
				},
				Observe: func(_ context.Context, e holdsend.Event) { events <- e },
			}))
			connection := sendRaw(t, server, rawPost("Idempotency-Key: abc-12345\r\nContent-Length: 2\r\n\r\n{}"))
			receive(t, started, "create")
			require.NoError(t, connection.Close())
			assert.ErrorIs(t, receive(t, reported, "the error"), context.Canceled)
			assert.ErrorIs(t, receive(t, events, "the event").Err, context.Canceled)
			_, err := store.Find(t.Context(), holdsend.Scope{Owner: "ada", Operation: "POST /notes", Key: "abc-12345"})
			assert.ErrorIs(t, err, holdsend.ErrNotFound)
			response := post(t, server, "/notes", "{}", keyed("abc-12345"))
			assert.Empty(t, response.Header.Get(holdsend.HeaderReplayed))
			assert.Equal(t, holdsend.OutcomeCreated, receive(t, events, "the event").Outcome)
		})
	}
}

// Once a handler has answered 2xx, the write is kept although the client has left.
func TestLayerClientLeavesAfterTheAnswer(t *testing.T) {
	t.Parallel()
	started := make(chan struct{})
	events := make(chan holdsend.Event, 2)
	server := newServer(t, holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, &holdsend.MiddlewareOptions{
		Observe: func(_ context.Context, e holdsend.Event) { events <- e },
	})(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusCreated)
		close(started)
		<-r.Context().Done()
	})))
	connection := sendRaw(t, server, rawPost("Idempotency-Key: abc-12345\r\nContent-Length: 2\r\n\r\n{}"))
	receive(t, started, "the handler")
	require.NoError(t, connection.Close())
	event := receive(t, events, "the event")
	assert.Equal(t, holdsend.OutcomeCreated, event.Outcome)
	assert.NoError(t, event.Err)
	response := post(t, server, "/notes", "{}", keyed("abc-12345"))
	assert.Equal(t, http.StatusCreated, response.StatusCode)
	assert.Equal(t, "true", response.Header.Get(holdsend.HeaderReplayed))
}

// A duplicate whose client leaves while it waits is over at once, and the first attempt goes on.
func TestLayerWaitingClientLeaves(t *testing.T) {
	t.Parallel()
	started, finish := make(chan struct{}), make(chan struct{})
	events := make(chan holdsend.Event, 2)
	server := newServer(t, holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, func(*http.Request, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
		close(started)
		<-finish
		return holdsend.Response{Status: http.StatusCreated}, nil
	}, &holdsend.MiddlewareOptions{Wait: 2 * patience, Observe: func(_ context.Context, e holdsend.Event) { events <- e }}))
	first := make(chan *http.Response, 1)
	go func() { first <- post(t, server, "/notes", "{}", keyed("abc-12345")) }()
	receive(t, started, "create")
	connection := sendRaw(t, server, rawPost("Idempotency-Key: abc-12345\r\nContent-Length: 2\r\n\r\n{}"))
	require.NoError(t, connection.(*net.TCPConn).Close())
	assert.ErrorIs(t, receive(t, events, "the event").Err, context.Canceled)
	close(finish)
	assert.Equal(t, http.StatusCreated, receive(t, first, "the first answer").StatusCode)
	assert.Equal(t, holdsend.OutcomeCreated, receive(t, events, "the event").Outcome)
}

func TestLayerLargeAnswers(t *testing.T) {
	t.Parallel()
	for _, limit := range []int64{0, 10} {
		most := 10
		if limit == 0 {
			most = 1 << 20
		}
		for _, test := range []struct {
			status, size int
			key          string
			kept         bool
		}{
			{201, most, "abc-12345", true},
			{201, most + 1, "abc-12345", false},
			{201, 3 * most, "abc-12345", false},
			{404, most + 1, "abc-12345", false},
			{201, most + 1, "", false},
		} {
			if limit == 0 && (test.status != 201 || test.size > most+1) {
				continue // the default is one number: these cases are about any
			}
			body := strings.Repeat("x", test.size)
			runs := 0
			header := http.Header{}
			if test.key != "" {
				header = keyed(test.key)
			}
			options := &holdsend.MiddlewareOptions{MaxResponseBytes: limit}
			for _, handler := range []http.Handler{
				holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, func(*http.Request, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
					runs++
					return holdsend.Response{Status: test.status, Header: http.Header{"Location": {"/notes/1"}, "Set-Cookie": {"a=1"}}, Body: []byte(body)}, nil
				}, options),
				holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, options)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					runs++
					w.Header().Set("Location", "/notes/1")
					w.Header().Set("Set-Cookie", "a=1")
					w.WriteHeader(test.status)
					_, _ = io.WriteString(w, body[:test.size/2])
					_, _ = io.WriteString(w, body[test.size/2:])
				})),
			} {
				runs = 0
				send := func() *http.Response {
					return serve(handler, newRequest(http.MethodPost, "/notes", "{}", header))
				}
				first := send()
				assert.Equal(t, test.status, first.StatusCode)
				assert.Equal(t, body, bodyOf(t, first), "the first caller gets it whole")
				assert.Equal(t, "/notes/1", first.Header.Get("Location"))
				assert.Equal(t, "a=1", first.Header.Get("Set-Cookie"))
				assert.NotContains(t, first.Header, "Idempotent-Body-Omitted")
				if test.status != 201 || test.key == "" {
					continue
				}
				for range 2 {
					again := send()
					assert.Equal(t, test.status, again.StatusCode)
					assert.Equal(t, "true", again.Header.Get(holdsend.HeaderReplayed))
					assert.Equal(t, "/notes/1", again.Header.Get("Location"))
					assert.Empty(t, again.Header.Get("Set-Cookie"))
					if test.kept {
						assert.NotContains(t, again.Header, "Idempotent-Body-Omitted")
						assert.Equal(t, body, bodyOf(t, again))
					} else {
						assert.Equal(t, "true", again.Header.Get("Idempotent-Body-Omitted"))
						assert.Empty(t, bodyOf(t, again))
						assert.Equal(t, "0", again.Header.Get("Content-Length"))
					}
				}
				assert.Equal(t, 1, runs, "create never runs again because its answer was large")
			}
		}
	}
}

// Headers of one connection, one message or one caller reach the first caller and nobody else.
func TestLayerStoredHeaders(t *testing.T) {
	t.Parallel()
	bothTimes := http.Header{
		"Content-Type": {"text/plain"}, "Location": {"/notes/1"}, "Etag": {`"1"`}, "Link": {"<a>", "<b>"},
		"Cache-Control": {"no-store"}, "X-Empty": {""},
	}
	onlyFirst := http.Header{
		"Set-Cookie": {"session=secret", "b=2"}, "Authorization": {"secret"}, "Www-Authenticate": {"Basic"},
		"Proxy-Authenticate": {"Basic"}, "Proxy-Anything": {"1"}, "Keep-Alive": {"timeout=5"}, "Upgrade": {"h2c"},
		"Te": {"trailers"}, "X-Hop": {"1"}, "X-Hop-Two": {"1"},
	}
	connection := []string{"close, x-hop", "X-HOP-TWO"}
	set := func(h http.Header) {
		for _, header := range []http.Header{bothTimes, onlyFirst, {"Connection": connection}} {
			for name, values := range header {
				h[name] = values
			}
		}
		h.Set("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
	}
	for name, handler := range map[string]http.Handler{
		"Handler": holdsend.Handler(holdsend.NewMemoryStore(nil), ownerAda, func(*http.Request, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
			response := holdsend.Response{Status: http.StatusCreated, Header: http.Header{}, Body: []byte("a note")}
			set(response.Header)
			return response, nil
		}, nil),
		"Middleware": holdsend.Middleware(holdsend.NewMemoryStore(nil), ownerAda, nil)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			set(w.Header())
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "a note")
		})),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := newServer(t, handler)
			first := post(t, server, "/notes", "{}", keyed("abc-12345"))
			again := post(t, server, "/notes", "{}", keyed("abc-12345"))
			require.Equal(t, "true", again.Header.Get(holdsend.HeaderReplayed))
			for name, values := range bothTimes {
				assert.Equal(t, values, first.Header[name], name)
				assert.Equal(t, values, again.Header[name], name)
			}
			for name, values := range onlyFirst {
				assert.Equal(t, values, first.Header[name], name)
				assert.NotContains(t, again.Header, name)
			}
			assert.Equal(t, "Thu, 01 Jan 1970 00:00:00 GMT", first.Header.Get("Date"))
			assert.NotEqual(t, "Thu, 01 Jan 1970 00:00:00 GMT", again.Header.Get("Date"))
			assert.Equal(t, "a note", bodyOf(t, again))
		})
	}
}
