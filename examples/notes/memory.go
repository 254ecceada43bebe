package main

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/holdsend/holdsend-go"
)

// openMemory returns a backend that forgets everything when the process ends.
func openMemory(logger *slog.Logger) *backend {
	logger.Warn("everything is kept in memory and lost when the service stops: leave out -db :memory: to keep it in a file")
	store := holdsend.NewMemoryStore(nil)
	entries := &memoryEntries{lastIDs: map[collection]int64{}, lists: map[memoryList][]entry{}}
	return &backend{
		name:    "memory",
		handler: newHandler(store, entries, logger),
		purge:   store.PurgeExpired,
		close:   func() {},
	}
}

// memoryEntries changes only in OnCommit, so that a rolled back create or delete leaves no trace.
type memoryEntries struct {
	mu      sync.Mutex
	lastIDs map[collection]int64
	lists   map[memoryList][]entry
}

type memoryList struct {
	collection collection
	owner      string
}

func (m *memoryEntries) add(_ context.Context, tx *holdsend.MemoryTx, c collection, owner string, e entry) (entry, error) {
	m.mu.Lock()
	m.lastIDs[c]++ // like a sequence: a rolled back create leaves a gap
	e.ID, e.ReceivedAt = m.lastIDs[c], time.Now().UTC().Truncate(time.Microsecond)
	m.mu.Unlock()
	if e.WrittenAt != nil {
		writtenAt := e.WrittenAt.UTC().Truncate(time.Microsecond) // as Postgres keeps it
		e.WrittenAt = &writtenAt
	}
	list := memoryList{c, owner}
	tx.OnCommit(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.lists[list] = append(m.lists[list], e)
	})
	return e, nil
}

func (m *memoryEntries) remove(_ context.Context, tx *holdsend.MemoryTx, c collection, owner string, id int64) (bool, error) {
	list := memoryList{c, owner}
	isIt := func(e entry) bool { return e.ID == id }
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.ContainsFunc(m.lists[list], isIt) {
		return false, nil
	}
	tx.OnCommit(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.lists[list] = slices.DeleteFunc(m.lists[list], isIt)
	})
	return true, nil
}

func (m *memoryEntries) list(_ context.Context, c collection, owner string) ([]entry, error) {
	m.mu.Lock()
	list := append([]entry{}, m.lists[memoryList{c, owner}]...)
	m.mu.Unlock()
	slices.SortFunc(list, func(a, b entry) int { return cmp.Compare(a.ID, b.ID) }) // from commit order to arrival
	return list[max(0, len(list)-listLimit):], nil
}
