package service

import (
	"context"
	"time"

	"github.com/holdsend/holdsend-go"
)

// The bugs that a service can be told to have. The harness must find each.
const (
	BugNoRecord    = "no record"      // keys are ignored: a retry creates again
	BugEarly       = "early answer"   // the answer leaves before the commit
	BugSharedOwner = "shared owner"   // everybody has one owner: one gets another's answer
	BugNoReplay    = "never replays"  // a completed record is taken for a claim that is alive
	BugChanged     = "changed replay" // a replay has another body
)

// Bugs has them all.
func Bugs() []string {
	return []string{BugNoRecord, BugEarly, BugSharedOwner, BugNoReplay, BugChanged}
}

// withBug returns store with a bug, if it is one of a store.
func withBug[Tx any](bug string, store holdsend.Store[Tx]) holdsend.Store[Tx] {
	switch bug {
	case BugEarly, BugNoReplay, BugChanged:
		return buggyStore[Tx]{Store: store, bug: bug}
	}
	return store
}

type buggyStore[Tx any] struct {
	holdsend.Store[Tx]
	bug string
}

func (s buggyStore[Tx]) Begin(ctx context.Context, c holdsend.Claim) (holdsend.Attempt[Tx], *holdsend.Record, error) {
	attempt, record, err := s.Store.Begin(ctx, c)
	if attempt != nil && s.bug == BugEarly {
		attempt = earlyAttempt[Tx]{attempt}
	}
	return attempt, s.change(record), err
}

func (s buggyStore[Tx]) Find(ctx context.Context, scope holdsend.Scope) (*holdsend.Record, error) {
	record, err := s.Store.Find(ctx, scope)
	return s.change(record), err
}

func (s buggyStore[Tx]) change(record *holdsend.Record) *holdsend.Record {
	if record == nil || record.State != holdsend.StateCompleted {
		return record
	}
	switch s.bug {
	case BugNoReplay:
		record.State = holdsend.StateClaimed
	case BugChanged:
		record.Response.Body = append(record.Response.Body, ' ')
	}
	return record
}

type earlyAttempt[Tx any] struct{ holdsend.Attempt[Tx] }

func (a earlyAttempt[Tx]) Complete(ctx context.Context, c holdsend.Completion) error {
	go func() {
		time.Sleep(50 * time.Millisecond)
		_ = a.Attempt.Complete(context.WithoutCancel(ctx), c)
	}()
	return nil
}
