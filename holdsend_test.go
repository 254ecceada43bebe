package holdsend_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/holdsend/holdsend-go"
)

// A fakeStore does what a test tells it to.
type fakeStore[Tx any] struct {
	holdsend.Store[Tx] // nil: a method that the test did not expect panics

	begin func(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[Tx], *holdsend.Record, error)
	find  func(ctx context.Context, s holdsend.Scope) (*holdsend.Record, error)
	inTx  func(ctx context.Context, fn func(ctx context.Context, tx Tx) error) error
}

func (s *fakeStore[Tx]) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[Tx], *holdsend.Record, error) {
	return s.begin(ctx, c)
}

func (s *fakeStore[Tx]) Find(ctx context.Context, scope holdsend.Scope) (*holdsend.Record, error) {
	return s.find(ctx, scope)
}

func (s *fakeStore[Tx]) InTx(ctx context.Context, fn func(ctx context.Context, tx Tx) error) error {
	return s.inTx(ctx, fn)
}

// A fakeAttempt remembers how it ended.
type fakeAttempt struct {
	complete, abort error // what the methods return
	calls           []string
	completion      holdsend.Completion
	onEnd           func(ctx context.Context)
}

func (a *fakeAttempt) Tx() string { return "tx" }

func (a *fakeAttempt) Complete(ctx context.Context, c holdsend.Completion) error {
	a.calls, a.completion = append(a.calls, "complete"), c
	if a.onEnd != nil {
		a.onEnd(ctx)
	}
	return a.complete
}

func (a *fakeAttempt) Abort(ctx context.Context) error {
	a.calls = append(a.calls, "abort")
	if a.onEnd != nil {
		a.onEnd(ctx)
	}
	return a.abort
}

// warningAttempt is a fakeAttempt that has something to report.
type warningAttempt struct {
	*fakeAttempt
	warning error
}

func (a warningAttempt) Warning() error { return a.warning }

// holding returns a store that hands out the attempt.
func holding(attempt holdsend.Attempt[string]) *fakeStore[string] {
	return &fakeStore[string]{begin: func(context.Context, holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
		return attempt, nil, nil
	}}
}

func noteRequest() holdsend.Request {
	return holdsend.Request{
		Owner: "ada", Operation: "note.create", Header: keyed("abc-12345"), Content: json.RawMessage(`{"text":"a note"}`),
	}
}

var noteScope = holdsend.Scope{Owner: "ada", Operation: "note.create", Key: "abc-12345"}

func answerWith[Tx any](response holdsend.Response, err error) holdsend.CreateFunc[Tx] {
	return func(context.Context, Tx, holdsend.Incoming) (holdsend.Response, error) { return response, err }
}

func unexpected[Tx any](t *testing.T) holdsend.CreateFunc[Tx] {
	return func(context.Context, Tx, holdsend.Incoming) (holdsend.Response, error) {
		t.Error("create ran")
		return holdsend.Response{}, errors.New("create ran")
	}
}

func codeOf(t *testing.T, answer holdsend.Answer) string {
	t.Helper()
	var problem struct{ Code string }
	require.NoError(t, json.Unmarshal(answer.Body, &problem), "%s", answer.Body)
	return problem.Code
}

func requireFree(t *testing.T, store *holdsend.MemoryStore) {
	t.Helper()
	_, err := store.Find(context.Background(), noteScope)
	require.ErrorIs(t, err, holdsend.ErrNotFound, "the key must be free")
}

// The table of states: what a request gets, by the record that stands at its scope. Content is compared before state.
func TestStateTable(t *testing.T) {
	t.Parallel()
	same, err := holdsend.Fingerprint("note.create", json.RawMessage(`{"text":"a note"}`))
	require.NoError(t, err)
	other, err := holdsend.Fingerprint("note.create", json.RawMessage(`{"text":"another"}`))
	require.NoError(t, err)
	original := holdsend.Response{Status: 201, Header: http.Header{"Location": {"/notes/1"}}, Body: []byte("a note"), ResourceRef: "1"}

	for name, test := range map[string]struct {
		record      holdsend.Record
		fingerprint string
		want        holdsend.Outcome
		status      int
		tookOver    bool
	}{
		"none":                              {holdsend.Record{}, "", "created", 201, false},
		"claimed, same content":             {holdsend.Record{State: "claimed"}, same, "in_progress", 409, false},
		"claimed, other content":            {holdsend.Record{State: "claimed"}, other, "key_conflict", 409, false},
		"abandoned, same content":           {holdsend.Record{State: "claimed", Abandoned: true}, same, "created", 201, true},
		"abandoned, other content":          {holdsend.Record{State: "claimed", Abandoned: true}, other, "key_conflict", 409, false},
		"completed, same content":           {holdsend.Record{State: "completed", Response: original}, same, "replayed", 201, false},
		"completed, other content":          {holdsend.Record{State: "completed", Response: original}, other, "key_conflict", 409, false},
		"gone, same content":                {holdsend.Record{State: "gone"}, same, "gone", 410, false},
		"gone, other content":               {holdsend.Record{State: "gone"}, other, "key_conflict", 409, false},
		"completed, expired, same content":  {holdsend.Record{State: "completed", Response: original, Expired: true}, same, "created", 201, false},
		"completed, expired, other content": {holdsend.Record{State: "completed", Response: original, Expired: true}, other, "created", 201, false},
		"gone, expired, same content":       {holdsend.Record{State: "gone", Expired: true}, same, "created", 201, false},
		"gone, expired, other content":      {holdsend.Record{State: "gone", Expired: true}, other, "created", 201, false},
		// Nobody knows what it stands for, nor needs to.
		"expired, of an unknown tag": {holdsend.Record{State: "completed", Response: original, Expired: true}, "hs9:00", "created", 201, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			attempt := &fakeAttempt{}
			var claims []holdsend.Claim
			store := &fakeStore[string]{begin: func(_ context.Context, c holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
				claims = append(claims, c)
				assert.Equal(t, noteScope, c.Scope)
				assert.Equal(t, same, c.Fingerprint)
				if test.fingerprint == "" || c.Replace != nil {
					return attempt, nil, nil
				}
				record := test.record
				record.Scope, record.Fingerprint, record.ClaimID = c.Scope, test.fingerprint, "claim-1"
				return nil, &record, nil
			}}
			var events []holdsend.Event
			req := noteRequest()
			req.Wait = -1
			req.Observe = func(_ context.Context, e holdsend.Event) { events = append(events, e) }
			answer, err := holdsend.HandleIdempotent(t.Context(), store, req, answerWith[string](holdsend.Response{Status: 201, Body: []byte("new")}, nil))
			require.NoError(t, err)
			assert.Equal(t, test.want, answer.Outcome)
			assert.Equal(t, test.status, answer.Status)
			require.Len(t, events, 1)
			assert.Equal(t, test.want, events[0].Outcome)
			assert.Equal(t, test.tookOver, events[0].TookOver)
			assert.Equal(t, "note.create", events[0].Operation)
			assert.NoError(t, events[0].Err)

			switch test.want {
			case "created":
				assert.Equal(t, "new", string(answer.Body))
				assert.Equal(t, []string{"complete"}, attempt.calls)
				if test.fingerprint != "" {
					require.Len(t, claims, 2)
					assert.Nil(t, claims[0].Replace)
					assert.Equal(t, "claim-1", claims[1].Replace.ClaimID)
				}
			case "replayed":
				assert.Equal(t, "a note", string(answer.Body))
				assert.Equal(t, http.Header{"Location": {"/notes/1"}, "Idempotent-Replayed": {"true"}}, answer.Header)
			default:
				assert.Equal(t, string(test.want), codeOf(t, answer))
				assert.Equal(t, "application/problem+json", answer.Header.Get("Content-Type"))
				assert.Equal(t, test.want == "in_progress", answer.Header.Get("Retry-After") != "")
				for _, secret := range []string{"ada", "abc-12345", "note.create", "a note"} {
					assert.NotContains(t, string(answer.Body), secret)
				}
			}
			if test.want != "created" {
				assert.Empty(t, attempt.calls)
				assert.Len(t, claims, 1)
			}
		})
	}
}

