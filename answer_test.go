package holdsend_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

// What others around the handler have set (CORS, sessions) stays where several values make sense.
func TestAnswerAddsToVaryAndSetCookie(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	w.Header().Set("Vary", "Origin")
	w.Header().Set("Set-Cookie", "session=1")
	w.Header().Set("Content-Type", "text/html")
	holdsend.Answer{Status: 201, Header: http.Header{
		"Vary": {"Accept"}, "Set-Cookie": {"seen=1"}, "Content-Type": {"text/plain"}, "Connection": {"close"}, "Content-Length": {"99"},
	}, Body: []byte("stored")}.ServeHTTP(w, nil)
	require.Equal(t, []string{"Origin", "Accept"}, w.Header()["Vary"])
	require.Equal(t, []string{"session=1", "seen=1"}, w.Header()["Set-Cookie"])
	require.Equal(t, "text/plain", w.Header().Get("Content-Type"))
	require.Equal(t, "close", w.Header().Get("Connection"))
	require.Equal(t, "6", w.Header().Get("Content-Length"))
}

// A body that was left out is said to be, whatever create says of it.
func TestBodyOmittedIsTheLibrarysToSay(t *testing.T) {
	t.Parallel()
	h := holdsend.Handler(holdsend.NewMemoryStore(nil), func(*http.Request) (string, error) { return "ada", nil },
		func(*http.Request, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
			return holdsend.Response{Status: 201, Header: http.Header{"Idempotent-Body-Omitted": {"false"}}, Body: make([]byte, 100)}, nil
		}, &holdsend.MiddlewareOptions{MaxResponseBytes: 10})
	for _, want := range []string{"false", "true"} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest("POST", "/", nil)
		r.Header.Set(holdsend.HeaderIdempotencyKey, key)
		h.ServeHTTP(w, r)
		require.Equal(t, want, w.Header().Get("Idempotent-Body-Omitted"))
	}
}

// A nil pointer or map is a forgotten field like nil itself: all requests would be the same.
func TestContentThatIsNilInside(t *testing.T) {
	t.Parallel()
	type note struct{ Text string }
	for name, content := range map[string]any{"a pointer": (*note)(nil), "a map": map[string]any(nil), "a slice": []string(nil)} {
		r := request(key)
		r.Content = content
		_, err := holdsend.HandleIdempotent(context.Background(), holdsend.NewMemoryStore(nil), r,
			func(context.Context, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
				return holdsend.Response{Status: 201}, nil
			})
		require.ErrorContains(t, err, "content is nil", name)
		require.NotErrorIs(t, err, holdsend.ErrNotPlainJSON, name)
	}
}
