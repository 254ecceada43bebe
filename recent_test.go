package holdsend

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestRecentRemembersAndForgets(t *testing.T) {
	t.Parallel()
	r := newRecent()
	scope := func(n int) Scope {
		return Scope{Owner: "ada", Operation: "note.create", Key: "item-" + strconv.Itoa(n)}
	}
	for n := range 100_000 {
		r.add(scope(n))
		assert.True(t, r.has(scope(n)))
		assert.False(t, r.has(scope(-1-n)))
	}
	assert.False(t, r.has(Scope{}))
	remembered := 0
	for n := range 100_000 {
		if r.has(scope(n)) {
			remembered++
		}
	}
	assert.Greater(t, remembered, 3000)
	assert.LessOrEqual(t, remembered, len(r.hashes))
	// Each part of the scope counts.
	r.add(scope(0))
	assert.False(t, r.has(Scope{Owner: "bob", Operation: "note.create", Key: "item-0"}))
	assert.False(t, r.has(Scope{Owner: "ada", Operation: "note.delete", Key: "item-0"}))
}