// The other reading of hs1 is the same content, whichever server wrote the record.
func TestBothReadingsReplay(t *testing.T) {
	t.Parallel()
	const content = `{"10":1,"9":2}`
	// The SHA-256 of `11:note.create|{"10":1,"9":2}`: keys in plain order, as an early server wrote them.
	const plain = "hs1:fa73d8c588eac52e8611ed5dffd1b92c6b5c3aaf7dd9615bc930cc4e72c33081"
	store := holdsend.NewMemoryStore(nil)
	written, err := holdsend.Fingerprint("note.create", json.RawMessage(content))
	require.NoError(t, err)
	require.NotEqual(t, plain, written)
	attempt, _, err := store.Begin(t.Context(), holdsend.Claim{Scope: noteScope, Fingerprint: plain})
	require.NoError(t, err)
	require.NoError(t, attempt.Complete(t.Context(), holdsend.Completion{Response: holdsend.Response{Status: 201}}))
	req := noteRequest()
	req.Content = json.RawMessage(content)
	answer, err := holdsend.HandleIdempotent(t.Context(), store, req, unexpected[*holdsend.MemoryTx](t))
	require.NoError(t, err)
	assert.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
}

// A newer server wrote it: the client must not give its item up.
func TestUnknownFingerprintIsAnError(t *testing.T) {
	t.Parallel()
	for _, state := range []holdsend.State{"claimed", "completed", "gone"} {
		for _, abandoned := range []bool{false, true} {
			store := &fakeStore[string]{begin: func(_ context.Context, c holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
				assert.Nil(t, c.Replace)
				return nil, &holdsend.Record{State: state, Fingerprint: "hs9:00", Abandoned: abandoned}, nil
			}}
			_, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(), unexpected[string](t))
			assert.ErrorContains(t, err, "tag")
		}
	}
}

func TestUnknownStateIsAnError(t *testing.T) {
	t.Parallel()
	req := noteRequest()
	fingerprint, err := holdsend.Fingerprint(req.Operation, req.Content)
	require.NoError(t, err)
	store := &fakeStore[string]{begin: func(context.Context, holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
		return nil, &holdsend.Record{State: "resting", Fingerprint: fingerprint}, nil
	}}
	_, err = holdsend.HandleIdempotent(t.Context(), store, req, unexpected[string](t))
	assert.ErrorContains(t, err, `state "resting"`)
}

func TestCreatesAnswer(t *testing.T) {
	t.Parallel()
	for _, status := range []int{100, 199, 200, 201, 204, 226, 299, 300, 304, 399, 400, 404, 409, 410, 500, 503, 599} {
		for _, key := range []string{"abc-12345", ""} {
			store := holdsend.NewMemoryStore(nil)
			runs, commits := 0, 0
			create := func(_ context.Context, tx *holdsend.MemoryTx, in holdsend.Incoming) (holdsend.Response, error) {
				runs++
				tx.OnCommit(func() { commits++ })
				return holdsend.Response{Status: status, Header: http.Header{"X-Run": {fmt.Sprint(runs)}}, Body: []byte("an answer")}, nil
			}
			req := noteRequest()
			want := holdsend.OutcomeCreated
			if key == "" {
				req.Header = nil
				want = holdsend.OutcomeUnkeyed
			} else if status < 200 || status > 299 {
				want = holdsend.OutcomeNotStored
			}
			stored := 200 <= status && status <= 299
			for run := 1; run <= 2; run++ {
				answer, err := holdsend.HandleIdempotent(t.Context(), store, req, create)
				require.NoError(t, err)
				assert.Equal(t, status, answer.Status)
				assert.Equal(t, "an answer", string(answer.Body))
				if run == 2 && stored && key != "" {
					assert.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
					assert.Equal(t, "1", answer.Header.Get("X-Run"))
				} else {
					assert.Equal(t, want, answer.Outcome, status)
					assert.Equal(t, http.Header{"X-Run": {fmt.Sprint(run)}}, answer.Header)
				}
			}
			switch {
			case !stored:
				assert.Equal(t, 2, runs)
				assert.Zero(t, commits)
				requireFree(t, store)
			case key == "":
				assert.Equal(t, 2, commits)
				requireFree(t, store)
			default:
				assert.Equal(t, 1, runs)
				assert.Equal(t, 1, commits)
			}
		}
	}
}

func TestCreateFails(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	for name, test := range map[string]struct {
		response holdsend.Response
		err      error
		want     string
	}{
		"an error":               {holdsend.Response{Status: 201}, mine, "mine"},
		"status 0":               {holdsend.Response{}, nil, "status 0"},
		"status 99":              {holdsend.Response{Status: 99}, nil, "status 99"},
		"status 600":             {holdsend.Response{Status: 600}, nil, "status 600"},
		"status 1000":            {holdsend.Response{Status: 1000}, nil, "status 1000"},
		"status -200":            {holdsend.Response{Status: -200}, nil, "status -200"},
		"a ref that is too long": {holdsend.Response{Status: 201, ResourceRef: strings.Repeat("a", 256)}, nil, "Response.ResourceRef"},
		"a ref that is no UTF-8": {holdsend.Response{Status: 201, ResourceRef: "\xff"}, nil, "Response.ResourceRef"},
		"a ref with a NUL":       {holdsend.Response{Status: 201, ResourceRef: "\x00"}, nil, "Response.ResourceRef"},
	} {
		for _, header := range []http.Header{keyed("abc-12345"), nil} {
			store := holdsend.NewMemoryStore(nil)
			commits := 0
			var events []holdsend.Event
			req := noteRequest()
			req.Header = header
			req.Observe = func(_ context.Context, e holdsend.Event) { events = append(events, e) }
			answer, err := holdsend.HandleIdempotent(t.Context(), store, req, func(_ context.Context, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
				tx.OnCommit(func() { commits++ })
				return test.response, test.err
			})
			assert.ErrorContains(t, err, test.want, name)
			if test.err != nil {
				assert.Equal(t, mine, err, "unchanged")
			}
			assert.Zero(t, answer, name)
			assert.Zero(t, commits, name)
			requireFree(t, store)
			require.Len(t, events, 1, name)
			assert.ErrorIs(t, events[0].Err, err, name)
			assert.Empty(t, events[0].Outcome, name)
		}
	}
}

