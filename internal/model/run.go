package model

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/contracttest"
)

const (
	operation = "note.create"

	defaultPatience = 30 * time.Second

	// shortTTL is that of records which a sequence wants to expire.
	shortTTL = 40 * time.Millisecond

	// slowAnswer: the protocol gives a store a second for a take-over. A machine that is slower than that answers
	// in_progress, and the request is sent again.
	slowAnswer = 900 * time.Millisecond
)

// The states of a client.
type clientState int

const (
	resting clientState = iota
	waiting             // for another client's attempt
	running             // its create
)

// A client sends one request at a time.
type client[Tx any] struct {
	state   clientState
	scope   int
	content string
	attempt int  // while running
	left    bool // its context has ended

	tx     holdsend.Attempt[Tx] // of the create that runs
	end    chan action          // tells create how to end
	events chan event
	cancel context.CancelFunc
}

// An event is what a request did.
type event struct {
	runs   bool // its create has started, and has written
	answer holdsend.Answer
	err    error
	panic  any
}

// A run is one sequence on a store, and beside it on the model.
type run[Tx any] struct {
	harness  contracttest.Harness[Tx]
	store    holdsend.Store[Tx] // the harness's, looked at by remember
	alphabet alphabet
	patience time.Duration
	name     string // no two sequences on a store share it

	clients  []client[Tx]
	records  []Record
	attempts int          // how many there were
	written  map[int]bool // which of them committed
	trace    []string
}

func newRun[Tx any](h contracttest.Harness[Tx], a alphabet, patience time.Duration, name string) *run[Tx] {
	return &run[Tx]{
		harness: h, store: remember[Tx]{h.Store}, alphabet: a, patience: patience, name: name,
		clients: make([]client[Tx], a.clients), records: make([]Record, a.scopes), written: map[int]bool{},
	}
}

// scopeOf returns the scope of that number: 0 and 1 are of one owner, 2 has the key of 0.
func (r *run[Tx]) scopeOf(scope int) holdsend.Scope {
	return holdsend.Scope{
		Owner:     []string{"ada-", "ada-", "bob-"}[scope] + r.name,
		Operation: operation,
		Key:       []string{"key-00000001", "key-00000002", "key-00000001"}[scope],
	}
}

func (r *run[Tx]) living() int {
	n := 0
	for _, record := range r.records {
		if record.State == holdsend.StateClaimed && record.Alive {
			n++
		}
	}
	return n
}

func (r *run[Tx]) waiterOf(scope int) int {
	return slices.IndexFunc(r.clients, func(c client[Tx]) bool { return c.state == waiting && c.scope == scope })
}

// do runs a step on the store and on the model, and returns how they differ.
func (r *run[Tx]) do(ctx context.Context, s step) error {
	r.trace = append(r.trace, s.String())
	ctx, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	if err := r.step(ctx, s); err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	return r.compare(ctx)
}

func (r *run[Tx]) step(ctx context.Context, s step) error {
	switch s.action {
	case send:
		return r.send(ctx, s)
	case sendWait:
		r.start(s, time.Minute)
		r.clients[s.client].state = waiting
		return nil
	case leave:
		c := &r.clients[s.client]
		c.cancel()
		c.left = true
		if c.state == running {
			return nil // create decides
		}
		e, err := r.event(ctx, s.client)
		if err == nil && !errors.Is(e.err, context.Canceled) {
			err = fmt.Errorf("a waiter whose context ended got %s, want its context's error", e)
		}
		return err
	case crash:
		c := &r.clients[s.client]
		r.records[c.scope].Crash(c.attempt)
		return r.harness.Crash(ctx, c.tx)
	case tombstone:
		record := &r.records[s.scope]
		resource := holdsend.Resource{Owner: r.scopeOf(s.scope).Owner, Operation: operation, Ref: record.Response.ResourceRef}
		var turned int64
		err := r.store.InTx(ctx, func(ctx context.Context, tx Tx) (err error) {
			turned, err = r.store.TombstoneResource(ctx, tx, resource)
			return err
		})
		if want := record.Tombstone(); err == nil && turned != want {
			err = fmt.Errorf("%d tombstones, want %d", turned, want)
		}
		return err
	case forget:
		var want int64
		for scope := range r.records {
			if scope < 2 {
				want += r.records[scope].Forget()
			}
		}
		forgotten, err := r.store.ForgetOwner(ctx, r.scopeOf(0).Owner)
		if err == nil && forgotten != want {
			err = fmt.Errorf("%d records forgotten, want %d", forgotten, want)
		}
		return err
	case purge:
		if _, err := r.store.PurgeExpired(ctx); err != nil {
			return err
		}
		for scope := range r.records {
			record := &r.records[scope]
			record.Purge()
			if record.Vague() {
				if err := r.resolve(ctx, scope); err != nil {
					return err
				}
			}
		}
		return nil
	case age:
		r.records[s.scope].Old = Yes
		return r.until(ctx, s.scope, "abandoned", func(record *holdsend.Record) bool { return record.Abandoned })
	case expire:
		r.records[s.scope].Expired = Yes
		return r.until(ctx, s.scope, "expired", func(record *holdsend.Record) bool { return record.Expired })
	}
	return r.end(ctx, s)
}

