"""The whole schema: tables, triggers, functions and what each database role may do.

Revisions 0001 to 0010 of version 0.1 led to this schema (docs/decisions/0050-one-baseline-migration.md).

- The only way to move an account's balance is to insert a row into `entries`: a trigger does it and checks
  the row against the account. No application role may update `accounts`.
- The train worker binds a dataset to its account after it has read the records; sealing binds nothing. A
  dataset that is public, above the site's caps, very small, or overlaps another account is `held` until
  somebody independent of its owner decides (`reviews`).
- Keys are made by redeem_invitation() and add_own_key() alone, which ask for the text of an invitation or of
  a present key: no table holds either.
- Audit rows are added by add_audit() alone, which numbers and chains them under one lock, and removed from
  the old end alone by trim_audit_log().
- Every function has a fixed search_path that ends with pg_temp: a temporary table cannot replace ours.

There is no downgrade: go back by restoring a backup.
"""

from alembic import op

revision = "0010"
down_revision = None

APPLICATION = ("sluice_service", "sluice_train", "sluice_publish", "sluice_sweep")

PEOPLE = """
CREATE TABLE teams (
    id uuid PRIMARY KEY,
    name text NOT NULL UNIQUE,
    -- NULL: the site's default.
    quota_bytes bigint CONSTRAINT teams_quota_bytes CHECK (quota_bytes >= 0),
    quota_jobs bigint CONSTRAINT teams_quota_jobs CHECK (quota_jobs >= 0),
    quota_job_seconds bigint CONSTRAINT teams_quota_job_seconds CHECK (quota_job_seconds >= 1),
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE people (
    id uuid PRIMARY KEY,
    name text NOT NULL UNIQUE,
    role text NOT NULL CONSTRAINT people_role CHECK (role IN ('admin', 'curator', 'analyst')),
    subject text UNIQUE,
    team_id uuid REFERENCES teams,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- NULL: by the installation or by single sign-on.
    created_by uuid REFERENCES people,
    disabled_at timestamptz
);
CREATE TABLE invitations (
    id uuid PRIMARY KEY,
    person_id uuid NOT NULL REFERENCES people,
    -- NULL until it is confirmed.
    digest bytea UNIQUE CONSTRAINT invitations_digest CHECK (length(digest) = 32),
    issued_by uuid REFERENCES people,
    confirmed_by uuid REFERENCES people,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    used_at timestamptz,
    revoked_at timestamptz,
    refused bigint NOT NULL DEFAULT 0,
    CONSTRAINT invitations_expire CHECK (expires_at <= created_at + interval '31 days'),
    CONSTRAINT invitations_used CHECK (used_at IS NULL OR digest IS NOT NULL)
);
CREATE INDEX invitations_by_person ON invitations (person_id);
CREATE TABLE keys (
    id uuid PRIMARY KEY,
    person_id uuid NOT NULL REFERENCES people,
    label text NOT NULL,
    digest bytea NOT NULL UNIQUE CONSTRAINT keys_digest CHECK (length(digest) = 32),
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    revoked_at timestamptz,
    issued_by uuid REFERENCES people,
    invitation_id uuid UNIQUE REFERENCES invitations
);
-- Set by whoever owns the tables (`python -m migrations`), not by the service.
CREATE TABLE rules (
    id smallint PRIMARY KEY CONSTRAINT rules_one CHECK (id = 1),
    independent_days integer NOT NULL CONSTRAINT rules_independent_days
        CHECK (independent_days BETWEEN 1 AND 365)
);
INSERT INTO rules VALUES (1, 7);
-- The first response to each idempotency key, never deleted: the same key and body get the same response.
CREATE TABLE replies (
    person_id uuid NOT NULL REFERENCES people,
    key text NOT NULL,
    request bytea NOT NULL CONSTRAINT replies_request CHECK (length(request) = 32),
    status smallint,
    body jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (person_id, key)
);

-- Follows both people to whoever created or invited them within the set time, and from there on in the same
-- way. They are independent if no person is reached from both: nobody may have had the keys of both.
CREATE FUNCTION independent(one uuid, other uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    WITH RECURSIVE window_start AS (
        SELECT now() - make_interval(days => independent_days) AS at FROM rules
    ), links AS (
        SELECT id AS person, created_by AS inviter FROM people, window_start WHERE created_at > at
        UNION SELECT person_id, issued_by FROM invitations, window_start WHERE used_at > at
        UNION SELECT person_id, confirmed_by FROM invitations, window_start WHERE used_at > at
        -- Keys from before there were invitations: some admin, unknown which, saw their text.
        UNION SELECT person_id, '00000000-0000-0000-0000-000000000000' FROM keys, window_start
            WHERE invitation_id IS NULL AND issued_by IS NULL AND created_at > at
    ), holders (start, person) AS (
        VALUES (one, one), (other, other)
        UNION SELECT holders.start, links.inviter FROM holders JOIN links USING (person)
            WHERE links.inviter IS NOT NULL
    )
    SELECT one IS NOT NULL AND other IS NOT NULL AND NOT EXISTS (
        SELECT FROM holders AS a JOIN holders AS b USING (person) WHERE a.start = one AND b.start = other)
$$;
CREATE FUNCTION is_admin(wanted uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM people WHERE id = wanted AND role = 'admin' AND disabled_at IS NULL)
$$;
-- Until one person could act as an admin, the installation makes the first ones.
CREATE FUNCTION site_has_admin() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM people WHERE role = 'admin' AND (subject IS NOT NULL
        OR EXISTS (SELECT FROM keys WHERE person_id = people.id)))
$$;
-- Returns 'redeemed', or why not. Refusals are counted so that a second use can be seen.
CREATE FUNCTION redeem_invitation(token text, key_id uuid, key_digest bytea, key_label text,
        key_expires timestamptz) RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    wanted invitations;
BEGIN
    SELECT * INTO wanted FROM invitations WHERE digest = sha256(convert_to(token, 'UTF8')) FOR UPDATE;
    IF wanted.id IS NULL THEN
        RETURN 'unknown';
    END IF;
    IF wanted.used_at IS NOT NULL OR wanted.revoked_at IS NOT NULL OR wanted.expires_at <= now() THEN
        UPDATE invitations SET refused = refused + 1 WHERE id = wanted.id;
        RETURN CASE WHEN wanted.used_at IS NOT NULL THEN 'used'
            WHEN wanted.revoked_at IS NOT NULL THEN 'revoked' ELSE 'expired' END;
    END IF;
    UPDATE invitations SET used_at = clock_timestamp() WHERE id = wanted.id;
    -- add_own_key takes this lock too: no older key makes another one meanwhile.
    PERFORM FROM people WHERE id = wanted.person_id FOR UPDATE;
    UPDATE keys SET revoked_at = now() WHERE person_id = wanted.person_id AND revoked_at IS NULL;
    UPDATE people SET disabled_at = NULL WHERE id = wanted.person_id AND disabled_at IS NOT NULL;
    INSERT INTO keys (id, person_id, label, digest, expires_at, issued_by, invitation_id)
        VALUES (key_id, wanted.person_id, key_label, key_digest, key_expires, wanted.issued_by, wanted.id);
    RETURN 'redeemed';
END $$;
-- Adds a key for the owner of a valid one; false if `current_key` is not valid.
CREATE FUNCTION add_own_key(current_key text, key_id uuid, key_digest bytea, key_label text,
        key_expires timestamptz) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    PERFORM FROM people WHERE id = (SELECT person_id FROM keys
        WHERE digest = sha256(convert_to(current_key, 'UTF8'))) FOR UPDATE;
    INSERT INTO keys (id, person_id, label, digest, expires_at, issued_by)
        SELECT key_id, people.id, key_label, key_digest, key_expires, people.id
        FROM keys JOIN people ON people.id = keys.person_id
        WHERE keys.digest = sha256(convert_to(current_key, 'UTF8')) AND keys.revoked_at IS NULL
            AND keys.expires_at > now() AND people.disabled_at IS NULL;
    RETURN FOUND;
END $$;
CREATE FUNCTION people_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_user = 'sluice_service' THEN
        NEW.created_at := now();
        -- People of single sign-on have no creator; others have none only before the site's first admin.
        IF NEW.subject IS NULL AND NOT is_admin(NEW.created_by) AND site_has_admin() THEN
            RAISE EXCEPTION 'people are added by an admin' USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER people_begin BEFORE INSERT ON people FOR EACH ROW EXECUTE FUNCTION people_begin();
CREATE FUNCTION people_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_user = 'sluice_service' AND (NEW.role <> OLD.role AND OLD.subject IS NULL
        OR NEW.disabled_at IS NULL AND OLD.disabled_at IS NOT NULL) THEN
        RAISE EXCEPTION 'a role stays; whoever is disabled comes back by an invitation'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER people_keep BEFORE UPDATE ON people FOR EACH ROW EXECUTE FUNCTION people_keep();
CREATE FUNCTION invitations_begin() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    invited people;
BEGIN
    SELECT * INTO invited FROM people WHERE id = NEW.person_id;
    IF current_user = 'sluice_service' THEN
        NEW.created_at := now();
        IF NEW.confirmed_by IS NOT NULL OR NEW.used_at IS NOT NULL OR
            (CASE WHEN NEW.issued_by IS NULL THEN site_has_admin()
            ELSE NOT is_admin(NEW.issued_by) OR (invited.role = 'admin') <> (NEW.digest IS NULL) END) THEN
            RAISE EXCEPTION 'an admin invites; of an admin a second one confirms it'
                USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    IF invited.subject IS NOT NULL THEN
        RAISE EXCEPTION 'people of single sign-on have no keys' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER invitations_begin BEFORE INSERT ON invitations
    FOR EACH ROW EXECUTE FUNCTION invitations_begin();
CREATE FUNCTION invitations_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.revoked_at IS NULL AND OLD.revoked_at IS NOT NULL
        OR (NEW.digest, NEW.confirmed_by, NEW.expires_at)
            IS DISTINCT FROM (OLD.digest, OLD.confirmed_by, OLD.expires_at)
        AND NOT (OLD.digest IS NULL AND NEW.digest IS NOT NULL AND OLD.revoked_at IS NULL
            AND OLD.expires_at > now() AND NEW.confirmed_by <> OLD.person_id AND is_admin(NEW.confirmed_by)
            AND is_admin(OLD.issued_by) AND independent(OLD.issued_by, NEW.confirmed_by)) THEN
        RAISE EXCEPTION 'an invitation of an admin is confirmed once, by an independent admin'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER invitations_keep BEFORE UPDATE ON invitations
    FOR EACH ROW EXECUTE FUNCTION invitations_keep();
"""

