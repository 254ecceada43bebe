package holdsend_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
)

// A service is a Handler on one store. Its create writes one note, and answers as respond says.
type service struct {
	handler func(respond func(*http.Request) holdsend.Response, o holdsend.MiddlewareOptions) http.Handler
	notes   func() int // that are committed
	forget  func(owner string) (int64, error)
	damage  func(assignment string) // of every record; nil: the store keeps them where nobody can
}

// eachService runs a test on a memory store, and on Postgres with a pool of one connection.
func eachService(t *testing.T, test func(t *testing.T, s service)) {
	t.Helper()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		store := holdsend.NewMemoryStore(nil)
		var notes atomic.Int64
		test(t, service{
			handler: func(respond func(*http.Request) holdsend.Response, o holdsend.MiddlewareOptions) http.Handler {
				return holdsend.Handler(store, ownerHeader, func(r *http.Request, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
					tx.OnCommit(func() { notes.Add(1) })
					return respond(r), nil
				}, &o)
			},
			notes:  func() int { return int(notes.Load()) },
			forget: func(owner string) (int64, error) { return store.ForgetOwner(t.Context(), owner) },
		})
	})
	t.Run("Postgres", func(t *testing.T) {
		t.Parallel()
		b := newBed(t, nil, func(c *pgxpool.Config) { c.MaxConns = 1 })
		test(t, service{
			handler: func(respond func(*http.Request) holdsend.Response, o holdsend.MiddlewareOptions) http.Handler {
				return holdsend.Handler(b.store, ownerHeader, func(r *http.Request, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
					if _, err := insertNote(r.Context(), tx, in); err != nil {
						return holdsend.Response{}, err
					}
					return respond(r), nil
				}, &o)
			},
			notes:  b.notes,
			forget: func(owner string) (int64, error) { return b.store.ForgetOwner(t.Context(), owner) },
			damage: func(assignment string) { pgtest.Exec(t, b.aside, "UPDATE holdsend_records SET "+assignment) },
		})
	})
}

func operationHeader(r *http.Request) string { return r.Header.Get("X-Operation") }

