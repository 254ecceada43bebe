package holdsend

// CrashMemoryAttempt ends the holder of a, an attempt of a MemoryStore, as kill -9 would end that of a store outside
// this process: the transaction is gone, the claim stays, and the attempt can no longer commit.
func CrashMemoryAttempt(a Attempt[*MemoryTx]) {
	attempt := a.(*memoryAttempt)
	store := attempt.tx.store
	store.mu.Lock()
	defer store.mu.Unlock()
	store.letGo(attempt.record)
}
