// Package postgressql holds the SQL of the Postgres stores, one statement a constant. {records} stands for the table.
//
// Every parameter is cast where it is used, so that each statement means the same in every query mode of a driver and
// behind a pooler. Ages and expiry are judged by the database's clock alone (statement_timestamp), durations come in
// microseconds.
package postgressql

import (
	"errors"
	"strings"
)

// Statements is the SQL of a store for one table.
type Statements struct {
	Claim, Replace         string // no row: lost
	ClaimOrFind            string // lost: the record that stands there
	ReplaceOrFind          string
	LockByScope, LockByRow string
	Complete, Settle       string
	Free, Outcome          string
	Find                   string
	Tombstone              string
	Now                    string
	ForgetBatch            string
	ForgetNext, ForgetOne  string
	PurgeRecords           string
	PurgeClaims            string
}

// For returns the statements for the table named by records, which must be a quoted identifier, qualified or not.
func For(records string) *Statements {
	// Outermost first; the table's name last, for it may look like a placeholder.
	fill := func(sql string) string {
		sql = strings.NewReplacer("{how}", strings.ReplaceAll(how, "{scope}", scope), "{scope}", scope).Replace(sql)
		sql = strings.NewReplacer("{old}", old, "{hurry}", hurry).Replace(sql)
		return strings.NewReplacer("{records}", records, "{records literal}", Literal(records)).Replace(sql)
	}
	withRecord := func(sql, takeOverAfter string) string {
		return fill(strings.ReplaceAll(sql, "{record}", strings.ReplaceAll(record, "{take over after}", takeOverAfter)))
	}
	return &Statements{
		Claim: fill(claim), Replace: fill(replace),
		ClaimOrFind:   withRecord(strings.ReplaceAll(orFind, "{mine}", claim), "$6"),
		ReplaceOrFind: withRecord(strings.ReplaceAll(orFind, "{mine}", replace), "$6"),
		LockByScope:   fill(strings.ReplaceAll(lockByScope, "{max idle}", "$5")),
		LockByRow:     fill(strings.ReplaceAll(lockByRow, "{max idle}", "$3")),
		Complete:      fill(complete), Settle: fill(settle),
		Free: fill(free), Outcome: fill(outcome),
		Find:        withRecord(find, "$4"),
		Tombstone:   fill(tombstone),
		Now:         now,
		ForgetBatch: fill(forgetBatch),
		ForgetNext:  fill(forgetNext), ForgetOne: fill(forgetOne),
		PurgeRecords: fill(purgeRecords),
		PurgeClaims:  fill(purgeClaims),
	}
}