DATASETS = """
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
    -- Written as a difference, so that no sum can overflow.
    CONSTRAINT accounts_within_capacity CHECK (held <= capacity - settled)
);
CREATE TABLE datasets (
    id uuid PRIMARY KEY,
    owner_id uuid NOT NULL REFERENCES people,
    team_id uuid REFERENCES teams,
    name text NOT NULL,
    schema jsonb NOT NULL,
    nominal_size bigint NOT NULL CONSTRAINT datasets_nominal_size CHECK (nominal_size >= 1),
    relation text NOT NULL,
    epsilon double precision NOT NULL,
    delta double precision NOT NULL,
    renyi_order smallint NOT NULL,
    parent_id uuid REFERENCES datasets,
    public boolean NOT NULL DEFAULT false,
    over_cap boolean NOT NULL DEFAULT false,
    -- Why a dataset is held, and which datasets it shares records with: for the admin who decides.
    causes text[] NOT NULL DEFAULT '{}' CONSTRAINT datasets_causes
        CHECK (causes <@ ARRAY['budget', 'public', 'few', 'overlap']),
    matches jsonb NOT NULL DEFAULT '[]',
    account_id uuid REFERENCES accounts,
    state text NOT NULL CONSTRAINT datasets_state
        CHECK (state IN ('draft', 'uploading', 'checking', 'held', 'ready', 'rejected', 'deleted')),
    fault text,
    object_key text NOT NULL UNIQUE,
    upload_id text,
    -- Stated before the first part is signed where there is a quota; counted until the dataset is sealed.
    declared_bytes bigint CONSTRAINT datasets_declared_bytes CHECK (declared_bytes >= 1),
    size bigint,
    sha256 bytea,
    content_sha256 bytea CONSTRAINT datasets_content_sha256
        CHECK (content_sha256 IS NULL OR length(content_sha256) = 32 AND public),
    -- The data key, encrypted for the train worker, and the id of the key-encryption key.
    key_id text,
    wrapped_key bytea CONSTRAINT datasets_wrapped_key
        CHECK (wrapped_key IS NULL OR length(wrapped_key) BETWEEN 384 AND 1024 AND key_id IS NOT NULL),
    report jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    sealed_at timestamptz,
    checked_at timestamptz,
    attempts bigint NOT NULL DEFAULT 0,
    retry_at timestamptz,
    deleted_at timestamptz,
    deleted_by uuid REFERENCES people,
    deletion_reason text,
    removed_at timestamptz,
    CONSTRAINT datasets_sealed CHECK (
        state IN ('draft', 'uploading', 'deleted')
        OR (size IS NOT NULL AND sha256 IS NOT NULL AND sealed_at IS NOT NULL)),
    CONSTRAINT datasets_ready CHECK (state <> 'ready' OR account_id IS NOT NULL)
);
CREATE INDEX datasets_by_owner ON datasets (owner_id, created_at DESC, id DESC);
CREATE INDEX datasets_by_team ON datasets (team_id, created_at DESC, id DESC);
CREATE INDEX datasets_to_remove ON datasets (state)
    WHERE state IN ('deleted', 'rejected') AND removed_at IS NULL;
CREATE TABLE reviews (
    dataset_id uuid PRIMARY KEY REFERENCES datasets,
    decision text NOT NULL CONSTRAINT reviews_decision CHECK (decision IN ('accept', 'join', 'reject')),
    account_id uuid REFERENCES accounts,
    reason text NOT NULL CONSTRAINT reviews_reason CHECK (reason <> ''),
    decided_by uuid NOT NULL REFERENCES people,
    at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT reviews_join CHECK ((decision = 'join') = (account_id IS NOT NULL))
);

CREATE FUNCTION datasets_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_user = 'sluice_service' AND (NEW.state <> 'draft' OR NEW.account_id IS NOT NULL) THEN
        RAISE EXCEPTION 'a dataset begins as a draft' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_begin BEFORE INSERT ON datasets FOR EACH ROW EXECUTE FUNCTION datasets_begin();
CREATE FUNCTION datasets_keep() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    decision text;
BEGIN
    IF (NEW.id, NEW.owner_id, NEW.schema, NEW.nominal_size, NEW.relation, NEW.epsilon, NEW.delta,
        NEW.renyi_order, NEW.parent_id, NEW.object_key, NEW.over_cap)
        IS DISTINCT FROM
        (OLD.id, OLD.owner_id, OLD.schema, OLD.nominal_size, OLD.relation, OLD.epsilon, OLD.delta,
        OLD.renyi_order, OLD.parent_id, OLD.object_key, OLD.over_cap)
        OR OLD.sealed_at IS NOT NULL AND (NEW.size, NEW.sha256, NEW.sealed_at)
            IS DISTINCT FROM (OLD.size, OLD.sha256, OLD.sealed_at)
        OR OLD.account_id IS NOT NULL AND NEW.account_id IS DISTINCT FROM OLD.account_id
        OR NOT NEW.causes @> OLD.causes THEN
        RAISE EXCEPTION 'what is fixed about a dataset stays as it is' USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.state = OLD.state THEN
        RETURN NEW;
    END IF;
    IF (OLD.state, NEW.state) NOT IN (
        ('draft', 'uploading'), ('uploading', 'checking'), ('checking', 'ready'), ('checking', 'held'),
        ('checking', 'rejected'), ('held', 'checking'), ('held', 'rejected')) AND NEW.state <> 'deleted' THEN
        RAISE EXCEPTION 'a dataset does not go from % to %', OLD.state, NEW.state
            USING ERRCODE = 'restrict_violation';
    END IF;
    SELECT reviews.decision INTO decision FROM reviews WHERE dataset_id = NEW.id;
    IF OLD.state = 'held' AND NEW.state <> 'deleted'
        AND (NEW.state = 'rejected') IS DISTINCT FROM (decision = 'reject') THEN
        RAISE EXCEPTION 'a held dataset waits for a decision' USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.state = 'ready' THEN
        -- Terms above the caps are confirmed by a second person, unless the account had them before.
        IF (NEW.public OR cardinality(NEW.causes) > 0
            OR NEW.over_cap AND NOT EXISTS (
                SELECT FROM datasets WHERE account_id = NEW.account_id AND id <> NEW.id))
            AND decision IS NULL OR current_user = 'sluice_service' THEN
            RAISE EXCEPTION 'this dataset waits for a decision' USING ERRCODE = 'restrict_violation';
        END IF;
        IF NEW.relation <> (SELECT relation FROM accounts WHERE id = NEW.account_id) THEN
            RAISE EXCEPTION 'a dataset has the relation of its account' USING ERRCODE = 'restrict_violation';
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_keep BEFORE UPDATE ON datasets FOR EACH ROW EXECUTE FUNCTION datasets_keep();
CREATE FUNCTION sources_stay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'what is public, and what a job builds on, stays as it is'
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER public_stays BEFORE UPDATE ON datasets FOR EACH ROW
    WHEN (NEW.public IS DISTINCT FROM OLD.public) EXECUTE FUNCTION sources_stay();
-- A dataset is made in the team of its owner, whatever the insert says.
CREATE FUNCTION datasets_take_team() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.team_id := (SELECT team_id FROM people WHERE id = NEW.owner_id);
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_take_team BEFORE INSERT ON datasets
    FOR EACH ROW EXECUTE FUNCTION datasets_take_team();
-- It moves at most once: from no team into the owner's present one.
CREATE FUNCTION datasets_keep_team() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.team_id IS NOT NULL
        OR NEW.team_id IS DISTINCT FROM (SELECT team_id FROM people WHERE id = NEW.owner_id) THEN
        RAISE EXCEPTION 'a dataset stays in the team it was made in' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_keep_team BEFORE UPDATE ON datasets FOR EACH ROW
    WHEN (NEW.team_id IS DISTINCT FROM OLD.team_id) EXECUTE FUNCTION datasets_keep_team();
CREATE FUNCTION datasets_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
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
CREATE TRIGGER datasets_deletion BEFORE UPDATE ON datasets FOR EACH ROW EXECUTE FUNCTION datasets_deletion();
-- The data key can be set until the upload is sealed, which needs it; deleting the dataset destroys it.
CREATE FUNCTION datasets_key() RETURNS trigger LANGUAGE plpgsql AS $$
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
CREATE TRIGGER datasets_key BEFORE UPDATE ON datasets FOR EACH ROW EXECUTE FUNCTION datasets_key();
-- Rejecting gives access to nothing, so anybody but the owner may.
CREATE FUNCTION reviews_follow() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    PERFORM FROM datasets WHERE id = NEW.dataset_id AND state = 'held' AND owner_id <> NEW.decided_by
        AND (NEW.decision = 'reject' OR independent(owner_id, NEW.decided_by))
        FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'a held dataset is decided by somebody independent of its owner'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER reviews_follow BEFORE INSERT ON reviews FOR EACH ROW EXECUTE FUNCTION reviews_follow();
"""

