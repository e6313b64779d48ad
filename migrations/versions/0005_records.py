"""Balances move with ledger rows alone; accounts follow records; some datasets wait for a second person.

- Inserting a row into `entries` is the only way to move an account's balance: a trigger does it and checks
  the row against the account. No application role may update `accounts`.
- The train worker binds a dataset to its account, after it has read the records; sealing binds nothing.
- A dataset that is public, above the site's caps, very small, or known from another account is `held` until
  somebody other than its owner decides (`reviews`).
- Every function has a fixed search_path that ends with pg_temp: a temporary table cannot stand in for ours.
"""

from alembic import op

revision = "0005"
down_revision = "0004"

TABLES = """
CREATE TABLE reviews (
    dataset_id uuid PRIMARY KEY REFERENCES datasets,
    decision text NOT NULL CONSTRAINT reviews_decision CHECK (decision IN ('accept', 'join', 'reject')),
    account_id uuid REFERENCES accounts,
    reason text NOT NULL CONSTRAINT reviews_reason CHECK (reason <> ''),
    decided_by uuid NOT NULL REFERENCES people,
    at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT reviews_join CHECK ((decision = 'join') = (account_id IS NOT NULL))
);
ALTER TABLE datasets ADD COLUMN over_cap boolean NOT NULL DEFAULT false;
-- Why a dataset is held and which others it shares records with: for the admin who decides.
ALTER TABLE datasets ADD COLUMN causes text[] NOT NULL DEFAULT '{}' CONSTRAINT datasets_causes
    CHECK (causes <@ ARRAY['budget', 'public', 'few', 'overlap']);
ALTER TABLE datasets ADD COLUMN matches jsonb NOT NULL DEFAULT '[]';
ALTER TABLE datasets DROP CONSTRAINT datasets_state;
ALTER TABLE datasets ADD CONSTRAINT datasets_state
    CHECK (state IN ('draft', 'uploading', 'checking', 'held', 'ready', 'rejected', 'deleted'));
ALTER TABLE datasets DROP CONSTRAINT datasets_sealed;
ALTER TABLE datasets ADD CONSTRAINT datasets_sealed CHECK (
    state IN ('draft', 'uploading', 'deleted')
    OR (size IS NOT NULL AND sha256 IS NOT NULL AND sealed_at IS NOT NULL));
ALTER TABLE datasets ADD CONSTRAINT datasets_ready CHECK (state <> 'ready' OR account_id IS NOT NULL);
-- A public declaration made before it took two people waits for the second one.
UPDATE datasets SET state = 'held', causes = '{public}' WHERE public AND state = 'ready';
DROP TABLE contents;
-- The witness starts anew as a log outside the vault.
UPDATE witness SET generation = 0, acknowledged = 0, behind = NULL
"""

LEDGER = """
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
        -- Two people agreed on it; or the owner of the tables brings back a grant that a restore forgot.
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
"""

GUARDS = """
CREATE TRIGGER reviews_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON reviews
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();
CREATE FUNCTION reviews_follow() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    PERFORM FROM datasets WHERE id = NEW.dataset_id AND state = 'held' AND owner_id <> NEW.decided_by
        FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'a held dataset is decided by somebody other than its owner'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER reviews_follow BEFORE INSERT ON reviews FOR EACH ROW EXECUTE FUNCTION reviews_follow();
CREATE FUNCTION datasets_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_user = 'sluice_service' AND (NEW.state <> 'draft' OR NEW.account_id IS NOT NULL) THEN
        RAISE EXCEPTION 'a dataset begins as a draft' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER datasets_begin BEFORE INSERT ON datasets FOR EACH ROW EXECUTE FUNCTION datasets_begin();
CREATE OR REPLACE FUNCTION datasets_keep() RETURNS trigger LANGUAGE plpgsql AS $$
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
-- What a source tells is not charged: it is public, confirmed, and on no account with private records.
CREATE OR REPLACE FUNCTION sources_are_public() RETURNS trigger LANGUAGE plpgsql AS $$
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
CREATE FUNCTION jobs_have_accounts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM datasets WHERE id = NEW.dataset_id AND state = 'ready'
        AND account_id = NEW.account_id) THEN
        RAISE EXCEPTION 'a job works on a ready dataset and is charged to its account'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER jobs_have_accounts BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_have_accounts()
"""

RIGHTS = """
REVOKE INSERT ON accounts FROM sluice_service;
REVOKE UPDATE (epsilon, capacity, held, settled, moves, head) ON accounts FROM sluice_service;
REVOKE UPDATE (held, settled, moves, head) ON accounts FROM sluice_train, sluice_sweep;
REVOKE ALL ON FUNCTION lock_account(uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION lock_account(uuid) TO sluice_service, sluice_train, sluice_sweep;
REVOKE UPDATE (account_id) ON datasets FROM sluice_service;
GRANT UPDATE (fault) ON datasets TO sluice_service;
GRANT SELECT, INSERT ON reviews TO sluice_service;
GRANT INSERT ON accounts TO sluice_train;
GRANT SELECT ON reviews, witness TO sluice_train;
GRANT UPDATE (account_id, causes, matches) ON datasets TO sluice_train
"""

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


def upgrade() -> None:
    for statements in (TABLES, LEDGER, GUARDS, RIGHTS, FIXED_PATH):
        op.execute(statements)