// A ref of 255 bytes is a ref.
func TestLongestResourceRef(t *testing.T) {
	t.Parallel()
	store := holdsend.NewMemoryStore(nil)
	ref := strings.Repeat("a", 255)
	_, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(), answerWith[*holdsend.MemoryTx](holdsend.Response{Status: 201, ResourceRef: ref}, nil))
	require.NoError(t, err)
	record, err := store.Find(t.Context(), noteScope)
	require.NoError(t, err)
	assert.Equal(t, ref, record.Response.ResourceRef)
}

func TestCreatePanics(t *testing.T) {
	t.Parallel()
	for _, header := range []http.Header{keyed("abc-12345"), nil} {
		store := holdsend.NewMemoryStore(nil)
		commits := 0
		var events []holdsend.Event
		req := noteRequest()
		req.Header = header
		req.Observe = func(_ context.Context, e holdsend.Event) { events = append(events, e) }
		create := func(end func()) holdsend.CreateFunc[*holdsend.MemoryTx] {
			return func(_ context.Context, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
				tx.OnCommit(func() { commits++ })
				end()
				return holdsend.Response{Status: 201}, nil
			}
		}
		assert.PanicsWithValue(t, "boom", func() {
			_, _ = holdsend.HandleIdempotent(t.Context(), store, req, create(func() { panic("boom") }))
		})
		requireFree(t, store)

		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = holdsend.HandleIdempotent(context.Background(), store, req, create(runtime.Goexit))
			t.Error("it returned")
		}()
		receive(t, done, "the end of the goroutine")
		requireFree(t, store)

		assert.Zero(t, commits)
		require.Len(t, events, 2)
		for _, e := range events {
			assert.Error(t, e.Err)
			assert.Empty(t, e.Outcome)
		}
	}
}

// Everything that ends an attempt runs on a context that is not the client's, keeps its values and has a bound.
func TestAttemptEndsThoughTheClientLeft(t *testing.T) {
	t.Parallel()
	type valueKey struct{}
	for name, test := range map[string]struct {
		response holdsend.Response
		err      error
		want     []string
	}{
		"2xx":      {holdsend.Response{Status: 201}, nil, []string{"complete"}},
		"an error": {holdsend.Response{}, context.Canceled, []string{"abort"}},
		"404":      {holdsend.Response{Status: 404}, nil, []string{"abort"}},
	} {
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), valueKey{}, "value"))
		attempt := &fakeAttempt{onEnd: func(ctx context.Context) {
			assert.NoError(t, ctx.Err(), name)
			assert.Equal(t, "value", ctx.Value(valueKey{}), name)
			deadline, ok := ctx.Deadline()
			assert.True(t, ok, name)
			assert.LessOrEqual(t, time.Until(deadline), 5*time.Second, name)
			assert.Greater(t, time.Until(deadline), time.Duration(0), name)
		}}
		_, err := holdsend.HandleIdempotent(ctx, holding(attempt), noteRequest(), func(ctx context.Context, _ string, _ holdsend.Incoming) (holdsend.Response, error) {
			cancel()
			assert.Error(t, ctx.Err(), "create is told")
			return test.response, test.err
		})
		assert.Equal(t, test.err, err, name)
		assert.Equal(t, test.want, attempt.calls, name)
	}
}

func TestCompletionFails(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	for name, test := range map[string]struct {
		complete, abort error
		want            []error
	}{
		"claim lost":           {fmt.Errorf("store: %w", holdsend.ErrClaimLost), nil, []error{holdsend.ErrClaimLost}},
		"outcome unknown":      {holdsend.ErrOutcomeUnknown, nil, []error{holdsend.ErrOutcomeUnknown}},
		"another":              {mine, nil, []error{mine}},
		"another, and abort":   {mine, errors.New("abort"), []error{mine}},
		"create had committed": {mine, holdsend.ErrTxEnded, []error{mine, holdsend.ErrTxEnded}},
	} {
		attempt := &fakeAttempt{complete: test.complete, abort: test.abort}
		answer, err := holdsend.HandleIdempotent(t.Context(), holding(attempt), noteRequest(), answerWith[string](holdsend.Response{Status: 201}, nil))
		for _, want := range test.want {
			assert.ErrorIs(t, err, want, name)
		}
		assert.Zero(t, answer, name)
		assert.Equal(t, []string{"complete", "abort"}, attempt.calls, "%s: every attempt is ended", name)
	}
}

// A fault that the answer does not show is in the event.
func TestEventShowsWhatTheAnswerHides(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	for name, test := range map[string]struct {
		attempt  holdsend.Attempt[string]
		response holdsend.Response
		createErr,
		wantErr error
		inEvent []error
	}{
		"a warning":                   {warningAttempt{&fakeAttempt{}, holdsend.ErrTxEnded}, holdsend.Response{Status: 201}, nil, nil, []error{holdsend.ErrTxEnded}},
		"no warning":                  {warningAttempt{&fakeAttempt{}, nil}, holdsend.Response{Status: 201}, nil, nil, nil},
		"abort failed":                {&fakeAttempt{abort: mine}, holdsend.Response{Status: 404}, nil, nil, []error{mine}},
		"abort failed after an error": {&fakeAttempt{abort: mine}, holdsend.Response{}, context.Canceled, context.Canceled, []error{mine, context.Canceled}},
		"404 and committed":           {&fakeAttempt{abort: holdsend.ErrTxEnded}, holdsend.Response{Status: 404}, nil, holdsend.ErrTxEnded, []error{holdsend.ErrTxEnded}},
		"an error and committed":      {&fakeAttempt{abort: holdsend.ErrTxEnded}, holdsend.Response{}, mine, holdsend.ErrTxEnded, []error{mine, holdsend.ErrTxEnded}},
	} {
		var event holdsend.Event
		req := noteRequest()
		req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
		answer, err := holdsend.HandleIdempotent(t.Context(), holding(test.attempt), req, answerWith[string](test.response, test.createErr))
		if test.wantErr == nil {
			assert.NoError(t, err, name)
			assert.Equal(t, test.response.Status, answer.Status, name)
			assert.Equal(t, answer.Outcome, event.Outcome, name)
		} else {
			assert.ErrorIs(t, err, test.wantErr, name)
			assert.Empty(t, event.Outcome, name)
		}
		if test.inEvent == nil {
			assert.NoError(t, event.Err, name)
		}
		for _, want := range test.inEvent {
			assert.ErrorIs(t, event.Err, want, name)
		}
	}
}

