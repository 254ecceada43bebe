package holdsend

// Canonical returns the canonical JSON that a fingerprint is the hash of, with buffers of its own, so that their cost
// can be measured.
func Canonical(text []byte) ([]byte, error) {
	var c canonicalizer
	return c.canonicalize(unframed(text), indexFirst)
}

// CanonicalPlainOrder is Canonical in the other reading of hs1.
func CanonicalPlainOrder(text []byte) ([]byte, error) {
	var c canonicalizer
	return c.canonicalize(unframed(text), plainOrder)
}