// send sends a request that does not wait for others.
func (r *run[Tx]) send(ctx context.Context, s step) error {
	for {
		r.start(s, -1)
		started := time.Now()
		e, err := r.event(ctx, s.client)
		if err != nil {
			return err
		}
		slow := e.answer.Outcome == holdsend.OutcomeInProgress && time.Since(started) > slowAnswer
		if err := r.answered(s.client, e); err == nil || !slow {
			return err
		}
	}
}

// answered compares what a client got with the model, which then follows it.
func (r *run[Tx]) answered(number int, e event) error {
	c := &r.clients[number]
	record := &r.records[c.scope]
	if e.err != nil || e.panic != nil {
		return fmt.Errorf("got %s, want one of %q", e, record.Answers(c.content))
	}
	outcome := e.answer.Outcome
	if e.runs {
		outcome = Runs
	}
	if !allows(record.Answers(c.content), outcome) {
		return fmt.Errorf("got %s, want one of %q", e, record.Answers(c.content))
	}
	want := map[holdsend.Outcome]int{
		holdsend.OutcomeKeyConflict: 409, holdsend.OutcomeInProgress: 409, holdsend.OutcomeGone: 410,
		holdsend.OutcomeReplayed: record.Response.Status,
	}
	switch outcome {
	case Runs:
		c.state = running
		record.Claim(c.attempt, c.content)
		return nil
	case holdsend.OutcomeReplayed:
		if e.answer.Header.Get("X-Attempt") != record.Response.Header.Get("X-Attempt") ||
			string(e.answer.Body) != string(record.Response.Body) || e.answer.Header.Get(holdsend.HeaderReplayed) != "true" {
			return fmt.Errorf("the replay is not the original answer: %s", e)
		}
	default:
		var problem struct{ Code string }
		if json.Unmarshal(e.answer.Body, &problem) != nil || problem.Code != string(outcome) {
			return fmt.Errorf("the refusal has no code %s: %s", outcome, e.answer.Body)
		}
	}
	if e.answer.Status != want[outcome] {
		return fmt.Errorf("%s has status %d, want %d", outcome, e.answer.Status, want[outcome])
	}
	return nil
}

// end ends the create of a client, and compares its answer.
func (r *run[Tx]) end(ctx context.Context, s step) error {
	c := &r.clients[s.client]
	record := &r.records[c.scope]
	holds := record.Holds(c.attempt)
	own := record.State == holdsend.StateClaimed && record.Attempt == c.attempt
	c.end <- s.action
	e, err := r.event(ctx, s.client)
	if err != nil {
		return err
	}
	stored := s.action == create || s.action == expiring
	if record.End(c.attempt, response(r.name, c.attempt, 201), stored, s.action == expiring) {
		r.written[c.attempt] = true
	}
	ok := false
	switch {
	case stored && holds:
		ok = e.err == nil && e.answer.Outcome == holdsend.OutcomeCreated && e.answer.Status == 201 &&
			string(e.answer.Body) == string(record.Response.Body)
	case stored: // its claim is another's by now, or it died: nothing is stored
		ok = e.err != nil
	case s.action == refuse:
		ok = e.err == nil && e.answer.Outcome == holdsend.OutcomeNotStored && e.answer.Status == 422
	case s.action == fail:
		ok = errors.Is(e.err, errCreate)
	case s.action == panics:
		ok = e.panic == any(errCreate)
	}
	if !ok {
		return fmt.Errorf("got %s", e)
	}
	if own && !holds { // a zombie may free the key that it still has
		return r.resolve(ctx, c.scope)
	}
	return nil
}

