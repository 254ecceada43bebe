// Package service is the victim of package chaos: an HTTP service whose creates are protected by holdsend, on a database
// and a store of its main program's choice. It runs in a process of its own, so that it can be killed.
package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/holdsend/holdsend-go"
)

// Variable names the environment variable that makes a program a service: its Config as JSON.
const Variable = "HOLDSEND_CHAOS_SERVICE"

// The routes of the service. Each is an operation of its own.
const (
	Notes    = "/notes"    // Handler
	Orders   = "/orders"   // Middleware
	Fleeting = "/fleeting" // Handler, with records that expire after FleetingTTL
	Forget   = "/forget"   // calls ForgetOwner for the owner
	Purge    = "/purge"    // calls PurgeExpired
)

// OwnerHeader says who sends a request.
const OwnerHeader = "Chaos-Owner"

// FleetingTTL is how long the records of Fleeting last.
const FleetingTTL = 50 * time.Millisecond

// wait is how long a duplicate waits for a running attempt.
const wait = 300 * time.Millisecond

// Config is what the harness tells a service.
type Config struct {
	Control   string // where the harness listens
	Database  string // a connection URL, or a file
	PoolSize  int
	Isolation string // of the attempt's transaction; empty: the database's default
	Pooled    bool   // a PgBouncer stands in between
	Contend   bool   // every create also counts, in counters that they all share
	Bug       string // a fault of the service itself, from Bugs: the harness must find it

	TakeOverAfter, StaleClaim, MaxIdle time.Duration
}

// FromEnvironment returns the Config of this process, and whether it is a service at all.
func FromEnvironment() (Config, bool, error) {
	var c Config
	text, is := os.LookupEnv(Variable)
	if !is {
		return c, false, nil
	}
	return c, true, json.Unmarshal([]byte(text), &c)
}

// A Row is what a create writes. Nothing in its table is unique but the id: a create that ran twice is there twice.
type Row struct {
	ID                     int64
	Owner, Operation, Item string
	Text                   string
}

// Tables are those that a main program creates beside the store's. {id} stands for its database's way to number rows.
const Tables = `
CREATE TABLE IF NOT EXISTS resources ({id}, owner text NOT NULL, operation text NOT NULL, item text NOT NULL, text text NOT NULL);
CREATE TABLE IF NOT EXISTS counters (id int PRIMARY KEY, value bigint NOT NULL);
`

// A Database is what differs between databases.
type Database[Tx any] struct {
	Store    holdsend.Store[Tx]
	Insert   func(ctx context.Context, tx Tx, row Row) (int64, error)
	Delete   func(ctx context.Context, tx Tx, id int64) error
	Count    func(ctx context.Context, tx Tx) error // adds to two of the counters; nil: never asked to
	Backends func(ctx context.Context, tx Tx) (told, server uint32)
	SQLState func(error) string // empty: not an error of the database's
	Fill     func()             // takes all connections for a moment
	FillDisk func()             // fills the disk for a moment; nil: never asked to
	// Make has the faults that a create makes itself. Each returns what came of it, from the database.
	Make map[string]func(ctx context.Context, tx Tx) error
}

// Run serves until the harness ends it.
func Run[Tx any](config Config, db Database[Tx]) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	control, err := connect(config.Control, map[string]func(){Fill: db.Fill, FillDisk: db.FillDisk})
	if err != nil {
		return err
	}
	s := &service[Tx]{config: config, db: db, control: control}
	control.send(Message{Kind: Hello, Address: listener.Addr().String(), Clock: time.Now()})
	return http.Serve(listener, s.handler())
}

type service[Tx any] struct {
	config  Config
	db      Database[Tx]
	control *control
}

func (s *service[Tx]) handler() http.Handler {
	store := holdsend.Store[Tx](failpointStore[Tx]{Store: withBug(s.config.Bug, s.db.Store), backends: s.db.Backends})
	owner := func(r *http.Request) (string, error) { return r.Header.Get(OwnerHeader), nil }
	if s.config.Bug == BugSharedOwner {
		owner = func(*http.Request) (string, error) { return "everybody", nil }
	}
	options := func(ttl time.Duration) *holdsend.MiddlewareOptions {
		return &holdsend.MiddlewareOptions{
			RequireKey: s.config.Bug != BugNoRecord, Wait: wait, CompletedTTL: ttl, OnError: s.onError,
			Observe: func(_ context.Context, e holdsend.Event) {
				if e.Err != nil && e.Outcome != "" {
					s.control.send(Message{Kind: Failed, Text: "warned: " + s.kindOf(e.Err)})
				}
			},
		}
	}
	mux := http.NewServeMux()
	mux.Handle("POST "+Notes, holdsend.Handler(store, owner, s.create, options(0)))
	mux.Handle("POST "+Orders, holdsend.Middleware(store, owner, options(time.Hour))(http.HandlerFunc(s.order)))
	mux.Handle("POST "+Fleeting, holdsend.Handler(store, owner, s.create, options(FleetingTTL)))
	mux.HandleFunc("DELETE "+Notes+"/{id}", s.delete)
	mux.HandleFunc("POST "+Forget, func(w http.ResponseWriter, r *http.Request) {
		_, err := s.db.Store.ForgetOwner(r.Context(), r.Header.Get(OwnerHeader))
		s.done(w, err)
	})
	mux.HandleFunc("POST "+Purge, func(w http.ResponseWriter, r *http.Request) {
		_, err := s.db.Store.PurgeExpired(r.Context())
		s.done(w, err)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.config.Bug == BugNoRecord {
			r.Header.Del(holdsend.HeaderIdempotencyKey)
		}
		r = withFailpoint(r, s.control)
		mux.ServeHTTP(failpointWriter{ResponseWriter: w, ctx: r.Context()}, r)
	})
}

