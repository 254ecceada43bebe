// Package holdsend makes a retried write happen once.
//
// A client sends the same Idempotency-Key on every attempt at one item. The server claims the key, creates the resource
// and completes the key's record in one transaction, and answers every later attempt with the original answer.
//
// [Handler] and [Middleware] do it for net/http. [HandleIdempotent] is the protocol itself, for use inside a handler of
// your own. [NewPostgresStore] keeps the records beside your data in Postgres, on pgx; package sqlstore does so for a
// *sql.DB, on Postgres and on SQLite; [NewMemoryStore] is for tests and for services that keep nothing. Run package
// contracttest on a store that you write yourself.
package holdsend

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/holdsend/holdsend-go/internal/bounds"
)

const (
	defaultWait = 2 * time.Second

	// completionTimeout bounds what must happen although the client is gone: completing after create answered, and
	// freeing the key after it failed.
	completionTimeout = 5 * time.Second

	// A waiting duplicate looks again when the attempt in its process ends; for one elsewhere after pollFirst, then after
	// ever longer pauses, up to pollMost. Each pause is jittered by a quarter, so that a storm of duplicates does not
	// ask in step.
	pollFirst = 50 * time.Millisecond
	pollMost  = 250 * time.Millisecond

	// askAtLeast is how long the store may take to answer although Wait has passed.
	askAtLeast = time.Second
)

// Request describes one attempt at one item.
type Request struct {
	Owner     string      // the authenticated person or tenant, from the session, never from the body: 1 to 255 bytes
	Operation string      // the name of the create, such as "post.create": 1 to 255 bytes
	Header    http.Header // Idempotency-Key and Written-At are read from here

	// Content is what makes two requests the same. A json.RawMessage and a []byte are JSON text; anything else goes
	// through json.Marshal. Nil is an error: a forgotten field would make all requests the same.
	Content any

	RequireKey   bool          // refuse a request without a key; default false: it runs create unprotected
	Wait         time.Duration // how long a duplicate waits for a running attempt; default 2 s; negative: not at all
	CompletedTTL time.Duration // how long a completed record is kept; default 0: until erased

	// Observe is called once at the end of each call, with its outcome; default nil. It must not block.
	Observe func(context.Context, Event)
}

// Incoming is what create is told about the request.
type Incoming struct {
	Key       string     // empty: the request had none
	WrittenAt *time.Time // when the user wrote the item, by the client's clock; nil: none was accepted
}

// CreateFunc writes the resource in tx and answers. A 2xx response commits; any other response, an error and a panic roll
// back and free the key. It must not commit or roll back tx, keep it, or use it from another goroutine.
type CreateFunc[Tx any] func(ctx context.Context, tx Tx, in Incoming) (Response, error)

// Event tells Request.Observe how a request ended.
type Event struct {
	Outcome   Outcome // empty if Err ended the request
	Operation string
	Duration  time.Duration // from the call to its end, create included
	Waited    time.Duration // of it, spent waiting for another attempt
	TookOver  bool          // the claim of an attempt that died was taken over
	// Err is what HandleIdempotent returned, or a fault that the answer does not show, such as a create that
	// committed its own transaction.
	Err error
}

// HandleIdempotent runs create at most once for (Owner, Operation, key in Header) and returns the answer to write: that
// of create, committed together with what create wrote; on a retry the original one; or a refusal, as a problem
// document with a code. No answer is returned before its transaction has committed.
//
// The error is create's own, unchanged; a store's; or one that tells how req is malformed. ErrClaimLost means that
// nothing was stored, ErrOutcomeUnknown that it may have been: both ask for a retry with the same key. After any other
// error nothing is stored and the key is free, unless it is ErrTxEnded: what create itself committed is there. ErrorAnswer
// makes the answer to an error. If ctx ends while the request waits for another attempt, the error is ctx's.
func HandleIdempotent[Tx any](ctx context.Context, store Store[Tx], req Request, create CreateFunc[Tx]) (Answer, error) {
	call := call[Tx]{store: store, req: req, create: create, maxStored: math.MaxInt64}
	return call.answer(ctx)
}

// A call is one run of HandleIdempotent.
type call[Tx any] struct {
	store     Store[Tx]
	req       Request
	create    CreateFunc[Tx]
	maxStored int64 // how large a body may be to be kept in a record, in bytes
	scope     Scope
	in        Incoming
	event     Event
	warning   error // a fault that the answer does not show
}

var (
	errCreateExited  = errors.New("holdsend: create panicked or ended its goroutine: rolled back")
	errStoreContract = errors.New("holdsend: the store's Begin must return exactly one of attempt, record and error: run package contracttest on it")
)

