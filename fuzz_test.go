package holdsend_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/headertext"
)

// plainKey is the key's form as a pattern: the second reading of what the library reads byte by byte.
var plainKey = regexp.MustCompile(`\A(?:"([A-Za-z0-9_.:-]{8,128})"|([A-Za-z0-9_.:-]{8,128}))\z`)

func FuzzKey(f *testing.F) {
	for _, raw := range []string{"", "abc-12345", `"abc-12345"`, `"abc-12345`, `abc-12345"`, `"`, `""`, "abc 12345", "abc-1234\n",
		strings.Repeat("k", 7), strings.Repeat("k", 8), strings.Repeat("k", 128), strings.Repeat("k", 129), "ключ-ключ", "abc-12345, abc-12345"} {
		f.Add(raw, "")
	}
	f.Add("abc-12345", "abc-12345")
	f.Fuzz(func(t *testing.T, raw, second string) {
		request := noteRequest()
		request.Header = http.Header{holdsend.HeaderIdempotencyKey: {raw}}
		want := ""
		if match := plainKey.FindStringSubmatch(raw); match != nil {
			want = match[1] + match[2]
		}
		if second != "" {
			request.Header["idempotency-key"], want = []string{second}, ""
		}
		store := holdsend.NewMemoryStore(nil)
		got := ""
		answer, err := holdsend.HandleIdempotent(t.Context(), store, request,
			func(_ context.Context, _ *holdsend.MemoryTx, in holdsend.Incoming) (holdsend.Response, error) {
				got = in.Key
				return holdsend.Response{Status: 201}, nil
			})
		require.NoError(t, err)
		require.Equal(t, want, got)
		if want == "" {
			require.Equal(t, holdsend.OutcomeKeyInvalid, answer.Outcome)
			return
		}
		require.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	})
}

// neverStored is written out again, from what a replay must not carry.
var neverStored = []string{
	"Connection", "Keep-Alive", "Te", "Transfer-Encoding", "Upgrade", "Trailer", "Set-Cookie", "Set-Cookie2", "Authorization",
	"Www-Authenticate", "Date", "Content-Length", "Idempotent-Replayed",
}

func isNeverStored(name string, connection []string) bool {
	name = http.CanonicalHeaderKey(name) // what is no header's name stays as it is, and is never sent
	for _, value := range connection {
		for _, option := range strings.Split(value, ",") {
			if strings.EqualFold(strings.TrimSpace(option), name) {
				return true
			}
		}
	}
	return slices.Contains(neverStored, name) || strings.HasPrefix(name, "Proxy-")
}

// Any header that create sets: the first caller gets it; the record has it unless it is one that is never stored; what is
// stored comes back as it was.
func FuzzStoredHeaders(f *testing.F) {
	for _, name := range []string{"X-A", "Set-Cookie", "set-cookie", "SET-COOKIE", "Proxy-Authenticate", "proxy-x", "Keep-Alive", "Date",
		"Content-Type", "X-\xff", "", "Set-Cookie ", "X-A\r\nSet-Cookie", "Idempotent-Replayed", "ſet-Cookie", "Te", "Upgrade"} {
		f.Add(name, "value", "X-B", "b\r\nSet-Cookie: c=d", "close, X-B")
	}
	f.Add("\xa0", "", "0", "", "\xa0")
	f.Add("X-A", "\x00\xff é", "x-a", "", "x-a ,\tX-C,")
	f.Fuzz(func(t *testing.T, name1, value1, name2, value2, connection string) {
		header := http.Header{"Connection": {connection}}
		header[name1] = append(header[name1], value1)
		header[name2] = append(header[name2], value2, value1)
		given := header.Clone()
		var options []string // of Connection, in any spelling
		for name, values := range header {
			if http.CanonicalHeaderKey(name) == "Connection" {
				options = append(options, values...)
			}
		}
		store := holdsend.NewMemoryStore(nil)
		first, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(),
			answerWith[*holdsend.MemoryTx](holdsend.Response{Status: 201, Header: header, Body: []byte("a")}, nil))
		require.NoError(t, err)
		require.Equal(t, given, first.Header, "the first caller gets them all")

		want := http.Header{}
		for name, values := range given {
			if !isNeverStored(name, options) {
				want[name] = values
			}
		}
		record, err := store.Find(t.Context(), noteScope)
		require.NoError(t, err)
		require.Equal(t, want, record.Response.Header)

		text, err := headertext.Encode(record.Response.Header)
		require.NoError(t, err)
		decoded, err := headertext.Decode(text)
		require.NoError(t, err)
		require.Equal(t, want, decoded)

		again, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(), unexpected[*holdsend.MemoryTx](t))
		require.NoError(t, err)
		want[holdsend.HeaderReplayed] = []string{"true"}
		require.Equal(t, want, again.Header)
	})
}