// settle follows the waiting clients whose wait is over.
func (r *run[Tx]) settle(ctx context.Context) error {
	for i := range r.clients {
		c := &r.clients[i]
		if c.state != waiting {
			continue
		}
		if record := r.records[c.scope]; record.State == holdsend.StateClaimed && record.Alive {
			continue
		}
		if r.records[c.scope].State == holdsend.StateClaimed {
			r.records[c.scope].Old = Yes // it waits as long as it takes
		}
		e, err := r.event(ctx, i)
		if err == nil {
			err = r.answered(i, e)
		}
		if err != nil {
			return fmt.Errorf("the waiting client %d: %w", i+1, err)
		}
	}
	return nil
}

// compare looks at all records and writes.
func (r *run[Tx]) compare(ctx context.Context) error {
	for scope := range r.records {
		want := &r.records[scope]
		got, err := r.store.Find(ctx, r.scopeOf(scope))
		if errors.Is(err, holdsend.ErrNotFound) {
			if want.State != "" {
				return fmt.Errorf("scope %d: no record, want one that is %s", scope+1, want.State)
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("find: %w", err)
		}
		fingerprint, err := holdsend.Fingerprint(operation, json.RawMessage(`"`+want.Content+`"`))
		switch {
		case err != nil:
			return err
		case got.State != want.State:
			return fmt.Errorf("scope %d: a record that is %s, want %q", scope+1, got.State, want.State)
		case got.Fingerprint != fingerprint:
			return fmt.Errorf("scope %d: a record of other content, want that of %s", scope+1, want.Content)
		case got.Response.Status != want.Response.Status || string(got.Response.Body) != string(want.Response.Body) ||
			got.Response.ResourceRef != want.Response.ResourceRef:
			return fmt.Errorf("scope %d: another answer is stored: %d %s", scope+1, got.Response.Status, got.Response.Body)
		case got.Expired && want.Expired == No:
			return fmt.Errorf("scope %d: expired, though it has no time to live", scope+1)
		case !got.Expired && want.Expired == Yes:
			return fmt.Errorf("scope %d: not expired any more", scope+1)
		case got.Abandoned && got.State != holdsend.StateClaimed:
			return fmt.Errorf("scope %d: a record that is %s and abandoned", scope+1, got.State)
		}
		if got.Expired {
			want.Expired = Yes
		}
		if got.Abandoned {
			want.Old = Yes
		}
	}
	for attempt := 1; attempt <= r.attempts; attempt++ {
		want := 0
		if r.written[attempt] {
			want = 1
		}
		got, err := r.harness.Count(ctx, writeName(r.name, attempt))
		if err != nil {
			return fmt.Errorf("count: %w", err)
		}
		if got != want {
			return fmt.Errorf("attempt %d has %d committed writes, want %d", attempt, got, want)
		}
	}
	return nil
}

// resolve asks the store what became of a record that the model knows too little of: it stands there unchanged, or not at
// all.
func (r *run[Tx]) resolve(ctx context.Context, scope int) error {
	_, err := r.store.Find(ctx, r.scopeOf(scope))
	if errors.Is(err, holdsend.ErrNotFound) {
		r.records[scope] = Record{}
		return nil
	}
	return err
}

// until waits for the record to become so.
func (r *run[Tx]) until(ctx context.Context, scope int, what string, is func(*holdsend.Record) bool) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for {
		record, err := r.store.Find(ctx, r.scopeOf(scope))
		if err != nil {
			return err
		}
		if is(record) {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("scope %d: the record is never %s", scope+1, what)
		}
	}
}

var errCreate = errors.New("create failed")

func writeName(name string, attempt int) string { return fmt.Sprintf("%s-%d", name, attempt) }

func response(name string, attempt, status int) holdsend.Response {
	return holdsend.Response{
		Status: status, Header: http.Header{"X-Attempt": {writeName(name, attempt)}},
		Body: []byte("the answer of " + writeName(name, attempt)), ResourceRef: fmt.Sprint(attempt),
	}
}