// answer handles the request, and tells Observe how it ended.
func (c *call[Tx]) answer(ctx context.Context) (Answer, error) {
	if c.req.Observe != nil {
		start := time.Now()
		c.event.Operation = c.req.Operation
		c.event.Err = errCreateExited // stands if create panics or ends its goroutine: nothing below then returns
		defer func() {
			c.event.Duration = time.Since(start)
			c.req.Observe(ctx, c.event)
		}()
	}
	answer, err := c.handle(ctx)
	c.event.Outcome, c.event.Err = answer.Outcome, c.warning
	if err != nil {
		c.event.Err = errors.Join(err, c.warning)
		return Answer{}, err
	}
	return answer, nil
}

// handle checks the request, in the order in which nothing is read or written for one that is malformed.
func (c *call[Tx]) handle(ctx context.Context) (Answer, error) {
	if err := c.checkCaller(); err != nil {
		return Answer{}, err
	}
	key, ok := parseKey(c.req.Header)
	if !ok {
		return refusal(http.StatusBadRequest, OutcomeKeyInvalid, "The Idempotency-Key header must be sent once, with 8 to 128 characters of A-Z a-z 0-9 _ - : . (quotes around them are allowed)."), nil
	}
	if key == "" {
		if c.req.RequireKey {
			return refusal(http.StatusBadRequest, OutcomeKeyRequired, "This request must carry an Idempotency-Key header."), nil
		}
		return c.runUnkeyed(ctx)
	}
	c.in = Incoming{Key: key}
	if raw, count := headerValue(c.req.Header, HeaderWrittenAt); count == 1 {
		if at, ok := AcceptWrittenAt(raw, time.Now()); ok {
			c.in.WrittenAt = &at
		}
	}
	fingerprint, err := Fingerprint(c.req.Operation, c.req.Content)
	if errors.Is(err, ErrNotPlainJSON) {
		return refusal(http.StatusBadRequest, OutcomeContentInvalid, "The content of the request is not plain JSON."), nil
	}
	if err != nil {
		return Answer{}, err
	}
	c.scope = Scope{Owner: c.req.Owner, Operation: c.req.Operation, Key: key}
	return c.claim(ctx, fingerprint)
}

// checkCaller finds mistakes of the service, which no client can mend.
func (c *call[Tx]) checkCaller() error {
	if c.store == nil {
		return errors.New("holdsend: HandleIdempotent needs a store")
	}
	if c.create == nil {
		return errors.New("holdsend: HandleIdempotent needs a create function")
	}
	if c.req.Content == nil {
		return errors.New("holdsend: Request.Content is nil, which would make all requests the same: use json.RawMessage(\"null\") for JSON null")
	}
	if c.req.CompletedTTL < 0 {
		return errors.New("holdsend: Request.CompletedTTL is negative: use 0 to keep records until they are erased")
	}
	if err := bounds.Required("Request.Owner", c.req.Owner); err != nil {
		return err
	}
	return bounds.Required("Request.Operation", c.req.Operation)
}

// claim claims the key and runs create, or answers from the record that stands at the scope, waiting for a running
// attempt if it must.
func (c *call[Tx]) claim(ctx context.Context, fingerprint string) (Answer, error) {
	wait := waiter{limit: c.req.Wait, scope: c.scope, waiters: waitersOf(c.store)}
	if wait.limit == 0 {
		wait.limit = defaultWait
	}
	defer func() {
		wait.stop()
		c.event.Waited = wait.waited()
	}()

	claim := Claim{Scope: c.scope, Fingerprint: fingerprint}
	for {
		attempt, record, err := c.begin(ctx, &wait, claim)
		if attempt != nil {
			wait.stop()
			c.event.TookOver = claim.Replace != nil && claim.Replace.State == StateClaimed
			return c.run(ctx, attempt)
		}
		// What the store has just refused to replace has a living attempt, or is being replaced: try again after a
		// pause, not at once.
		refused := record != nil && claim.Replace != nil &&
			record.ClaimID == claim.Replace.ClaimID && record.State == claim.Replace.State
		claim.Replace = nil

		for record != nil && err == nil {
			verdict, answer, judgeErr := c.judge(record, fingerprint)
			if verdict == final {
				return answer, judgeErr
			}
			wait.start()
			if verdict == replaceable && !refused {
				claim.Replace = record
				break
			}
			record, err = c.lookLater(ctx, &wait)
			refused = false
		}
		if errors.Is(err, errWaitOver) {
			return refusal(http.StatusConflict, OutcomeInProgress, "The first request with this Idempotency-Key is still running. Send it again with the same key."), nil
		}
		if err != nil {
			return Answer{}, err
		}
	}
}