JOBS = """
CREATE TABLE jobs (
    id uuid PRIMARY KEY,
    dataset_id uuid NOT NULL REFERENCES datasets,
    source_id uuid REFERENCES datasets,
    after_id uuid REFERENCES jobs,
    shared boolean NOT NULL DEFAULT false,
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
    -- How long the job may run, fixed when it is made, and how long workers have worked on it.
    limit_seconds bigint CONSTRAINT jobs_limit_seconds CHECK (limit_seconds >= 1),
    ran_seconds bigint NOT NULL DEFAULT 0,
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
    synthesizer_removed_at timestamptz,
    UNIQUE (id, account_id, cost)
);
CREATE INDEX jobs_by_owner ON jobs (owner_id, created_at DESC, id DESC);
CREATE INDEX jobs_unfinished ON jobs (state) WHERE state IN ('queued', 'running');
CREATE INDEX jobs_by_dataset ON jobs (dataset_id);
-- Facts about records, visible to the curator who owns the job alone.
CREATE TABLE diagnostics (
    job_id uuid PRIMARY KEY REFERENCES jobs,
    fence bigint NOT NULL,
    lines text NOT NULL,
    picture text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);
-- Heartbeats of running processes.
CREATE TABLE parts (
    name text PRIMARY KEY,
    role text NOT NULL,
    version text NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now()
);

CREATE FUNCTION jobs_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.opened_at IS NOT NULL THEN
        RAISE EXCEPTION 'a job begins with its records closed' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER jobs_begin BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_begin();
CREATE FUNCTION jobs_have_accounts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM datasets WHERE id = NEW.dataset_id AND state = 'ready'
        AND account_id = NEW.account_id) THEN
        RAISE EXCEPTION 'a job works on a ready dataset and is charged to its account'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER jobs_have_accounts BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_have_accounts();
CREATE FUNCTION jobs_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.opened_at IS NOT NULL AND NEW.opened_at IS DISTINCT FROM OLD.opened_at
        OR OLD.state IN ('trained', 'failed', 'cancelled') AND NEW.state <> OLD.state
        OR NEW.fence < OLD.fence
        OR (NEW.id, NEW.dataset_id, NEW.account_id, NEW.plan, NEW.event, NEW.cost)
            IS DISTINCT FROM (OLD.id, OLD.dataset_id, OLD.account_id, OLD.plan, OLD.event, OLD.cost) THEN
        RAISE EXCEPTION 'what is fixed about a job stays as it is' USING ERRCODE = 'restrict_violation';
    END IF;
    -- Records are opened only while the job's cost is reserved.
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
-- Learning from a source is not charged: it is public, confirmed, and on no account with private records.
CREATE FUNCTION sources_are_public() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (coalesce(NEW.plan ->> 'kind', '') = 'adapt') <> (NEW.source_id IS NOT NULL) THEN
        RAISE EXCEPTION 'an adaptation has a source, and nothing else has'
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
CREATE TRIGGER sources_are_public BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION sources_are_public();
CREATE TRIGGER sources_stay BEFORE UPDATE ON jobs FOR EACH ROW
    WHEN (NEW.source_id IS DISTINCT FROM OLD.source_id) EXECUTE FUNCTION sources_stay();
-- A relay continues the generator of a trained job whose owner shared it.
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
    EXECUTE FUNCTION sources_stay();
"""

