"""Triggers look up what a method needs and makes in a table, instead of naming methods.

`python -m migrations` fills `methods` from sluice.methods after each upgrade; no application role may
write it. A kind of plan that is not in the table needs no source, cannot be a relay and makes samples.
"""

from alembic import op

revision = "0011"
down_revision = "0010"

METHODS = """
CREATE TABLE methods (
    name text PRIMARY KEY,
    needs_source boolean NOT NULL,
    can_relay boolean NOT NULL,
    makes_samples boolean NOT NULL
);
GRANT SELECT ON methods TO sluice_service;

-- Learning from a source is not charged: it is public, confirmed, and on no account with private records.
CREATE OR REPLACE FUNCTION sources_are_public() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF (NEW.source_id IS NOT NULL) <> EXISTS (
        SELECT FROM methods WHERE name = NEW.plan ->> 'kind' AND needs_source) THEN
        RAISE EXCEPTION 'a job has a source if its method needs one, and only then'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.source_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM datasets AS source WHERE source.id = NEW.source_id AND source.public
            AND source.state = 'ready'
            AND EXISTS (SELECT FROM reviews WHERE dataset_id = source.id AND decision = 'accept')
            AND NOT EXISTS (SELECT FROM datasets AS other
                WHERE NOT other.public AND other.account_id IS NOT NULL
                    AND (other.account_id = source.account_id
                        OR other.matches @> jsonb_build_array(jsonb_build_object('dataset', source.id))))
        ) THEN
        RAISE EXCEPTION 'a source is public' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
-- A relay continues the generator of a trained job whose owner shared it.
CREATE OR REPLACE FUNCTION relays_follow() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF (NEW.shared OR NEW.after_id IS NOT NULL) AND NOT EXISTS (
            SELECT FROM methods WHERE name = NEW.plan ->> 'kind' AND can_relay)
        OR NEW.after_id IS NOT NULL AND NOT EXISTS (
            SELECT FROM jobs WHERE id = NEW.after_id AND state = 'trained' AND shared) THEN
        RAISE EXCEPTION 'a relay goes on from a trained job that is shared'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE FUNCTION classifiers_have_no_samples() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF (cardinality(NEW.formats) = 0) <> EXISTS (
        SELECT FROM jobs JOIN methods ON methods.name = jobs.plan ->> 'kind'
        WHERE jobs.id = NEW.job_id AND NOT methods.makes_samples) THEN
        RAISE EXCEPTION 'a release has samples if its method makes them, and only then'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
"""


def upgrade() -> None:
    op.execute(METHODS)