// A verdict is what the record that stands at the scope means for this request.
type verdict int

const (
	final       verdict = iota // answer with it
	replaceable                // take its place, if the store allows it
	running                    // another attempt holds it: wait
)

// judge is the state table. Content is compared before state: a key that stands for something else is neither waited for
// nor taken over, however old its claim is.
func (c *call[Tx]) judge(record *Record, fingerprint string) (verdict, Answer, error) {
	if record.Expired { // as if there were none
		return replaceable, Answer{}, nil
	}
	same, err := record.Fingerprint == fingerprint, error(nil)
	if !same { // the record's own tag decides how it is compared
		same, err = MatchFingerprint(record.Fingerprint, c.req.Operation, c.req.Content)
	}
	if err != nil {
		return final, Answer{}, err
	}
	if !same {
		return final, refusal(http.StatusConflict, OutcomeKeyConflict, "This Idempotency-Key was used for a request with other content. Use a new key for new content."), nil
	}
	switch record.State {
	case StateCompleted:
		if !isStoredStatus(record.Response.Status) {
			return final, Answer{}, fmt.Errorf("holdsend: the record has a stored answer with status %d, which is never stored: it needs repair by hand", record.Response.Status)
		}
		return final, replay(record), nil
	case StateGone:
		return final, refusal(http.StatusGone, OutcomeGone, "What this request created was deleted since."), nil
	case StateClaimed:
		if record.Abandoned {
			return replaceable, Answer{}, nil
		}
		return running, Answer{}, nil
	}
	return final, Answer{}, fmt.Errorf("holdsend: the record has state %q, which this version does not know: update the library", record.State)
}

// begin asks the store for the claim, and holds it to its contract.
func (c *call[Tx]) begin(ctx context.Context, wait *waiter, claim Claim) (Attempt[Tx], *Record, error) {
	askCtx, cancel := wait.bound(ctx)
	defer cancel()
	attempt, record, err := c.store.Begin(askCtx, claim)
	switch {
	case attempt != nil && (record != nil || err != nil):
		return nil, nil, errors.Join(errStoreContract, err, abort(ctx, attempt))
	case attempt == nil && record == nil && err == nil:
		return nil, nil, errStoreContract
	case err != nil:
		return nil, nil, waitError(ctx, askCtx, err)
	}
	return attempt, record, nil
}

// lookLater pauses, then returns the record, or nil if the scope is empty by then: the first attempt failed, or was
// forgotten.
func (c *call[Tx]) lookLater(ctx context.Context, wait *waiter) (*Record, error) {
	if err := wait.pause(ctx); err != nil {
		return nil, err
	}
	askCtx, cancel := wait.bound(ctx)
	defer cancel()
	record, err := c.store.Find(askCtx, c.scope)
	switch {
	case errors.Is(err, ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, waitError(ctx, askCtx, err)
	case record == nil:
		return nil, errors.New("holdsend: the store's Find must return a record or an error: run package contracttest on it")
	}
	return record, nil
}

// run runs create under a claim and ends the attempt: complete on a 2xx, abort on anything else.
func (c *call[Tx]) run(ctx context.Context, attempt Attempt[Tx]) (Answer, error) {
	wake := waitersOf(c.store).wakeOne
	defer func() { wake(c.scope) }() // once the attempt has ended, however it did
	returned := false
	defer func() {
		if !returned { // a panic or runtime.Goexit in create, which goes on
			c.event.Err = errors.Join(c.event.Err, abort(ctx, attempt))
		}
	}()
	response, err := c.create(ctx, attempt.Tx(), c.in)
	if err == nil {
		err = checkResponse(response)
	}
	returned = true

	if err != nil {
		abortErr := abort(ctx, attempt)
		if errors.Is(abortErr, ErrTxEnded) {
			return Answer{}, errors.Join(err, abortErr)
		}
		c.warning = abortErr
		return Answer{}, err
	}
	answer := Answer{Outcome: OutcomeCreated, Status: response.Status, Header: response.Header, Body: response.Body}
	if !isStoredStatus(response.Status) {
		answer.Outcome = OutcomeNotStored
		// The transaction is gone even where the key could not be freed, which a retry finds abandoned. But a write
		// that create itself committed makes this answer a lie.
		if c.warning = abort(ctx, attempt); errors.Is(c.warning, ErrTxEnded) {
			return Answer{}, c.warning
		}
		return answer, nil
	}

	stored := response
	stored.Header = storedHeader(response.Header)
	if int64(len(response.Body)) > c.maxStored {
		stored.Body, stored.Header = nil, http.Header{}
		maps.Copy(stored.Header, storedHeader(response.Header))
		stored.Header[headerBodyOmitted] = []string{"true"} // whatever create says
	}
	completeCtx, cancel := detached(ctx)
	defer cancel()
	wake = waitersOf(c.store).wakeAll
	err = attempt.Complete(completeCtx, Completion{Response: stored, TTL: c.req.CompletedTTL})
	if err != nil {
		// Abort knows which of these must keep the key.
		return Answer{}, joinEnded(err, abort(ctx, attempt))
	}
	if w, ok := attempt.(Warner); ok {
		c.warning = w.Warning()
	}
	return answer, nil
}

// runUnkeyed runs create in a transaction with no record.
func (c *call[Tx]) runUnkeyed(ctx context.Context) (Answer, error) {
	create, in := c.create, c.in // not c itself, which would move to the heap for every request
	var response Response
	err := c.store.InTx(ctx, func(ctx context.Context, tx Tx) error {
		var err error
		if response, err = create(ctx, tx, in); err != nil {
			return err
		}
		if err := checkResponse(response); err != nil {
			return err
		}
		if !isStoredStatus(response.Status) {
			return errNotStored
		}
		return nil
	})
	if err != nil && !errors.Is(err, errNotStored) {
		return Answer{}, err
	}
	return Answer{Outcome: OutcomeUnkeyed, Status: response.Status, Header: response.Header, Body: response.Body}, nil
}

// errNotStored rolls an unkeyed create back and never leaves this file.
var errNotStored = errors.New("holdsend: create did not answer 2xx")

func isStoredStatus(status int) bool { return 200 <= status && status <= 299 }

func checkResponse(r Response) error {
	if r.Status < 100 || r.Status > 599 {
		return fmt.Errorf("holdsend: create returned status %d: it must be 100 to 599", r.Status)
	}
	return bounds.Optional("Response.ResourceRef", r.ResourceRef)
}

// abort ends an attempt although the client may be gone.
func abort[Tx any](ctx context.Context, attempt Attempt[Tx]) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	return attempt.Abort(ctx)
}