func TestServiceMistakes(t *testing.T) {
	t.Parallel()
	var noStore holdsend.Store[string]
	_, err := holdsend.HandleIdempotent(t.Context(), noStore, noteRequest(), unexpected[string](t))
	assert.ErrorContains(t, err, "needs a store")
	_, err = holdsend.HandleIdempotent(t.Context(), &fakeStore[string]{}, noteRequest(), nil)
	assert.ErrorContains(t, err, "needs a create function")

	for want, change := range map[string]func(*holdsend.Request){
		"Content is nil":                       func(r *holdsend.Request) { r.Content = nil },
		"CompletedTTL is negative":             func(r *holdsend.Request) { r.CompletedTTL = -1 },
		"Request.Owner is empty":               func(r *holdsend.Request) { r.Owner = "" },
		"Request.Owner is 256 bytes long":      func(r *holdsend.Request) { r.Owner = strings.Repeat("s", 256) },
		"Request.Owner is not valid UTF-8":     func(r *holdsend.Request) { r.Owner = "s\xff" },
		"Request.Owner contains a NUL":         func(r *holdsend.Request) { r.Owner = "s\x00" },
		"Request.Operation is empty":           func(r *holdsend.Request) { r.Operation = "" },
		"Request.Operation is 256 bytes long":  func(r *holdsend.Request) { r.Operation = strings.Repeat("s", 256) },
		"Request.Operation is not valid UTF-8": func(r *holdsend.Request) { r.Operation = "s\xff" },
		"Request.Operation contains a NUL":     func(r *holdsend.Request) { r.Operation = "s\x00" },
	} {
		for _, header := range []http.Header{keyed("abc-12345"), keyed("bad"), nil} {
			req := noteRequest()
			req.Header = header
			change(&req)
			var event holdsend.Event
			req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
			answer, err := holdsend.HandleIdempotent(t.Context(), &fakeStore[string]{}, req, unexpected[string](t))
			assert.ErrorContains(t, err, "holdsend: ")
			assert.ErrorContains(t, err, want)
			assert.NotContains(t, err.Error(), strings.Repeat("s", 10))
			assert.Zero(t, answer)
			assert.ErrorIs(t, event.Err, err)
		}
	}

	// The longest are allowed.
	req := noteRequest()
	req.Owner, req.Operation = strings.Repeat("a", 255), strings.Repeat("é", 127)+"e"
	answer, err := holdsend.HandleIdempotent(t.Context(), holding(&fakeAttempt{}), req, answerWith[string](holdsend.Response{Status: 201}, nil))
	require.NoError(t, err)
	assert.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*holdsend.Request)
		want   holdsend.Outcome
	}{
		"no key":            {func(r *holdsend.Request) { r.Header, r.RequireKey = nil, true }, "key_required"},
		"a bad key":         {func(r *holdsend.Request) { r.Header = keyed("bad") }, "key_invalid"},
		"an empty key":      {func(r *holdsend.Request) { r.Header = keyed("") }, "key_invalid"},
		"two keys":          {func(r *holdsend.Request) { r.Header = http.Header{"Idempotency-Key": {"abc-12345", "abc-12345"}} }, "key_invalid"},
		"bad content":       {func(r *holdsend.Request) { r.Content = json.RawMessage("{") }, "content_invalid"},
		"empty content":     {func(r *holdsend.Request) { r.Content = []byte{} }, "content_invalid"},
		"content of no use": {func(r *holdsend.Request) { r.Content = func() {} }, "content_invalid"},
		"deep content": {func(r *holdsend.Request) {
			r.Content = []byte(strings.Repeat("[", 10_001) + strings.Repeat("]", 10_001))
		}, "content_invalid"},
		"a bad key and bad content": {func(r *holdsend.Request) { r.Header, r.Content = keyed("bad"), []byte("{") }, "key_invalid"},
	} {
		req := noteRequest()
		test.change(&req)
		var event holdsend.Event
		req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
		// The store panics if anything is read or written.
		answer, err := holdsend.HandleIdempotent(t.Context(), &fakeStore[string]{}, req, unexpected[string](t))
		require.NoError(t, err, name)
		assert.Equal(t, test.want, answer.Outcome, name)
		assert.Equal(t, http.StatusBadRequest, answer.Status, name)
		assert.Equal(t, string(test.want), codeOf(t, answer), name)
		assert.Equal(t, test.want, event.Outcome, name)
		assert.NoError(t, event.Err, name)
	}
}

func TestUnkeyed(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	inTx := func(ctx context.Context, fn func(context.Context, string) error) error { return fn(ctx, "tx") }
	req := noteRequest()
	req.Header = http.Header{"Written-At": {time.Now().Add(-time.Hour).Format(time.RFC3339)}}
	req.Content = json.RawMessage("{") // nothing is compared
	answer, err := holdsend.HandleIdempotent(t.Context(), &fakeStore[string]{inTx: inTx}, req, func(_ context.Context, tx string, in holdsend.Incoming) (holdsend.Response, error) {
		assert.Equal(t, "tx", tx)
		assert.Zero(t, in, "Written-At is ignored without a key")
		return holdsend.Response{Status: 202}, nil
	})
	require.NoError(t, err)
	assert.Equal(t, holdsend.OutcomeUnkeyed, answer.Outcome)
	assert.Equal(t, 202, answer.Status)

	// The store's own error after create answered well: the answer is not given.
	for _, lost := range []error{mine, holdsend.ErrOutcomeUnknown} {
		store := &fakeStore[string]{inTx: func(ctx context.Context, fn func(context.Context, string) error) error {
			assert.NoError(t, fn(ctx, "tx"))
			return lost
		}}
		answer, err = holdsend.HandleIdempotent(t.Context(), store, req, answerWith[string](holdsend.Response{Status: 201}, nil))
		assert.Equal(t, lost, err)
		assert.Zero(t, answer)
	}
}

func TestStoresThatBreakTheContract(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	for name, test := range map[string]struct {
		record *holdsend.Record
		err    error
		both   bool
	}{
		"nothing":               {nil, nil, false},
		"an attempt and record": {&holdsend.Record{State: "claimed"}, nil, true},
		"an attempt and error":  {nil, mine, true},
		"all three":             {&holdsend.Record{State: "completed"}, mine, true},
	} {
		attempt := &fakeAttempt{}
		store := &fakeStore[string]{begin: func(context.Context, holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
			if test.both {
				return attempt, test.record, test.err
			}
			return nil, test.record, test.err
		}}
		_, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(), unexpected[string](t))
		assert.ErrorContains(t, err, "exactly one of attempt, record and error", name)
		if test.err != nil {
			assert.ErrorIs(t, err, mine, name)
		}
		if test.both {
			assert.Equal(t, []string{"abort"}, attempt.calls, "%s: it is not left open", name)
		}
	}
}

