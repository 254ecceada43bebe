package holdsend

import (
	"hash/maphash"
	"sync/atomic"
)

// A recent remembers scopes whose record this process has lately completed, so that a retry looks for the record before it
// tries to claim the key. It is a hint and no more: it forgets, and it takes one scope in very many for another.
type recent struct {
	seed   maphash.Seed
	hashes [4096]atomic.Uint64 // each at the place that its last bits say
}

func newRecent() *recent { return &recent{seed: maphash.MakeSeed()} }

func (r *recent) place(s Scope) (*atomic.Uint64, uint64) {
	hash := maphash.Comparable(r.seed, s)
	return &r.hashes[hash%uint64(len(r.hashes))], hash
}

func (r *recent) add(s Scope) {
	place, hash := r.place(s)
	place.Store(hash)
}

func (r *recent) has(s Scope) bool {
	place, hash := r.place(s)
	return place.Load() == hash
}
