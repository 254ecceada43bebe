package rest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestAfterRestsTwiceAsLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		time.Sleep(20 * time.Millisecond)
		After(context.Background(), began)
		assert.Equal(t, 60*time.Millisecond, time.Since(began))
	})
}

func TestAfterEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		time.Sleep(time.Hour)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		After(ctx, began)
		assert.Equal(t, time.Hour+time.Second, time.Since(began))
	})
}