func TestStoreErrorsComeBackUnchanged(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	store := &fakeStore[string]{begin: func(context.Context, holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
		return nil, nil, mine
	}}
	_, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(), unexpected[string](t))
	assert.Equal(t, mine, err)
}

// The record holds copies: what a caller does to an answer or a response changes no replay.
func TestCopiesInAndOut(t *testing.T) {
	t.Parallel()
	store := holdsend.NewMemoryStore(nil)
	response := holdsend.Response{Status: 201, Header: http.Header{"Link": {"<a>"}}, Body: []byte("a note")}
	first, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(), answerWith[*holdsend.MemoryTx](response, nil))
	require.NoError(t, err)
	for _, header := range []http.Header{response.Header, first.Header} {
		header["Link"][0] = "changed"
		header.Set("X-Added", "1")
	}
	response.Body[0] = 'X'
	for range 2 {
		again, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(), unexpected[*holdsend.MemoryTx](t))
		require.NoError(t, err)
		assert.Equal(t, http.Header{"Link": {"<a>"}, "Idempotent-Replayed": {"true"}}, again.Header)
		assert.Equal(t, "a note", string(again.Body))
		again.Header["Link"][0] = "changed"
		again.Body[0] = 'X'
	}
}

func TestStoredHeaders(t *testing.T) {
	t.Parallel()
	attempt := &fakeAttempt{}
	all := http.Header{
		"Content-Type": {"text/plain"}, "Location": {"/"}, "x-lower": {"1", "2"}, "X-Proxy": {"kept"},
		"Connection": {"x-hop , X-Other"}, "connection": {"X-Third"}, "X-Hop": {"1"}, "x-other": {"1"}, "X-Third": {"1"},
		"Keep-Alive": {"1"}, "Te": {"1"}, "Transfer-Encoding": {"chunked"}, "Upgrade": {"1"}, "Trailer": {"X"},
		"Set-Cookie": {"1"}, "set-cookie": {"2"}, "Set-Cookie2": {"1"}, "Authorization": {"1"}, "Www-Authenticate": {"1"}, "WWW-Authenticate": {"1"},
		"Date": {"1"}, "Content-Length": {"1"}, "Proxy-Authenticate": {"1"}, "proxy-anything": {"1"}, "Idempotent-Replayed": {"true"},
	}
	answer, err := holdsend.HandleIdempotent(t.Context(), holding(attempt), noteRequest(), answerWith[string](holdsend.Response{Status: 201, Header: all}, nil))
	require.NoError(t, err)
	assert.Equal(t, all, answer.Header, "the first caller gets all")
	assert.Equal(t, http.Header{
		"Content-Type": {"text/plain"}, "Location": {"/"}, "x-lower": {"1", "2"}, "X-Proxy": {"kept"},
	}, attempt.completion.Response.Header)
}

func TestCompletionCarriesTTLAndRef(t *testing.T) {
	t.Parallel()
	attempt := &fakeAttempt{}
	req := noteRequest()
	req.CompletedTTL = time.Hour
	_, err := holdsend.HandleIdempotent(t.Context(), holding(attempt), req, answerWith[string](holdsend.Response{Status: 201, ResourceRef: "1", Body: []byte("a")}, nil))
	require.NoError(t, err)
	assert.Equal(t, time.Hour, attempt.completion.TTL)
	assert.Equal(t, "1", attempt.completion.Response.ResourceRef)
	assert.Equal(t, "a", string(attempt.completion.Response.Body))
}

func TestIncoming(t *testing.T) {
	t.Parallel()
	at := time.Now().UTC().Add(-time.Hour).Truncate(time.Second)
	for _, name := range []string{"Written-At", "written-at"} {
		req := noteRequest()
		req.Header = http.Header{"Idempotency-Key": {`"abc-12345"`}, name: {at.Format(time.RFC3339)}}
		_, err := holdsend.HandleIdempotent(t.Context(), holding(&fakeAttempt{}), req, func(_ context.Context, _ string, in holdsend.Incoming) (holdsend.Response, error) {
			assert.Equal(t, "abc-12345", in.Key)
			if assert.NotNil(t, in.WrittenAt) {
				assert.True(t, at.Equal(*in.WrittenAt))
			}
			return holdsend.Response{Status: 201}, nil
		})
		require.NoError(t, err)
	}
	req := noteRequest()
	req.Header = http.Header{"Idempotency-Key": {"abc-12345"}, "Written-At": {at.Format(time.RFC3339)}, "written-at": {at.Format(time.RFC3339)}}
	_, err := holdsend.HandleIdempotent(t.Context(), holding(&fakeAttempt{}), req, func(_ context.Context, _ string, in holdsend.Incoming) (holdsend.Response, error) {
		assert.Nil(t, in.WrittenAt, "two headers are none")
		return holdsend.Response{Status: 201}, nil
	})
	require.NoError(t, err)
}

// startFirst runs a first attempt in the bubble, and returns once create runs. It answers when told to.
func startFirst(store *holdsend.MemoryStore) (finish chan<- holdsend.Response, wait func()) {
	started, answer := make(chan struct{}), make(chan holdsend.Response)
	var group sync.WaitGroup
	group.Go(func() {
		_, _ = holdsend.HandleIdempotent(context.Background(), store, noteRequest(), func(context.Context, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
			close(started)
			return <-answer, nil
		})
	})
	<-started
	return answer, group.Wait
}

func TestDuplicateWaitsForTheOriginal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := holdsend.NewMemoryStore(nil)
		finish, wait := startFirst(store)
		defer wait()
		go func() {
			time.Sleep(time.Second)
			finish <- holdsend.Response{Status: 201, Body: []byte("original")}
		}()
		var event holdsend.Event
		req := noteRequest()
		req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
		start := time.Now()
		answer, err := holdsend.HandleIdempotent(t.Context(), store, req, unexpected[*holdsend.MemoryTx](t))
		require.NoError(t, err)
		assert.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
		assert.Equal(t, "original", string(answer.Body))
		took := time.Since(start)
		assert.Equal(t, time.Second, took, "it is woken when the attempt ends")
		assert.Equal(t, took, event.Waited)
		assert.Equal(t, took, event.Duration)
	})
}

