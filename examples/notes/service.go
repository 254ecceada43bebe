package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/holdsend/holdsend-go"
	"github.com/rs/cors"
)

// The operations are part of every stored record. They are names of their own, not taken from the routes, so that a
// route can be renamed while a phone still retries what it sent to the old one.
const (
	createNote             = "note.create"
	createEmergencyMessage = "emergency-message.create"
)

const (
	// noteRecordTTL is how long a note's record answers retries. A client must give up on a note 30 days after it was
	// written, the age at which Written-At is no longer believed either. The record counts from when the note was
	// stored, which is later, so it outlives the last retry.
	noteRecordTTL = 30 * 24 * time.Hour

	// emergencyRecordTTL is 0: kept until erased. Nobody can say when a phone that was lost, empty or out of reach
	// stops retrying a call for help, and a retry that outlived its record would be taken for a second emergency. A
	// record is little more than a copy of its message. The messages themselves have no DELETE, so a retry is never
	// told that its message is gone.
	emergencyRecordTTL = 0

	maxTextLength = 5000     // characters
	maxBodyBytes  = 64 << 10 // holds the longest text even if each character is written as two \u escapes
	listLimit     = 1000     // a list shows the last ones; a real service would page
)

// A collection is a kind of entry. The value is also the name of its table.
type collection string

const (
	notes             collection = "notes"
	emergencyMessages collection = "emergency_messages"
)

// An entry is a note or an emergency message.
type entry struct {
	ID   int64  `json:"id,string"`
	Text string `json:"text"`
	// WrittenAt is when the author wrote it, by the author's clock; nil: not known, which may well mean long ago.
	// Nothing is ordered by it: clocks of phones are wrong, and an entry that was written yesterday and arrives now
	// must not slip in unseen among those of yesterday.
	WrittenAt  *time.Time `json:"written_at"`
	ReceivedAt time.Time  `json:"received_at"` // when it arrived, by the server's clock
}

// entries is where a backend keeps what users write: in the database of its holdsend.Store, so that an entry and its
// record commit together. What runs in a tx becomes visible when that commits, or never.
type entries[Tx any] interface {
	// add stores e for owner and returns it as list will, with its ID (never used before in c) and ReceivedAt.
	add(ctx context.Context, tx Tx, c collection, owner string, e entry) (entry, error)
	// remove deletes an entry of owner and reports whether there was one.
	remove(ctx context.Context, tx Tx, c collection, owner string, id int64) (bool, error)
	// list returns owner's last listLimit entries in the order in which they arrived, and no nil slice.
	list(ctx context.Context, c collection, owner string) ([]entry, error)
}

type service[Tx any] struct {
	store   holdsend.Store[Tx]
	entries entries[Tx]
	logger  *slog.Logger
}

// newHandler returns the API. Tx is inferred: it is the same code on every backend.
func newHandler[Tx any](store holdsend.Store[Tx], entries entries[Tx], logger *slog.Logger) http.Handler {
	s := &service[Tx]{store: store, entries: entries, logger: logger}
	mux := http.NewServeMux()
	mux.Handle("POST /api/notes", s.create(notes, createNote, holdsend.MiddlewareOptions{
		CompletedTTL: noteRecordTTL,
	}))
	mux.HandleFunc("GET /api/notes", s.list(notes))
	mux.HandleFunc("DELETE /api/notes/{id}", s.deleteNote)
	mux.Handle("POST /api/emergency-messages", s.create(emergencyMessages, createEmergencyMessage, holdsend.MiddlewareOptions{
		CompletedTTL: emergencyRecordTTL,
		RequireKey:   true, // a retry without a key would be a second emergency
	}))
	mux.HandleFunc("GET /api/emergency-messages", s.list(emergencyMessages))
	return mux
}