// Scopes that look alike when their parts are joined, or are SQL: each creates once and is replayed its own answer.
func TestSecurityScopesAreApart(t *testing.T) {
	t.Parallel()
	eachService(t, func(t *testing.T, s service) {
		server := newServer(t, s.handler(func(r *http.Request) holdsend.Response {
			return holdsend.Response{Status: 201, Body: fmt.Appendf(nil, "%q %q %q", r.Header.Get("X-Owner"), operationHeader(r), r.Header.Get("Idempotency-Key"))}
		}, holdsend.MiddlewareOptions{Operation: operationHeader}))
		scopes := [][3]string{
			{"a|b", "c", "abc-12345"}, {"a", "b|c", "abc-12345"},
			{"a:b", "c", "abc-12345"}, {"a", "b:c", "abc-12345"}, {"a", "b", "c:abc-12345"}, {"a", "b:c:abc", "-1234567"}, {"a", "b:c", "abc:-1234567"},
			{"1:a", "1:b", "abc-12345"}, {"1", "a1:b", "abc-12345"}, {"a", "11:b", "abc-12345"}, {"a1", "1:b", "abc-12345"},
			{`a","b`, "c", "abc-12345"}, {"a", `b","c`, "abc-12345"}, {`a\`, "b", "abc-12345"}, {"a", `\b`, "abc-12345"},
			{"a/b", "c", "abc-12345"}, {"a", "b/c", "abc-12345"}, {"a", "b", "abc-123456"},
			{"' OR '1'='1", "c", "abc-12345"}, {"'; DROP TABLE notes; --", "c", "abc-12345"}, {"c", "'; DROP TABLE holdsend_records; --", "abc-12345"},
			{"$1", "$2", "abc-12345"}, {"$2", "$1", "abc-12345"}, {"%", "_", "abc-12345"}, {"_", "%", "abc-12345"}, {"{scope}", "{records}", "abc-12345"},
			{"A", "b", "abc-12345"}, {"a", "B", "abc-12345"}, {"a", "b", "ABC-12345"}, {"a", "b", "abc-12345"},
		}
		for round := range 2 {
			for _, scope := range scopes {
				response := post(t, server, "/notes", `{}`, http.Header{"X-Owner": {scope[0]}, "X-Operation": {scope[1]}, "Idempotency-Key": {scope[2]}})
				require.Equal(t, 201, response.StatusCode, "%q", scope)
				require.Equal(t, fmt.Sprintf("%q %q %q", scope[0], scope[1], scope[2]), bodyOf(t, response))
				require.Equal(t, round == 1, response.Header.Get(holdsend.HeaderReplayed) == "true", "%q", scope)
			}
		}
		require.Equal(t, len(scopes), s.notes())
		forgotten, err := s.forget("' OR '1'='1")
		require.NoError(t, err)
		require.EqualValues(t, 1, forgotten)
	})
}

// rawAnswer sends a request and returns the answer as it came, up to its end.
func rawAnswer(t *testing.T, address, owner string) string {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = fmt.Fprintf(conn, "POST /notes HTTP/1.1\r\nHost: h\r\nX-Owner: %s\r\nIdempotency-Key: abc-12345\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}", owner)
	require.NoError(t, err)
	answer, err := io.ReadAll(conn)
	require.NoError(t, err)
	return string(answer)
}

// What create put into a header, by way of a line break, becomes no header of its own: not in the first answer, nor in
// what is replayed, also where the record was tampered with.
func TestSecurityHeadersAreNotSmuggled(t *testing.T) {
	t.Parallel()
	eachService(t, func(t *testing.T, s service) {
		server := newServer(t, s.handler(func(*http.Request) holdsend.Response {
			return holdsend.Response{Status: 201, Body: []byte("the body"), Header: http.Header{
				"X-Value":                    {"a\r\nX-Injected: 1\r\n\r\n<html>", "b\nX-Injected: 2", "c\rX-Injected: 3"},
				"X-Name\r\nX-Injected":       {"4"},
				"X-Name: a\nX-Injected":      {"5"},
				"Set-Cookie":                 {"session=secret"},
				"set-cookie":                 {"session=lower"},
				"Content-Length":             {"3"},
				"Transfer-Encoding":          {"chunked"},
				"X-Ends\r\n\r\nHTTP/1.1 200": {"6"},
			}}
		}, holdsend.MiddlewareOptions{}))
		require.NotNil(t, server)
		check := func(what string) string {
			raw := rawAnswer(t, server.Listener.Addr().String(), "ada")
			response, err := http.ReadResponse(bufio.NewReader(strings.NewReader(raw)), nil)
			require.NoError(t, err, what)
			response = readAll(t, response)
			require.Equal(t, 201, response.StatusCode, what)
			require.Equal(t, "the body", bodyOf(t, response), what)
			require.Empty(t, response.Header.Values("X-Injected"), what)
			require.Equal(t, 1, strings.Count(raw, "HTTP/1.1 "), what)
			require.Equal(t, 1, strings.Count(raw, "\r\n\r\n"), what)
			return raw
		}
		require.Contains(t, check("the first answer"), "session=secret")
		require.NotContains(t, check("the replay"), "session=")
		require.Equal(t, 1, s.notes())
		if s.damage != nil {
			s.damage(`header = '{"X-Value": ["a\r\nX-Injected: 7\r\n\r\n"], "X-Injected: 8\r\nX-Name": ["b"], "X\u0000": ["\u0000"]}'`)
			check("a record with line breaks")
		}
	})
}

// A body that stalls holds neither the claim nor a connection of the pool, which has one: the key is claimed once the body
// is here.
func TestSecurityStalledBodyHoldsNothing(t *testing.T) {
	t.Parallel()
	eachService(t, func(t *testing.T, s service) {
		arrived := make(chan struct{})
		var once sync.Once
		handler := s.handler(func(*http.Request) holdsend.Response { return holdsend.Response{Status: 201} }, holdsend.MiddlewareOptions{})
		server := newServer(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.ContentLength == 100 {
				r.Body = &watchedBody{r.Body, func() { once.Do(func() { close(arrived) }) }}
			}
			handler.ServeHTTP(w, r)
		}))
		stalled, err := net.Dial("tcp", server.Listener.Addr().String())
		require.NoError(t, err)
		defer stalled.Close()
		_, err = io.WriteString(stalled, "POST /notes HTTP/1.1\r\nHost: h\r\nX-Owner: ada\r\nIdempotency-Key: abc-12345\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
		require.NoError(t, err)
		receive(t, arrived, "the service to read the stalled body")

		response := post(t, server, "/notes", `{}`, http.Header{"X-Owner": {"ada"}, "Idempotency-Key": {"abc-12345"}})
		require.Equal(t, 201, response.StatusCode)
		require.Empty(t, response.Header.Get(holdsend.HeaderReplayed))
		require.Equal(t, 1, s.notes())
	})
}

// watchedBody tells when it is read for the second time: what was sent has been read, and the rest is waited for.
type watchedBody struct {
	io.ReadCloser
	waits func()
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p[:min(len(p), 1)])
	b.waits()
	return n, err
}

// A record that somebody damaged is answered with 500, and create does not run again.
func TestSecurityDamagedRecord(t *testing.T) {
	t.Parallel()
	for _, damage := range []string{
		"header = 'canary'", "header = '[]'", `header = '{"X-A": "canary"}'`, `header = '{"X-A": ["€"]}'`, "header = NULL", "header = ''",
		"status = 0", "status = -1", "status = 99", "status = 101", "status = 600", "status = 32767", "status = NULL",
		"fingerprint = ''", "fingerprint = 'hs9:canary'", "fingerprint = 'hs1:canary'", "fingerprint = fingerprint || 'canary'",
		"state = 'canary'", "state = ''",
	} {
		t.Run(damage, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, nil, nil)
			handler := holdsend.Handler(b.store, ownerHeader, func(r *http.Request, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				return insertNote(r.Context(), tx, in)
			}, &holdsend.MiddlewareOptions{OnError: func(w http.ResponseWriter, r *http.Request, err error) {
				if strings.Contains(err.Error(), "canary") && !strings.Contains(err.Error(), "the record has state") {
					t.Errorf("the error shows what is stored: %v", err)
				}
				holdsend.ErrorAnswer(err).ServeHTTP(w, r)
			}})
			server := newServer(t, handler)
			header := http.Header{"X-Owner": {"ada"}, "Idempotency-Key": {"abc-12345"}}
			require.Equal(t, 201, post(t, server, "/notes", `{}`, header).StatusCode)
			pgtest.Exec(t, b.aside, "UPDATE holdsend_records SET "+damage)
			requireProblem(t, post(t, server, "/notes", `{}`, header), http.StatusInternalServerError, "internal")
			require.Equal(t, 1, b.notes())
		})
	}
}

// Canaries stand for what no answer and no error may show.
const (
	canaryOwner    = "canary-owner"
	canaryKey      = "canary-key-1"
	canaryBody     = "canary-body"
	canaryPassword = "canary-password"
)

// No answer shows anything of the request or the database, on any path; nor does an error that goes into a log.
func TestSecurityTextsShowNothing(t *testing.T) {
	t.Parallel()
	body := `{"text":"` + canaryBody + `"}`
	healthy := newBed(t, nil, nil)
	unset, err := holdsend.NewPostgresStore(pgtest.Pool(t, pgtest.URL(t), nil), nil)
	require.NoError(t, err)
	away := storeThatIsAway(t)

	type step struct {
		store *holdsend.PostgresStore
		name  string
		body  string
		key   string
		fails error  // create's
		code  string // "": 201
	}
	errOwn := errors.New("own")
	for _, s := range []step{
		{healthy.store, "created", body, canaryKey, nil, ""},
		{healthy.store, "replayed", body, canaryKey, nil, ""},
		{healthy.store, "conflict", `{"text":"` + canaryBody + ` other"}`, canaryKey, nil, "key_conflict"},
		{healthy.store, "bad key", body, canaryKey + " ", nil, "key_invalid"},
		{healthy.store, "no key", body, "", nil, "key_required"},
		{healthy.store, "bad JSON", `{"` + canaryBody, canaryKey, nil, "content_invalid"},
		{healthy.store, "a number too large", `{"` + canaryBody + `":1e999}`, canaryKey, nil, "content_invalid"},
		{healthy.store, "bad UTF-8", `{"` + canaryBody + "\xff\"}", canaryKey, nil, "content_invalid"},
		{healthy.store, "too large", `"` + strings.Repeat(canaryBody, 100) + `"`, canaryKey, nil, "body_too_large"},
		{healthy.store, "create fails", body, "another-" + canaryKey, errOwn, "internal"},
		{unset, "no table", body, canaryKey, nil, "internal"},
		{away, "no database", body, canaryKey, nil, "internal"},
	} {
		t.Run(s.name, func(t *testing.T) { // in order: they share a record
			var logged []error
			handler := holdsend.Handler(s.store, ownerHeader, func(r *http.Request, tx pgx.Tx, in holdsend.Incoming) (holdsend.Response, error) {
				if s.fails != nil {
					return holdsend.Response{}, s.fails
				}
				return insertNote(r.Context(), tx, in)
			}, &holdsend.MiddlewareOptions{
				RequireKey: true, MaxBodyBytes: 500, Wait: -1,
				OnError: func(w http.ResponseWriter, r *http.Request, err error) {
					logged = append(logged, err)
					holdsend.ErrorAnswer(err).ServeHTTP(w, r)
				},
				Observe: func(_ context.Context, e holdsend.Event) {
					if e.Err != nil {
						logged = append(logged, e.Err)
					}
				},
			})
			header := http.Header{"X-Owner": {canaryOwner}, "Content-Type": {"application/json"}}
			if s.key != "" {
				header["Idempotency-Key"] = []string{s.key}
			}
			response := serve(handler, newRequest("POST", "/canary-path", s.body, header))
			text := bodyOf(t, response)
			for name, values := range response.Header {
				text += name + strings.Join(values, "")
			}
			require.NotContains(t, text, "canary")
			if s.code == "" {
				require.Equal(t, 201, response.StatusCode, text)
			} else {
				require.Contains(t, text, `"code":"`+s.code+`"`)
			}
			require.Equal(t, s.code == "internal", len(logged) > 0, "%v", logged)
			for _, err := range logged {
				for _, canary := range []string{canaryOwner, canaryKey, canaryBody, canaryPassword} {
					require.NotContains(t, err.Error(), canary)
				}
			}
		})
	}
	require.Equal(t, 1, healthy.notes())
}

// storeThatIsAway returns a store whose database refuses connections, with a password in its URL.
func storeThatIsAway(t *testing.T) *holdsend.PostgresStore {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := listener.Addr().String()
	require.NoError(t, listener.Close())
	pool, err := pgxpool.New(t.Context(), "postgres://someone:"+canaryPassword+"@"+address+"/notes?sslmode=disable&connect_timeout=5")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store, err := holdsend.NewPostgresStore(pool, nil)
	require.NoError(t, err)
	return store
}