func TestDuplicateWaitsNoLongerThanWait(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]time.Duration{
		0: 2 * time.Second, -1: 0, 1: 1, 50 * time.Millisecond: 50 * time.Millisecond, 10 * time.Second: 10 * time.Second,
	} {
		synctest.Test(t, func(t *testing.T) {
			// Long past TakeOverAfter a living attempt is not abandoned, whatever the record says.
			store := holdsend.NewMemoryStore(&holdsend.MemoryOptions{TakeOverAfter: time.Millisecond})
			finish, waitFirst := startFirst(store)
			time.Sleep(time.Second)
			var event holdsend.Event
			req := noteRequest()
			req.Wait = wait
			req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
			start := time.Now()
			answer, err := holdsend.HandleIdempotent(t.Context(), store, req, unexpected[*holdsend.MemoryTx](t))
			require.NoError(t, err)
			assert.Equal(t, holdsend.OutcomeInProgress, answer.Outcome)
			assert.Equal(t, http.StatusConflict, answer.Status)
			assert.NotEmpty(t, answer.Header.Get("Retry-After"))
			assert.Equal(t, want, time.Since(start))
			assert.Equal(t, want, event.Waited)
			assert.False(t, event.TookOver)
			finish <- holdsend.Response{Status: 201}
			waitFirst()
		})
	}
}

// Other content is never waited for.
func TestConflictDoesNotWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := holdsend.NewMemoryStore(nil)
		finish, wait := startFirst(store)
		time.Sleep(48 * time.Hour)
		req := noteRequest()
		req.Content = json.RawMessage(`"other"`)
		start := time.Now()
		answer, err := holdsend.HandleIdempotent(t.Context(), store, req, unexpected[*holdsend.MemoryTx](t))
		require.NoError(t, err)
		assert.Equal(t, holdsend.OutcomeKeyConflict, answer.Outcome)
		assert.Zero(t, time.Since(start))
		finish <- holdsend.Response{Status: 201}
		wait()
	})
}

// A store without a method Waiters wakes nobody: the attempt may as well run in another process.
type elsewhere struct {
	holdsend.Store[*holdsend.MemoryTx]
	looks *atomic.Int64
}

func (s elsewhere) Find(ctx context.Context, scope holdsend.Scope) (*holdsend.Record, error) {
	s.looks.Add(1)
	return s.Store.Find(ctx, scope)
}

func TestDuplicateLooksForAnAttemptElsewhere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := holdsend.NewMemoryStore(nil)
		finish, wait := startFirst(store)
		defer wait()
		go func() {
			time.Sleep(time.Second)
			finish <- holdsend.Response{Status: 201, Body: []byte("original")}
		}()
		looks := new(atomic.Int64)
		start := time.Now()
		answer, err := holdsend.HandleIdempotent(t.Context(), elsewhere{store, looks}, noteRequest(), unexpected[*holdsend.MemoryTx](t))
		require.NoError(t, err)
		assert.Equal(t, holdsend.OutcomeReplayed, answer.Outcome)
		took := time.Since(start)
		assert.GreaterOrEqual(t, took, time.Second)
		assert.Less(t, took, 1500*time.Millisecond, "it looks again often enough")
		assert.LessOrEqual(t, looks.Load(), int64(took/(100*time.Millisecond)), "and not more often than every 100 ms")
	})
}

// Every waiter is woken, and one whose attempt failed waits for the next one, which is among them.
func TestWaitersAreWokenTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := holdsend.NewMemoryStore(nil)
		finish, wait := startFirst(store)
		var creates atomic.Int64
		var group sync.WaitGroup
		start := time.Now()
		for range 50 {
			group.Go(func() {
				answer, err := holdsend.HandleIdempotent(context.Background(), store, noteRequest(), func(context.Context, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
					creates.Add(1)
					time.Sleep(500 * time.Millisecond)
					return holdsend.Response{Status: 201, Body: []byte("second")}, nil
				})
				assert.NoError(t, err)
				assert.Equal(t, "second", string(answer.Body))
				assert.Equal(t, 1500*time.Millisecond, time.Since(start))
			})
		}
		time.Sleep(time.Second)
		finish <- holdsend.Response{Status: 500}
		wait()
		group.Wait()
		assert.EqualValues(t, 1, creates.Load())
	})
}

// Each attempt that fails lets one of those who wait try. If all of them asked then, n duplicates of a create that fails
// would ask the database n * n times.
func TestWaitersOfACreateThatFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const duplicates = 200
		store := holdsend.NewMemoryStore(nil)
		asking := &asked{MemoryStore: store}
		var creates atomic.Int64
		var group sync.WaitGroup
		start := time.Now()
		for range duplicates {
			group.Go(func() {
				req := noteRequest()
				req.Wait = time.Minute
				_, err := holdsend.HandleIdempotent(context.Background(), asking, req, func(context.Context, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
					creates.Add(1)
					time.Sleep(10 * time.Millisecond)
					return holdsend.Response{}, io.ErrUnexpectedEOF
				})
				assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
			})
		}
		group.Wait()
		assert.EqualValues(t, duplicates, creates.Load(), "each of them got its turn")
		assert.Equal(t, duplicates*10*time.Millisecond, time.Since(start), "and at once when the one before it ended")
		assert.Less(t, asking.calls.Load(), int64(20*duplicates))
	})
}

// asked counts how often a store was asked.
type asked struct {
	*holdsend.MemoryStore
	calls atomic.Int64
}

func (s *asked) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[*holdsend.MemoryTx], *holdsend.Record, error) {
	s.calls.Add(1)
	return s.MemoryStore.Begin(ctx, c)
}

func (s *asked) Find(ctx context.Context, scope holdsend.Scope) (*holdsend.Record, error) {
	s.calls.Add(1)
	return s.MemoryStore.Find(ctx, scope)
}

// If the first attempt fails while a duplicate waits, the duplicate creates.
func TestWaiterClaimsAFreedKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := holdsend.NewMemoryStore(nil)
		finish, wait := startFirst(store)
		go func() {
			time.Sleep(time.Second)
			finish <- holdsend.Response{Status: 404}
		}()
		var event holdsend.Event
		req := noteRequest()
		req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
		answer, err := holdsend.HandleIdempotent(t.Context(), store, req, func(context.Context, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
			time.Sleep(time.Minute) // not part of the wait
			return holdsend.Response{Status: 201}, nil
		})
		require.NoError(t, err)
		assert.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		assert.False(t, event.TookOver, "nobody died")
		assert.Equal(t, time.Second, event.Waited, "it is woken when the attempt ends")
		assert.Equal(t, event.Waited+time.Minute, event.Duration)
		wait()
	})
}

