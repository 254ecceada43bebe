package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/pgtest"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// eachBackend runs a test on every backend, with logs going to log.
func eachBackend(t *testing.T, log io.Writer, test func(t *testing.T, url string)) {
	logger := slog.New(slog.NewTextHandler(log, nil))
	serve := func(t *testing.T, b *backend) {
		t.Cleanup(b.close)
		server := httptest.NewServer(withCORS([]string{"https://app.example"}, b.handler))
		t.Cleanup(server.Close)
		test(t, server.URL)
	}
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		serve(t, openMemory(logger))
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		b, err := openSQLite(t.Context(), filepath.Join(t.TempDir(), "notes.db"), logger)
		if err != nil {
			t.Fatal(err)
		}
		serve(t, b)
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		b, err := openPostgres(t.Context(), pgtest.URL(t), logger)
		if err != nil {
			t.Fatal(err)
		}
		serve(t, b)
	})
}

// An answer is what a request got.
type answer struct {
	status int
	header http.Header
	body   string
}

// send sends a request. headers are names and values in turn.
func send(t *testing.T, method, url, body string, headers ...string) answer {
	t.Helper()
	a, err := trySend(t.Context(), method, url, body, headers...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func trySend(ctx context.Context, method, url, body string, headers ...string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	for i := 0; i < len(headers); i += 2 {
		request.Header.Add(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	got, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, string(got)}, err
}

// want fails unless a has the status, and the code that a problem carries; "" for an answer that is no problem.
func (a answer) want(t *testing.T, status int, code string) answer {
	t.Helper()
	if a.status != status || a.code() != code {
		t.Fatalf("got %d with code %q, want %d with code %q: %s", a.status, a.code(), status, code, a.body)
	}
	if code != "" && a.header.Get("Content-Type") != "application/problem+json" {
		t.Errorf("a refusal has Content-Type %q", a.header.Get("Content-Type"))
	}
	return a
}

func (a answer) code() string {
	var problem struct{ Code string }
	_ = json.Unmarshal([]byte(a.body), &problem) // a body that is no object has no code
	return problem.Code
}

func (a answer) entry(t *testing.T) entry {
	t.Helper()
	var e entry
	if err := json.Unmarshal([]byte(a.body), &e); err != nil {
		t.Fatalf("%v in %s", err, a.body)
	}
	return e
}

// wantReplay fails unless a is the original answer once more.
func (a answer) wantReplay(t *testing.T, original answer) {
	t.Helper()
	if a.status != original.status || a.body != original.body || a.header.Get(holdsend.HeaderReplayed) != "true" {
		t.Fatalf("got %d %s (replayed: %q), want a replay of %d %s",
			a.status, a.body, a.header.Get(holdsend.HeaderReplayed), original.status, original.body)
	}
}

func (a answer) wantFirst(t *testing.T) answer {
	t.Helper()
	a.want(t, http.StatusCreated, "")
	if a.header.Get(holdsend.HeaderReplayed) != "" {
		t.Fatalf("a first answer says that it is a replay: %s", a.body)
	}
	return a
}

func listed(t *testing.T, url, user string, c collection) []entry {
	t.Helper()
	path := map[collection]string{notes: "/api/notes", emergencyMessages: "/api/emergency-messages"}[c]
	a := send(t, "GET", url+path, "", headerDemoUser, user).want(t, http.StatusOK, "")
	var lists map[collection][]entry
	if err := json.Unmarshal([]byte(a.body), &lists); err != nil || lists[c] == nil {
		t.Fatalf("got %s, want a list (error: %v)", a.body, err)
	}
	return lists[c]
}

func texts(list []entry) []string {
	texts := []string{}
	for _, e := range list {
		texts = append(texts, e.Text)
	}
	return texts
}

func wantTexts(t *testing.T, list []entry, want ...string) {
	t.Helper()
	if got := texts(list); !slices.Equal(got, want) {
		t.Fatalf("listed %q, want %q", got, want)
	}
}

func TestLifeOfANote(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		wantTexts(t, listed(t, url, "ada", notes)) // an empty list, not null
		post := func(body string) answer {
			return send(t, "POST", url+"/api/notes", body, headerDemoUser, "ada", "Idempotency-Key", "note-0001")
		}
		first := post(`{"text":"Buy milk"}`).wantFirst(t)
		post(`{"text":"Buy milk"}`).wantReplay(t, first)
		post(` { "text" : "Buy \u006dilk" } `).wantReplay(t, first)
		post(`{"text":"Buy bread"}`).want(t, http.StatusConflict, "key_conflict")
		list := listed(t, url, "ada", notes)
		wantTexts(t, list, "Buy milk")
		if list[0] != first.entry(t) {
			t.Errorf("listed %v, answered %v", list[0], first.entry(t))
		}

		remove := func() answer {
			return send(t, "DELETE", url+"/api/notes/"+first.entry(t).ref(), "", headerDemoUser, "ada")
		}
		if a := remove().want(t, http.StatusNoContent, ""); a.body != "" {
			t.Errorf("DELETE answered %q", a.body)
		}
		post(`{"text":"Buy milk"}`).want(t, http.StatusGone, "gone")
		post(`{"text":"Buy bread"}`).want(t, http.StatusConflict, "key_conflict")
		remove().want(t, http.StatusNotFound, "not_found")
		wantTexts(t, listed(t, url, "ada", notes))
	})
}

func TestNotesWithoutAKey(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		for range 2 {
			send(t, "POST", url+"/api/notes", `{"text":"twice"}`, headerDemoUser, "ada").wantFirst(t)
		}
		list := listed(t, url, "ada", notes)
		wantTexts(t, list, "twice", "twice")
		send(t, "DELETE", url+"/api/notes/"+list[0].ref(), "", headerDemoUser, "ada").want(t, http.StatusNoContent, "")
		wantTexts(t, listed(t, url, "ada", notes), "twice")
	})
}

