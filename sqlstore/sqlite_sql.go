package sqlstore

import "strings"

// sqliteStatements is the SQL of an SQLiteStore for one table. Ages and expiry are judged by SQLite's clock alone, in
// milliseconds.
type sqliteStatements struct {
	find, claim, replace, mark, lock, complete, settle, own, free, tombstone, now, forget, purgeRecords, purgeClaims string
}

func sqliteStatementsFor(table string) *sqliteStatements {
	fill := func(sql string) string {
		// The table's name last, for it may look like a placeholder.
		return strings.NewReplacer("{scope}", sqliteScope, "{now}", sqliteNow, "{records}", quoted(table)).Replace(sql)
	}
	return &sqliteStatements{
		find: fill(sqliteFind), claim: fill(sqliteClaim), replace: fill(sqliteReplace), mark: fill(sqliteMark),
		lock: fill(sqliteLock), complete: fill(sqliteComplete), settle: fill(sqliteSettle), own: fill(sqliteOwn),
		free: fill(sqliteFree), tombstone: fill(sqliteTombstone), now: fill("SELECT {now}"), forget: fill(sqliteForget),
		purgeRecords: fill(sqlitePurgeRecords), purgeClaims: fill(sqlitePurgeClaims),
	}
}

// The parameters ?1 to ?3 of most statements.
const sqliteScope = `owner = ?1 AND operation = ?2 AND key = ?3`

// Rounded: the product of a floating point number may lie just under the millisecond that is meant.
const sqliteNow = `CAST(round(unixepoch('subsec') * 1000) AS INTEGER)`

// sqliteFind reads a record; ?4 is TakeOverAfter. abs: a claim of the future is one from before the clock was set back, and
// must not hold its key until then.
const sqliteFind = `SELECT state, fingerprint, claim_id, claimed_at, completed_at, expires_at, status, header, body, resource_ref,
	state <> 'claimed' AND coalesce(expires_at <= {now}, 0),
	state = 'claimed' AND marked = 0 AND abs({now} - claimed_at) >= ?4
FROM {records} WHERE {scope}`

// sqliteClaim inserts a claim into an empty scope. ?4 claim id, ?5 fingerprint.
const sqliteClaim = `INSERT INTO {records} (owner, operation, key, state, fingerprint, claim_id, claimed_at)
VALUES (?1, ?2, ?3, 'claimed', ?5, ?4, {now}) ON CONFLICT (owner, operation, key) DO NOTHING`

// sqliteReplace takes the place of an expired record or an abandoned claim, by compare-and-set. Whoever runs it holds the
// write lock, which no other attempt then can: an attempt holds it from its first statement to its end. So a claim that
// is old has no living attempt, but for one between its claim and its lock, which marked and the claim id fence.
// ?4 claim id, ?5 fingerprint, ?6 and ?7 claim id and state of the record to replace, ?8 TakeOverAfter.
const sqliteReplace = `UPDATE {records} SET state = 'claimed', fingerprint = ?5, claim_id = ?4, marked = 0, claimed_at = {now},
	completed_at = NULL, expires_at = NULL, status = NULL, header = NULL, body = NULL, resource_ref = NULL
WHERE {scope} AND claim_id = ?6 AND state = ?7
	AND (state <> 'claimed' AND expires_at <= {now} OR state = 'claimed' AND marked = 0 AND abs({now} - claimed_at) >= ?8)`

// sqliteMark is the first statement of an attempt's transaction: it takes the write lock, and its mark, once committed,
// tells a COMMIT of create's own from a ROLLBACK. No row: the claim was lost meanwhile. ?4 claim id.
const sqliteMark = `UPDATE {records} SET marked = 1 WHERE {scope} AND claim_id = ?4 AND state = 'claimed'`

// sqliteLock takes the write lock and changes nothing.
const sqliteLock = `UPDATE {records} SET marked = marked WHERE 0`

// sqliteComplete is the last statement of an attempt's transaction. ?4 claim id, ?5 TTL (NULL: none), ?6 status,
// ?7 header, ?8 body, ?9 resource ref. The transaction has held the write lock since its mark, so the claim id and the state
// can only have been changed by create itself.
const sqliteComplete = `UPDATE {records} SET state = 'completed', marked = 0, completed_at = {now}, expires_at = {now} + ?5,
	status = ?6, header = ?7, body = ?8, resource_ref = ?9
WHERE {scope} AND claim_id = ?4 AND state = 'claimed'`

// sqliteSettle is sqliteComplete for a transaction that create itself had committed.
const sqliteSettle = sqliteComplete + ` AND marked = 1`

// sqliteOwn looks at a claim: its state, and whether it is marked. ?4 claim id.
const sqliteOwn = `SELECT state, marked FROM {records} WHERE {scope} AND claim_id = ?4`

// sqliteFree gives a key back, but for one whose create committed by itself. ?4 claim id, ?5 the mark that it has: 1 in
// the attempt's own transaction, 0 outside of it.
const sqliteFree = `DELETE FROM {records} WHERE {scope} AND claim_id = ?4 AND state = 'claimed' AND marked = ?5`

// sqliteTombstone keeps fingerprint, claim id and expiry. ?1 owner, ?2 operation, ?3 resource ref.
const sqliteTombstone = `UPDATE {records} SET state = 'gone', status = NULL, header = NULL, body = NULL, resource_ref = NULL
WHERE owner = ?1 AND operation = ?2 AND resource_ref = ?3 AND state = 'completed'`

// The rest deletes in batches, so that nobody waits long for the write lock. Whoever runs one of them holds it, so that
// none of the claims has a living attempt, but for one before its lock, which then starts over.

// ?1 owner, ?2 when ForgetOwner was called. A record of the future is one from before the clock was set back, and so is older
// too.
const sqliteForget = `DELETE FROM {records} WHERE rowid IN (
	SELECT rowid FROM {records} WHERE owner = ?1 AND (claimed_at <= ?2 OR claimed_at > {now}) LIMIT 1000)`

const sqlitePurgeRecords = `DELETE FROM {records} WHERE rowid IN (
	SELECT rowid FROM {records} WHERE state <> 'claimed' AND expires_at <= {now} LIMIT 1000)`

// ?1 StaleClaim.
const sqlitePurgeClaims = `DELETE FROM {records} WHERE rowid IN (
	SELECT rowid FROM {records} WHERE state = 'claimed' AND marked = 0 AND abs({now} - claimed_at) >= ?1 LIMIT 1000)`