// A waiter whose context ends returns that context's error, at once.
func TestWaitersContextEnds(t *testing.T) {
	t.Parallel()
	for _, deadline := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			store := holdsend.NewMemoryStore(nil)
			finish, wait := startFirst(store)
			ctx, cancel := context.WithCancel(t.Context())
			want := context.Canceled
			if deadline {
				ctx, cancel = context.WithTimeout(t.Context(), 777*time.Millisecond)
				want = context.DeadlineExceeded
			} else {
				time.AfterFunc(777*time.Millisecond, cancel)
			}
			defer cancel()
			start := time.Now()
			answer, err := holdsend.HandleIdempotent(ctx, store, noteRequest(), unexpected[*holdsend.MemoryTx](t))
			assert.ErrorIs(t, err, want)
			assert.Zero(t, answer)
			assert.Equal(t, 777*time.Millisecond, time.Since(start))
			finish <- holdsend.Response{Status: 201}
			wait()
		})
	}
}

// A waiter looks at a pace that grows, so that a storm of duplicates is no storm of queries.
func TestWaiterPace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		req := noteRequest()
		req.Wait = 10 * time.Second
		fingerprint, err := holdsend.Fingerprint(req.Operation, req.Content)
		require.NoError(t, err)
		begins, finds, replaces := 0, 0, 0
		// Abandoned by its age, and alive: the store refuses each replacement.
		record := holdsend.Record{State: "claimed", Fingerprint: fingerprint, ClaimID: "1", Abandoned: true}
		store := &fakeStore[string]{
			begin: func(_ context.Context, c holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
				if begins++; begins > 1000 {
					return nil, nil, errors.New("a storm of tries")
				}
				if c.Replace != nil {
					replaces++
				}
				return nil, new(record), nil
			},
			find: func(context.Context, holdsend.Scope) (*holdsend.Record, error) { finds++; return new(record), nil },
		}
		answer, err := holdsend.HandleIdempotent(t.Context(), store, req, unexpected[string](t))
		require.NoError(t, err)
		assert.Equal(t, holdsend.OutcomeInProgress, answer.Outcome)
		// At most one look per 3/4 of 250 ms, once the pace is reached.
		assert.Less(t, finds, 70)
		assert.Greater(t, finds, 30)
		assert.Equal(t, finds+1, replaces, "each look at an abandoned claim is a try")
		assert.Equal(t, replaces+1, begins)
	})
}

// A dead attempt's claim is taken over as soon as the store lets go of it.
func TestWaiterTakesOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		req := noteRequest()
		fingerprint, err := holdsend.Fingerprint(req.Operation, req.Content)
		require.NoError(t, err)
		start := time.Now()
		record := func() *holdsend.Record {
			return &holdsend.Record{State: "claimed", Fingerprint: fingerprint, ClaimID: "1", Abandoned: time.Since(start) > 500*time.Millisecond}
		}
		store := &fakeStore[string]{
			begin: func(_ context.Context, c holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
				if c.Replace != nil && time.Since(start) > time.Second {
					return &fakeAttempt{}, nil, nil
				}
				return nil, record(), nil
			},
			find: func(context.Context, holdsend.Scope) (*holdsend.Record, error) { return record(), nil },
		}
		var event holdsend.Event
		req.Observe = func(_ context.Context, e holdsend.Event) { event = e }
		answer, err := holdsend.HandleIdempotent(t.Context(), store, req, answerWith[string](holdsend.Response{Status: 201}, nil))
		require.NoError(t, err)
		assert.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
		assert.True(t, event.TookOver)
		assert.Less(t, event.Waited, 1500*time.Millisecond)
	})
}

// What happens to the record while a duplicate waits.
func TestRecordChangesDuringTheWait(t *testing.T) {
	t.Parallel()
	req := noteRequest()
	same, err := holdsend.Fingerprint(req.Operation, req.Content)
	require.NoError(t, err)
	other, err := holdsend.Fingerprint(req.Operation, json.RawMessage("1"))
	require.NoError(t, err)
	mine := errors.New("mine")
	for name, test := range map[string]struct {
		found     *holdsend.Record
		err       error
		want      holdsend.Outcome
		wantError error
	}{
		"completed":                {&holdsend.Record{State: "completed", Fingerprint: same, Response: holdsend.Response{Status: 201}}, nil, "replayed", nil},
		"gone":                     {&holdsend.Record{State: "gone", Fingerprint: same}, nil, "gone", nil},
		"claimed by other content": {&holdsend.Record{State: "claimed", Fingerprint: other}, nil, "key_conflict", nil},
		"completed and expired":    {&holdsend.Record{State: "completed", Fingerprint: same, Expired: true}, nil, "created", nil},
		"freed":                    {nil, holdsend.ErrNotFound, "created", nil},
		"freed, as it says":        {nil, fmt.Errorf("store: %w", holdsend.ErrNotFound), "created", nil},
		"an error":                 {nil, mine, "", mine},
		"neither":                  {nil, nil, "", nil},
	} {
		synctest.Test(t, func(t *testing.T) {
			found := false
			store := &fakeStore[string]{
				begin: func(_ context.Context, c holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
					if found {
						return &fakeAttempt{}, nil, nil
					}
					return nil, &holdsend.Record{State: "claimed", Fingerprint: same}, nil
				},
				find: func(context.Context, holdsend.Scope) (*holdsend.Record, error) {
					found = true
					return test.found, test.err
				},
			}
			answer, err := holdsend.HandleIdempotent(t.Context(), store, req, answerWith[string](holdsend.Response{Status: 201}, nil))
			if test.want == "" {
				require.Error(t, err, name)
				if test.wantError != nil {
					assert.Equal(t, test.wantError, err, name)
				} else {
					assert.ErrorContains(t, err, "Find must return a record or an error", name)
				}
				return
			}
			require.NoError(t, err, name)
			assert.Equal(t, test.want, answer.Outcome, name)
		})
	}
}

// Time spent waiting for a connection is part of the wait.
func TestAskingIsPartOfTheWait(t *testing.T) {
	t.Parallel()
	for _, leaves := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			req := noteRequest()
			fingerprint, err := holdsend.Fingerprint(req.Operation, req.Content)
			require.NoError(t, err)
			store := &fakeStore[string]{
				begin: func(context.Context, holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
					return nil, &holdsend.Record{State: "claimed", Fingerprint: fingerprint}, nil
				},
				find: func(ctx context.Context, _ holdsend.Scope) (*holdsend.Record, error) {
					<-ctx.Done() // a pool with no connection left
					return nil, fmt.Errorf("pool: %w", ctx.Err())
				},
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if leaves {
				time.AfterFunc(time.Second, cancel)
			}
			start := time.Now()
			answer, err := holdsend.HandleIdempotent(ctx, store, req, unexpected[string](t))
			if leaves {
				assert.Equal(t, context.Canceled, err)
				assert.Equal(t, time.Second, time.Since(start))
				return
			}
			require.NoError(t, err)
			assert.Equal(t, holdsend.OutcomeInProgress, answer.Outcome)
			assert.Equal(t, 2*time.Second, time.Since(start))
		})
	}
}

