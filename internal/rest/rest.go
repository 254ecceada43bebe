// Package rest keeps a long deletion from taking the database for itself.
package rest

import (
	"context"
	"time"
)

// share is how many times as long as a batch the rest after it is: others have two thirds of the time.
const share = 2

// After rests after a batch that began at began. It returns early if ctx ends.
func After(ctx context.Context, began time.Time) {
	timer := time.NewTimer(share * time.Since(began))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
