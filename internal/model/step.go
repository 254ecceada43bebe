package model

import (
	"fmt"

	"github.com/holdsend/holdsend-go"
)

// An action is what a step does.
type action string

const (
	send      action = "sends"                        // a duplicate does not wait
	sendWait  action = "sends and waits"              // a duplicate of a running attempt
	create    action = "creates"                      // its create answers 201
	expiring  action = "creates what expires"         // the same, with a short time to live
	refuse    action = "answers 422"                  // not stored
	fail      action = "fails"                        // create returns an error
	panics    action = "panics"                       // create panics
	crash     action = "crashes"                      // its holder dies; what is left of it may end later, as a zombie
	leave     action = "leaves"                       // its context ends
	tombstone action = "the resource is deleted"      //
	forget    action = "the owner is forgotten"       //
	purge     action = "the store is purged"          //
	age       action = "the claim grows old"          //
	expire    action = "the record's time has passed" //
)

// A step is one thing that happens. What it does not need is zero.
type step struct {
	action  action
	client  int
	scope   int
	content string
}

func (s step) String() string {
	switch s.action {
	case send, sendWait:
		return fmt.Sprintf("client %d %s %s to scope %d", s.client+1, s.action, s.content, s.scope+1)
	case create, expiring, refuse, fail, panics, crash, leave:
		return fmt.Sprintf("client %d %s", s.client+1, s.action)
	case purge, forget:
		return string(s.action)
	}
	return fmt.Sprintf("scope %d: %s", s.scope+1, s.action)
}

// An alphabet is which steps a sequence is made of.
type alphabet struct {
	scopes  int // 0 and 1 are of one owner, 2 is of another one with the key of 0
	clients int // how many attempts and waiting duplicates there are at a time
	all     bool
}

var (
	// exhaustive leaves out what makes more sequences of the same kind: which of two clients that do nothing comes next,
	// which of two contents comes first, and steps that change nothing.
	exhaustive = alphabet{scopes: 1, clients: 3}
	random     = alphabet{scopes: 3, clients: 4, all: true}
)

// steps returns what may happen next.
func (r *run[Tx]) steps() []step {
	var next []step
	living := r.living() > 0
	// With one writer, whoever writes waits for a living attempt: only duplicates are answered beside it.
	busy := living && r.harness.SingleWriter
	idle := -1
	for i := range r.clients {
		switch c := &r.clients[i]; {
		case c.state == resting:
			if idle < 0 {
				idle = i
			}
		case c.state == waiting:
			next = append(next, step{action: leave, client: i})
		case c.state == running:
			// What a zombie does may write too (it frees its key).
			if holds := r.records[c.scope].Holds(c.attempt); holds || !busy {
				next = append(next, step{action: create, client: i}, step{action: refuse, client: i})
				if r.alphabet.all {
					next = append(next, step{action: expiring, client: i}, step{action: fail, client: i}, step{action: panics, client: i})
				}
				if holds {
					next = append(next, step{action: crash, client: i})
				}
				if r.alphabet.all && !c.left {
					next = append(next, step{action: leave, client: i})
				}
			}
		}
	}
	for scope := range r.records {
		record := &r.records[scope]
		if idle >= 0 {
			for _, content := range []string{"A", "B"} {
				if !r.alphabet.all && record.State == "" && content != "A" {
					continue
				}
				// A claim, or a take-over, of another scope would wait for the writer.
				if !busy || !allows(record.Answers(content), Runs) {
					next = append(next, step{action: send, client: idle, scope: scope, content: content})
				}
			}
			if r.alphabet.all && record.State == holdsend.StateClaimed && record.Alive && r.waiterOf(scope) < 0 {
				next = append(next, step{action: sendWait, client: idle, scope: scope, content: record.Content})
			}
		}
		switch {
		case record.State == holdsend.StateCompleted && !busy:
			next = append(next, step{action: tombstone, scope: scope})
		case record.State == holdsend.StateClaimed && record.Old != Yes:
			next = append(next, step{action: age, scope: scope})
		}
		if record.Expired == Perhaps {
			next = append(next, step{action: expire, scope: scope})
		}
	}
	if !living && (r.records[0].State != "" || r.alphabet.all) { // it would wait for a living attempt
		next = append(next, step{action: forget})
	}
	if !busy && (r.alphabet.all || r.records[0].Vague() || r.records[0].Expired == Yes) {
		next = append(next, step{action: purge})
	}
	return next
}
