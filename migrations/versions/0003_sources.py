"""Public datasets, and jobs that learn from one of them beside the private one they are charged for."""

from alembic import op

revision = "0003"
down_revision = "0002"

TABLES = """
ALTER TABLE datasets ADD COLUMN public boolean NOT NULL DEFAULT false;
ALTER TABLE jobs ADD COLUMN source_id uuid REFERENCES datasets;
-- A classifier is released without samples.
ALTER TABLE releases DROP CONSTRAINT releases_count;
ALTER TABLE releases ADD CONSTRAINT releases_count CHECK (
    count BETWEEN 0 AND 1000000 AND (count = 0) = (cardinality(formats) = 0))
"""

GUARDS = """
-- Nobody pays for what a source tells, so no private dataset may ever have been on its account.
CREATE FUNCTION sources_are_public() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (coalesce(NEW.plan ->> 'kind', '') = 'adapt') <> (NEW.source_id IS NOT NULL) THEN
        RAISE EXCEPTION 'an adaptation has a source, and nothing else has'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.source_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM datasets AS source WHERE source.id = NEW.source_id AND source.public AND NOT EXISTS (
            SELECT FROM datasets AS other
            WHERE other.account_id = source.account_id AND NOT other.public)) THEN
        RAISE EXCEPTION 'a source is public' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER sources_are_public BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION sources_are_public();
CREATE FUNCTION classifiers_have_no_samples() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM jobs WHERE id = NEW.job_id
        AND (source_id IS NOT NULL) = (cardinality(NEW.formats) = 0)) THEN
        RAISE EXCEPTION 'an adaptation has no samples, and everything else has'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER classifiers_have_no_samples BEFORE INSERT ON releases
    FOR EACH ROW EXECUTE FUNCTION classifiers_have_no_samples();
CREATE FUNCTION sources_stay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'what is public, and what a job builds on, stays as it is'
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER public_stays BEFORE UPDATE ON datasets FOR EACH ROW
    WHEN (NEW.public IS DISTINCT FROM OLD.public) EXECUTE FUNCTION sources_stay();
CREATE TRIGGER sources_stay BEFORE UPDATE ON jobs FOR EACH ROW
    WHEN (NEW.source_id IS DISTINCT FROM OLD.source_id) EXECUTE FUNCTION sources_stay()
"""


def upgrade() -> None:
    for statements in (TABLES, GUARDS):
        op.execute(statements)