LEDGER = """
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
    -- The cost is reserved before the job is inserted; both must agree when the transaction ends.
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
CREATE TABLE witness (
    id smallint PRIMARY KEY CONSTRAINT witness_one CHECK (id = 1),
    checked_at timestamptz,
    generation bigint NOT NULL DEFAULT 0,
    behind jsonb,
    acknowledged bigint NOT NULL DEFAULT 0
);
INSERT INTO witness (id) VALUES (1);

-- Takes the account's lock, then reads what the next row needs: under READ COMMITTED each statement sees what
-- was committed before it began.
CREATE FUNCTION lock_account(wanted uuid)
    RETURNS TABLE (moves bigint, head bytea, at timestamptz, epsilon double precision, capacity bigint,
        remaining bigint)
    LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    PERFORM FROM accounts WHERE id = wanted FOR NO KEY UPDATE;
    RETURN QUERY SELECT a.moves, a.head, clock_timestamp(), a.epsilon, a.capacity,
        a.capacity - a.held - a.settled FROM accounts AS a WHERE a.id = wanted;
END $$;
-- An account starts empty; its first row grants its budget.
CREATE FUNCTION accounts_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.capacity, NEW.held, NEW.settled, NEW.moves) <> (0, 0, 0, 0)
        OR NEW.head <> decode(repeat('00', 32), 'hex') THEN
        RAISE EXCEPTION 'an account starts empty' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER accounts_begin BEFORE INSERT ON accounts FOR EACH ROW EXECUTE FUNCTION accounts_begin();
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
-- The only writer of balances: applies a ledger row to its account, in the row's own transaction.
CREATE FUNCTION apply_entry() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    account accounts;
    grown bigint := 0;
    promised bigint := 0;
    spent bigint := 0;
    budget double precision;
BEGIN
    SELECT * INTO account FROM accounts WHERE id = NEW.account_id FOR NO KEY UPDATE;
    IF account.id IS NULL OR NEW.number <> account.moves + 1 OR NEW.previous <> account.head THEN
        RAISE EXCEPTION 'row % does not follow the last one of its account', NEW.number
            USING ERRCODE = 'restrict_violation';
    END IF;
    budget := account.epsilon;
    IF NEW.kind = 'grant' THEN
        grown := NEW.cost;
        budget := (NEW.terms ->> 'epsilon')::double precision;
        IF (NEW.terms ->> 'relation', (NEW.terms ->> 'delta')::double precision, (NEW.terms ->> 'order')::int)
            IS DISTINCT FROM (account.relation, account.delta, account.renyi_order::int)
            OR budget IS NULL OR budget < account.epsilon
            OR NEW.number = 1 AND budget <> account.epsilon THEN
            RAISE EXCEPTION 'a grant keeps the terms of its account' USING ERRCODE = 'restrict_violation';
        END IF;
        -- The capacity of (epsilon, delta) at the order; 2 units for the rounding of logarithms.
        IF account.capacity + grown > 2 + greatest(0, 1e9::double precision * (budget
            - ln(1 - 1 / account.renyi_order::double precision)
            + ln(account.delta * account.renyi_order) / (account.renyi_order - 1))) THEN
            RAISE EXCEPTION 'a grant gives no more than its epsilon' USING ERRCODE = 'restrict_violation';
        END IF;
        -- Two people agreed on it; or the owner of the tables repeats a grant that a restored backup lacks.
        IF NEW.number > 1 AND session_user <> current_user AND NOT EXISTS (
            SELECT FROM grants WHERE account_id = NEW.account_id AND state = 'confirmed' AND epsilon = budget
                AND decided_by <> proposed_by) THEN
            RAISE EXCEPTION 'nobody confirmed this grant' USING ERRCODE = 'restrict_violation';
        END IF;
    ELSIF NEW.kind = 'reserve' THEN
        promised := NEW.cost;
    ELSE
        spent := CASE NEW.kind WHEN 'settle' THEN NEW.cost ELSE 0 END;
        promised := CASE WHEN NEW.job_id IS NULL THEN 0 ELSE -NEW.cost END;
    END IF;
    UPDATE accounts SET epsilon = budget, capacity = capacity + grown, held = held + promised,
        settled = settled + spent, moves = NEW.number, head = NEW.digest
        WHERE id = NEW.account_id AND held + promised <= capacity + grown - settled - spent;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the account has less left than this row takes' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER apply_entry AFTER INSERT ON entries FOR EACH ROW EXECUTE FUNCTION apply_entry();
CREATE FUNCTION grants_follow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state = 'confirmed' AND NOT independent(NEW.proposed_by, NEW.decided_by) THEN
        RAISE EXCEPTION 'a grant is confirmed by somebody independent of its proposer'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER grants_follow BEFORE INSERT OR UPDATE ON grants
    FOR EACH ROW EXECUTE FUNCTION grants_follow();
"""

