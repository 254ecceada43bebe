-- The table in which HoldSend keeps its records: one row for each (owner, operation, key).
--
-- It may be run again at any time, also by many services at once and beside live traffic: what is there already is left
-- alone and not locked. Changes to this file only ever add. It creates no schema.
--
-- A service needs SELECT, INSERT, UPDATE and DELETE on the table (and USAGE on its schema); only whoever runs this file
-- the first time needs CREATE on the schema.
DO $holdsend$
DECLARE
	records regclass;
BEGIN
	-- Services start side by side. Held until this transaction ends; the number is nothing but unlikely to be used
	-- by anybody else.
	PERFORM pg_advisory_xact_lock(5210614398113473127);

	records := to_regclass('holdsend_records');
	IF records IS NULL THEN
		CREATE TABLE holdsend_records (
			-- Collation "C": an upgrade of the system's C library re-sorts any other collation, and a unique
			-- index that is out of order would admit a second claim.
			owner        text COLLATE "C" NOT NULL,
			operation    text COLLATE "C" NOT NULL,
			key          text COLLATE "C" NOT NULL,
			state        text COLLATE "C" NOT NULL, -- claimed, completed or gone. No CHECK: each write would parse it anew
			fingerprint  text COLLATE "C" NOT NULL,
			claim_id     uuid NOT NULL,        -- of the attempt that holds or completed the record
			claimed_at   timestamptz NOT NULL, -- infinity: create committed by itself and then failed; never freed
			completed_at timestamptz,
			expires_at   timestamptz,          -- NULL: kept until erased
			status       smallint,             -- the answer, from here on: NULL while claimed and once gone
			header       text,                 -- a JSON object of arrays, each byte as one character
			body         bytea,
			resource_ref text COLLATE "C",
			PRIMARY KEY (owner, operation, key)
		);
		records := to_regclass('holdsend_records');
	ELSIF NOT EXISTS (SELECT FROM pg_class WHERE oid = records) THEN
		-- Another service has just created it, all of it, and under repeatable read this transaction cannot see that.
		RETURN;
	END IF;

	-- An index is looked for by its columns, and Postgres picks its name: unique and short enough for any table's.
	-- (CREATE INDEX IF NOT EXISTS would queue behind every open transaction that has written to the table, and
	-- everybody else behind it.)

	-- For TombstoneResource.
	IF NOT EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
			WHERE i.indrelid = records AND a.attname = 'resource_ref') THEN
		CREATE INDEX ON holdsend_records (owner, operation, resource_ref) WHERE resource_ref IS NOT NULL;
	END IF;

	-- For PurgeExpired: expired records.
	IF NOT EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
			WHERE i.indrelid = records AND a.attname = 'expires_at') THEN
		CREATE INDEX ON holdsend_records (expires_at) WHERE expires_at IS NOT NULL;
	END IF;

	-- For PurgeExpired: claims that nobody finished. Its condition is one that no statement of a create has: under
	-- WHERE state = 'claimed' the planner took this index to find a claim by its scope, and walked over every claim
	-- that was completed since the last vacuum.
	IF NOT EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
			WHERE i.indrelid = records AND a.attname = 'claimed_at') THEN
		CREATE INDEX ON holdsend_records (claimed_at) WHERE completed_at IS NULL;
	END IF;
END
$holdsend$;
