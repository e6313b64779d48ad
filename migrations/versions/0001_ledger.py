"""People, datasets, accounts and their append-only ledger, jobs, signs of life, and who may do what.

Going back is restoring a backup: a ledger has no way down.
"""

from alembic import op

revision = "0001"
down_revision = None

APPLICATION = ("sluice_service", "sluice_train", "sluice_publish", "sluice_sweep")
EVERYONE = ", ".join(APPLICATION)

TABLES = """
CREATE TABLE people (
    id uuid PRIMARY KEY,
    name text NOT NULL UNIQUE,
    role text NOT NULL CONSTRAINT people_role CHECK (role IN ('admin', 'curator', 'analyst')),
    subject text UNIQUE,
    created_at timestamptz NOT NULL DEFAULT now(),
    disabled_at timestamptz
);
CREATE TABLE keys (
    id uuid PRIMARY KEY,
    person_id uuid NOT NULL REFERENCES people,
    label text NOT NULL,
    digest bytea NOT NULL UNIQUE CONSTRAINT keys_digest CHECK (length(digest) = 32),
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    revoked_at timestamptz
);
CREATE TABLE accounts (
    id uuid PRIMARY KEY,
    relation text NOT NULL CONSTRAINT accounts_relation CHECK (relation IN ('add_remove', 'replace_one')),
    epsilon double precision NOT NULL CONSTRAINT accounts_epsilon CHECK (epsilon > 0),
    delta double precision NOT NULL CONSTRAINT accounts_delta CHECK (delta > 0 AND delta < 1),
    renyi_order smallint NOT NULL CONSTRAINT accounts_order CHECK (renyi_order BETWEEN 2 AND 1024),
    capacity bigint NOT NULL,
    held bigint NOT NULL DEFAULT 0,
    settled bigint NOT NULL DEFAULT 0,
    moves bigint NOT NULL DEFAULT 0,
    head bytea NOT NULL CONSTRAINT accounts_head CHECK (length(head) = 32),
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT accounts_signs CHECK (capacity >= 0 AND held >= 0 AND settled >= 0),
    -- Written this way round the sum cannot overflow.
    CONSTRAINT accounts_within_capacity CHECK (held <= capacity - settled)
);
-- What was ever uploaded, by content: the people in it keep their account when a dataset is deleted.
CREATE TABLE contents (
    sha256 bytea PRIMARY KEY CONSTRAINT contents_sha256 CHECK (length(sha256) = 32),
    account_id uuid NOT NULL REFERENCES accounts
);
CREATE TABLE datasets (
    id uuid PRIMARY KEY,
    owner_id uuid NOT NULL REFERENCES people,
    name text NOT NULL,
    schema jsonb NOT NULL,
    nominal_size bigint NOT NULL CONSTRAINT datasets_nominal_size CHECK (nominal_size >= 1),
    relation text NOT NULL,
    epsilon double precision NOT NULL,
    delta double precision NOT NULL,
    renyi_order smallint NOT NULL,
    parent_id uuid REFERENCES datasets,
    account_id uuid REFERENCES accounts,
    state text NOT NULL CONSTRAINT datasets_state
        CHECK (state IN ('draft', 'uploading', 'checking', 'ready', 'rejected', 'deleted')),
    fault text,
    object_key text NOT NULL UNIQUE,
    upload_id text,
    size bigint,
    sha256 bytea,
    report jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    sealed_at timestamptz,
    checked_at timestamptz,
    CONSTRAINT datasets_sealed CHECK (
        state IN ('draft', 'uploading', 'deleted')
        OR (account_id IS NOT NULL AND size IS NOT NULL AND sha256 IS NOT NULL AND sealed_at IS NOT NULL))
);
CREATE INDEX datasets_by_owner ON datasets (owner_id, created_at DESC, id DESC);
CREATE TABLE jobs (
    id uuid PRIMARY KEY,
    dataset_id uuid NOT NULL REFERENCES datasets,
    account_id uuid NOT NULL REFERENCES accounts,
    owner_id uuid NOT NULL REFERENCES people,
    plan jsonb NOT NULL,
    event jsonb NOT NULL,
    cost bigint NOT NULL CONSTRAINT jobs_cost CHECK (cost >= 0),
    readings jsonb NOT NULL,
    state text NOT NULL CONSTRAINT jobs_state
        CHECK (state IN ('queued', 'running', 'trained', 'failed', 'cancelled')),
    fault text,
    step bigint NOT NULL DEFAULT 0,
    steps bigint NOT NULL,
    fence bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    checkpoint bigint,
    synthesizer_key text,
    synthesizer_sha256 bytea,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    opened_at timestamptz,
    finished_at timestamptz,
    cancel_asked_at timestamptz,
    UNIQUE (id, account_id, cost)
);
CREATE INDEX jobs_by_owner ON jobs (owner_id, created_at DESC, id DESC);
CREATE INDEX jobs_unfinished ON jobs (state) WHERE state IN ('queued', 'running');
CREATE TABLE entries (
    account_id uuid NOT NULL REFERENCES accounts,
    number bigint NOT NULL CONSTRAINT entries_number CHECK (number >= 1),
    kind text NOT NULL CONSTRAINT entries_kind CHECK (kind IN ('grant', 'reserve', 'settle', 'void')),
    cost bigint NOT NULL CONSTRAINT entries_cost CHECK (cost >= 0),
    job_id uuid,
    event jsonb,
    readings jsonb,
    terms jsonb,
    actor text NOT NULL,
    reason text NOT NULL,
    at timestamptz NOT NULL,
    previous bytea NOT NULL CONSTRAINT entries_previous CHECK (length(previous) = 32),
    digest bytea NOT NULL CONSTRAINT entries_digest CHECK (length(digest) = 32),
    PRIMARY KEY (account_id, number),
    CONSTRAINT entries_job CHECK (kind = 'grant' OR kind = 'settle' OR job_id IS NOT NULL),
    CONSTRAINT entries_terms CHECK ((kind = 'grant') = (terms IS NOT NULL)),
    -- A promise is made before its job is written; at the end of the transaction both say the same.
    CONSTRAINT entries_of_job FOREIGN KEY (job_id, account_id, cost) REFERENCES jobs (id, account_id, cost)
        DEFERRABLE INITIALLY DEFERRED
);
CREATE UNIQUE INDEX entries_reserved_once ON entries (account_id, job_id) WHERE kind = 'reserve';
CREATE UNIQUE INDEX entries_ended_once ON entries (account_id, job_id) WHERE kind IN ('settle', 'void');
CREATE TABLE grants (
    id uuid PRIMARY KEY,
    account_id uuid NOT NULL REFERENCES accounts,
    epsilon double precision NOT NULL,
    reason text NOT NULL,
    proposed_by uuid NOT NULL REFERENCES people,
    proposed_at timestamptz NOT NULL DEFAULT now(),
    decided_by uuid REFERENCES people,
    decided_at timestamptz,
    state text NOT NULL CONSTRAINT grants_state CHECK (state IN ('proposed', 'confirmed', 'withdrawn')),
    CONSTRAINT grants_two_people CHECK (state <> 'confirmed' OR decided_by <> proposed_by)
);
CREATE UNIQUE INDEX grants_one_open ON grants (account_id) WHERE state = 'proposed';
-- First answers, kept for ever: the same key and body get the same answer.
CREATE TABLE replies (
    person_id uuid NOT NULL REFERENCES people,
    key text NOT NULL,
    request bytea NOT NULL CONSTRAINT replies_request CHECK (length(request) = 32),
    status smallint,
    body jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (person_id, key)
);
CREATE TABLE witness (
    id smallint PRIMARY KEY CONSTRAINT witness_one CHECK (id = 1),
    checked_at timestamptz,
    generation bigint NOT NULL DEFAULT 0,
    behind jsonb,
    acknowledged bigint NOT NULL DEFAULT 0
);
INSERT INTO witness (id) VALUES (1);
CREATE TABLE parts (
    name text PRIMARY KEY,
    role text NOT NULL,
    version text NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now()
)
"""

