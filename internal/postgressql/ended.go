package postgressql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// How an attempt's transaction ended, in the words of pg_xact_status.
const (
	Committed  = "committed"
	Aborted    = "aborted"
	InProgress = "in progress" // a backend whose connection was lost notices that in its own time
)

const (
	// outcomeTimeout bounds finding out what became of an attempt that did not commit for sure. It is a bound of its own:
	// the request's may be used up by then, and a database that restarts is worth waiting for.
	outcomeTimeout = 10 * time.Second

	// AskTimeout bounds one question on one connection: one that has fallen silent is not the only one.
	AskTimeout = 3 * time.Second

	shortestPause = 2 * time.Millisecond // between two questions; each is twice the one before
	longestPause  = 100 * time.Millisecond
)

// untilEnded asks until it is answered something else than that it is not over, or ctx ends.
func untilEnded(ctx context.Context, ask func() (over bool)) error {
	for pause := shortestPause; !ask(); pause = min(2*pause, longestPause) {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Judge runs Free by ask, and again while the database has not ended the attempt's transaction.
func Judge(ctx context.Context, ask func() (how string, err error)) error {
	var err error
	ended := untilEnded(ctx, func() bool {
		var how string
		how, err = ask()
		return err != nil || how != InProgress
	})
	if ended != nil {
		return fmt.Errorf("holdsend: the database has not ended the attempt's transaction: %w", ended)
	}
	return err
}

// A Fate is what became of an attempt that did not commit for sure.
type Fate int

const (
	Unknown   Fate = iota
	NotStored      // the attempt is free to abort
	Stored
	Settled // create had committed the transaction itself, and the record was completed afterwards
	Kept    // create had committed the transaction itself, and the record could not be completed: Free keeps the key
)

// FindOut runs Outcome by ask until the truth about an attempt is known, or its time is up. A database that restarts
// answers soon, so errors are asked again; the last one is returned where they stand in the way. If create itself committed
// the transaction, FindOut runs Settle by settle.
func FindOut(ctx context.Context, ask func(ctx context.Context) (state, how string, err error), settle func(ctx context.Context) error) (Fate, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), outcomeTimeout)
	defer cancel()
	fate, known := Unknown, false
	var lastErr error
	failed := func(err error) {
		if ctx.Err() == nil || lastErr == nil { // that the time is up says nothing new
			lastErr = err
		}
	}
	_ = untilEnded(ctx, func() bool {
		state, how, err := ask(ctx)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			lastErr, known = errors.New("holdsend: the claim is gone"), true
		case err != nil:
			failed(err)
		case state != "claimed" && state != "": // completed, or a tombstone since, under this claim id
			fate, known = Stored, true
		case how == Aborted:
			fate, known = NotStored, true
		case state == "claimed" && how == Committed:
			// By create; or by the attempt itself while the question was answered: then Settle finds nothing to complete.
			if err := settle(ctx); err == nil {
				fate, known = Settled, true
			} else if !errors.Is(err, sql.ErrNoRows) {
				fate = Kept
				failed(err)
			}
		}
		return known
	})
	return fate, lastErr
}

// FreeError says what came of Free. Ended is the error of a create that ended its own transaction.
func FreeError(how string, err, ended error) error {
	switch {
	case err != nil:
		return fmt.Errorf("holdsend: free the key of a failed attempt (a retry takes it over when the attempt's connection has ended): %w", err)
	case how == Committed:
		return fmt.Errorf("holdsend: create committed its transaction and then gave no 2xx to store, so its key stays claimed until ForgetOwner: %w", ended)
	case how != Aborted:
		return errors.New("holdsend: the database cannot tell how the attempt's transaction ended, so its key was not freed")
	}
	return nil
}

// Explain adds the fix to errors that a wrong set-up gives, by their SQLSTATE. The text shows no value: the errors of
// drivers print the server's message alone. Options is the name of the type that has Schema and Table.
func Explain(sqlState, options string, err error) error {
	switch sqlState {
	case "42P01", "3F000":
		return fmt.Errorf("holdsend: the records table was not found: run PostgresSchema, or set %s.Schema and Table: %w", options, err)
	case "42703":
		return fmt.Errorf("holdsend: the records table lacks a column: run PostgresSchema of this version: %w", err)
	case "42501":
		return fmt.Errorf("holdsend: the database role needs SELECT, INSERT, UPDATE and DELETE on the records table: %w", err)
	case "25006":
		return fmt.Errorf("holdsend: the database is read-only: connect to a primary: %w", err)
	}
	return err
}
