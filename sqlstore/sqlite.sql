-- The table in which HoldSend keeps its records in an SQLite database: one row for each (owner, operation, key).
--
-- It may be run again at any time, also by many processes at once. Changes to this file only ever add. Times are
-- milliseconds since 1970. It needs SQLite 3.42 or newer.
CREATE TABLE IF NOT EXISTS holdsend_records (
	owner        TEXT NOT NULL,
	operation    TEXT NOT NULL,
	key          TEXT NOT NULL,
	state        TEXT NOT NULL CHECK (state IN ('claimed', 'completed', 'gone')),
	fingerprint  TEXT NOT NULL,
	claim_id     TEXT NOT NULL,              -- of the attempt that holds or completed the record
	-- Set by the first statement of the attempt's transaction. Seen on a claim, it says that this transaction was
	-- committed without completing the record: create committed by itself. Such a claim is never taken over.
	marked       INTEGER NOT NULL DEFAULT 0,
	claimed_at   INTEGER NOT NULL,
	completed_at INTEGER,
	expires_at   INTEGER,                    -- NULL: kept until erased
	status       INTEGER,                    -- the answer, from here on: NULL while claimed and once gone
	header       TEXT,                       -- a JSON object of arrays, each byte as one character
	body         BLOB,
	resource_ref TEXT,
	PRIMARY KEY (owner, operation, key)
) STRICT;

-- For TombstoneResource.
CREATE INDEX IF NOT EXISTS holdsend_records_resource ON holdsend_records (owner, operation, resource_ref) WHERE resource_ref IS NOT NULL;

-- For PurgeExpired: expired records, and claims that nobody finished.
CREATE INDEX IF NOT EXISTS holdsend_records_expiry ON holdsend_records (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS holdsend_records_claims ON holdsend_records (claimed_at) WHERE state = 'claimed';
