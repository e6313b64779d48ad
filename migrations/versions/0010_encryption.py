"""Uploads are encrypted under a data key per dataset; deleting a dataset destroys its key.

- `wrapped_key` is the data key, encrypted for the train worker; `key_id` names the key-encryption key. It can
  be set until the upload is sealed. Whoever sets the state `deleted` removes it.
- No upload is sealed without one.
- Checkpoints from before are not encrypted and are no longer read: jobs that were under way start over.
"""

from alembic import op

revision = "0010"
down_revision = "0009"

TABLES = """
ALTER TABLE datasets ADD COLUMN content_sha256 bytea
    CONSTRAINT datasets_content_sha256
    CHECK (content_sha256 IS NULL OR length(content_sha256) = 32 AND public);
ALTER TABLE datasets ADD COLUMN key_id text;
ALTER TABLE datasets ADD COLUMN wrapped_key bytea
    CONSTRAINT datasets_wrapped_key
    CHECK (wrapped_key IS NULL OR length(wrapped_key) BETWEEN 384 AND 1024 AND key_id IS NOT NULL);
UPDATE jobs SET checkpoint = NULL WHERE checkpoint IS NOT NULL AND state IN ('queued', 'running')
"""

GUARDS = """
CREATE FUNCTION datasets_key() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF NEW.state = 'deleted' THEN
        NEW.wrapped_key := NULL;
    ELSIF OLD.state NOT IN ('draft', 'uploading') AND NEW.wrapped_key IS DISTINCT FROM OLD.wrapped_key THEN
        RAISE EXCEPTION 'the key of a sealed dataset stays as it is' USING ERRCODE = 'restrict_violation';
    ELSIF OLD.state = 'uploading' AND NEW.state = 'checking' AND NEW.wrapped_key IS NULL THEN
        RAISE EXCEPTION 'an upload is sealed with its key' USING ERRCODE = 'restrict_violation';
    END IF;
    IF OLD.state NOT IN ('draft', 'uploading') AND NEW.key_id IS DISTINCT FROM OLD.key_id
        OR OLD.content_sha256 IS NOT NULL AND NEW.content_sha256 IS DISTINCT FROM OLD.content_sha256 THEN
        RAISE EXCEPTION 'what is fixed about a dataset stays as it is' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_key BEFORE UPDATE ON datasets FOR EACH ROW EXECUTE FUNCTION datasets_key()
"""

RIGHTS = """
GRANT UPDATE (key_id, wrapped_key) ON datasets TO sluice_service;
GRANT UPDATE (content_sha256) ON datasets TO sluice_train
"""


def upgrade() -> None:
    for statements in (TABLES, GUARDS, RIGHTS):
        op.execute(statements)
