// Package model is the protocol's table of states as a program without a store, and an explorer that holds stores to it:
// it runs sequences of steps on a real store and on the model and compares them after each step.
package model

import (
	"slices"

	"github.com/holdsend/holdsend-go"
)

// Maybe is what the model knows of something that depends on the clock.
type Maybe int

// The model knows that it is not so, cannot know, or knows that it is so.
const (
	No Maybe = iota
	Perhaps
	Yes
)

// A Record is what stands at one scope.
type Record struct {
	State    holdsend.State // "": nothing stands there
	Content  string         // of the request that claimed it
	Attempt  int            // that claimed it
	Alive    bool           // claimed: its attempt can still commit
	Old      Maybe          // claimed: old enough to be taken over
	Expired  Maybe          // completed or gone: past its expiry
	Response holdsend.Response
}

// Runs is what a request may get beside an outcome: its create starts.
const Runs holdsend.Outcome = "create runs"

// Answers returns all that a request with that content may get. This is the table of states.
func (r Record) Answers(content string) []holdsend.Outcome {
	if r.State == "" || r.Expired == Yes {
		return []holdsend.Outcome{Runs}
	}
	var answers []holdsend.Outcome
	if r.Expired == Perhaps {
		answers = append(answers, Runs)
	}
	switch {
	case content != r.Content: // before the state
		answers = append(answers, holdsend.OutcomeKeyConflict)
	case r.State == holdsend.StateCompleted:
		answers = append(answers, holdsend.OutcomeReplayed)
	case r.State == holdsend.StateGone:
		answers = append(answers, holdsend.OutcomeGone)
	case r.Alive:
		answers = append(answers, holdsend.OutcomeInProgress)
	default:
		if r.Old != Yes {
			answers = append(answers, holdsend.OutcomeInProgress)
		}
		if r.Old != No {
			answers = append(answers, Runs)
		}
	}
	return answers
}

// Claim is what a request does to the record when its create starts.
func (r *Record) Claim(attempt int, content string) {
	*r = Record{State: holdsend.StateClaimed, Content: content, Attempt: attempt, Alive: true, Old: Perhaps}
}

// Holds reports whether the attempt can still commit.
func (r *Record) Holds(attempt int) bool {
	return r.State == holdsend.StateClaimed && r.Attempt == attempt && r.Alive
}

// End is what the end of an attempt's create does to the record: it returns whether the write is committed. An attempt
// that lost its claim changes nothing; one that died and still has its claim may free it.
func (r *Record) End(attempt int, response holdsend.Response, stored, expires bool) (committed bool) {
	switch {
	case !r.Holds(attempt):
		return false
	case !stored:
		*r = Record{}
		return false
	}
	r.State, r.Response = holdsend.StateCompleted, response
	if expires {
		r.Expired = Perhaps
	}
	return true
}

// Crash is what the death of an attempt's holder does.
func (r *Record) Crash(attempt int) {
	if r.Holds(attempt) {
		r.Alive = false
	}
}

// Tombstone is what the deletion of the resource does, and returns how many records it turns.
func (r *Record) Tombstone() int64 {
	if r.State != holdsend.StateCompleted {
		return 0
	}
	r.State, r.Response = holdsend.StateGone, holdsend.Response{}
	return 1
}

// Forget is what ForgetOwner does where no attempt lives, and returns how many records it deletes.
func (r *Record) Forget() int64 {
	if r.State == "" {
		return 0
	}
	*r = Record{}
	return 1
}

// Purge is what PurgeExpired does. It may also delete what the model knows too little of: see Vague.
func (r *Record) Purge() {
	if r.Expired == Yes {
		*r = Record{}
	}
}

// Vague reports whether a purge may delete the record or leave it: the clock decides.
func (r *Record) Vague() bool {
	return r.Expired == Perhaps || r.State == holdsend.StateClaimed && !r.Alive
}

// allows reports whether one of the answers is that outcome.
func allows(answers []holdsend.Outcome, outcome holdsend.Outcome) bool {
	return slices.Contains(answers, outcome)
}