// joinEnded returns err, and with it what Abort found out if create had committed the transaction itself.
func joinEnded(err, abortErr error) error {
	if errors.Is(abortErr, ErrTxEnded) {
		return errors.Join(err, abortErr)
	}
	return err
}

// detached returns a context that keeps ctx's values but not its end, and has a bound of its own.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), completionTimeout)
}

// errWaitOver ends a wait that did not see the other attempt end. It never leaves this file.
var errWaitOver = errors.New("holdsend: the wait is over")

// A waiter paces a duplicate that waits for another attempt. It holds no connection and no lock between two looks.
type waiter struct {
	limit    time.Duration // negative: do not wait
	scope    Scope
	waiters  *Waiters
	room     *room         // nil: not waiting, or not any more
	started  time.Time     // zero: not waiting yet
	stopped  time.Time     // zero: still waiting
	interval time.Duration // the next pause
}

// start starts the wait, unless it has started.
func (w *waiter) start() {
	if w.started.IsZero() {
		w.started, w.interval, w.room = time.Now(), pollFirst, w.waiters.enter(w.scope)
	}
}

// pause sleeps until the next look is due.
func (w *waiter) pause(ctx context.Context) error {
	left := w.limit - time.Since(w.started)
	if left <= 0 {
		return errWaitOver
	}
	pause := w.interval*3/4 + rand.N(w.interval/2)
	timer := time.NewTimer(min(pause, left)) // the last look comes when Wait has passed
	defer timer.Stop()
	select {
	case <-timer.C:
		w.interval = min(w.interval*2, pollMost)
		return nil
	case <-w.room.next:
		w.interval = pollFirst
		return nil
	case <-w.room.all:
		// Whoever holds the scope next is another attempt. Wait for that one from before the look that may show it.
		w.waiters.leave(w.scope, w.room)
		w.interval, w.room = pollFirst, w.waiters.enter(w.scope)
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// bound returns the context to ask the store on. Once this call waits, asking is part of the wait: a pool whose
// connections are all taken must not hold it for longer. The last look, and a take-over, get a moment all the same.
func (w *waiter) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if w.started.IsZero() {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, max(w.limit-time.Since(w.started), askAtLeast))
}

// waitError tells the end of the caller's context from the end of the wait from a fault of the store.
func waitError(ctx, askCtx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case askCtx.Err() != nil:
		return errWaitOver
	}
	return err
}

// stop ends the wait, unless it has ended.
func (w *waiter) stop() {
	if w.room != nil {
		w.waiters.leave(w.scope, w.room)
		w.stopped, w.room = time.Now(), nil
	}
}

func (w *waiter) waited() time.Duration {
	if w.started.IsZero() {
		return 0
	}
	return w.stopped.Sub(w.started)
}