// start sends a request.
func (r *run[Tx]) start(s step, wait time.Duration) {
	r.attempts++
	attempt, h, scope := r.attempts, r.harness, r.scopeOf(s.scope)
	ctx, cancel := context.WithCancel(context.Background())
	r.clients[s.client] = client[Tx]{
		scope: s.scope, content: s.content, attempt: attempt, cancel: cancel,
		// Both hold what is ever sent, so that nobody is left behind.
		end: make(chan action, 1), events: make(chan event, 2),
	}
	c := &r.clients[s.client]
	end, events := c.end, c.events
	request := holdsend.Request{
		Owner: scope.Owner, Operation: scope.Operation, Content: json.RawMessage(`"` + s.content + `"`), Wait: wait,
		Header: http.Header{holdsend.HeaderIdempotencyKey: {scope.Key}},
	}
	go func() {
		defer cancel()
		var e event
		defer func() {
			e.panic = recover()
			events <- e
		}()
		// A time to live is the request's, while it is create that decides here: remember puts it in.
		ttl := new(time.Duration)
		ctx := context.WithValue(ctx, rememberedKey{}, &remembered[Tx]{attempt: &c.tx, ttl: ttl})
		e.answer, e.err = holdsend.HandleIdempotent(ctx, r.store, request,
			func(ctx context.Context, tx Tx, _ holdsend.Incoming) (holdsend.Response, error) {
				if err := h.Write(ctx, tx, writeName(r.name, attempt)); err != nil {
					return holdsend.Response{}, err
				}
				events <- event{runs: true}
				switch how := <-end; how {
				case refuse:
					return response(r.name, attempt, 422), nil
				case fail:
					return holdsend.Response{}, errCreate
				case panics:
					panic(errCreate)
				case expiring:
					*ttl = shortTTL
				}
				return response(r.name, attempt, 201), nil
			})
	}()
}

// event waits for what a request does next. A request that is answered leaves its client resting.
func (r *run[Tx]) event(ctx context.Context, number int) (event, error) {
	c := &r.clients[number]
	select {
	case e := <-c.events:
		c.state = resting
		return e, nil
	case <-ctx.Done():
		return event{}, fmt.Errorf("client %d is not answered within %v", number+1, r.patience)
	}
}

func (e event) String() string {
	switch {
	case e.runs:
		return string(Runs)
	case e.panic != nil:
		return fmt.Sprintf("a panic: %v", e.panic)
	case e.err != nil:
		return fmt.Sprintf("the error %q", e.err)
	}
	return fmt.Sprintf("%s %d %s", e.answer.Outcome, e.answer.Status, e.answer.Body)
}

// close ends all requests that are under way, and returns once they have ended.
func (r *run[Tx]) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), r.patience)
	defer cancel()
	var stuck error
	for i := range r.clients {
		c := &r.clients[i]
		if c.cancel == nil {
			continue
		}
		c.cancel()
		c.end <- fail
	}
	for i := range r.clients {
		for c := &r.clients[i]; c.state != resting; {
			e, err := r.event(ctx, i)
			if err != nil {
				stuck = err
				break
			}
			if e.runs { // a waiter got the key as its holder ended
				c.state = running
			}
		}
	}
	return stuck
}

// clear forgets what the sequence left. No attempt lives any more.
func (r *run[Tx]) clear() error {
	ctx, cancel := context.WithTimeout(context.Background(), r.patience)
	defer cancel()
	for scope := range r.records {
		if _, err := r.store.ForgetOwner(ctx, r.scopeOf(scope).Owner); err != nil {
			return fmt.Errorf("forget what the sequence left: %w", err)
		}
	}
	return nil
}

// remember tells the explorer which attempt a request got, by way of its context.
type remember[Tx any] struct{ holdsend.Store[Tx] }

type rememberedKey struct{}

type remembered[Tx any] struct {
	attempt *holdsend.Attempt[Tx]
	ttl     *time.Duration
}

func (s remember[Tx]) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[Tx], *holdsend.Record, error) {
	attempt, record, err := s.Store.Begin(ctx, c)
	if seen, ok := ctx.Value(rememberedKey{}).(*remembered[Tx]); ok && attempt != nil {
		*seen.attempt = attempt
		attempt = limited[Tx]{attempt, seen.ttl}
	}
	return attempt, record, err
}

// limited is an attempt whose record gets a time to live.
type limited[Tx any] struct {
	holdsend.Attempt[Tx]
	ttl *time.Duration
}

func (a limited[Tx]) Complete(ctx context.Context, c holdsend.Completion) error {
	c.TTL = *a.ttl
	return a.Attempt.Complete(ctx, c)
}
