package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/holdsend/holdsend-go"
	"github.com/holdsend/holdsend-go/internal/chaos/service"
)

const (
	// A client leaves when it gets no answer for so long. With a fault to wait for it is more patient.
	patience      = 2 * time.Second
	shotPatience  = 10 * time.Second
	retryAtLeast  = 5 * time.Millisecond
	retryAtMost   = 40 * time.Millisecond
	connectPause  = 10 * time.Millisecond
	lateDuplicate = 50 * time.Millisecond
)

// An item is what a client wants to be done once.
type item struct {
	mu sync.Mutex
	history

	acknowledged chan struct{} // closed at the first 2xx
	id           int64         // that it named

	twins    bool  // two clients send it at once
	resends  int   // how often it is sent again after its 2xx
	conflict *item // sent after it with the same key, as something else
	shot     *shot // the fault that strikes it; nil: none
}

func newItem(name, owner, operation, key string, rule rule) *item {
	return &item{
		history:      history{name: name, owner: owner, operation: operation, key: key, text: "text of " + name, rule: rule},
		acknowledged: make(chan struct{}),
	}
}

// saw keeps an answer.
func (i *item) saw(a answer) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.answers = append(i.answers, a)
	if !a.is2xx() || i.id != 0 {
		return
	}
	var note service.Note
	if err := json.Unmarshal([]byte(a.body), &note); err == nil && note.ID != 0 { // else the checker finds out
		i.id = note.ID
	} else {
		i.id = -1
	}
	close(i.acknowledged)
}

// carry does all that clients want with one item.
func (r *round) carry(i *item) {
	switch s := i.shot; {
	case s != nil && s.fault == deleteResource:
		r.send(i, nil)
		r.send(i, s) // the fault is for a duplicate
	case i.twins:
		var both sync.WaitGroup
		both.Go(func() { r.send(i, s) })
		both.Go(func() { r.send(i, nil) })
		both.Wait()
	default:
		r.send(i, s)
	}
	for range i.resends {
		r.pause(lateDuplicate)
		r.send(i, nil)
	}
	if i.rule == deleted && r.delete(i) {
		r.send(i, nil)
	}
	if i.conflict != nil {
		r.send(i.conflict, nil)
	}
}

// send sends an item until it is answered for good, or the round is over. A fault that is for it is tried a few times; if
// it does not strike, another item gets it.
func (r *round) send(i *item, s *shot) {
	for try := 0; r.ctx.Err() == nil; try++ {
		var a answer
		switch {
		case s == nil:
			a = r.attempt(i, nil)
		case s.isAtRandom():
			r.strikeAtRandom(s)
			s = nil
			a = r.attempt(i, nil)
		default:
			var over bool
			a, over = r.attemptUnderFire(i, s)
			if !over && (try == 2 || a.isFinal()) {
				r.missed(s)
				over = true
			}
			if over {
				s = nil
			}
		}
		if a.isFinal() {
			return
		}
		r.pause(retryAtLeast + time.Duration(r.dice.below(int(retryAtMost-retryAtLeast))))
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.unanswered++
}

func (r *round) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-r.ctx.Done():
	}
}

// attempt sends an item once, to any service. Where a fault makes the client move on, the answer that may still come is
// kept when it comes.
func (r *round) attempt(i *item, s *shot) answer {
	limit := patience
	var leave, moveOn <-chan struct{}
	if s != nil {
		limit, leave, moveOn = shotPatience, s.leave, s.moveOn
	}
	ctx, cancel := context.WithTimeout(r.ctx, limit)
	answered := make(chan answer, 1)
	r.attempts.Add(1)
	r.background.Go(func() {
		defer cancel()
		a := r.post(ctx, i, s)
		i.saw(a)
		answered <- a
	})
	for {
		select {
		case a := <-answered:
			return a
		case <-moveOn:
			return answer{}
		case <-leave:
			cancel()
			leave = nil
		}
	}
}

// post sends one request and reads its answer.
func (r *round) post(ctx context.Context, i *item, s *shot) (a answer) {
	a.started = time.Since(r.began)
	defer func() { a.ended = time.Since(r.began) }()
	p := r.slots.pick(r.dice, nil)
	if p == nil {
		r.pause(connectPause)
		a.problem = "no service runs"
		return a
	}
	a.service = p.slot
	body, err := json.Marshal(service.Note{Item: i.name, Text: i.text})
	if err != nil {
		panic(err) // strings always marshal
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.address+i.operation, bytes.NewReader(body))
	if err != nil {
		panic(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set(service.OwnerHeader, i.owner)
	request.Header.Set(holdsend.HeaderIdempotencyKey, i.key)
	request.Header.Set(holdsend.HeaderWrittenAt, time.Now().Format(time.RFC3339)) // another on each attempt: it is no content
	if s != nil {
		s.ask(request.Header)
	}
	response, err := r.http.Do(request)
	if err != nil {
		a.problem = err.Error()
		return a
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil { // cut short: it counts as none
		a.problem = err.Error()
		return a
	}
	a.status, a.body = response.StatusCode, string(text)
	a.replayed = response.Header.Get(holdsend.HeaderReplayed) == "true"
	a.location = response.Header.Get("Location")
	if !a.is2xx() {
		var problem struct{ Code string }
		_ = json.Unmarshal(text, &problem) // not ours to judge: it is no final answer then
		a.code, a.body = problem.Code, ""
	}
	return a
}

// call sends a request that is not a create, to a service other than not if there is one.
func (r *round) call(ctx context.Context, not *process, method, path, owner string) error {
	p := r.slots.pick(r.dice, not)
	if p == nil {
		return errDead
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://"+p.address+path, nil)
	if err != nil {
		panic(err)
	}
	request.Header.Set(service.OwnerHeader, owner)
	response, err := r.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		return fmt.Errorf("%s %s was answered %d", method, path, response.StatusCode)
	}
	return nil
}

// delete has the resource of an item deleted, until that is acknowledged or the round is over.
func (r *round) delete(i *item) bool {
	i.mu.Lock()
	if i.deletedAt > 0 {
		i.mu.Unlock()
		return true
	}
	i.deleting = true
	path := fmt.Sprintf("%s/%d", i.operation, i.id)
	i.mu.Unlock()
	for r.ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(r.ctx, patience)
		err := r.call(ctx, nil, http.MethodDelete, path, i.owner)
		cancel()
		if err == nil {
			i.mu.Lock()
			i.deletedAt = time.Since(r.began)
			i.mu.Unlock()
			return true
		}
		r.pause(retryAtMost)
	}
	return false
}