// create serves the POST of a collection.
func (s *service[Tx]) create(c collection, operation string, o holdsend.MiddlewareOptions) http.Handler {
	o.Operation = func(*http.Request) string { return operation }
	// The JSON body alone is what makes two requests the same. Method and path stay out of it, so that a record answers
	// a retry that reaches another route, or another HoldSend server on the same table.
	o.Content = func(_ *http.Request, body []byte) (any, error) { return json.RawMessage(body), nil }
	o.MaxBodyBytes = maxBodyBytes
	o.Observe = s.observe

	return holdsend.Handler(s.store, demoUser, func(r *http.Request, tx Tx, in holdsend.Incoming) (holdsend.Response, error) {
		// This runs once per key. A retry never gets here, so validation may become stricter without refusing a retry
		// of what was accepted long ago.
		owner, err := demoUser(r)
		if err != nil {
			return holdsend.Response{}, err
		}
		body, err := io.ReadAll(r.Body) // the library has read it already, within MaxBodyBytes
		if err != nil {
			return holdsend.Response{}, err
		}
		text, complaint := parseText(body)
		if complaint != "" {
			return problem(http.StatusBadRequest, "invalid", complaint), nil // not 2xx: nothing is stored, the key is free
		}
		created, err := s.entries.add(r.Context(), tx, c, owner, entry{Text: text, WrittenAt: in.WrittenAt})
		if err != nil {
			return holdsend.Response{}, err
		}
		response, err := holdsend.JSON(http.StatusCreated, created)
		response.ResourceRef = created.ref() // by which deleteNote finds the record
		return response, err
	}, &o)
}

func (e entry) ref() string { return strconv.FormatInt(e.ID, 10) }

// parseText returns the text in body, or a complaint for the client. Fields that it does not know are let pass: a phone
// with a newer app must get its message through.
func parseText(body []byte) (text, complaint string) {
	var content struct {
		Text *string `json:"text"`
	}
	if err := json.Unmarshal(body, &content); err != nil {
		return "", `The body must be a JSON object such as {"text":"Buy milk"}.`
	}
	switch {
	case content.Text == nil || strings.TrimSpace(*content.Text) == "":
		return "", "The text is missing or empty."
	case utf8.RuneCountInString(*content.Text) > maxTextLength:
		return "", "The text is longer than " + strconv.Itoa(maxTextLength) + " characters."
	case strings.ContainsRune(*content.Text, 0): // Postgres cannot hold it
		return "", "The text contains a NUL character."
	}
	return *content.Text, ""
}

// list serves the GET of a collection.
func (s *service[Tx]) list(c collection) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		owner, err := demoUser(r)
		if err != nil {
			unauthenticated(w, r)
			return
		}
		entries, err := s.entries.list(r.Context(), c, owner)
		if err != nil {
			s.fail(w, r, err)
			return
		}
		response, err := holdsend.JSON(http.StatusOK, map[collection][]entry{c: entries})
		if err != nil {
			s.fail(w, r, err)
			return
		}
		response.Header.Set("Cache-Control", "no-store")
		serve(w, r, response)
	}
}

