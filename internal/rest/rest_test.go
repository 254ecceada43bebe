package rest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for took, want := range map[time.Duration]time.Duration{
			0: 0, 20 * time.Millisecond: 40 * time.Millisecond, time.Second: time.Second, time.Hour: time.Second,
		} {
			start := time.Now()
			After(context.Background(), took)
			assert.Equal(t, want, time.Since(start))
		}
	})
}

func TestAfterEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		start := time.Now()
		After(ctx, time.Second)
		assert.Equal(t, 10*time.Millisecond, time.Since(start))
	})
}
