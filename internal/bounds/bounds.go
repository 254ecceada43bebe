// Package bounds holds the one rule for the names that make up a scope or name a resource.
package bounds

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// MaxBytes is how long an owner, an operation and a resource ref may be.
const MaxBytes = 255

// Required returns an error unless value is 1 to MaxBytes bytes of UTF-8 without a NUL (Postgres text cannot hold one).
// The error names what, never the value.
func Required(what, value string) error {
	if value == "" {
		return fmt.Errorf("holdsend: %s is empty: it must name one, or unrelated requests would share a scope", what)
	}
	return Optional(what, value)
}

// Optional is Required for a value that may be empty.
func Optional(what, value string) error {
	switch {
	case len(value) > MaxBytes:
		return fmt.Errorf("holdsend: %s is %d bytes long: at most %d are allowed", what, len(value), MaxBytes)
	case !utf8.ValidString(value):
		return fmt.Errorf("holdsend: %s is not valid UTF-8", what)
	case strings.IndexByte(value, 0) >= 0:
		return fmt.Errorf("holdsend: %s contains a NUL byte", what)
	}
	return nil
}