// deleteNote deletes a note and turns its record into a tombstone, both or neither: a retry of the create that comes
// later must be told that the note is gone, not bring it back. Without the tombstone it would be told "created" for a
// note that is not there.
//
// A DELETE needs no key: the second one finds nothing, and 404 is as good an answer to it as 204.
func (s *service[Tx]) deleteNote(w http.ResponseWriter, r *http.Request) {
	owner, err := demoUser(r)
	if err != nil {
		unauthenticated(w, r)
		return
	}
	found := false
	// An id that is no number names no note.
	if id, err := strconv.ParseInt(r.PathValue("id"), 10, 64); err == nil {
		err = s.store.InTx(r.Context(), func(ctx context.Context, tx Tx) (err error) {
			if found, err = s.entries.remove(ctx, tx, notes, owner, id); err != nil || !found {
				return err
			}
			_, err = s.store.TombstoneResource(ctx, tx, holdsend.Resource{Owner: owner, Operation: createNote, Ref: entry{ID: id}.ref()})
			return err
		})
		if err != nil {
			s.fail(w, r, err)
			return
		}
	}
	if !found {
		serve(w, r, problem(http.StatusNotFound, "not_found", "There is no such note."))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// headerDemoUser says who sends the request, and ANYONE CAN WRITE ANY NAME INTO IT. It stands in for a real sign-in (a
// session cookie, a verified token) so that the example can be tried with curl. Never deploy it.
const headerDemoUser = "X-Demo-User"

// demoUser is the holdsend.OwnerFunc: replace it by your sign-in. Whatever you put here must be proven by the request,
// because who controls the owner can read another owner's answers.
func demoUser(r *http.Request) (string, error) {
	users := r.Header.Values(headerDemoUser)
	if len(users) != 1 || len(users[0]) < 1 || len(users[0]) > 64 {
		return "", errUnauthenticated
	}
	for _, c := range []byte(users[0]) {
		if c <= ' ' || c > '~' {
			return "", errUnauthenticated
		}
	}
	return users[0], nil
}

var errUnauthenticated = errors.New("the " + headerDemoUser + " header must be sent once, with 1 to 64 printable ASCII characters")

func unauthenticated(w http.ResponseWriter, r *http.Request) {
	serve(w, r, problem(http.StatusUnauthorized, "unauthenticated", "Sign in with the "+headerDemoUser+" header."))
}

// fail answers a request that is no create. 503 asks for a retry, 500 shows no detail.
func (s *service[Tx]) fail(w http.ResponseWriter, r *http.Request, err error) {
	s.logger.ErrorContext(r.Context(), "request failed", "pattern", r.Pattern, "error", err)
	holdsend.ErrorAnswer(err).ServeHTTP(w, r)
}

// observe logs how each create ended. Keys, owners and contents stay out of the log.
func (s *service[Tx]) observe(ctx context.Context, e holdsend.Event) {
	level := slog.LevelInfo
	attributes := []slog.Attr{
		slog.String("operation", e.Operation),
		slog.String("outcome", string(e.Outcome)),
		slog.Duration("duration", e.Duration),
	}
	if e.Waited > 0 {
		attributes = append(attributes, slog.Duration("waited", e.Waited))
	}
	if e.TookOver {
		attributes = append(attributes, slog.Bool("took_over", true))
	}
	if e.Err != nil {
		attributes = append(attributes, slog.Any("error", e.Err))
		if !errors.Is(e.Err, context.Canceled) { // a client that left is no fault of ours
			level = slog.LevelError
		}
	}
	s.logger.LogAttrs(ctx, level, "create", attributes...)
}

// problem returns an RFC 9457 problem, as the library's own refusals are.
func problem(status int, code, detail string) holdsend.Response {
	response, err := holdsend.JSON(status, struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail"`
		Code   string `json:"code"`
	}{"about:blank", http.StatusText(status), status, detail, code})
	if err != nil {
		panic(err) // strings and a number always marshal
	}
	response.Header.Set("Content-Type", "application/problem+json")
	return response
}

func serve(w http.ResponseWriter, r *http.Request, response holdsend.Response) {
	holdsend.Answer{Status: response.Status, Header: response.Header, Body: response.Body}.ServeHTTP(w, r)
}

// withCORS lets web pages of the given origins call the API. It goes around everything else: without its headers on a
// refusal too, the page could not read the refusal, and would see a network error that it retries for ever.
func withCORS(origins []string, next http.Handler) http.Handler {
	return cors.New(cors.Options{
		AllowedOrigins: origins,
		AllowedMethods: []string{http.MethodGet, http.MethodPost, http.MethodDelete},
		AllowedHeaders: []string{"Content-Type", headerDemoUser, holdsend.HeaderIdempotencyKey, holdsend.HeaderWrittenAt},
		ExposedHeaders: []string{holdsend.HeaderReplayed, "Idempotent-Body-Omitted", "Retry-After"},
		MaxAge:         600, // seconds
	}).Handler(next)
}

// withTimeout ends the context of each request after limit. A create that it cuts off is rolled back and its key freed;
// one that has answered is committed all the same.
func withTimeout(limit time.Duration, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), limit)
		defer cancel()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}
