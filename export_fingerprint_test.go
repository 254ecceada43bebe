package holdsend

import (
	"bytes"
	"io"
)

// Canonical returns the canonical JSON that a fingerprint is the hash of.
func Canonical(text []byte) ([]byte, error) { return canonical(text, indexFirst) }

// CanonicalPlainOrder is Canonical in the other reading of hs1.
func CanonicalPlainOrder(text []byte) ([]byte, error) { return canonical(text, plainOrder) }

func canonical(text []byte, order keyOrder) ([]byte, error) {
	var c canonicalizer
	var written bytes.Buffer
	if err := c.canonicalize(unframed(text), order, &written); err != nil {
		return nil, err
	}
	return written.Bytes(), nil
}

// Canonicalize does what Canonical does, with buffers of its own, and hands the outcome to nobody, so that its cost can be
// measured.
func Canonicalize(text []byte) error {
	var c canonicalizer
	return c.canonicalize(unframed(text), indexFirst, io.Discard)
}
