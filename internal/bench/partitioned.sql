-- The records, partitioned by owner. Run this before PostgresSchema, which then adds the indexes. Change the number of
-- partitions here, for it cannot be changed later without moving the records.
CREATE TABLE holdsend_records (
	owner        text COLLATE "C" NOT NULL,
	operation    text COLLATE "C" NOT NULL,
	key          text COLLATE "C" NOT NULL,
	state        text COLLATE "C" NOT NULL,
	fingerprint  text COLLATE "C" NOT NULL,
	claim_id     uuid NOT NULL,
	claimed_at   timestamptz NOT NULL,
	completed_at timestamptz,
	expires_at   timestamptz,
	status       smallint,
	header       text,
	body         bytea,
	resource_ref text COLLATE "C",
	PRIMARY KEY (owner, operation, key)
) PARTITION BY HASH (owner);

DO $$
DECLARE
	partitions int := 16;
BEGIN
	FOR n IN 0 .. partitions - 1 LOOP
		EXECUTE format('CREATE TABLE holdsend_records_%s PARTITION OF holdsend_records FOR VALUES WITH (MODULUS %s, REMAINDER %s)',
			n, partitions, n);
	END LOOP;
END
$$;