func TestUsersAreApart(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		post := func(user string) answer {
			return send(t, "POST", url+"/api/notes", `{"text":"mine"}`, headerDemoUser, user, "Idempotency-Key", "the-same-key")
		}
		ada := post("ada").wantFirst(t)
		bob := post("bob").wantFirst(t)
		if ada.entry(t).ID == bob.entry(t).ID {
			t.Fatal("two users share a note")
		}
		send(t, "DELETE", url+"/api/notes/"+ada.entry(t).ref(), "", headerDemoUser, "bob").want(t, http.StatusNotFound, "not_found")
		post("ada").wantReplay(t, ada)
		wantTexts(t, listed(t, url, "ada", notes), "mine")
		wantTexts(t, listed(t, url, "eve", notes))
	})
}

func TestParallelCreatesWithOneKey(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		const clients = 32
		answers := make([]answer, clients)
		var wg sync.WaitGroup
		for i := range clients {
			wg.Go(func() {
				// A machine that is slow enough answers in_progress, and a client then sends again.
				answers[i] = retry(t, "POST", url+"/api/notes", `{"text":"once"}`, headerDemoUser, "ada", "Idempotency-Key", "note-0001")
			})
		}
		wg.Wait()
		firsts := 0
		for _, a := range answers {
			if a.status != http.StatusCreated || a.body != answers[0].body {
				t.Errorf("got %d %s, and another client %s", a.status, a.body, answers[0].body)
			}
			if a.header.Get(holdsend.HeaderReplayed) == "" {
				firsts++
			}
		}
		if firsts != 1 {
			t.Errorf("%d answers are first ones, want 1", firsts)
		}
		wantTexts(t, listed(t, url, "ada", notes), "once")
	})
}

// retry sends a request as a client does: again, while there is no answer or one that asks for patience.
func retry(t *testing.T, method, url, body string, headers ...string) answer {
	deadline := time.Now().Add(time.Minute)
	for {
		a, err := trySend(context.Background(), method, url, body, headers...)
		if err == nil && a.code() != "in_progress" && a.status < 500 {
			return a
		}
		if time.Now().After(deadline) {
			t.Errorf("retried for a minute in vain: %d %s %v", a.status, a.body, err)
			return a
		}
	}
}

