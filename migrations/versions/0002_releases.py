"""Releases, who approved them and may read them, the keys that sign them, the lists of those withdrawn."""

from alembic import op

revision = "0002"
down_revision = "0001"

TABLES = """
CREATE TABLE releases (
    id uuid PRIMARY KEY,
    job_id uuid NOT NULL REFERENCES jobs,
    author_id uuid NOT NULL REFERENCES people,
    name text NOT NULL,
    note text NOT NULL,
    licence text NOT NULL,
    count bigint NOT NULL CONSTRAINT releases_count CHECK (count BETWEEN 1 AND 1000000),
    seed bigint NOT NULL CONSTRAINT releases_seed CHECK (seed >= 0),
    formats text[] NOT NULL,
    audience text NOT NULL CONSTRAINT releases_audience CHECK (audience IN ('everyone', 'granted')),
    reviewers smallint NOT NULL CONSTRAINT releases_reviewers CHECK (reviewers IN (1, 2)),
    supersedes uuid REFERENCES releases,
    state text NOT NULL CONSTRAINT releases_state CHECK (state IN ('building', 'in_review', 'approved',
        'publishing', 'published', 'superseded', 'withdrawing', 'withdrawn', 'discarded', 'failed')),
    fault text,
    build bigint NOT NULL DEFAULT 1,
    fence bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    done bigint NOT NULL DEFAULT 0,
    digest bytea CONSTRAINT releases_digest CHECK (length(digest) = 32),
    files jsonb,
    manifest jsonb,
    privacy jsonb,
    preview bytea,
    attestation text,
    reason text,
    created_at timestamptz NOT NULL DEFAULT now(),
    built_at timestamptz,
    published_at timestamptz,
    withdrawn_at timestamptz,
    CONSTRAINT releases_built CHECK (state IN ('building', 'discarded', 'failed')
        OR (digest IS NOT NULL AND files IS NOT NULL AND manifest IS NOT NULL AND privacy IS NOT NULL)),
    CONSTRAINT releases_attested CHECK (state NOT IN ('published', 'superseded')
        OR (attestation IS NOT NULL AND published_at IS NOT NULL))
);
CREATE INDEX releases_by_time ON releases (created_at DESC, id DESC);
CREATE INDEX releases_unfinished ON releases (state) WHERE state IN ('building', 'publishing', 'withdrawing');
CREATE TABLE approvals (
    release_id uuid NOT NULL REFERENCES releases,
    digest bytea NOT NULL CONSTRAINT approvals_digest CHECK (length(digest) = 32),
    person_id uuid NOT NULL REFERENCES people,
    note text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (release_id, digest, person_id)
);
CREATE TABLE readers (
    release_id uuid NOT NULL REFERENCES releases,
    person_id uuid NOT NULL REFERENCES people,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (release_id, person_id)
);
CREATE TABLE signing_keys (
    id text PRIMARY KEY,
    public bytea NOT NULL UNIQUE CONSTRAINT signing_keys_public CHECK (length(public) = 32),
    since timestamptz NOT NULL DEFAULT now()
);
-- Signed lists of what was withdrawn, each with all before it; the one with the highest number is in force.
CREATE TABLE revocations (
    number bigint PRIMARY KEY,
    envelope text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);
-- For the curator who owns the job, and nobody else: these are facts about records.
CREATE TABLE diagnostics (
    job_id uuid PRIMARY KEY REFERENCES jobs,
    fence bigint NOT NULL,
    lines text NOT NULL,
    picture text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
)
"""

