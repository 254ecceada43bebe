package contracttest

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/holdsend/holdsend-go"
)

// protocolCases runs the whole protocol over the store. They find what the other cases, one rule each, leave between
// them.
func protocolCases[Tx any]() []contractCase[Tx] {
	return []contractCase[Tx]{
		{
			name: "ProtocolCreatesOnce",
			rule: "of 64 simultaneous requests with one key, one creates, and all get its answer",
			run: func(b *bench[Tx]) {
				var created, ran atomic.Int64
				var wait sync.WaitGroup
				start := make(chan struct{})
				for range 64 {
					wait.Go(func() {
						<-start
						a, err := holdsend.HandleIdempotent(b.context(), b.Store, b.request(`{"text":"hello"}`),
							func(ctx context.Context, tx Tx, in holdsend.Incoming) (holdsend.Response, error) {
								ran.Add(1)
								return answer(), b.Write(ctx, tx, "once")
							})
						if a.Outcome == holdsend.OutcomeCreated {
							created.Add(1)
						}
						if err != nil || a.Status != answer().Status || string(a.Body) != string(answer().Body) {
							b.breaks("one of them got outcome %q, status %d, error %v", a.Outcome, a.Status, err)
						}
					})
				}
				close(start)
				wait.Wait()
				if created.Load() != 1 || ran.Load() != 1 {
					b.broken("create ran %d times, and %d requests created", ran.Load(), created.Load())
				}
				b.wrote("once", 1)
			},
		},
		{
			name: "ProtocolReplays",
			rule: "a retry gets the original status, headers and body, byte for byte, and says that it is a replay",
			run: func(b *bench[Tx]) {
				if a := b.handle(`{"text":"hello"}`, answer()); a.Outcome != holdsend.OutcomeCreated {
					b.broken("the first request's outcome is %q", a.Outcome)
				}
				for range 2 {
					a := b.handle(`{"text":"hello"}`, response("another"))
					if a.Outcome != holdsend.OutcomeReplayed {
						b.broken("the retry's outcome is %q", a.Outcome)
					}
					if a.Header.Get(holdsend.HeaderReplayed) != "true" {
						b.broken("the replay does not say that it is one")
					}
					a.Header.Del(holdsend.HeaderReplayed)
					got := holdsend.Response{Status: a.Status, Header: a.Header, Body: a.Body, ResourceRef: answer().ResourceRef}
					if difference := sameAnswer(got, answer()); difference != "" {
						b.broken("the replay has %s", difference)
					}
				}
				b.wrote("handled", 1)
			},
		},
		{
			name: "ProtocolRefusesOtherContent",
			rule: "a key that stands for other content is a conflict, before and after its resource is gone",
			run: func(b *bench[Tx]) {
				b.handle(`{"text":"hello"}`, answer())
				if a := b.handle(`{"text":"other"}`, answer()); a.Outcome != holdsend.OutcomeKeyConflict {
					b.broken("other content got outcome %q", a.Outcome)
				}
				b.tombstone(resource(answer().ResourceRef))
				if a := b.handle(`{"text":"other"}`, answer()); a.Outcome != holdsend.OutcomeKeyConflict {
					b.broken("other content got outcome %q once the resource was gone", a.Outcome)
				}
				if a := b.handle(`{"text":"hello"}`, answer()); a.Outcome != holdsend.OutcomeGone {
					b.broken("the same content got outcome %q once the resource was gone", a.Outcome)
				}
				b.wrote("handled", 1)
			},
		},
		{
			name: "ProtocolFailureFreesTheKey",
			rule: "a create that fails, panics or does not answer 2xx leaves nothing, and the next request creates",
			run: func(b *bench[Tx]) {
				fail := func(end func() (holdsend.Response, error)) (err error) {
					defer func() {
						if r := recover(); r != nil {
							err = errOwn
						}
					}()
					_, err = holdsend.HandleIdempotent(b.context(), b.Store, b.request(`{"text":"hello"}`),
						func(ctx context.Context, tx Tx, _ holdsend.Incoming) (holdsend.Response, error) {
							if err := b.Write(ctx, tx, "failed"); err != nil {
								b.breaks("Harness.Write: %v", err)
							}
							return end()
						})
					return err
				}
				if err := fail(func() (holdsend.Response, error) { return response("never"), errOwn }); !errors.Is(err, errOwn) {
					b.broken("create's error came back as %v", err)
				}
				b.empty(scope())
				if err := fail(func() (holdsend.Response, error) { panic("create's own") }); !errors.Is(err, errOwn) {
					b.broken("create's panic did not go on")
				}
				b.empty(scope())
				if err := fail(func() (holdsend.Response, error) { return holdsend.Response{Status: 422}, nil }); err != nil {
					b.broken("an answer of 422: %v", err)
				}
				b.empty(scope())
				b.wrote("failed", 0)
				if a := b.handle(`{"text":"hello"}`, answer()); a.Outcome != holdsend.OutcomeCreated {
					b.broken("the next request's outcome is %q", a.Outcome)
				}
			},
		},
		{
			name:  "ProtocolTakesOver",
			rule:  "a retry after the first holder died creates, with no help from outside",
			needs: needsCrash,
			run: func(b *bench[Tx]) {
				req := b.request(`{"text":"hello"}`)
				same, err := holdsend.Fingerprint(req.Operation, req.Content)
				if err != nil {
					b.t.Fatal(err)
				}
				dead := b.begin(holdsend.Claim{Scope: scope(), Fingerprint: same})
				b.write(dead, "handled")
				b.crash(dead)
				if a := b.handle(`{"text":"other"}`, answer()); a.Outcome != holdsend.OutcomeKeyConflict {
					b.broken("other content got outcome %q", a.Outcome)
				}
				if a := b.handle(`{"text":"hello"}`, answer()); a.Outcome != holdsend.OutcomeCreated {
					b.broken("the retry's outcome is %q", a.Outcome)
				}
				b.wrote("handled", 1)
			},
		},
	}
}

// request returns a keyed request at scope() with that JSON as its content.
func (b *bench[Tx]) request(content string) holdsend.Request {
	return holdsend.Request{
		Owner:     scope().Owner,
		Operation: scope().Operation,
		Header:    http.Header{holdsend.HeaderIdempotencyKey: {scope().Key}},
		Content:   json.RawMessage(content),
		Wait:      b.patience,
	}
}

// handle runs the protocol with a create that writes "handled" and answers r.
func (b *bench[Tx]) handle(content string, r holdsend.Response) holdsend.Answer {
	b.t.Helper()
	a, err := holdsend.HandleIdempotent(b.context(), b.Store, b.request(content),
		func(ctx context.Context, tx Tx, _ holdsend.Incoming) (holdsend.Response, error) {
			return r, b.Write(ctx, tx, "handled")
		})
	if err != nil {
		b.broken("HandleIdempotent: %v", err)
	}
	return a
}
