package holdsend_test

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails the tests of this package if one of them left a goroutine behind.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}