// Literal quotes text as an SQL string, whatever standard_conforming_strings says.
func Literal(text string) string {
	quoted := "'" + strings.ReplaceAll(text, "'", "''") + "'"
	if strings.Contains(text, `\`) {
		return "E" + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}

// The parameters $1 to $3 of most statements.
const scope = `owner = $1::text AND operation = $2::text AND key = $3::text`

// The columns of a record; {take over after} is a parameter. Least: a claim that is kept for good has claimed_at infinity.
const record = `state, fingerprint, claim_id::text, least(claimed_at, statement_timestamp()), completed_at, expires_at,
	status, header, body, resource_ref,
	coalesce(expires_at <= statement_timestamp(), false),
	state = 'claimed' AND claimed_at <= statement_timestamp() - {take over after}::bigint * interval '1 microsecond'`

// claim inserts a claim, and returns the row's ctid if it wins. $4 claim id, $5 fingerprint.
//
// The claim's commit need not be flushed. If a crash loses it, it loses every later transaction too, the one that would
// have completed it among them.
//
// NOT EXISTS: ON CONFLICT alone waits for whoever is completing, tombstoning or forgetting the row that stands there.
// With it, a replay also writes and locks nothing.
const claim = `INSERT INTO {records} (owner, operation, key, state, fingerprint, claim_id, claimed_at)
SELECT $1::text, $2::text, $3::text, 'claimed', $5::text, $4::uuid, statement_timestamp()
WHERE NOT EXISTS (SELECT FROM {records} WHERE {scope}) AND set_config('synchronous_commit', 'off', true) = 'off'
ON CONFLICT (owner, operation, key) DO NOTHING
RETURNING ctid::text`

// replace takes the place of an expired record or an abandoned claim, by compare-and-set, and returns the row's ctid if it
// wins. $4 claim id, $5 fingerprint, $6 TakeOverAfter, $7 and $8 claim id and state of the record to replace.
//
// SKIP LOCKED: a living attempt holds a lock on its row, so the row is not found, and nobody waits. It is the lock that
// tells a living attempt from a dead one; the age only spares the moment between claim and lock.
//
// lock_timeout: if another takes the place while this statement looks at the row, Postgres goes on to the row's new version,
// and there SKIP LOCKED does not count: it would wait for the other's create. LockNotAvailable says so: ask again. (From the
// function's place below the lock it is set before any lock is taken.)
const replace = `WITH old AS (
	SELECT tableoid AS old_table, ctid AS old_row
	FROM {records}, set_config('lock_timeout', '100ms', true)
	WHERE {scope} AND claim_id::text = $7::text AND state = $8::text
		AND (expires_at <= statement_timestamp()
			OR state = 'claimed' AND claimed_at <= statement_timestamp() - $6::bigint * interval '1 microsecond')
	FOR UPDATE SKIP LOCKED
)
UPDATE {records} SET state = 'claimed', fingerprint = $5::text, claim_id = $4::text::uuid,
	claimed_at = statement_timestamp(), completed_at = NULL, expires_at = NULL,
	status = NULL, header = NULL, body = NULL, resource_ref = NULL
FROM set_config('synchronous_commit', 'off', true), old
WHERE ctid = old_row AND tableoid = old_table
RETURNING ctid::text`

// orFind is claim or replace for a driver that cannot send a second statement along: a loss is one round trip, at some cost
// to a win. A win returns the ctid and nothing else, for the caller knows the rest; a loss the record that stands there, as
// of the start of the statement. No row at all means a race: ask again. $6 TakeOverAfter.
const orFind = `WITH mine (won) AS (
{mine}
)
SELECT NULL::text, {record}
	FROM {records} WHERE {scope} AND NOT EXISTS (SELECT FROM mine)
UNION ALL
SELECT won, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM mine`

// The first statement of an attempt's transaction locks its claim: while the lock is held, the attempt is alive. No row:
// the claim was lost meanwhile. It returns what the attempt needs later: the row, the transaction's id (a create that
// commits by itself is found out by it), the table as the search_path had it (create may change that), and the database's
// default isolation level. MaxIdle is in milliseconds.
//
// set_config: a process that hangs must not hold its key for ever. A stricter limit of the role or database stands.
//
// NO KEY UPDATE: enough to be seen by SKIP LOCKED, and what the completing update takes anyway.
const (
	lock = `SELECT ctid::text, pg_current_xact_id()::text, {records literal}::regclass::oid::bigint,
	current_setting('default_transaction_isolation'),
	set_config('idle_in_transaction_session_timeout', CASE
		WHEN current_setting('idle_in_transaction_session_timeout') <> '0'
			AND current_setting('idle_in_transaction_session_timeout')::interval < {max idle}::bigint * interval '1 millisecond'
		THEN current_setting('idle_in_transaction_session_timeout')
		ELSE {max idle}::bigint::text
	END, true)
FROM {records}
WHERE `

	// $4 claim id, $5 MaxIdle.
	lockByScope = lock + `{scope} AND claim_id = $4::uuid AND state = 'claimed'
FOR NO KEY UPDATE`

	// lockByRow is for serializable transactions, which must not read the table by its index: creates that have
	// nothing to do with each other share its pages and would fail with 40001. $1 ctid, $2 claim id, $3 MaxIdle.
	lockByRow = lock + `ctid = $1::tid AND claim_id = $2::uuid AND state = 'claimed'
FOR NO KEY UPDATE`
)

// MostRaces is how often a claim may neither be made nor meet another before that is ErrHidden, and a batch of a purge meet
// LockNotAvailable before that is the error. Races are over sooner.
const MostRaces = 100

// ErrHidden says that the table takes no claim, and shows none.
var ErrHidden = errors.New("holdsend: the key can be neither claimed nor found: row security or a trigger on the records table hides or drops rows, and must not")

// LockNotAvailable is the SQLSTATE of a statement that waited for longer than lock_timeout.
const LockNotAvailable = "55P03"

// GuardLost and GuardEnded are quoted in the error that complete raises when its guard fails.
const (
	GuardLost  = "holdsend: claim lost"
	GuardEnded = "holdsend: transaction ended by create"
)

// complete is the last statement of an attempt's transaction; COMMIT follows in the same round trip, and must not be run
// if the guard fails: so the guard raises an error (a cast is what plain SQL has for that). It finds the row by ctid,
// which the lock pins, and so works alike under every isolation level. $1 ctid, $2 claim id, $3 transaction id, $4 TTL
// (NULL: none), $5 status, $6 header, $7 body, $8 resource ref.
const complete = `WITH completed AS (
	UPDATE {records} SET state = 'completed', completed_at = statement_timestamp(),
		expires_at = statement_timestamp() + $4::bigint * interval '1 microsecond',
		status = $5::bigint, header = $6::text, body = $7::bytea, resource_ref = $8::text
	WHERE ctid = $1::tid AND claim_id = $2::uuid AND state = 'claimed'
	RETURNING 1
)
SELECT CAST(CASE
	WHEN pg_current_xact_id() <> $3::xid8 THEN '` + GuardEnded + `'
	WHEN NOT EXISTS (SELECT FROM completed) THEN '` + GuardLost + `'
	ELSE '1'
END AS integer)`

// how an attempt's transaction ended, judged on any connection: 'committed', 'aborted', or 'in progress' until it has ended.
// $1 to $3 scope, $4 claim id, $5 transaction id.
//
// A transaction id alone is no proof. After a crash, or on a standby that took over, the ids that never got there are given
// again, and the same id may belong to anybody. But an attempt locks its claim, which leaves a mark in the claim's xmax, and the
// lock goes through the log as everything does: a database that has the mark has seen the transaction, and gives its id to
// nobody else. Where there is no mark at all, nothing of the transaction is there. The mark need not be the id itself:
// completing inside of a savepoint makes it another, and so does a Settle or a Free that did not get to its commit. So no
// statement may take it away. Where the claim is gone, 'committed' decides nothing; 'aborted' is true even of an id that was
// given again, since what had committed would have kept it.
const how = `coalesce((
		SELECT CASE
			WHEN state <> 'claimed' OR claimed_at = 'infinity' THEN 'committed'
			WHEN xmax = '0' THEN 'aborted'
			ELSE pg_xact_status($5::text::xid8)
		END
		FROM {records} WHERE {scope} AND claim_id = $4::text::uuid
	), pg_xact_status($5::text::xid8), '')`

// settle completes a record whose attempt's transaction create itself has committed: freeing the key would double that
// write. No row: it was completed, or the claim is gone.
// $1 to $3 scope, $4 claim id, $5 TTL, $6 status, $7 header, $8 body, $9 resource ref.
const settle = `UPDATE {records} SET state = 'completed', completed_at = statement_timestamp(),
	expires_at = statement_timestamp() + $5::bigint * interval '1 microsecond',
	status = $6::bigint, header = $7::text, body = $8::bytea, resource_ref = $9::text
WHERE {scope} AND claim_id = $4::text::uuid AND state = 'claimed'
RETURNING true`

// free gives the key back after an attempt that did not complete, and returns how its transaction ended. If create itself
// committed it, the claim is kept for good instead: claimed_at infinity is never abandoned. $4 claim id, $5 transaction id
// (NULL: create did not run). A freed key need not be flushed, by the reason of claim; a kept one must be.
const free = `WITH attempt AS (
	SELECT CASE WHEN $5::text IS NULL THEN 'aborted' ELSE {how} END AS how
), async AS (
	SELECT how, CASE WHEN how = 'aborted' THEN set_config('synchronous_commit', 'off', true) END FROM attempt
), freed AS (
	DELETE FROM {records} USING async
	WHERE {scope} AND claim_id = $4::text::uuid AND state = 'claimed' AND how = 'aborted'
), kept AS (
	UPDATE {records} SET claimed_at = 'infinity' FROM async
	WHERE {scope} AND claim_id = $4::text::uuid AND state = 'claimed' AND how = 'committed'
)
SELECT how FROM async`

// outcome finds out what became of an attempt: the record's state, and how the transaction ended. 'claimed' beside
// 'committed' is a transaction that create itself committed, or a commit that came after the statement began. No row: the
// claim is gone, and nobody can tell. $4 claim id, $5 transaction id.
const outcome = `SELECT state, how
FROM (
	SELECT coalesce((SELECT state FROM {records} WHERE {scope} AND claim_id = $4::text::uuid), '') AS state, {how} AS how
) AS attempt
WHERE state <> '' OR how <> 'committed'`

const find = `SELECT {record} FROM {records} WHERE {scope}`

// tombstone keeps fingerprint, claim id and expiry. $1 owner, $2 operation, $3 resource ref.
const tombstone = `UPDATE {records} SET state = 'gone', status = NULL, header = NULL, body = NULL, resource_ref = NULL
WHERE owner = $1::text AND operation = $2::text AND resource_ref = $3::text AND state = 'completed'`

const now = `SELECT statement_timestamp()`

// Statements that name no table, for stores on database/sql.
const (
	// TransactionID tells one transaction from another.
	TransactionID = `SELECT pg_current_xact_id()::text`

	// DefaultIsolation is that of a statement which travels alone.
	DefaultIsolation = `SELECT current_setting('default_transaction_isolation')`
)

// What ForgetOwner takes: records older than its call ($2), and those of the future: claims that are kept for good, and what
// was written before the database's clock was set back. It is clock_timestamp that knows them from a claim which took a
// record's place while this statement waited.
const forgettable = `owner = $1::text AND (claimed_at <= $2::timestamptz OR claimed_at > clock_timestamp())`

// old finds the rows that a batch has locked. The array has them fetched one by one: a join with them would read the table from
// end to end where Postgres thinks that cheaper, and it is not, for each batch does it again. A ctid alone names a row in
// each partition.
const old = `ctid = ANY (ARRAY(SELECT old_row FROM old)) AND (tableoid, ctid) IN (SELECT old_table, old_row FROM old)`

// forgetBatch deletes up to a batch of an owner's records, after the scope in $3 and $4, and returns the last one it
// took. It leaves those that an attempt holds.
const forgetBatch = `WITH old AS (
	SELECT tableoid AS old_table, ctid AS old_row
	FROM {records}
	WHERE ` + forgettable + ` AND (operation, key) > ($3::text COLLATE "C", $4::text COLLATE "C")
	ORDER BY operation, key LIMIT 1000
	FOR UPDATE SKIP LOCKED
), forgotten AS (
	DELETE FROM {records} WHERE {old} RETURNING operation, key
)
SELECT operation, key, count(*) OVER () FROM forgotten ORDER BY operation DESC, key DESC LIMIT 1`

// forgetNext finds the next record that is left; forgetOne deletes it, waiting for its attempt to end.
const forgetNext = `SELECT operation, key FROM {records}
WHERE ` + forgettable + ` AND (operation, key) > ($3::text COLLATE "C", $4::text COLLATE "C")
ORDER BY operation, key LIMIT 1`

const forgetOne = `DELETE FROM {records} WHERE ` + forgettable + ` AND operation = $3::text AND key = $4::text`

// purgeRecords and purgeClaims delete one batch each, in the order of an index and from where the last one ended ($1), so
// that no batch walks over what earlier ones deleted. SKIP LOCKED spares living attempts and waits for nobody; where it would
// (see replace), LockNotAvailable asks for another try.
const purgeRecords = `WITH old AS (
	SELECT tableoid AS old_table, ctid AS old_row
	FROM {records}
	WHERE expires_at >= $1::timestamptz AND expires_at <= statement_timestamp() AND {hurry}
	ORDER BY expires_at LIMIT 1000
	FOR UPDATE SKIP LOCKED
), purged AS (
	DELETE FROM {records} WHERE {old} RETURNING expires_at
)
SELECT count(*), max(expires_at) FROM purged`

// hurry is evaluated once, before the first row.
const hurry = `(SELECT set_config('lock_timeout', '100ms', true)) IS NOT NULL`

// completed_at IS NULL is the index's condition, which no other statement may repeat: see schema.sql. $2 StaleClaim.
const purgeClaims = `WITH old AS (
	SELECT tableoid AS old_table, ctid AS old_row
	FROM {records}
	WHERE completed_at IS NULL AND state = 'claimed' AND claimed_at >= $1::timestamptz
		AND claimed_at <= statement_timestamp() - $2::bigint * interval '1 microsecond' AND {hurry}
	ORDER BY claimed_at LIMIT 1000
	FOR UPDATE SKIP LOCKED
), purged AS (
	DELETE FROM {records} WHERE {old} RETURNING claimed_at
)
SELECT count(*), max(claimed_at) FROM purged`

// TableName returns the quoted name of the table with oid $1, its schema included.
const TableName = `SELECT format('%I.%I', nspname, relname) FROM pg_catalog.pg_class c
	JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1::bigint::oid`