// Any request gets create's answer, or a problem document that has what a problem has, a code that is known and no word
// of the request.
func FuzzProblem(f *testing.F) {
	f.Add("/notes", "", "abc-12345", "application/json", `{"a":1}`)
	f.Add("/notes", "a=b", "", "application/json", `{"a":1}`)
	f.Add("/notes", "", "short", "application/json", `{"a":1}`)
	f.Add("/notes", "", "abc-12345", "application/json", `{"a":`)
	f.Add("/notes", "", "abc-12345", "application/problem+json", `1e999`)
	f.Add("/notes", "", "abc-12345", "multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n--b--")
	f.Add("/notes", "", "abc-12345", "multipart/form-data", "--b")
	f.Add("/"+strings.Repeat("n", 300), "", "abc-12345", "text/plain", strings.Repeat("large", 100))
	f.Add("/\xff\x00", "\xff", "abc-12345", "\xff", "\xff")
	codes := map[string]int{"key_required": 400, "key_invalid": 400, "content_invalid": 400, "uri_too_long": 414, "body_too_large": 413, "internal": 500}
	f.Fuzz(func(t *testing.T, path, query, key, contentType, body string) {
		runs := 0
		handler := holdsend.Handler(holdsend.NewMemoryStore(nil), func(*http.Request) (string, error) { return "ada", nil },
			func(*http.Request, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
				runs++
				return holdsend.Response{Status: 201, Body: []byte("created")}, nil
			}, &holdsend.MiddlewareOptions{MaxBodyBytes: 256, RequireKey: true})
		send := func() *httptest.ResponseRecorder {
			r := &http.Request{
				Method: "POST", URL: &url.URL{Path: path, RawQuery: query}, Body: io.NopCloser(strings.NewReader(body)),
				ContentLength: int64(len(body)), Header: http.Header{"Content-Type": {contentType}},
			}
			if key != "" {
				r.Header[holdsend.HeaderIdempotencyKey] = []string{key}
			}
			recorder := httptest.NewRecorder()
			handler.ServeHTTP(recorder, r.WithContext(t.Context()))
			return recorder
		}
		first, second := send(), send()
		require.Equal(t, first.Code, second.Code)
		require.Equal(t, first.Body.String(), second.Body.String())
		if first.Code == 201 {
			require.Equal(t, 1, runs)
			require.Equal(t, "created", first.Body.String())
			require.Equal(t, "true", second.Header().Get(holdsend.HeaderReplayed))
			return
		}
		require.Zero(t, runs)
		require.Equal(t, "application/problem+json", first.Header().Get("Content-Type"))
		members := map[string]any{}
		require.NoError(t, json.Unmarshal(first.Body.Bytes(), &members))
		require.Len(t, members, 5)
		code, _ := members["code"].(string)
		require.Equal(t, codes[code], first.Code, code)
		require.EqualValues(t, first.Code, members["status"])
		require.Equal(t, http.StatusText(first.Code), members["title"])
		require.Equal(t, "about:blank", members["type"])
		require.NotEmpty(t, members["detail"])
	})
}

// Whatever is stored as a fingerprint: it matches where it is one of the two readings, is another's where it is a
// fingerprint, and else an error that shows nothing of it.
func FuzzMatchFingerprint(f *testing.F) {
	const hash = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for _, stored := range []string{"", "hs1", "hs1:", "hs1:" + hash, "hs1:" + strings.ToUpper(hash), "hs2:" + hash, "hs1:" + hash + "0", "\xff", "hs1:" + hash[:63] + "g"} {
		f.Add(stored, []byte(`{"10":1,"9":2}`))
	}
	wellFormed := regexp.MustCompile(`\Ahs1:[0-9a-f]{64}\z`)
	f.Fuzz(func(t *testing.T, stored string, content []byte) {
		fingerprint, err := holdsend.Fingerprint("note.create", content)
		if err != nil {
			return
		}
		same, err := holdsend.MatchFingerprint(fingerprint, "note.create", content)
		require.NoError(t, err)
		require.True(t, same)

		same, err = holdsend.MatchFingerprint(stored, "note.create", content)
		if !wellFormed.MatchString(stored) {
			require.Error(t, err)
			require.NotErrorIs(t, err, holdsend.ErrNotPlainJSON)
			if len(stored) > 8 {
				require.NotContains(t, err.Error(), stored)
			}
			return
		}
		require.NoError(t, err)
		if same && stored != fingerprint {
			plain, err := holdsend.CanonicalPlainOrder(content)
			require.NoError(t, err)
			canonical, err := holdsend.Canonical(content)
			require.NoError(t, err)
			require.NotEqual(t, string(plain), string(canonical), "there is no second reading of this content")
		}
	})
}

// Any header comes back from the text that a column keeps, byte by byte, and the text is what a text column can hold.
func FuzzHeaderText(f *testing.F) {
	f.Add("X-A", "value", "X-B", "")
	f.Add("X-\xff", "\x00\x80\xff", "x-a", "é € \u2028 <>&\r\n\"\\")
	f.Fuzz(func(t *testing.T, name1, value1, name2, value2 string) {
		header := http.Header{name1: {value1, value2}}
		header[name2] = append(header[name2], value2)
		text, err := headertext.Encode(header)
		require.NoError(t, err)
		require.NotContains(t, text, "\x00", "Postgres text cannot hold a NUL")
		require.True(t, json.Valid([]byte(text)))
		decoded, err := headertext.Decode(text)
		require.NoError(t, err)
		require.Equal(t, header, decoded)
	})
}
