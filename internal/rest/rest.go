// Package rest keeps a long deletion from taking the database for itself.
package rest

import (
	"context"
	"time"
)

const (
	// share is how many times as long as a batch the rest after it is: others have two thirds of the time.
	share = 2

	// most is the longest rest: a batch that takes longer than this has waited for others, and need not do so again.
	most = time.Second
)

// After rests after a batch that took so long. It returns early if ctx ends.
func After(ctx context.Context, took time.Duration) {
	timer := time.NewTimer(min(share*took, most))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