RELEASES = """
CREATE TABLE releases (
    id uuid PRIMARY KEY,
    job_id uuid NOT NULL REFERENCES jobs,
    author_id uuid NOT NULL REFERENCES people,
    name text NOT NULL,
    note text NOT NULL,
    licence text NOT NULL,
    -- A classifier is released without samples.
    count bigint NOT NULL CONSTRAINT releases_count
        CHECK (count BETWEEN 0 AND 1000000 AND (count = 0) = (cardinality(formats) = 0)),
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
    attempts bigint NOT NULL DEFAULT 0,
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
-- Bundles copied to the public bucket for reviewers. A row is inserted before the first file is put there,
-- and deleted after the last is removed.
CREATE TABLE review_copies (
    release_id uuid NOT NULL REFERENCES releases,
    build bigint NOT NULL,
    digest bytea NOT NULL CONSTRAINT review_copies_digest CHECK (length(digest) = 32),
    PRIMARY KEY (release_id, build, digest)
);
CREATE TABLE signing_keys (
    id text PRIMARY KEY,
    public bytea NOT NULL UNIQUE CONSTRAINT signing_keys_public CHECK (length(public) = 32),
    since timestamptz NOT NULL DEFAULT now()
);
-- Signed lists of all withdrawn releases so far; the one with the highest number is in force.
CREATE TABLE revocations (
    number bigint PRIMARY KEY,
    envelope text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

-- A release is of a job whose cost is settled.
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
    -- A bundle changes only while it is being built.
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
    -- What is published was approved, by its digest, by somebody other than its author where two are needed.
    IF NEW.state IN ('approved', 'publishing', 'published') AND NOT EXISTS (
        SELECT FROM approvals WHERE release_id = NEW.id AND digest = NEW.digest
            AND (NEW.reviewers = 1 OR person_id <> NEW.author_id)) THEN
        RAISE EXCEPTION 'nobody approved this bundle' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER releases_keep BEFORE UPDATE ON releases FOR EACH ROW EXECUTE FUNCTION releases_keep();
CREATE FUNCTION approvals_follow() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    found releases;
BEGIN
    SELECT * INTO found FROM releases WHERE id = NEW.release_id FOR UPDATE;
    IF found.state NOT IN ('in_review', 'approved') OR NEW.digest IS DISTINCT FROM found.digest THEN
        RAISE EXCEPTION 'an approval is of the bundle under review' USING ERRCODE = 'restrict_violation';
    END IF;
    IF found.reviewers > 1 AND NOT independent(found.author_id, NEW.person_id) THEN
        RAISE EXCEPTION 'a release is approved by somebody independent of its author'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER approvals_follow BEFORE INSERT ON approvals FOR EACH ROW EXECUTE FUNCTION approvals_follow();
-- Admins approve, and curators of the dataset's team.
CREATE FUNCTION approvals_by_colleagues() RETURNS trigger LANGUAGE plpgsql AS $$
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
    FOR EACH ROW EXECUTE FUNCTION approvals_by_colleagues();
"""

