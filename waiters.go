package holdsend

import "sync"

// Waiters is where the calls of one process that wait for an attempt meet the call that runs it: they are woken when it
// ends, instead of at their next look. Calls in other processes go on looking. A Store has a place for it by one method,
//
//	func (s *MyStore) Waiters() *holdsend.Waiters { return &s.waiters }
//
// and need do nothing else; a store that wraps another hands on that one's. The zero value is ready for use.
type Waiters struct {
	mu    sync.Mutex
	rooms map[Scope]*room // of the scopes that somebody waits for
}

// A room is where the calls wait that wait for the same attempt.
type room struct {
	next   chan struct{} // wakes one of them: the attempt has failed, and one of them may try
	all    chan struct{} // closed when the attempt has ended otherwise
	inside int
}

// waitersOf returns nil, which wakes nobody, for a store that has none.
func waitersOf(store any) *Waiters {
	if s, ok := store.(interface{ Waiters() *Waiters }); ok {
		return s.Waiters()
	}
	return nil
}

// enter returns the room of those who wait for the attempt that holds scope, to be left.
func (w *Waiters) enter(scope Scope) *room {
	if w == nil {
		return &room{}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.rooms[scope]
	if r == nil {
		r = &room{next: make(chan struct{}, 1), all: make(chan struct{})}
		if w.rooms == nil {
			w.rooms = map[Scope]*room{}
		}
		w.rooms[scope] = r
	}
	r.inside++
	return r
}

func (w *Waiters) leave(scope Scope, r *room) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.inside--; r.inside == 0 && w.rooms[scope] == r {
		delete(w.rooms, scope)
	}
}

// wakeAll tells those who wait for scope that its attempt has ended.
func (w *Waiters) wakeAll(scope Scope) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.rooms[scope]; r != nil {
		close(r.all)
		delete(w.rooms, scope)
	}
}

// wakeOne tells one of those who wait for scope that its attempt has failed. If all asked the database then, a create that
// fails for each of them would make them ask as often as the square of their number.
func (w *Waiters) wakeOne(scope Scope) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.rooms[scope]; r != nil {
		select {
		case r.next <- struct{}{}:
		default: // somebody is being woken already
		}
	}
}