GUARDS = """
CREATE TRIGGER approvals_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON approvals
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE TRIGGER signing_keys_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON signing_keys
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE TRIGGER revocations_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON revocations
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE TRIGGER releases_stay BEFORE DELETE OR TRUNCATE ON releases
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE FUNCTION approvals_follow() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    found releases;
BEGIN
    SELECT * INTO found FROM releases WHERE id = NEW.release_id FOR UPDATE;
    IF found.state NOT IN ('in_review', 'approved') OR NEW.digest IS DISTINCT FROM found.digest THEN
        RAISE EXCEPTION 'an approval is of the bundle under review' USING ERRCODE = 'restrict_violation';
    END IF;
    IF found.reviewers > 1 AND NEW.person_id = found.author_id THEN
        RAISE EXCEPTION 'an author does not approve' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER approvals_follow BEFORE INSERT ON approvals FOR EACH ROW EXECUTE FUNCTION approvals_follow();
-- Nothing leaves unpaid: a release is of a job that is settled.
CREATE FUNCTION releases_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state <> 'building' OR NOT EXISTS (
        SELECT FROM jobs JOIN entries ON entries.job_id = jobs.id AND entries.kind = 'settle'
        WHERE jobs.id = NEW.job_id AND jobs.state = 'trained') THEN
        RAISE EXCEPTION 'a release begins with a job that is trained and settled'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER releases_begin BEFORE INSERT ON releases FOR EACH ROW EXECUTE FUNCTION releases_begin();
CREATE FUNCTION releases_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.job_id, NEW.author_id, NEW.name, NEW.note, NEW.licence, NEW.count, NEW.seed, NEW.formats,
        NEW.reviewers, NEW.supersedes, NEW.created_at)
        IS DISTINCT FROM
        (OLD.id, OLD.job_id, OLD.author_id, OLD.name, OLD.note, OLD.licence, OLD.count, OLD.seed, OLD.formats,
        OLD.reviewers, OLD.supersedes, OLD.created_at)
        OR NEW.fence < OLD.fence OR NEW.build < OLD.build THEN
        RAISE EXCEPTION 'what is fixed about a release stays as it is' USING ERRCODE = 'restrict_violation';
    END IF;
    -- What was built changes only while it is being built.
    IF OLD.state <> 'building' AND NEW.state <> 'building'
        AND (NEW.digest, NEW.files, NEW.manifest, NEW.privacy, NEW.preview)
            IS DISTINCT FROM (OLD.digest, OLD.files, OLD.manifest, OLD.privacy, OLD.preview) THEN
        RAISE EXCEPTION 'a bundle stays as it was built' USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.state IS DISTINCT FROM OLD.state AND (OLD.state, NEW.state) NOT IN (
        ('building', 'in_review'), ('building', 'failed'), ('building', 'discarded'),
        ('in_review', 'approved'), ('in_review', 'building'), ('in_review', 'discarded'),
        ('approved', 'publishing'), ('approved', 'building'), ('approved', 'discarded'),
        ('publishing', 'published'), ('failed', 'building'), ('failed', 'discarded'),
        ('published', 'superseded'), ('published', 'withdrawing'), ('superseded', 'withdrawing'),
        ('publishing', 'withdrawing'), ('withdrawing', 'withdrawn')) THEN
        RAISE EXCEPTION 'a release does not go from % to %', OLD.state, NEW.state
            USING ERRCODE = 'restrict_violation';
    END IF;
    -- Four eyes: what is published was approved, byte for byte, by somebody who may.
    IF NEW.state IN ('approved', 'publishing', 'published') AND NOT EXISTS (
        SELECT FROM approvals WHERE release_id = NEW.id AND digest = NEW.digest
            AND (NEW.reviewers = 1 OR person_id <> NEW.author_id)) THEN
        RAISE EXCEPTION 'nobody approved this bundle' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER releases_keep BEFORE UPDATE ON releases FOR EACH ROW EXECUTE FUNCTION releases_keep()
"""

RIGHTS = """
GRANT SELECT, INSERT ON releases, approvals, readers TO sluice_service;
GRANT DELETE ON readers TO sluice_service;
GRANT UPDATE (state, fault, build, audience, reason, withdrawn_at, lease_until, digest, done) ON releases
    TO sluice_service;
GRANT SELECT ON signing_keys, revocations, diagnostics TO sluice_service;

GRANT SELECT ON releases, approvals, revocations TO sluice_publish;
GRANT UPDATE (state, fault, fence, lease_until, done, digest, files, manifest, privacy, preview, attestation,
    built_at, published_at, withdrawn_at) ON releases TO sluice_publish;
GRANT SELECT, INSERT ON signing_keys TO sluice_publish;
GRANT INSERT ON revocations TO sluice_publish;

GRANT SELECT ON releases, revocations TO sluice_sweep;

GRANT SELECT, INSERT, UPDATE ON diagnostics TO sluice_train
"""


def upgrade() -> None:
    for statements in (TABLES, GUARDS, RIGHTS):
        op.execute(statements)