AUDIT_LOG = """
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
CREATE INDEX audit_log_by_time ON audit_log USING brin (at);

-- A row's digest is the SHA-256 of the digest before it and of its fields, each as LENGTH:TEXT, or - for
-- none; src/sluice/release/audit_log.py computes the same.
CREATE FUNCTION audit_fields(VARIADIC fields text[]) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(string_agg(coalesce(octet_length(field) || ':' || field, '-'), '' ORDER BY place), '')
        FROM unnest(fields) WITH ORDINALITY AS given (field, place)
$$;
CREATE FUNCTION audit_digest(one audit_log) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT sha256(one.previous || convert_to(audit_fields(one.number::text,
        to_char(one.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), one.writer, one.person_id::text,
        one.name, one.role, one.key_id::text, one.address, one.request, one.action,
        audit_fields(VARIADIC one.objects), one.status::text, one.answers::text, one.times::text), 'UTF8'))
$$;
-- Called as a transaction of its own, which holds the lock until it ends. A row that is not `durable` reaches
-- the disk before any later change does, since the write-ahead log is written in order.
CREATE FUNCTION add_audit(person uuid, name text, role text, key uuid, address text, request text,
    action text, objects text[], status int, answers bigint, times bigint, durable boolean)
    RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    one audit_log;
BEGIN
    PERFORM pg_advisory_xact_lock(340813);
    -- Only trim_audit_log, which has just removed these rows, may say so.
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
-- Returns how many rows it removed. Rows of the last 30 days stay, whatever is asked.
CREATE FUNCTION trim_audit_log(before timestamptz) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    last audit_log;
    removed bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(340813);
    -- Up to the first younger row, since clocks may have been set back.
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
CREATE FUNCTION audit_log_ends() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM audit_log WHERE number < (SELECT max(number) FROM gone))
        OR EXISTS (SELECT FROM gone WHERE at >= now() - interval '30 days') THEN
        RAISE EXCEPTION 'the audit log loses its oldest rows alone' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER audit_log_ends AFTER DELETE ON audit_log REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION audit_log_ends();
"""

