package service

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/holdsend/holdsend-go"
)

// A Step is where in a request a fault strikes.
type Step string

// The steps of a request, in order.
const (
	BeforeClaim Step = "before claim" // nothing was sent to the database
	Claimed     Step = "claimed"      // the claim is committed, the attempt's transaction is open
	InCreate    Step = "in create"    // create has written its row
	Completing  Step = "completing"   // create has answered 2xx
	Committing  Step = "committing"   // COMMIT is on its way
	Answering   Step = "answering"    // committed; the answer has not left
)

// Steps has them in order.
func Steps() []Step { return []Step{BeforeClaim, Claimed, InCreate, Completing, Committing, Answering} }

// Headers with which a client asks for a fault.
const (
	FaultHeader = "Chaos-Fault" // the fault's number and the step at which to wait for it, as "7 in create"
	MakeHeader  = "Chaos-Make"  // the fault that create itself makes, as "7 deadlock"
)

// A failpoint makes one request wait at one step, once.
type failpoint struct {
	control *control
	fault   int
	step    Step
	fired   atomic.Bool
}

type failpointKey struct{}

// withFailpoint returns r with the failpoint that its header asks for.
func withFailpoint(r *http.Request, c *control) *http.Request {
	number, step, _ := strings.Cut(r.Header.Get(FaultHeader), " ")
	fault, err := strconv.Atoi(number)
	if err != nil {
		return r
	}
	p := &failpoint{control: c, fault: fault, step: Step(step)}
	return r.WithContext(context.WithValue(r.Context(), failpointKey{}, p))
}

// waitsAt returns the failpoint of a request if it is for this step and has not fired.
func waitsAt(ctx context.Context, step Step) *failpoint {
	p, _ := ctx.Value(failpointKey{}).(*failpoint)
	if p == nil || p.step != step || p.fired.Swap(true) {
		return nil
	}
	return p
}

// reach waits for the harness if the request has a failpoint at this step.
func reach(ctx context.Context, step Step) {
	if p := waitsAt(ctx, step); p != nil {
		p.control.stop(Message{Fault: p.fault, Step: step})
	}
}

// failpointStore has the failpoints of a request that lie inside the library.
type failpointStore[Tx any] struct {
	holdsend.Store[Tx]
	backends backends[Tx]
}

func (s failpointStore[Tx]) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[Tx], *holdsend.Record, error) {
	reach(ctx, BeforeClaim)
	attempt, record, err := s.Store.Begin(ctx, c)
	if attempt == nil || err != nil {
		return attempt, record, err
	}
	a := &failpointAttempt[Tx]{Attempt: attempt, backends: s.backends}
	a.reach(ctx, Claimed)
	return a, nil, nil
}

// backends returns which process of the database serves a transaction: as the connection was told, and in truth.
type backends[Tx any] func(ctx context.Context, tx Tx) (told, server uint32)

// reachIn is reach for a step inside an attempt's transaction.
func (b backends[Tx]) reachIn(ctx context.Context, tx Tx, step Step) {
	if p := waitsAt(ctx, step); p != nil {
		told, server := b(ctx, tx)
		p.control.stop(Message{Fault: p.fault, Step: step, Backend: told, Server: server})
	}
}

type failpointAttempt[Tx any] struct {
	holdsend.Attempt[Tx]
	backends backends[Tx]
}

func (a *failpointAttempt[Tx]) reach(ctx context.Context, step Step) {
	a.backends.reachIn(ctx, a.Tx(), step)
}

func (a *failpointAttempt[Tx]) Complete(ctx context.Context, c holdsend.Completion) error {
	a.reach(ctx, Completing)
	a.reach(ctx, Committing) // from here the harness watches the connection, or the clock
	return a.Attempt.Complete(ctx, c)
}

// Warning implements holdsend.Warner.
func (a *failpointAttempt[Tx]) Warning() error {
	if w, ok := a.Attempt.(holdsend.Warner); ok {
		return w.Warning()
	}
	return nil
}

// failpointWriter has the failpoint before an answer leaves.
type failpointWriter struct {
	http.ResponseWriter
	ctx context.Context
}

func (w failpointWriter) WriteHeader(status int) {
	if 200 <= status && status <= 299 {
		reach(w.ctx, Answering)
	}
	w.ResponseWriter.WriteHeader(status)
}