func TestListIsOrderedByArrival(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		now := time.Now().UTC().Truncate(time.Second)
		writtenAt := map[string]string{
			"new":     now.Format(time.RFC3339),
			"old":     now.Add(-48*time.Hour).Format("2006-01-02T15:04:05") + ".123456789Z",
			"unsaid":  "",
			"ancient": now.Add(-31 * 24 * time.Hour).Format(time.RFC3339), // too long ago to be believed
			"zoned":   now.Add(-time.Hour).In(time.FixedZone("", 2*60*60)).Format(time.RFC3339),
		}
		order := []string{"new", "old", "unsaid", "ancient", "zoned"}
		for _, text := range order {
			a := send(t, "POST", url+"/api/notes", `{"text":"`+text+`"}`, headerDemoUser, "ada",
				"Idempotency-Key", "written-"+text, "Written-At", writtenAt[text])
			a.wantFirst(t)
		}
		list := listed(t, url, "ada", notes)
		wantTexts(t, list, order...)
		want := []*time.Time{&now, new(now.Add(-48*time.Hour + 123456*time.Microsecond)), nil, nil, new(now.Add(-time.Hour))}
		for i, e := range list {
			switch {
			case want[i] == nil && e.WrittenAt == nil:
			case want[i] == nil || e.WrittenAt == nil || !e.WrittenAt.Equal(*want[i]):
				t.Errorf("%s: written_at is %v, want %v", e.Text, e.WrittenAt, want[i])
			case e.WrittenAt.Location() != time.UTC:
				t.Errorf("%s: written_at is %v, want it in UTC", e.Text, e.WrittenAt)
			}
			if e.ReceivedAt.Before(now.Add(-time.Minute)) || e.ReceivedAt.After(now.Add(10*time.Minute)) {
				t.Errorf("%s: received_at is %v, want about now", e.Text, e.ReceivedAt)
			}
			if i > 0 && e.ReceivedAt.Before(list[i-1].ReceivedAt) {
				t.Errorf("%s is listed after a note that arrived later", e.Text)
			}
		}
	})
}

func TestListShowsTheLastOnes(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		for i := range listLimit + 2 {
			body := fmt.Sprintf(`{"text":"%d"}`, i)
			send(t, "POST", url+"/api/notes", body, headerDemoUser, "ada").wantFirst(t)
		}
		list := listed(t, url, "ada", notes)
		if len(list) != listLimit || list[0].Text != "2" || list[listLimit-1].Text != fmt.Sprint(listLimit+1) {
			t.Errorf("listed %d notes from %q, want the last %d in order of arrival", len(list), list[0].Text, listLimit)
		}
	})
}

