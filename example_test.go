package holdsend_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/holdsend/holdsend-go"
)

// signedIn stands for what reads your session.
func signedIn(*http.Request) (string, error) { return "ada", nil }

// send sends a note to a handler and prints what comes back.
func send(h http.Handler, key, body string) {
	r := httptest.NewRequest(http.MethodPost, "/notes", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Idempotency-Key", key)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	fmt.Print(w.Code)
	if w.Header().Get(holdsend.HeaderReplayed) == "true" {
		fmt.Print(" (replayed)")
	}
	if w.Body.Len() > 0 {
		fmt.Print(" ", w.Body)
	}
	fmt.Println()
}

func ExampleHandler() {
	store := holdsend.NewMemoryStore(nil)
	notes := map[int]string{}

	create := func(r *http.Request, tx *holdsend.MemoryTx, in holdsend.Incoming) (holdsend.Response, error) {
		var note struct{ Text string }
		if err := json.NewDecoder(r.Body).Decode(&note); err != nil {
			return holdsend.JSON(http.StatusBadRequest, "a note is an object with a text") // not stored: rolled back
		}
		id := len(notes) + 1
		tx.OnCommit(func() { notes[id] = note.Text }) // with Postgres: an INSERT through tx
		return holdsend.JSON(http.StatusCreated, map[string]any{"id": id, "text": note.Text})
	}
	mux := http.NewServeMux()
	mux.Handle("POST /notes", holdsend.Handler(store, signedIn, create, nil))

	send(mux, "phone-1:note-1", `{"text":"milk"}`)
	send(mux, "phone-1:note-1", `{"text":"milk"}`) // the first answer was lost on its way
	send(mux, "phone-1:note-2", `{"text":"bread"}`)
	fmt.Println(len(notes), "notes")
	// Output:
	// 201 {"id":1,"text":"milk"}
	// 201 (replayed) {"id":1,"text":"milk"}
	// 201 {"id":2,"text":"bread"}
	// 2 notes
}

func ExampleMiddleware() {
	store := holdsend.NewMemoryStore(nil)
	notes := 0

	create := func(w http.ResponseWriter, r *http.Request) {
		tx, err := holdsend.TxFromContext[*holdsend.MemoryTx](r.Context())
		if err != nil {
			http.Error(w, "not protected", http.StatusInternalServerError)
			return
		}
		tx.OnCommit(func() { notes++ })
		w.WriteHeader(http.StatusCreated) // held back until the transaction has committed
		fmt.Fprint(w, "noted")
	}
	protect := holdsend.Middleware(store, signedIn, &holdsend.MiddlewareOptions{
		Operation: func(*http.Request) string { return "note.create" }, // outlives a renamed route
	})
	mux := http.NewServeMux()
	mux.Handle("POST /notes", protect(http.HandlerFunc(create)))

	send(mux, "phone-1:note-1", `{"text":"milk"}`)
	send(mux, "phone-1:note-1", `{"text":"milk"}`)
	fmt.Println(notes, "note")
	// Output:
	// 201 noted
	// 201 (replayed) noted
	// 1 note
}

func ExampleHandleIdempotent() {
	store := holdsend.NewMemoryStore(nil)
	notes := 0

	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		owner, err := signedIn(r)
		if err != nil {
			http.Error(w, "sign in first", http.StatusUnauthorized)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
		if err != nil {
			http.Error(w, "the body cannot be read", http.StatusBadRequest)
			return
		}
		answer, err := holdsend.HandleIdempotent(r.Context(), store, holdsend.Request{
			Owner:      owner,
			Operation:  "note.create",
			Header:     r.Header,
			Content:    json.RawMessage(body),
			RequireKey: true,
		}, func(ctx context.Context, tx *holdsend.MemoryTx, in holdsend.Incoming) (holdsend.Response, error) {
			tx.OnCommit(func() { notes++ })
			return holdsend.JSON(http.StatusCreated, map[string]int{"id": 1})
		})
		if err != nil {
			answer = holdsend.ErrorAnswer(err) // log err here
		}
		answer.ServeHTTP(w, r)
	})

	send(handler, "phone-1:note-1", `{"text":"milk"}`)
	send(handler, "phone-1:note-1", `{ "text": "milk" }`)
	send(handler, "phone-1:note-1", `{"text":"bread"}`)
	fmt.Println(notes, "note")
	// Output:
	// 201 {"id":1}
	// 201 (replayed) {"id":1}
	// 409 {"type":"about:blank","title":"Conflict","status":409,"detail":"This Idempotency-Key was used for a request with other content. Use a new key for new content.","code":"key_conflict"}
	// 1 note
}

