"""Relays: a job that goes on from the generator of another, which may be another owner's."""

from alembic import op

revision = "0004"
down_revision = "0003"

TABLES = """
ALTER TABLE jobs ADD COLUMN after_id uuid REFERENCES jobs;
ALTER TABLE jobs ADD COLUMN shared boolean NOT NULL DEFAULT false
"""

GUARDS = """
-- What is handed on was trained, and handed on by its owner.
CREATE FUNCTION relays_follow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.shared OR NEW.after_id IS NOT NULL) AND coalesce(NEW.plan ->> 'kind', '') <> 'gswgan'
        OR NEW.after_id IS NOT NULL AND NOT EXISTS (
            SELECT FROM jobs WHERE id = NEW.after_id AND state = 'trained' AND shared) THEN
        RAISE EXCEPTION 'a relay goes on from a trained job that is shared'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER relays_follow BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION relays_follow();
CREATE TRIGGER relays_stay BEFORE UPDATE ON jobs FOR EACH ROW
    WHEN ((NEW.after_id, NEW.shared) IS DISTINCT FROM (OLD.after_id, OLD.shared))
    EXECUTE FUNCTION sources_stay()
"""


def upgrade() -> None:
    for statements in (TABLES, GUARDS):
        op.execute(statements)