func TestBadContent(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		for i, test := range []struct {
			name, body     string
			status         int
			keyed, unkeyed string // codes
		}{
			{"nothing", ``, 400, "content_invalid", "invalid"},
			{"no JSON", `Buy milk`, 400, "content_invalid", "invalid"},
			{"cut short", `{"text":"Buy`, 400, "content_invalid", "invalid"},
			{"more after it", `{"text":"Buy milk"} x`, 400, "content_invalid", "invalid"},
			{"null", `null`, 400, "invalid", "invalid"},
			{"a string", `"Buy milk"`, 400, "invalid", "invalid"},
			{"an array", `[{"text":"Buy milk"}]`, 400, "invalid", "invalid"},
			{"no text", `{"title":"Buy milk"}`, 400, "invalid", "invalid"},
			{"null text", `{"text":null}`, 400, "invalid", "invalid"},
			{"a number as text", `{"text":5}`, 400, "invalid", "invalid"},
			{"empty text", `{"text":""}`, 400, "invalid", "invalid"},
			{"blank text", `{"text":" \t\u00a0"}`, 400, "invalid", "invalid"},
			{"NUL in the text", `{"text":"a\u0000b"}`, 400, "invalid", "invalid"},
			{"text too long", `{"text":"` + strings.Repeat("ä", maxTextLength+1) + `"}`, 400, "invalid", "invalid"},
			{"body too long", `{"text":"` + strings.Repeat("a", maxBodyBytes) + `"}`, 413, "body_too_large", "body_too_large"},
		} {
			for _, path := range []string{"/api/notes", "/api/emergency-messages"} {
				key := fmt.Sprintf("bad-content-%d", i)
				a := send(t, "POST", url+path, test.body, headerDemoUser, "ada", "Idempotency-Key", key)
				if a.status != test.status || a.code() != test.keyed {
					t.Errorf("%s with a key: got %d %s, want %d %s", test.name, a.status, a.code(), test.status, test.keyed)
				}
				// A refusal leaves the key free for what was mended.
				send(t, "POST", url+path, `{"text":"mended"}`, headerDemoUser, "ada", "Idempotency-Key", key).wantFirst(t)
			}
			a := send(t, "POST", url+"/api/notes", test.body, headerDemoUser, "bob")
			if a.status != test.status || a.code() != test.unkeyed {
				t.Errorf("%s without a key: got %d %s, want %d %s", test.name, a.status, a.code(), test.status, test.unkeyed)
			}
		}
		wantTexts(t, listed(t, url, "bob", notes))
	})
}

func TestGoodContent(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		want := []string{}
		for i, test := range []struct{ body, text string }{
			{`{"text":"` + strings.Repeat("ä", maxTextLength) + `"}`, strings.Repeat("ä", maxTextLength)},
			{`{"text":"` + strings.Repeat(`\ud83d\ude00`, maxTextLength) + `"}`, strings.Repeat("😀", maxTextLength)},
			{`{"text":" spaces stay "}`, " spaces stay "},
			{`{"text":"of a newer app","mood":"fine"}`, "of a newer app"},
			{`{"text":"<b>'quotes' & \"more\"; -- \n"}`, "<b>'quotes' & \"more\"; -- \n"},
		} {
			post := func() answer {
				return send(t, "POST", url+"/api/notes", test.body, headerDemoUser, "ada", "Idempotency-Key", fmt.Sprintf("good-content-%d", i))
			}
			first := post().wantFirst(t)
			if first.entry(t).Text != test.text {
				t.Errorf("%.40s: answered %.40q", test.body, first.entry(t).Text)
			}
			post().wantReplay(t, first)
			want = append(want, test.text)
		}
		wantTexts(t, listed(t, url, "ada", notes), want...)
	})
}

func TestUnknownNotesCannotBeDeleted(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		send(t, "POST", url+"/api/notes", `{"text":"stays"}`, headerDemoUser, "ada", "Idempotency-Key", "note-0001").wantFirst(t)
		for _, id := range []string{"2", "0", "-1", "abc", "1x", "9223372036854775808", "%00", "1%20OR%201=1"} {
			send(t, "DELETE", url+"/api/notes/"+id, "", headerDemoUser, "ada").want(t, http.StatusNotFound, "not_found")
		}
		wantTexts(t, listed(t, url, "ada", notes), "stays")
	})
}

func TestEmergencyMessages(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		path := url + "/api/emergency-messages"
		send(t, "POST", path, `{"text":"help"}`, headerDemoUser, "ada").want(t, http.StatusBadRequest, "key_required")
		wantTexts(t, listed(t, url, "ada", emergencyMessages))

		post := func() answer {
			return send(t, "POST", path, `{"text":"help"}`, headerDemoUser, "ada", "Idempotency-Key", "the-same-key")
		}
		first := post().wantFirst(t)
		post().wantReplay(t, first)
		// The same key and text for a note is another operation.
		note := send(t, "POST", url+"/api/notes", `{"text":"help"}`, headerDemoUser, "ada", "Idempotency-Key", "the-same-key").wantFirst(t)
		// Deleting a note with the same id leaves the message and its record alone.
		if note.entry(t).ID != first.entry(t).ID {
			t.Fatalf("the test wants equal ids, got %s and %s", note.body, first.body)
		}
		send(t, "DELETE", url+"/api/notes/"+note.entry(t).ref(), "", headerDemoUser, "ada").want(t, http.StatusNoContent, "")
		post().wantReplay(t, first)
		wantTexts(t, listed(t, url, "ada", emergencyMessages), "help")

		if a := send(t, "DELETE", path+"/1", "", headerDemoUser, "ada"); a.status != http.StatusNotFound {
			t.Errorf("DELETE of an emergency message got %d", a.status)
		}
	})
}

