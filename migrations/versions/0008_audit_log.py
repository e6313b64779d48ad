"""The audit log: who did, saw or downloaded what, from where, when.

- Rows are added by add_audit() alone, which numbers and chains them under one lock. No application role may
  write the table.
- A row's digest is the SHA-256 of the digest before it and of its fields, each as LENGTH:TEXT, or - for none
  (src/sluice/release/audit_log.py computes the same).
- Old rows are removed from the old end alone, by trim_audit_log(), which writes down the number and digest
  of the last one it removed.
"""

from alembic import op

revision = "0008"
down_revision = "0007"

TABLES = """
CREATE TABLE audit_log (
    number bigint PRIMARY KEY,
    at timestamptz NOT NULL,
    writer text NOT NULL,
    person_id uuid,
    name text,
    role text,
    key_id uuid,
    address text,
    request text,
    action text NOT NULL,
    objects text[] NOT NULL,
    status smallint,
    answers bigint,
    times bigint NOT NULL CONSTRAINT audit_log_times CHECK (times >= 1),
    previous bytea NOT NULL CONSTRAINT audit_log_previous CHECK (length(previous) = 32),
    digest bytea NOT NULL CONSTRAINT audit_log_digest CHECK (length(digest) = 32)
);
CREATE INDEX audit_log_by_person ON audit_log (person_id, number);
CREATE INDEX audit_log_by_object ON audit_log USING gin (objects);
CREATE INDEX audit_log_by_time ON audit_log USING brin (at)
"""

FUNCTIONS = """
CREATE FUNCTION audit_fields(VARIADIC fields text[]) RETURNS text LANGUAGE sql IMMUTABLE
    SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT coalesce(string_agg(coalesce(octet_length(field) || ':' || field, '-'), '' ORDER BY place), '')
        FROM unnest(fields) WITH ORDINALITY AS given (field, place)
$$;
CREATE FUNCTION audit_digest(one audit_log) RETURNS bytea LANGUAGE sql IMMUTABLE
    SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT sha256(one.previous || convert_to(audit_fields(one.number::text,
        to_char(one.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), one.writer, one.person_id::text,
        one.name, one.role, one.key_id::text, one.address, one.request, one.action,
        audit_fields(VARIADIC one.objects), one.status::text, one.answers::text, one.times::text), 'UTF8'))
$$;

-- One statement of its own transaction: the lock is held until it ends. A row that is not durable at once is
-- so before any later change is: the log of writes is written in order.
CREATE FUNCTION add_audit(person uuid, name text, role text, key uuid, address text, request text,
    action text, objects text[], status int, answers bigint, times bigint, durable boolean)
    RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    one audit_log;
BEGIN
    PERFORM pg_advisory_xact_lock(340813);
    -- Said by trim_audit_log, which has just removed these rows; a role itself could only make it up.
    IF action = 'audit log trimmed' AND EXISTS (SELECT FROM audit_log AS log
        WHERE log.number = (SELECT min(oldest.number) FROM audit_log AS oldest)
            AND (log.number::text, encode(log.previous, 'hex'))
                IS DISTINCT FROM (((add_audit.objects)[1]::bigint + 1)::text, (add_audit.objects)[2])) THEN
        RAISE EXCEPTION 'these rows were not removed' USING ERRCODE = 'restrict_violation';
    END IF;
    SELECT log.number + 1, log.digest INTO one.number, one.previous
        FROM audit_log AS log ORDER BY log.number DESC LIMIT 1;
    one.number := coalesce(one.number, 1);
    one.previous := coalesce(one.previous, decode(repeat('00', 32), 'hex'));
    one.at := clock_timestamp();
    one.writer := session_user;
    one.person_id := person;
    one.name := name;
    one.role := role;
    one.key_id := key;
    one.address := address;
    one.request := request;
    one.action := action;
    one.objects := objects;
    one.status := status;
    one.answers := answers;
    one.times := times;
    one.digest := audit_digest(one);
    INSERT INTO audit_log SELECT one.*;
    IF NOT durable THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    RETURN one.number;
END $$;

-- Gives how many rows it removed. Rows of the last 30 days stay, whatever is asked.
CREATE FUNCTION trim_audit_log(before timestamptz) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    last audit_log;
    removed bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(340813);
    -- Up to the first row that is younger: clocks may have been set back.
    SELECT * INTO last FROM audit_log WHERE number < (SELECT coalesce(min(number), 0) FROM audit_log
        WHERE at >= least(before, now() - interval '30 days')) ORDER BY number DESC LIMIT 1;
    IF last.number IS NULL THEN
        RETURN 0;
    END IF;
    DELETE FROM audit_log WHERE number <= last.number;
    GET DIAGNOSTICS removed = ROW_COUNT;
    PERFORM add_audit(NULL, NULL, NULL, NULL, NULL, NULL, 'audit log trimmed',
        ARRAY[last.number::text, encode(last.digest, 'hex')], NULL, NULL, removed, true);
    RETURN removed;
END $$;

CREATE TRIGGER audit_log_stays BEFORE UPDATE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE FUNCTION audit_log_ends() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM audit_log WHERE number < (SELECT max(number) FROM gone))
        OR EXISTS (SELECT FROM gone WHERE at >= now() - interval '30 days') THEN
        RAISE EXCEPTION 'the audit log loses its oldest rows alone' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER audit_log_ends AFTER DELETE ON audit_log REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION audit_log_ends()
"""

RIGHTS = """
REVOKE ALL ON FUNCTION audit_fields, audit_digest, add_audit, trim_audit_log, audit_log_ends FROM PUBLIC;
GRANT SELECT ON audit_log TO sluice_service;
GRANT EXECUTE ON FUNCTION add_audit TO sluice_service, sluice_train, sluice_publish, sluice_sweep;
GRANT EXECUTE ON FUNCTION trim_audit_log TO sluice_sweep
"""


def upgrade() -> None:
    for statements in (TABLES, FUNCTIONS, RIGHTS):
        op.execute(statements)