# What no code of ours may do, whatever it believes.
GUARDS = """
CREATE FUNCTION stay_as_written() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % stay as they are', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER entries_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON entries
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE TRIGGER accounts_stay BEFORE DELETE OR TRUNCATE ON accounts
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE TRIGGER contents_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON contents
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE TRIGGER replies_stay BEFORE DELETE OR TRUNCATE ON replies
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE FUNCTION entries_follow() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    reserved bigint;
    opened timestamptz;
BEGIN
    IF NEW.kind IN ('settle', 'void') AND NEW.job_id IS NOT NULL THEN
        SELECT cost INTO reserved FROM entries
            WHERE account_id = NEW.account_id AND job_id = NEW.job_id AND kind = 'reserve';
        IF reserved IS NULL OR reserved <> NEW.cost THEN
            RAISE EXCEPTION 'a % needs its reserve', NEW.kind USING ERRCODE = 'restrict_violation';
        END IF;
        SELECT opened_at INTO opened FROM jobs WHERE id = NEW.job_id FOR SHARE;
        IF NEW.kind = 'void' AND opened IS NOT NULL THEN
            RAISE EXCEPTION 'records were opened: nothing is given back' USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER entries_in_order BEFORE INSERT ON entries FOR EACH ROW EXECUTE FUNCTION entries_follow();
CREATE FUNCTION jobs_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.opened_at IS NOT NULL THEN
        RAISE EXCEPTION 'a job begins with its records closed' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER jobs_begin BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_begin();
CREATE FUNCTION jobs_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.opened_at IS NOT NULL AND NEW.opened_at IS DISTINCT FROM OLD.opened_at
        OR OLD.state IN ('trained', 'failed', 'cancelled') AND NEW.state <> OLD.state
        OR NEW.fence < OLD.fence
        OR (NEW.id, NEW.dataset_id, NEW.account_id, NEW.plan, NEW.event, NEW.cost)
            IS DISTINCT FROM (OLD.id, OLD.dataset_id, OLD.account_id, OLD.plan, OLD.event, OLD.cost) THEN
        RAISE EXCEPTION 'what is fixed about a job stays as it is' USING ERRCODE = 'restrict_violation';
    END IF;
    -- Charge before touch: records are opened only under a promise that stands.
    IF NEW.opened_at IS NOT NULL AND OLD.opened_at IS NULL AND (
        NOT EXISTS (SELECT FROM entries
            WHERE account_id = NEW.account_id AND job_id = NEW.id AND kind = 'reserve')
        OR EXISTS (SELECT FROM entries
            WHERE account_id = NEW.account_id AND job_id = NEW.id AND kind IN ('settle', 'void'))) THEN
        RAISE EXCEPTION 'a job without a standing promise opens nothing' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER jobs_keep BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_keep();
CREATE FUNCTION accounts_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.relation, NEW.delta, NEW.renyi_order, NEW.created_at)
        IS DISTINCT FROM (OLD.id, OLD.relation, OLD.delta, OLD.renyi_order, OLD.created_at)
        OR NEW.capacity < OLD.capacity OR NEW.settled < OLD.settled OR NEW.moves < OLD.moves THEN
        RAISE EXCEPTION 'what an account was opened with stays as it is' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER accounts_keep BEFORE UPDATE ON accounts FOR EACH ROW EXECUTE FUNCTION accounts_keep();
CREATE FUNCTION datasets_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.owner_id, NEW.schema, NEW.nominal_size, NEW.relation, NEW.parent_id, NEW.object_key)
        IS DISTINCT FROM
        (OLD.id, OLD.owner_id, OLD.schema, OLD.nominal_size, OLD.relation, OLD.parent_id, OLD.object_key)
        OR OLD.sealed_at IS NOT NULL AND (NEW.account_id, NEW.size, NEW.sha256, NEW.sealed_at)
            IS DISTINCT FROM (OLD.account_id, OLD.size, OLD.sha256, OLD.sealed_at) THEN
        RAISE EXCEPTION 'what is fixed about a dataset stays as it is' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_keep BEFORE UPDATE ON datasets FOR EACH ROW EXECUTE FUNCTION datasets_keep()
"""

