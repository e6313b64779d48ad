"""Deletion and bounded attempts.

- A deleted dataset says when and why, and since when its bytes are gone (`removed_at`). No job works on it.
- Checks of a dataset and attempts at a release are counted, so that none is repeated for ever.
"""

from alembic import op

revision = "0009"
down_revision = "0008"

TABLES = """
ALTER TABLE datasets ADD COLUMN attempts bigint NOT NULL DEFAULT 0;
ALTER TABLE datasets ADD COLUMN retry_at timestamptz;
ALTER TABLE datasets ADD COLUMN deleted_at timestamptz;
ALTER TABLE datasets ADD COLUMN deleted_by uuid REFERENCES people;
ALTER TABLE datasets ADD COLUMN deletion_reason text;
ALTER TABLE datasets ADD COLUMN removed_at timestamptz;
CREATE INDEX datasets_to_remove ON datasets (state)
    WHERE state IN ('deleted', 'rejected') AND removed_at IS NULL;
UPDATE datasets SET deleted_at = now() WHERE state = 'deleted';
ALTER TABLE jobs ADD COLUMN synthesizer_removed_at timestamptz;
ALTER TABLE releases ADD COLUMN attempts bigint NOT NULL DEFAULT 0
"""

GUARDS = """
CREATE FUNCTION datasets_deletion() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF NEW.state = 'deleted' AND OLD.state <> 'deleted' THEN
        NEW.deleted_at := now();
        -- The row is locked by now, and a job that starts locks it too.
        IF EXISTS (SELECT FROM jobs WHERE NEW.id IN (dataset_id, source_id)
            AND state IN ('queued', 'running')) THEN
            RAISE EXCEPTION 'a job works on this dataset' USING ERRCODE = 'restrict_violation';
        END IF;
    ELSIF (NEW.deleted_at, NEW.deleted_by, NEW.deletion_reason)
        IS DISTINCT FROM (OLD.deleted_at, OLD.deleted_by, OLD.deletion_reason) THEN
        RAISE EXCEPTION 'what is said about a deletion is said when it happens'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.removed_at IS DISTINCT FROM OLD.removed_at
        AND (OLD.removed_at IS NOT NULL OR NEW.state NOT IN ('deleted', 'rejected')) THEN
        RAISE EXCEPTION 'bytes are removed once, of a dataset that is over'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_deletion BEFORE UPDATE ON datasets FOR EACH ROW EXECUTE FUNCTION datasets_deletion()
"""

RIGHTS = """
GRANT UPDATE (deleted_by, deletion_reason) ON datasets TO sluice_service;
GRANT UPDATE (attempts) ON releases TO sluice_service;
GRANT UPDATE (attempts, retry_at, deletion_reason, removed_at) ON datasets TO sluice_train;
GRANT UPDATE (synthesizer_removed_at) ON jobs TO sluice_train;
GRANT DELETE ON diagnostics TO sluice_train;
GRANT SELECT ON releases TO sluice_train;
GRANT UPDATE (attempts) ON releases TO sluice_publish
"""


def upgrade() -> None:
    for statements in (TABLES, GUARDS, RIGHTS):
        op.execute(statements)