# Rows of these tables are never changed or deleted; those of the second kind may be updated.
APPEND_ONLY = """
CREATE FUNCTION stay_as_written() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % stay as they are', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER audit_log_stays BEFORE UPDATE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
""" + "".join(
    f"CREATE TRIGGER {table}_stay BEFORE {changes} ON {table}"
    " FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();\n"
    for changes, tables in {
        "UPDATE OR DELETE OR TRUNCATE": ("entries", "reviews", "approvals", "signing_keys", "revocations"),
        "DELETE OR TRUNCATE": ("accounts", "replies", "releases", "invitations"),
    }.items()
    for table in tables
)

# pg_temp is searched first unless it is named, so it is named last.
FIXED_PATH = """
DO $$
DECLARE
    name regprocedure;
BEGIN
    FOR name IN SELECT p.oid::regprocedure FROM pg_proc AS p
        WHERE p.pronamespace = 'public'::regnamespace AND p.prokind = 'f' LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, public, pg_temp', name);
    END LOOP;
END $$
"""

RIGHTS = """
REVOKE ALL ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO EVERYONE;
GRANT SELECT ON alembic_version TO EVERYONE;
GRANT SELECT, INSERT, UPDATE, DELETE ON parts TO EVERYONE;
GRANT SELECT ON accounts, entries, datasets, jobs TO EVERYONE;
REVOKE ALL ON FUNCTION lock_account, redeem_invitation, add_own_key, audit_fields, audit_digest, add_audit,
    trim_audit_log, audit_log_ends FROM PUBLIC;
GRANT EXECUTE ON FUNCTION add_audit TO EVERYONE;
GRANT EXECUTE ON FUNCTION lock_account TO sluice_service, sluice_train, sluice_sweep;
GRANT INSERT ON entries TO sluice_service, sluice_train, sluice_sweep;

GRANT SELECT ON keys, witness, rules, signing_keys, revocations, diagnostics, review_copies, audit_log
    TO sluice_service;
GRANT SELECT, INSERT ON teams, people, invitations, reviews, grants, replies, releases, approvals, readers
    TO sluice_service;
GRANT INSERT ON datasets, jobs TO sluice_service;
GRANT EXECUTE ON FUNCTION redeem_invitation, add_own_key TO sluice_service;
GRANT UPDATE (quota_bytes, quota_jobs, quota_job_seconds) ON teams TO sluice_service;
GRANT UPDATE (disabled_at, role, team_id) ON people TO sluice_service;
GRANT UPDATE (digest, confirmed_by, expires_at, revoked_at) ON invitations TO sluice_service;
GRANT UPDATE (revoked_at) ON keys TO sluice_service;
GRANT UPDATE (state, fault, team_id, upload_id, declared_bytes, size, sha256, sealed_at, key_id, wrapped_key,
    deleted_by, deletion_reason) ON datasets TO sluice_service;
GRANT UPDATE (state, fault, finished_at, cancel_asked_at) ON jobs TO sluice_service;
GRANT UPDATE (state, decided_by, decided_at) ON grants TO sluice_service;
GRANT UPDATE (status, body) ON replies TO sluice_service;
GRANT UPDATE (acknowledged) ON witness TO sluice_service;
GRANT UPDATE (state, fault, build, audience, reason, withdrawn_at, lease_until, digest, done, attempts)
    ON releases TO sluice_service;
GRANT DELETE ON readers TO sluice_service;

GRANT SELECT ON reviews, witness, releases TO sluice_train;
GRANT INSERT ON accounts TO sluice_train;
GRANT UPDATE (state, fault, report, checked_at, account_id, causes, matches, attempts, retry_at,
    deletion_reason, removed_at, content_sha256) ON datasets TO sluice_train;
GRANT UPDATE (ran_seconds, synthesizer_removed_at) ON jobs TO sluice_train;
GRANT SELECT, INSERT, UPDATE, DELETE ON diagnostics TO sluice_train;
GRANT UPDATE (state, fault, step, fence, lease_until, checkpoint, synthesizer_key, synthesizer_sha256,
    started_at, opened_at, finished_at) ON jobs TO sluice_train, sluice_sweep;

GRANT SELECT ON releases, approvals, revocations TO sluice_publish;
GRANT UPDATE (state, fault, fence, lease_until, done, digest, files, manifest, privacy, preview, attestation,
    built_at, published_at, withdrawn_at, attempts) ON releases TO sluice_publish;
GRANT SELECT, INSERT ON signing_keys TO sluice_publish;
GRANT INSERT ON revocations TO sluice_publish;
GRANT SELECT, INSERT, DELETE ON review_copies TO sluice_publish;

GRANT SELECT ON witness, releases, revocations, review_copies TO sluice_sweep;
GRANT UPDATE (checked_at, generation, behind) ON witness TO sluice_sweep;
GRANT EXECUTE ON FUNCTION trim_audit_log TO sluice_sweep
""".replace("EVERYONE", ", ".join(APPLICATION))


def upgrade() -> None:
    for role in APPLICATION:
        # Roles belong to the whole server: another database of ours may have made them, even just now.
        op.execute(f"""
            DO $$ BEGIN
                CREATE ROLE {role} NOLOGIN;
            EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
            END $$""")
    subjects = (PEOPLE, DATASETS, JOBS, LEDGER, RELEASES, AUDIT_LOG)
    for statements in (*subjects, APPEND_ONLY, FIXED_PATH, RIGHTS):
        op.execute(statements)