# Nobody rewrites an entry, nobody touches what an account was opened with.
RIGHTS = f"""
REVOKE ALL ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO {EVERYONE};
GRANT SELECT ON alembic_version TO {EVERYONE};
GRANT SELECT, INSERT, UPDATE, DELETE ON parts TO {EVERYONE};

GRANT SELECT, INSERT ON people, keys, accounts, contents, entries, datasets, jobs, grants, replies
    TO sluice_service;
GRANT UPDATE (disabled_at, role) ON people TO sluice_service;
GRANT UPDATE (revoked_at) ON keys TO sluice_service;
GRANT UPDATE (epsilon, capacity, held, settled, moves, head) ON accounts TO sluice_service;
GRANT UPDATE (state, upload_id, account_id, size, sha256, sealed_at) ON datasets TO sluice_service;
GRANT UPDATE (state, fault, finished_at, cancel_asked_at) ON jobs TO sluice_service;
GRANT UPDATE (state, decided_by, decided_at) ON grants TO sluice_service;
GRANT UPDATE (status, body) ON replies TO sluice_service;
GRANT SELECT ON witness TO sluice_service;
GRANT UPDATE (acknowledged) ON witness TO sluice_service;

GRANT SELECT ON accounts, entries, datasets, jobs TO sluice_train, sluice_sweep;
GRANT INSERT ON entries TO sluice_train, sluice_sweep;
GRANT UPDATE (held, settled, moves, head) ON accounts TO sluice_train, sluice_sweep;
GRANT UPDATE (state, fault, report, checked_at) ON datasets TO sluice_train;
GRANT UPDATE (state, fault, step, fence, lease_until, checkpoint, synthesizer_key, synthesizer_sha256,
    started_at, opened_at, finished_at) ON jobs TO sluice_train, sluice_sweep;
GRANT SELECT ON witness TO sluice_sweep;
GRANT UPDATE (checked_at, generation, behind) ON witness TO sluice_sweep;

GRANT SELECT ON accounts, entries, datasets, jobs TO sluice_publish
"""


def upgrade() -> None:
    for role in APPLICATION:
        # Roles belong to the whole server: another database of ours may have made them, even just now.
        op.execute(f"""
            DO $$ BEGIN
                CREATE ROLE {role} NOLOGIN;
            EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
            END $$""")
    for statements in (TABLES, GUARDS, RIGHTS):
        op.execute(statements)