// The claim is made on the caller's context as it is: only waiting is bounded by Wait.
func TestFirstAskIsNotBoundedByWait(t *testing.T) {
	t.Parallel()
	store := holding(&fakeAttempt{})
	inner := store.begin
	store.begin = func(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[string], *holdsend.Record, error) {
		_, bounded := ctx.Deadline()
		assert.False(t, bounded)
		return inner(ctx, c)
	}
	_, err := holdsend.HandleIdempotent(context.Background(), store, noteRequest(), answerWith[string](holdsend.Response{Status: 201}, nil))
	require.NoError(t, err)
}

func TestManyDuplicatesAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := holdsend.NewMemoryStore(nil)
		runs, commits := 0, 0
		bodies := make([]string, 64)
		var group sync.WaitGroup
		for i := range bodies {
			group.Go(func() {
				answer, err := holdsend.HandleIdempotent(t.Context(), store, noteRequest(), func(_ context.Context, tx *holdsend.MemoryTx, _ holdsend.Incoming) (holdsend.Response, error) {
					runs++ // unguarded: there must be one
					tx.OnCommit(func() { commits++ })
					time.Sleep(time.Second)
					return holdsend.Response{Status: 201, Body: fmt.Append(nil, "note ", runs)}, nil
				})
				assert.NoError(t, err)
				bodies[i] = string(answer.Body)
			})
		}
		group.Wait()
		for _, body := range bodies {
			assert.Equal(t, "note 1", body)
		}
		assert.Equal(t, 1, commits)
	})
}

func TestScopesAreApart(t *testing.T) {
	t.Parallel()
	store := holdsend.NewMemoryStore(nil)
	runs := 0
	for _, change := range []func(*holdsend.Request){
		func(*holdsend.Request) {},
		func(r *holdsend.Request) { r.Owner = "bob" },
		func(r *holdsend.Request) { r.Operation = "post.create" },
		func(r *holdsend.Request) { r.Header = keyed("abc-12346") },
		func(r *holdsend.Request) { r.Owner, r.Operation = "adanote", ".create" },
	} {
		req := noteRequest()
		change(&req)
		answer, err := holdsend.HandleIdempotent(t.Context(), store, req, func(context.Context, *holdsend.MemoryTx, holdsend.Incoming) (holdsend.Response, error) {
			runs++
			return holdsend.Response{Status: 201}, nil
		})
		require.NoError(t, err)
		assert.Equal(t, holdsend.OutcomeCreated, answer.Outcome)
	}
	assert.Equal(t, 5, runs)
}

func TestExpiredRecordIsAsNone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := holdsend.NewMemoryStore(nil)
		req := noteRequest()
		req.CompletedTTL = time.Hour
		send := func(content string) holdsend.Outcome {
			req.Content = json.RawMessage(content)
			answer, err := holdsend.HandleIdempotent(t.Context(), store, req, answerWith[*holdsend.MemoryTx](holdsend.Response{Status: 201}, nil))
			require.NoError(t, err)
			return answer.Outcome
		}
		assert.Equal(t, holdsend.OutcomeCreated, send("1"))
		time.Sleep(time.Hour - 1)
		assert.Equal(t, holdsend.OutcomeReplayed, send("1"))
		assert.Equal(t, holdsend.OutcomeKeyConflict, send("2"))
		time.Sleep(time.Nanosecond)
		assert.Equal(t, holdsend.OutcomeCreated, send("2"))
		assert.Equal(t, holdsend.OutcomeReplayed, send("2"))
	})
}

// A sqlError is an error as a Postgres driver has them.
type sqlError string

func (e sqlError) Error() string    { return "secret: " + string(e) }
func (e sqlError) SQLState() string { return string(e) }

func TestErrorAnswer(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err    error
		status int
		code   string
	}{
		{holdsend.ErrClaimLost, 503, "claim_lost"},
		{fmt.Errorf("secret: %w", holdsend.ErrClaimLost), 503, "claim_lost"},
		{holdsend.ErrOutcomeUnknown, 503, "outcome_unknown"},
		{errors.Join(errors.New("secret"), holdsend.ErrOutcomeUnknown), 503, "outcome_unknown"},
		{sqlError("40001"), 503, "transaction_conflict"},
		{fmt.Errorf("secret: %w", sqlError("40P01")), 503, "transaction_conflict"},
		{sqlError("23505"), 500, "internal"},
		{errors.New("secret"), 500, "internal"},
		{context.Canceled, 500, "internal"},
		{holdsend.ErrTxEnded, 500, "internal"},
		{holdsend.ErrNotFound, 500, "internal"},
		{nil, 500, "internal"},
	} {
		answer := holdsend.ErrorAnswer(test.err)
		assert.Equal(t, test.status, answer.Status, test.err)
		assert.Equal(t, test.code, codeOf(t, answer), test.err)
		assert.Equal(t, "application/problem+json", answer.Header.Get("Content-Type"))
		assert.Equal(t, test.status == 503, answer.Header.Get("Retry-After") != "", test.err)
		assert.Empty(t, answer.Outcome)
		assert.NotContains(t, string(answer.Body), "secret")
	}
}

func TestAnswerServeHTTP(t *testing.T) {
	t.Parallel()
	write := func(answer holdsend.Answer) *http.Response {
		w := httptest.NewRecorder()
		answer.ServeHTTP(w, nil)
		return w.Result()
	}
	header := http.Header{
		"Content-Length": {"99"}, "Transfer-Encoding": {"chunked"}, "Trailer": {"X"}, "Link": {"<a>", "<b>"},
	}
	response := write(holdsend.Answer{Status: 201, Header: header, Body: []byte("a note")})
	assert.Equal(t, 201, response.StatusCode)
	assert.Equal(t, "6", response.Header.Get("Content-Length"))
	assert.Equal(t, []string{"<a>", "<b>"}, response.Header["Link"])
	assert.NotContains(t, response.Header, "Transfer-Encoding")
	assert.NotContains(t, response.Header, "Trailer")
	assert.Equal(t, "a note", bodyOf(t, response))

	assert.NotContains(t, write(holdsend.Answer{Status: 204, Header: header}).Header, "Content-Length")
	assert.Equal(t, "0", write(holdsend.Answer{Status: 201}).Header.Get("Content-Length"))
	for _, status := range []int{-1, 0, 100, 101, 199, 600} {
		requireProblem(t, write(holdsend.Answer{Status: status, Body: []byte("a note")}), http.StatusInternalServerError, "internal")
	}
}

func TestJSON(t *testing.T) {
	t.Parallel()
	response, err := holdsend.JSON(201, map[string]int{"id": 1})
	require.NoError(t, err)
	assert.Equal(t, holdsend.Response{Status: 201, Header: http.Header{"Content-Type": {"application/json"}}, Body: []byte(`{"id":1}`)}, response)
	_, err = holdsend.JSON(201, func() {})
	var unsupported *json.UnsupportedTypeError
	assert.ErrorAs(t, err, &unsupported)
}