// A phone may come back after any time.
func TestHowLongRecordsAnswer(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	var mu sync.Mutex
	now := time.Now()
	pass := func(d time.Duration) { mu.Lock(); defer mu.Unlock(); now = now.Add(d) }
	store := holdsend.NewMemoryStore(&holdsend.MemoryOptions{Now: func() time.Time { mu.Lock(); defer mu.Unlock(); return now }})
	entries := &memoryEntries{lastIDs: map[collection]int64{}, lists: map[memoryList][]entry{}}
	server := httptest.NewServer(newHandler(store, entries, slog.New(slog.DiscardHandler)))
	t.Cleanup(server.Close)

	post := func(path string) answer {
		return send(t, "POST", server.URL+path, `{"text":"hello"}`, headerDemoUser, "ada", "Idempotency-Key", "the-same-key")
	}
	purge := func() {
		if _, err := store.PurgeExpired(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	note, message := post("/api/notes").wantFirst(t), post("/api/emergency-messages").wantFirst(t)
	pass(30*day - time.Minute)
	purge()
	post("/api/notes").wantReplay(t, note)
	post("/api/emergency-messages").wantReplay(t, message)
	pass(2 * time.Minute)
	purge()
	post("/api/notes").wantFirst(t)
	pass(10 * 365 * day)
	purge()
	post("/api/emergency-messages").wantReplay(t, message)
	wantTexts(t, listed(t, server.URL, "ada", emergencyMessages), "hello")
}

// What is stored must still answer after years of releases, and to other servers on the same table.
func TestWhatIsStoredOnPostgres(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	b, err := openPostgres(t.Context(), url, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	server := httptest.NewServer(b.handler)
	t.Cleanup(server.Close)
	pool := pgtest.Pool(t, url, nil)
	for _, test := range []struct {
		path, operation string
		kept            *time.Duration // nil: for ever
	}{
		{"/api/notes", "note.create", new(30 * 24 * time.Hour)},
		{"/api/emergency-messages", "emergency-message.create", nil},
	} {
		send(t, "POST", server.URL+test.path+"?from=phone", `{"text": "hello"}`,
			headerDemoUser, "ada", "Idempotency-Key", "the-same-key", "Content-Type", "application/json").wantFirst(t)
		const record = ` FROM holdsend_records WHERE owner = 'ada' AND key = 'the-same-key' AND operation = $1`
		kept := pgtest.Value[*float64](t, pool, `SELECT extract(epoch FROM expires_at - completed_at)::float8`+record, test.operation)
		switch {
		case kept == nil && test.kept == nil:
		case kept == nil || test.kept == nil || *kept != test.kept.Seconds():
			t.Errorf("%s: the record is kept for %v s, want %v (nil: for ever)", test.path, kept, test.kept)
		}
		want, err := holdsend.Fingerprint(test.operation, json.RawMessage(`{"text":"hello"}`))
		if err != nil {
			t.Fatal(err)
		}
		if got := pgtest.Value[string](t, pool, `SELECT fingerprint`+record, test.operation); got != want {
			t.Errorf("%s: the fingerprint is %s, want that of the JSON body alone, %s", test.path, got, want)
		}
	}
}

func TestRequestThatTakesTooLongFreesItsKey(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	b, err := openPostgres(t.Context(), url, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.close)
	post := func(limit time.Duration) answer {
		server := httptest.NewServer(withTimeout(limit, b.handler))
		t.Cleanup(server.Close)
		return send(t, "POST", server.URL+"/api/notes", `{"text":"slow"}`, headerDemoUser, "ada", "Idempotency-Key", "note-0001")
	}
	pool := pgtest.Pool(t, url, nil)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	pgtest.Exec(t, tx, `LOCK TABLE notes IN EXCLUSIVE MODE`)
	post(500*time.Millisecond).want(t, http.StatusInternalServerError, "internal")
	if n := pgtest.Value[int](t, pool, `SELECT count(*) FROM holdsend_records`); n != 0 {
		t.Errorf("%d records are left, want the key free", n)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	post(time.Minute).wantFirst(t)
}

func TestSignIn(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		for name, headers := range map[string][]string{
			"none":     {},
			"empty":    {headerDemoUser, ""},
			"two":      {headerDemoUser, "ada", headerDemoUser, "bob"},
			"too long": {headerDemoUser, strings.Repeat("a", 65)},
			"a space":  {headerDemoUser, "ada bob"},
			"no ASCII": {headerDemoUser, "åda"},
			"a cookie": {"Cookie", headerDemoUser + "=ada"},
		} {
			for _, route := range []string{"POST /api/notes", "GET /api/notes", "DELETE /api/notes/1", "POST /api/emergency-messages", "GET /api/emergency-messages"} {
				method, path, _ := strings.Cut(route, " ")
				a := send(t, method, url+path, `{"text":"hello"}`, append(headers, "Idempotency-Key", "note-0001")...)
				if a.status != http.StatusUnauthorized || a.code() != "unauthenticated" {
					t.Errorf("%s as %q: got %d %s", route, name, a.status, a.body)
				}
			}
		}
		wantTexts(t, listed(t, url, "ada", notes))
	})
}

func TestCORS(t *testing.T) {
	t.Parallel()
	eachBackend(t, io.Discard, func(t *testing.T, url string) {
		for _, route := range []string{"POST /api/notes", "GET /api/notes", "DELETE /api/notes/1", "POST /api/emergency-messages", "GET /api/emergency-messages"} {
			method, path, _ := strings.Cut(route, " ")
			// A browser sends the names in lower case, sorted, without spaces.
			preflight := func(origin, headers string) answer {
				return send(t, "OPTIONS", url+path, "", "Origin", origin,
					"Access-Control-Request-Method", method, "Access-Control-Request-Headers", headers)
			}
			const headers = "content-type,idempotency-key,written-at,x-demo-user"
			a := preflight("https://app.example", headers)
			if a.status != http.StatusNoContent ||
				a.header.Get("Access-Control-Allow-Origin") != "https://app.example" ||
				a.header.Get("Access-Control-Allow-Methods") != method ||
				a.header.Get("Access-Control-Allow-Headers") != headers {
				t.Errorf("%s: the preflight got %d %v", route, a.status, a.header)
			}
			if a := preflight("https://evil.example", headers); a.header.Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("%s: a stranger's preflight is allowed: %v", route, a.header)
			}
			if a := preflight("https://app.example", "x-other"); a.header.Get("Access-Control-Allow-Headers") != "" {
				t.Errorf("%s: any header is allowed: %v", route, a.header)
			}
		}
		post := func() answer {
			return send(t, "POST", url+"/api/notes", `{"text":"hello"}`, "Origin", "https://app.example",
				headerDemoUser, "ada", "Idempotency-Key", "note-0001")
		}
		first := post().wantFirst(t)
		replay := post()
		replay.wantReplay(t, first)
		refusal := send(t, "POST", url+"/api/notes", `{}`, "Origin", "https://app.example")
		for name, a := range map[string]answer{"first answer": first, "replay": replay, "refusal": refusal.want(t, 401, "unauthenticated")} {
			if got := a.header.Values("Access-Control-Allow-Origin"); !slices.Equal(got, []string{"https://app.example"}) {
				t.Errorf("the %s allows %q", name, got)
			}
			if got := a.header.Get("Access-Control-Expose-Headers"); got != "Idempotent-Replayed, Idempotent-Body-Omitted, Retry-After" {
				t.Errorf("the %s exposes %q", name, got)
			}
		}
	})
}

func TestLogsShowOutcomesAndNothingPrivate(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	eachBackend(t, &log, func(t *testing.T, url string) {
		for _, body := range []string{`{"text":"private-text"}`, `{"text":"private-text"}`, `{"text":"private-other"}`} {
			send(t, "POST", url+"/api/notes", body, headerDemoUser, "private-user", "Idempotency-Key", "private-key")
		}
		for _, outcome := range []string{"created", "replayed", "key_conflict"} {
			if line := "operation=note.create outcome=" + outcome + " "; !strings.Contains(log.String(), line) {
				t.Errorf("the log has no %q: %s", line, log.String())
			}
		}
		if strings.Contains(log.String(), "private") {
			t.Errorf("the log shows what is private: %s", log.String())
		}
	})
}

type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

// noTombstones is a store whose tombstones fail.
type noTombstones[Tx any] struct{ holdsend.Store[Tx] }

func (noTombstones[Tx]) TombstoneResource(context.Context, Tx, holdsend.Resource) (int64, error) {
	return 0, errors.New("no tombstones today")
}

func TestNoteStaysIfItsTombstoneFails(t *testing.T) {
	t.Parallel()
	logger := slog.New(slog.DiscardHandler)
	test := func(t *testing.T, handler http.Handler) {
		server := httptest.NewServer(handler)
		t.Cleanup(server.Close)
		post := func() answer {
			return send(t, "POST", server.URL+"/api/notes", `{"text":"stays"}`, headerDemoUser, "ada", "Idempotency-Key", "note-0001")
		}
		first := post().wantFirst(t)
		a := send(t, "DELETE", server.URL+"/api/notes/"+first.entry(t).ref(), "", headerDemoUser, "ada").want(t, http.StatusInternalServerError, "internal")
		if strings.Contains(a.body, "today") {
			t.Errorf("the answer shows the error: %s", a.body)
		}
		wantTexts(t, listed(t, server.URL, "ada", notes), "stays")
		post().wantReplay(t, first)
	}
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		store := noTombstones[*holdsend.MemoryTx]{holdsend.NewMemoryStore(nil)}
		test(t, newHandler(store, &memoryEntries{lastIDs: map[collection]int64{}, lists: map[memoryList][]entry{}}, logger))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pool := pgtest.Pool(t, pgtest.URL(t), nil)
		if err := createTables(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
		store, err := holdsend.NewPostgresStore(pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		test(t, newHandler(noTombstones[pgx.Tx]{store}, postgresEntries{pool}, logger))
	})
}

func TestServicesStartTogetherOnOneDatabase(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			b, err := openPostgres(t.Context(), url, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Error(err)
				return
			}
			b.close()
		})
	}
	wg.Wait()
}

// A service that starts must not wait for the creates of one that runs.
func TestServiceStartsBesideAnOpenCreate(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["lock_timeout"] = "5s"
	})
	if err := createTables(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	pgtest.Exec(t, tx, `INSERT INTO notes (owner, text) VALUES ('ada', 'open')`)
	pgtest.Exec(t, tx, `INSERT INTO emergency_messages (owner, text) VALUES ('ada', 'open')`)
	if err := createTables(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
}

func TestPurgeAtTheStartAndEveryHour(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		var at []time.Duration
		purgeEvery(ctx, purgeInterval, func(context.Context) (holdsend.Purged, error) {
			at = append(at, time.Since(start))
			switch len(at) {
			case 2:
				return holdsend.Purged{}, errors.New("the database is away") // the next one runs all the same
			case 4:
				cancel()
			}
			return holdsend.Purged{Records: 1}, nil
		}, slog.New(slog.DiscardHandler))
		if want := []time.Duration{0, time.Hour, 2 * time.Hour, 3 * time.Hour}; !slices.Equal(at, want) {
			t.Errorf("purged at %v, want %v", at, want)
		}
	})
}
