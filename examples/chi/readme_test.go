//go:build unix

package main

import (
	"testing"

	"github.com/holdsend/holdsend-go/examples/internal/shown"
)

func TestReadme(t *testing.T) {
	t.Parallel()
	shown.SmallExample(t)
}