func ExampleTxFromContext() {
	protect := holdsend.Middleware(holdsend.NewMemoryStore(nil), signedIn, nil)
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The type is that of the store's transactions: pgx.Tx for Postgres.
		tx, err := holdsend.TxFromContext[*holdsend.MemoryTx](r.Context())
		if err != nil {
			http.Error(w, "not protected", http.StatusInternalServerError)
			return
		}
		tx.OnCommit(func() { fmt.Println("committed") })
	}))
	send(handler, "phone-1:note-1", `{}`)

	_, err := holdsend.TxFromContext[*holdsend.MemoryTx](context.Background())
	fmt.Println(err)
	// Output:
	// committed
	// 200
	// holdsend: no transaction in this context: use the context of a request that Middleware protects, which GET, HEAD, OPTIONS and TRACE are not
}

func ExampleIncomingFromContext() {
	protect := holdsend.Middleware(holdsend.NewMemoryStore(nil), signedIn, nil)
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in, ok := holdsend.IncomingFromContext(r.Context())
		fmt.Println(ok, in.Key, in.WrittenAt == nil)
	}))
	send(handler, "phone-1:note-1", `{}`)
	// Output:
	// true phone-1:note-1 true
	// 200
}

func ExampleSetResourceRef() {
	store := holdsend.NewMemoryStore(nil)
	protect := holdsend.Middleware(store, signedIn, nil)
	mux := http.NewServeMux()
	mux.Handle("POST /notes", protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := holdsend.SetResourceRef(r.Context(), "note-1"); err != nil {
			http.Error(w, "not protected", http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})))
	send(mux, "phone-1:note-1", `{}`)

	// Deleting the note turns its record into a tombstone, in the same transaction.
	err := store.InTx(context.Background(), func(ctx context.Context, tx *holdsend.MemoryTx) error {
		_, err := store.TombstoneResource(ctx, tx, holdsend.Resource{Owner: "ada", Operation: "POST /notes", Ref: "note-1"})
		return err
	})
	fmt.Println(err)
	send(mux, "phone-1:note-1", `{}`)
	// Output:
	// 201
	// <nil>
	// 410 {"type":"about:blank","title":"Gone","status":410,"detail":"What this request created was deleted since.","code":"gone"}
}

func ExampleJSON() {
	response, err := holdsend.JSON(http.StatusCreated, map[string]string{"text": "milk"})
	fmt.Println(response.Status, response.Header.Get("Content-Type"), string(response.Body), err)
	// Output: 201 application/json {"text":"milk"} <nil>
}

func ExampleErrorAnswer() {
	for _, err := range []error{
		fmt.Errorf("insert note: %w", holdsend.ErrClaimLost),
		errors.New("relation \"notes\" does not exist"), // shown to nobody
	} {
		answer := holdsend.ErrorAnswer(err)
		var problem struct{ Code string }
		if err := json.Unmarshal(answer.Body, &problem); err != nil {
			fmt.Println(err)
		}
		fmt.Println(answer.Status, problem.Code, answer.Header.Get("Retry-After"))
	}
	// Output:
	// 503 claim_lost 1
	// 500 internal
}

func ExampleAnswer_ServeHTTP() {
	answer := holdsend.Answer{
		Status: http.StatusCreated,
		Header: http.Header{"Location": {"/notes/1"}},
		Body:   []byte("noted"),
	}
	w := httptest.NewRecorder()
	answer.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/notes", nil))
	fmt.Println(w.Code, w.Header().Get("Location"), w.Header().Get("Content-Length"), w.Body)
	// Output: 201 /notes/1 5 noted
}
