"""Teams: people who share datasets, jobs and reviews; copies of bundles for those who review them.

A dataset belongs to the team that its owner is in when it is registered; jobs and releases follow their
dataset. A person without a team shares with nobody. Quotas are per team.
"""

from alembic import op

revision = "0007"
down_revision = "0006"

TABLES = """
CREATE TABLE teams (
    id uuid PRIMARY KEY,
    name text NOT NULL UNIQUE,
    -- NULL: the default of the site.
    quota_bytes bigint CONSTRAINT teams_quota_bytes CHECK (quota_bytes >= 0),
    quota_jobs bigint CONSTRAINT teams_quota_jobs CHECK (quota_jobs >= 0),
    quota_job_seconds bigint CONSTRAINT teams_quota_job_seconds CHECK (quota_job_seconds >= 1),
    created_at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE people ADD COLUMN team_id uuid REFERENCES teams;
ALTER TABLE datasets ADD COLUMN team_id uuid REFERENCES teams;
-- Said before the first part is signed, where there is a quota; what counts until the dataset is sealed.
ALTER TABLE datasets ADD COLUMN declared_bytes bigint
    CONSTRAINT datasets_declared_bytes CHECK (declared_bytes >= 1);
-- How long a job may run, fixed when it is made, and how long workers have worked on it.
ALTER TABLE jobs ADD COLUMN limit_seconds bigint CONSTRAINT jobs_limit_seconds CHECK (limit_seconds >= 1);
ALTER TABLE jobs ADD COLUMN ran_seconds bigint NOT NULL DEFAULT 0;
CREATE INDEX datasets_by_team ON datasets (team_id, created_at DESC, id DESC);
CREATE INDEX jobs_by_dataset ON jobs (dataset_id);
-- Bundles that lie in the public bucket for their reviewers. A row is there before the first file is put, and
-- until the last is removed.
CREATE TABLE review_copies (
    release_id uuid NOT NULL REFERENCES releases,
    build bigint NOT NULL,
    digest bytea NOT NULL CONSTRAINT review_copies_digest CHECK (length(digest) = 32),
    PRIMARY KEY (release_id, build, digest)
)
"""

GUARDS = """
-- Whatever the application says, a dataset is made in the team of its owner.
CREATE FUNCTION datasets_take_team() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    NEW.team_id := (SELECT team_id FROM people WHERE id = NEW.owner_id);
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_take_team BEFORE INSERT ON datasets
    FOR EACH ROW EXECUTE FUNCTION datasets_take_team();
-- It moves once at most: from no team into the one its owner is in by then.
CREATE FUNCTION datasets_keep_team() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF OLD.team_id IS NOT NULL
        OR NEW.team_id IS DISTINCT FROM (SELECT team_id FROM people WHERE id = NEW.owner_id) THEN
        RAISE EXCEPTION 'a dataset stays in the team it was made in' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_keep_team BEFORE UPDATE ON datasets FOR EACH ROW
    WHEN (NEW.team_id IS DISTINCT FROM OLD.team_id) EXECUTE FUNCTION datasets_keep_team();
-- Who approves: an admin, or somebody the dataset belongs to.
CREATE FUNCTION approvals_by_colleagues() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM releases
            JOIN jobs ON jobs.id = releases.job_id
            JOIN datasets ON datasets.id = jobs.dataset_id
            JOIN people ON people.id = NEW.person_id
        WHERE releases.id = NEW.release_id AND people.role <> 'analyst'
            AND (people.role = 'admin' OR people.team_id = datasets.team_id
                OR people.id = datasets.owner_id)) THEN
        RAISE EXCEPTION 'an approval is of an admin or of the team of the dataset'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER approvals_by_colleagues BEFORE INSERT ON approvals
    FOR EACH ROW EXECUTE FUNCTION approvals_by_colleagues()
"""

RIGHTS = """
GRANT SELECT, INSERT ON teams TO sluice_service;
GRANT UPDATE (team_id) ON people, datasets TO sluice_service;
GRANT UPDATE (quota_bytes, quota_jobs, quota_job_seconds) ON teams TO sluice_service;
GRANT UPDATE (declared_bytes) ON datasets TO sluice_service;
GRANT UPDATE (ran_seconds) ON jobs TO sluice_train;
GRANT SELECT ON review_copies TO sluice_service, sluice_sweep;
GRANT SELECT, INSERT, DELETE ON review_copies TO sluice_publish
"""


def upgrade() -> None:
    for statements in (TABLES, GUARDS, RIGHTS):
        op.execute(statements)
