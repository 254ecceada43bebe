package main

// A mutant is the library with one rule broken on purpose.
type mutant struct {
	bug   string // what is wrong with it
	rule  string // what it breaks
	edits []edit
	tests tests // which must fail
}

// An edit replaces text that occurs exactly once in a file.
type edit struct{ file, old, new string }

// tests is one run of go test.
type tests struct{ directory, run string }

func root(run string) tests { return tests{".", run} }

// sql runs tests of the stores on database/sql, which live in a module of their own.
func sql(run string) tests { return tests{"internal/sqltest", run} }

const (
	schema   = "schema.sql"
	postgres = "internal/postgressql/postgressql.go" // also the SQL of sqlstore's Postgres store
	sqlite   = "sqlstore/sqlite_sql.go"
	attempt  = "store_postgres_attempt.go"
	memory   = "store_memory.go"
	protocol = "holdsend.go"

	postgresContract = "^TestPostgresKeepsTheContract$/"
	sqlContract      = "^TestPostgresKeepsTheContract$/^pgx$/"
	sqliteContract   = "^TestSQLiteKeepsTheContract$/^modernc$/"
	memoryContract   = "^TestMemoryStoreContract$/"
)

// mutants has the stores first, then the protocol and the HTTP layer.
var mutants = []mutant{
	// Postgres.
	{
		"Postgres: no unique index", "of many simultaneous requests one gets the claim",
		[]edit{
			{schema, "resource_ref text COLLATE \"C\",\n\t\t\tPRIMARY KEY (owner, operation, key)\n", "resource_ref text COLLATE \"C\"\n"},
			{postgres, "ON CONFLICT (owner, operation, key) DO NOTHING\n", ""},
		},
		root("^TestPostgresTableHasOneRowAScope$"),
	},
	{
		"Postgres: claim not committed before create", "a claim is visible to everybody before create starts",
		[]edit{{"store_postgres.go", `b.Queue("commit and chain")`, `b.Queue("savepoint claimed")`}},
		root(postgresContract + "^Begin"),
	},
	{
		"Postgres: claim by ON CONFLICT alone", "Begin never waits for a completion",
		[]edit{{postgres, "WHERE NOT EXISTS (SELECT FROM {records} WHERE {scope}) AND", "WHERE"}},
		root(postgresContract + "^Begin"),
	},
	{
		"Postgres: attempt does not lock its claim", "a living attempt is never robbed",
		[]edit{{postgres, "{scope} AND claim_id = $4::uuid AND state = 'claimed'\nFOR NO KEY UPDATE`", "{scope} AND claim_id = $4::uuid AND state = 'claimed'`"}},
		root(postgresContract + "^Replace"),
	},
	{
		"Postgres: take-over waits for a living attempt (no SKIP LOCKED)", "Begin never waits for another attempt",
		[]edit{
			{postgres, "\tFOR UPDATE SKIP LOCKED\n)\nUPDATE", "\tFOR UPDATE\n)\nUPDATE"},
			{postgres, "{records}, set_config('lock_timeout', '100ms', true)", "{records}, set_config('lock_timeout', '0', true)"},
		},
		root(postgresContract + "^Replace"),
	},
	{
		"Postgres: take-over without compare-and-set", "a record that changed since it was seen is not replaced",
		[]edit{{postgres, "claim_id::text = $7::text AND state = $8::text\n", "$7::text IS NOT NULL AND $8::text IS NOT NULL\n"}},
		root(postgresContract + "(^Replace|TakeOver)"),
	},
	{
		"Postgres: take-over at any age", "a claim is taken over only once it is old enough",
		[]edit{{postgres, "\t\t\tOR state = 'claimed' AND claimed_at <= statement_timestamp() - $6::bigint * interval '1 microsecond')\n\tFOR UPDATE",
			"\t\t\tOR state = 'claimed' AND $6::bigint IS NOT NULL)\n\tFOR UPDATE"}},
		root(postgresContract + "(^Replace|TakeOver)"),
	},
	{
		"Postgres: owner is no part of the lookup", "nobody gets another owner's answer",
		[]edit{{postgres, "const scope = `owner = $1::text AND", "const scope = `$1::text IS NOT NULL AND"}},
		root(postgresContract + "^Scope"),
	},
	{
		"Postgres: no transaction guard in the completion", "a create that ended its transaction is found out",
		[]edit{{postgres, "\tWHEN pg_current_xact_id() <> $3::xid8 THEN '` + GuardEnded + `'\n", "\tWHEN $3::xid8 IS NULL THEN '` + GuardEnded + `'\n"}},
		root("^TestPostgresCreateThatMistreatsItsTransaction$"),
	},
	{
		"Postgres: lost COMMIT answer taken for a rollback, and the key freed", "a key that may have committed is never freed",
		[]edit{
			{attempt, "\treturn a.findOut(ctx, answer, sent, err)", "\treturn err"},
			{postgres, "SELECT CASE WHEN $5::text IS NULL THEN 'aborted' ELSE {how} END AS how", "SELECT CASE WHEN true THEN 'aborted' ELSE {how} END AS how"},
			{postgres, "claim_id = $4::text::uuid AND state = 'claimed' AND how = 'aborted'", "claim_id = $4::text::uuid AND how = 'aborted'"},
		},
		root("^TestPostgresLostCommitAnswer$/^cache_statement$"),
	},
	{
		"Postgres: COMMIT sent again after a lost answer", "COMMIT is never sent twice",
		[]edit{{attempt, "\treturn a.findOut(ctx, answer, sent, err)", `	a.letGo(ctx)
	if conn, acquireErr := a.store.acquire(ctx); acquireErr == nil {
		a.conn = conn
		sent, err = a.commit(ctx, answer)
	}
	return a.findOut(ctx, answer, sent, err)`}},
		root("^TestPostgresLostCommitAnswer$/^cache_statement$"),
	},
	{
		"Postgres: a transaction's id is proof enough", "after a crash the id of a transaction that is lost may be another's",
		[]edit{{postgres, "WHEN xmax = '0' THEN 'aborted'", "WHEN false THEN 'aborted'"}},
		root("^TestPostgresCrashGivesTheTransactionsIDAgain$"),
	},
	{
		"Postgres: a mark that is not the attempt's id is taken for none", "nested transactions and failed settlements leave another mark",
		[]edit{{postgres, "WHEN xmax = '0' THEN 'aborted'", "WHEN xmax <> $5::text::xid8::xid THEN 'aborted'"}},
		root("^TestPostgres(LostCommitAnswerAfterANestedRollback|CommittedByCreateThenCut)$/^cache_statement"),
	},
	{
		"Postgres: a transaction that still runs is taken for one that failed", "a COMMIT under way is waited for",
		[]edit{{"internal/postgressql/ended.go", "case how == Aborted:", "case how != Committed:"}},
		root("^TestPostgresLostCommitAnswer$/^cache_statement$"),
	},
	{
		"Postgres: unknown outcome, and the key aborted", "while the outcome is unknown the key is kept",
		[]edit{
			{attempt, "case postgressql.NotStored:", "case postgressql.NotStored, postgressql.Unknown:"},
		},
		root("^TestPostgresOutcomeUnknown$"),
	},
	{
		"Postgres: a late completion is believed before its commit", "what a create committed completes its record",
		[]edit{{"internal/postgressql/ended.go", "if err := settle(ctx); err == nil {", "if err := settle(ctx); err != context.Canceled {"}},
		root("^TestPostgresCommittedByCreateAndAFault$/twice$"),
	},
	{
		"Postgres: a question takes all the time there is", "a connection that falls silent is not the only one",
		[]edit{{"internal/postgressql/ended.go", "AskTimeout = 3 * time.Second", "AskTimeout = outcomeTimeout"}},
		root("^TestPostgresCommittedByCreateAndAFault$/silent$"),
	},
	{
		"Postgres: what cannot be completed is left to the next retry", "a write that create committed keeps its key",
		[]edit{{"internal/postgressql/ended.go", "\t\t\t\tfate = Kept\n", ""}},
		root("^TestPostgresCommittedByCreateAndAFault$/the_record_can_never_be_completed$"),
	},
	{
		"Postgres: a claim that is gone leaves its outcome open", "a rollback is known whoever has the key by then",
		[]edit{{postgres, "WHERE state <> '' OR how <> 'committed'`", "WHERE state <> ''`"}},
		root("^TestPostgresRolledBackThenTakenOver$"),
	},
	{
		"Postgres: a query that nobody reads is not cancelled", "a backend that has nothing to send does not keep a key",
		[]edit{{attempt, "if conn.PgConn().IsBusy() && !conn.IsClosed() {", "if false {"}},
		root("^TestPostgresOpenRowsOfASlowQuery$"),
	},
	{
		"Postgres: expiry ignored", "an expired record is as if there were none",
		[]edit{{postgres, "\tcoalesce(expires_at <= statement_timestamp(), false),\n", "\tfalse,\n"}},
		root(postgresContract + "(Expired|TTL)"),
	},
	{
		"Postgres: tombstone loses the fingerprint", "a tombstone still tells other content",
		[]edit{{postgres, "UPDATE {records} SET state = 'gone', status = NULL", "UPDATE {records} SET state = 'gone', fingerprint = '', status = NULL"}},
		root(postgresContract + "(Tombstone|OtherContent)"),
	},
	{
		"Postgres: Abort waits for a newer claim, to free it", "Abort never touches a newer claim",
		[]edit{{postgres, "WHERE {scope} AND claim_id = $4::text::uuid AND state = 'claimed' AND how = 'aborted'", "WHERE {scope} AND $4::text IS NOT NULL AND state = 'claimed' AND how = 'aborted'"}},
		root(postgresContract + "(^Abort|^Complete)"),
	},
	{
		"Postgres: purge waits for living claims, and takes them", "purge spares living attempts and waits for none",
		[]edit{{postgres, "\tORDER BY claimed_at LIMIT 1000\n\tFOR UPDATE SKIP LOCKED\n", "\tORDER BY claimed_at LIMIT 1000\n\tFOR UPDATE\n"}},
		root(postgresContract + "^Purge"),
	},
	{
		"Postgres: a batch finds its rows by their place in any partition", "purge deletes what it has found, and nothing else",
		[]edit{{postgres, "(tableoid, ctid) IN (SELECT old_table, old_row FROM old)", "tableoid IN (SELECT old_table FROM old)"}},
		tests{"internal/bench", "^TestPartitionsAreErasedRowByRow$"},
	},
	{
		"Postgres: a record that this process remembers must still stand", "where nothing stands, Begin claims",
		[]edit{{"store_postgres.go", "s.standing(ctx, a); !errors.Is(err, pgx.ErrNoRows) {", "s.standing(ctx, a); record != nil || err != nil {"}},
		root(postgresContract + "^Forget"),
	},
	{
		"Postgres: forget takes newer records", "ForgetOwner deletes only what is older than its call",
		[]edit{{postgres, "(claimed_at <= $2::timestamptz OR claimed_at > clock_timestamp())", "($2::timestamptz IS NOT NULL)"}},
		root(postgresContract + "^Forget"),
	},
	{
		"Postgres: statements at the database's default level", "a statement that waited for a commit sees it",
		[]edit{{"store_postgres.go", "pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: o.TxOptions.AccessMode}", "pgx.TxOptions{}"}},
		root("^TestPostgresKeepsTheContractUnderEveryIsolationLevel$/^by_the_database's_default$/^repeatable_read$"),
	},
	{
		"Postgres: leaked transaction still works", "no transaction outlives its attempt",
		[]edit{{"store_postgres_tx.go", "if t.use.closed.Load() {", "if false {"}},
		root("^TestPostgresLeakedTransactionIsRefused$"),
	},
	{
		"Postgres: InTx commits what failed", "an error rolls a transaction without a record back",
		[]edit{{"store_postgres.go", "if err := fn(ctx, &postgresTx{tx: tx, use: &a.use}); err != nil {\n\t\treturn err\n\t}", "_ = fn(ctx, &postgresTx{tx: tx, use: &a.use})"}},
		root(postgresContract + "^InTx"),
	},
	{
		"Postgres through database/sql: lost COMMIT answer taken for a rollback", "a lost COMMIT answer is found out",
		[]edit{{"sqlstore/postgres_attempt.go", "\treturn a.findOut(ctx, answer, sent, err)", "\treturn err"}},
		sql("^TestPostgresLostCommitAnswer$/^pgx$"),
	},
	{
		"Postgres through database/sql: create's transaction ends with Begin's context", "an attempt outlives the context of its Begin",
		[]edit{{"sqlstore/postgres.go", "\t\tif !stop() && err == nil {\n\t\t\terr = ctx.Err()\n\t\t}\n\t\tswitch {", "\t\t_ = stop\n\t\tswitch {"}},
		sql(sqlContract + "^Begin"),
	},
	{
		"Postgres through database/sql: claim not committed before create", "a claim is visible to everybody before create starts",
		[]edit{{"sqlstore/postgres.go", "\tif s.committed.Load() == levelReadCommitted {\n", "\tif s.committed.Load() == levelReadCommitted {\n\t\tif statement == s.sql.ClaimOrFind {\n\t\t\t_, _ = conn.ExecContext(ctx, \"BEGIN\")\n\t\t}\n"}},
		sql(sqlContract + "^Begin"),
	},
	{
		"Postgres through database/sql: a create's own COMMIT is not settled", "what a create committed completes its record",
		[]edit{{"internal/postgressql/ended.go", "case state == \"claimed\" && how == Committed:", "case state == \"claimed\" && how == Committed && ctx != nil:\n\t\t\tfate, known = NotStored, true\n\t\tcase how == Committed:"}},
		sql("^TestPostgresCreateEndsItsTransaction$/^pgx$"),
	},
	{
		"Postgres through database/sql: lost COMMIT answer taken for a commit", "a lost COMMIT answer is found out",
		[]edit{{"internal/postgressql/ended.go", "case state != \"claimed\" && state != \"\":", "case state != \"\":"}},
		sql("^TestPostgresLostCommitAnswer$/^pgx$"),
	},
	{
		"Postgres through database/sql: a transaction's id is proof enough", "after a crash the id of a transaction that is lost may be another's",
		[]edit{{postgres, "WHEN xmax = '0' THEN 'aborted'", "WHEN false THEN 'aborted'"}},
		sql("^TestPostgresCrashGivesTheTransactionsIDAgain$"),
	},
	{
		"Postgres through database/sql: a transaction that still runs is taken for one that failed", "a COMMIT under way is waited for",
		[]edit{{"internal/postgressql/ended.go", "case how == Aborted:", "case how != Committed:"}},
		sql("^TestPostgresLostCommitAnswer$/^pgx$"),
	},
	{
		"Postgres through database/sql: unknown outcome, and the key aborted", "while the outcome is unknown the key is kept",
		[]edit{{"sqlstore/postgres_attempt.go", "case postgressql.NotStored:", "case postgressql.NotStored, postgressql.Unknown:"}},
		sql("^TestPostgresOutcomeUnknown$/^pgx$"),
	},
	{
		"Postgres through database/sql: a dead connection of the pool is an error", "a restart of the database fails no request that comes after it",
		[]edit{{"sqlstore/postgres.go", "const connectionTries = 3", "const connectionTries = 1"}},
		sql("^TestPostgresBrokenConnections$"),
	},

	// SQLite.
	{
		"SQLite: take-over of what another changed meanwhile", "a record that changed since it was seen is not replaced",
		[]edit{{sqlite, "AND claim_id = ?6 AND state = ?7\n", "AND ?6 IS NOT NULL AND ?7 IS NOT NULL\n"}},
		sql("^TestSQLiteRecordChangesBetweenTwoStatements$"),
	},
	{
		"SQLite: an attempt uses a claim that is not its own", "an attempt that lost its claim writes nothing",
		[]edit{{sqlite, "SET marked = 1 WHERE {scope} AND claim_id = ?4 AND", "SET marked = 1 WHERE {scope} AND ?4 IS NOT NULL AND"}},
		sql("^TestSQLiteRecordChangesBetweenTwoStatements$"),
	},
	{
		"SQLite: no claim guard in the completion", "an attempt that lost its claim writes nothing",
		[]edit{{sqlite, "resource_ref = ?9\nWHERE {scope} AND claim_id = ?4 AND", "resource_ref = ?9\nWHERE {scope} AND ?4 IS NOT NULL AND"}},
		sql("^TestSQLiteClaimLostInCreate$"),
	},
	{
		"SQLite: the claim is not marked", "what a create committed is told from what it rolled back",
		[]edit{{sqlite, "SET marked = 1 WHERE {scope}", "SET marked = marked WHERE {scope}"}},
		sql("^TestSQLiteCreateEndsItsTransaction$/^modernc$"),
	},
	{
		"SQLite: a claim of the future holds its key", "a clock that is set back holds no key",
		[]edit{{sqlite, "marked = 0 AND abs({now} - claimed_at) >= ?4", "marked = 0 AND {now} - claimed_at >= ?4"}},
		sql("^TestSQLiteClockIsSetBack$/^modernc$"),
	},
	{
		"SQLite: no unique index", "of many simultaneous requests one gets the claim",
		[]edit{
			{"sqlstore/sqlite.sql", "resource_ref TEXT,\n\tPRIMARY KEY (owner, operation, key)\n", "resource_ref TEXT\n"},
			{sqlite, " ON CONFLICT (owner, operation, key) DO NOTHING", ""},
		},
		sql("^TestSQLiteTableHasOneRowAScope$"),
	},
	{
		"SQLite: take-over without compare-and-set", "a record that changed since it was seen is not replaced",
		[]edit{
			{"sqlstore/sqlite.go", "return seen != nil && standing.ClaimID == seen.ClaimID && standing.State == seen.State && (", "return seen != nil && ("},
			{sqlite, "AND claim_id = ?6 AND state = ?7\n", "AND ?6 IS NOT NULL AND ?7 IS NOT NULL\n"},
		},
		sql(sqliteContract + "(^Replace|TakeOver)"),
	},
	{
		"SQLite: Abort keeps what create wrote", "a create that failed leaves nothing behind",
		[]edit{{"sqlstore/sqlite_attempt.go", `"ROLLBACK TO " + a.savepoint()`, `"RELEASE " + a.savepoint()`}},
		sql(sqliteContract + "(^Abort|ProtocolFailure)"),
	},
	{
		"SQLite: a transaction that was rolled back completes its record", "record and write are committed together or not at all",
		[]edit{
			{"sqlstore/sqlite_attempt.go", "if state == holdsend.StateClaimed && !marked {", "if false && state == \"\" && marked {"},
			{sqlite, "sqliteComplete + ` AND marked = 1`", "sqliteComplete"},
		},
		sql("^TestSQLiteCreateEndsItsTransaction$/^modernc$"),
	},
	{
		"SQLite: expiry counts from the claim", "a record's time to live counts from its completion",
		[]edit{{sqlite, "expires_at = {now} + ?5", "expires_at = claimed_at + ?5"}},
		sql(sqliteContract + "TTL"),
	},

	// Memory.
	{
		"memory: no claim guard in the completion", "an attempt that lost its claim writes nothing",
		[]edit{{memory, "if !s.stands(a.record) || !a.record.living {\n\t\ta.finished = true\n\t\ts.mu.Unlock()\n\t\treturn ErrClaimLost\n\t}\n", ""}},
		root("^TestMemoryClaimLost$|^TestMemoryStoreContract$/^Complete"),
	},
	{
		"memory: living claim taken over", "a living attempt is never robbed",
		[]edit{{memory, "s.isAbandoned(standing, now) && !standing.living", "s.isAbandoned(standing, now)"}},
		root(memoryContract + "^Replace"),
	},
	{
		"memory: Abort frees a newer claim", "Abort never touches a newer claim",
		[]edit{{memory, "\tif s.stands(a.record) {\n\t\ts.remove(a.record)\n\t}\n", "\tif r := s.records[a.record.kept.Scope]; r != nil {\n\t\ts.remove(r)\n\t}\n"}},
		root(memoryContract + "^Abort"),
	},
	{
		"memory: purge takes living claims", "purge spares living attempts",
		[]edit{{memory, "case r.kept.State == StateClaimed && !r.living && now", "case r.kept.State == StateClaimed && now"}},
		root("^TestMemoryPurgeBesideClaims$|^TestMemoryStoreContract$/^Purge"),
	},

	// The protocol.
	{
		"protocol: of duplicate keys any counts", "of duplicate keys the last one counts",
		[]edit{{"fingerprint.go", "\t\t\t\tif order >= 0 {", "\t\t\t\tif order > 0 {"}},
		root("^TestCanonical"),
	},
	{
		"protocol: state before content", "content is compared before state",
		[]edit{{protocol, "\tif !same {\n\t\treturn final, refusal(", "\tif !same && record.State == StateCompleted {\n\t\treturn final, refusal("}},
		root("^TestStateTable$"),
	},
	{
		"protocol: expiry ignored", "an expired record is as if there were none",
		[]edit{{protocol, "if record.Expired { // as if there were none", "if false {"}},
		root("^Test(StateTable|ExpiredRecordIsAsNone)$"),
	},
	{
		"protocol: release on a cancelled context", "a client that left leaves no key stuck",
		[]edit{{protocol, "\tctx, cancel := detached(ctx)\n\tdefer cancel()\n\treturn attempt.Abort(ctx)", "\treturn attempt.Abort(ctx)"}},
		root("^TestAttemptEndsThoughTheClientLeft$"),
	},
	{
		"protocol: completion on the request's context", "once create has answered, completion does not depend on the client",
		[]edit{{protocol, "completeCtx, cancel := detached(ctx)", "completeCtx, cancel := context.WithCancel(ctx)"}},
		root("^TestAttemptEndsThoughTheClientLeft$"),
	},
	{
		"protocol: answer although the completion failed", "no answer leaves before its transaction committed",
		[]edit{{protocol, "\t\treturn Answer{}, joinEnded(err, abort(ctx, attempt))", "\t\t_ = joinEnded(err, abort(ctx, attempt))"}},
		root("^TestCompletionFails$"),
	},
	{
		"protocol: 3xx stored", "only a 2xx is stored",
		[]edit{{protocol, "200 <= status && status <= 299", "200 <= status && status <= 399"}},
		root("^TestCreatesAnswer$"),
	},
	{
		"protocol: 1xx stored", "only a 2xx is stored",
		[]edit{{protocol, "200 <= status && status <= 299", "100 <= status && status <= 299"}},
		root("^TestCreatesAnswer$"),
	},
	{
		"protocol: a waiter never slows down", "a storm of duplicates does not wear the database out",
		[]edit{{protocol, "\tw.interval = min(w.interval*2, pollMost)\n", ""}},
		root("^TestWaiterPace$"),
	},
	{
		"protocol: Set-Cookie stored", "a replay carries nobody else's cookie",
		[]edit{{"answer.go", `"Set-Cookie", "Set-Cookie2",`, `"Set-Cookie2",`}},
		root("^Test(StoredHeaders|LayerStoredHeaders)$"),
	},
	{
		"protocol: the first of two keys counts", "two Idempotency-Key headers are a bad key",
		[]edit{{"key.go", "if count > 1 || len(key)", "if len(key)"}},
		root("^Test(Refusals|LayerKeys)$"),
	},

	// The HTTP layer.
	{
		"HTTP: answer before commit", "no answer leaves before its transaction committed",
		[]edit{
			{"handler.go", "\t\t\tl.serve(w, r)\n", "\t\t\tl.serve(w, r.WithContext(context.WithValue(r.Context(), \"w\", w)))\n"},
			{"handler.go", "next.ServeHTTP(&a.held, ", "next.ServeHTTP(ctx.Value(\"w\").(http.ResponseWriter), "},
		},
		root("^TestMiddleware"),
	},
	{
		"HTTP: large answer rolled back", "a create never runs again because its answer was large",
		[]edit{{protocol, "if !isStoredStatus(response.Status) {\n\t\tanswer", "if !isStoredStatus(response.Status) || int64(len(response.Body)) > c.maxStored {\n\t\tanswer"}},
		root("^TestLayerLargeAnswers$"),
	},
	{
		"HTTP: an empty owner passes", "nothing is looked up for a caller that nobody knows",
		[]edit{{"handler.go", `if err != nil || owner == "" {`, `if err != nil {`}},
		root("^TestLayerAsksTheOwnerFirst$"),
	},
	{
		"HTTP: the query is no content", "a request with another query is another request",
		[]edit{{"content.go", "text = appendURLString(text, r.URL.RawQuery)", `text = appendURLString(text, "")`}},
		root("^TestDefaultContentIsFrozen$"),
	},
}
