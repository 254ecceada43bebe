package holdsend

// CrashMemoryAttempt ends the holder of a, an attempt of a MemoryStore, as kill -9 would end that of a store outside
// this process: the transaction is gone, the claim stays, and the attempt can no longer commit.
func CrashMemoryAttempt(a Attempt[*MemoryTx]) {
	attempt := a.(*memoryAttempt)
	attempt.store.mu.Lock()
	defer attempt.store.mu.Unlock()
	attempt.store.letGo(attempt.record)
}