// A Note is what a client sends, and, with its id and owner, what it is answered.
type Note struct {
	ID        int64  `json:"id,omitempty"`
	Owner     string `json:"owner,omitempty"`
	Operation string `json:"operation,omitempty"`
	Item      string `json:"item"`
	Text      string `json:"text"`
}

// create writes a note and answers with it.
func (s *service[Tx]) create(r *http.Request, tx Tx, in holdsend.Incoming) (holdsend.Response, error) {
	ctx := r.Context()
	var note Note
	if err := json.NewDecoder(r.Body).Decode(&note); err != nil {
		return holdsend.JSON(http.StatusBadRequest, map[string]string{"code": "invalid"})
	}
	note.Owner, note.Operation = r.Header.Get(OwnerHeader), r.URL.Path
	row := Row{Owner: note.Owner, Operation: note.Operation, Item: note.Item, Text: note.Text}
	var err error
	if note.ID, err = s.db.Insert(ctx, tx, row); err != nil {
		return holdsend.Response{}, err
	}
	if s.config.Contend {
		if err := s.db.Count(ctx, tx); err != nil {
			return holdsend.Response{}, err
		}
	}
	backends[Tx](s.db.Backends).reachIn(ctx, tx, InCreate)
	if response, err := s.make(ctx, r.Header.Get(MakeHeader), tx); response != nil || err != nil {
		if response == nil {
			response = &holdsend.Response{}
		}
		return *response, err
	}
	response, err := holdsend.JSON(http.StatusCreated, note)
	response.Header.Set("Location", fmt.Sprintf("%s/%d", note.Operation, note.ID))
	response.ResourceRef = strconv.FormatInt(note.ID, 10)
	return response, err
}

// The faults that create makes without its database.
const (
	MakeError       = "create returns an error"
	MakePanic       = "create panics"
	MakeUnavailable = "create answers 503"
)

// make makes the fault that a request asks for. With neither a response nor an error, create goes on.
func (s *service[Tx]) make(ctx context.Context, header string, tx Tx) (*holdsend.Response, error) {
	number, name, is := strings.Cut(header, " ")
	if !is {
		return nil, nil
	}
	fault, err := strconv.Atoi(number)
	if err != nil {
		return nil, err
	}
	made := Message{Kind: Made, Fault: fault}
	switch name {
	case MakeError:
		s.control.send(made)
		return nil, errors.New("create was asked to fail")
	case MakePanic:
		s.control.send(made)
		panic(http.ErrAbortHandler)
	case MakeUnavailable:
		s.control.send(made)
		response, err := holdsend.JSON(http.StatusServiceUnavailable, map[string]string{"code": "asked"})
		return &response, err
	}
	do := s.db.Make[name]
	if do == nil {
		return nil, fmt.Errorf("this service cannot make the fault %q", name)
	}
	err = do(ctx, tx)
	made.Text = s.kindOf(err)
	s.control.send(made)
	return nil, err
}

// order is create behind Middleware.
func (s *service[Tx]) order(w http.ResponseWriter, r *http.Request) {
	tx, err := holdsend.TxFromContext[Tx](r.Context())
	if err != nil {
		panic(err)
	}
	in, _ := holdsend.IncomingFromContext(r.Context())
	response, err := s.create(r, tx, in)
	if err != nil { // a handler has no error to return: a status that is not 2xx rolls back too
		s.failed(err)
		response = holdsend.Response{Status: http.StatusInternalServerError}
	}
	for name, values := range response.Header {
		w.Header()[name] = values
	}
	if err := holdsend.SetResourceRef(r.Context(), response.ResourceRef); err != nil {
		panic(err)
	}
	w.WriteHeader(response.Status)
	_, _ = w.Write(response.Body)
}

// delete deletes a note and turns its record into a tombstone.
func (s *service[Tx]) delete(w http.ResponseWriter, r *http.Request) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err == nil {
		err = s.db.Store.InTx(r.Context(), func(ctx context.Context, tx Tx) error {
			if err := s.db.Delete(ctx, tx, id); err != nil {
				return err
			}
			_, err := s.db.Store.TombstoneResource(ctx, tx, holdsend.Resource{
				Owner: r.Header.Get(OwnerHeader), Operation: "POST " + Notes, Ref: strconv.FormatInt(id, 10),
			})
			return err
		})
	}
	s.done(w, err)
}

func (s *service[Tx]) done(w http.ResponseWriter, err error) {
	if err != nil {
		s.failed(err)
		holdsend.ErrorAnswer(err).ServeHTTP(w, nil)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *service[Tx]) onError(w http.ResponseWriter, r *http.Request, err error) {
	s.failed(err)
	holdsend.ErrorAnswer(err).ServeHTTP(w, r)
}

func (s *service[Tx]) failed(err error) {
	s.control.send(Message{Kind: Failed, Text: s.kindOf(err)})
}

// kindOf names an error by what can be counted.
func (s *service[Tx]) kindOf(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, holdsend.ErrTxEnded):
		return "transaction ended"
	case errors.Is(err, holdsend.ErrClaimLost):
		return "claim lost"
	case errors.Is(err, holdsend.ErrOutcomeUnknown):
		return "outcome unknown"
	}
	if state := s.db.SQLState(err); state != "" {
		return state
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return "context ended"
	}
	return "other"
}
