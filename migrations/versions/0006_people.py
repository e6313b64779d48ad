"""Who invited whom: invitations in place of keys that an admin has seen, and decisions by independent people.

- An admin invites a person; whoever redeems the invitation is given a key that nobody else has seen. Keys are
  made only by the two functions below, which ask for the text of an invitation or of a present key: no table
  holds either.
- Two people are independent unless one person may have had the keys of both: see `independent`.
- An invitation of an admin works once a second, independent admin confirmed it.
"""

from alembic import op

revision = "0006"
down_revision = "0005"

TABLES = """
-- Set by whoever owns the tables (`python -m migrations`), not by the service.
CREATE TABLE rules (
    id smallint PRIMARY KEY CONSTRAINT rules_one CHECK (id = 1),
    independent_days integer NOT NULL CONSTRAINT rules_independent_days
        CHECK (independent_days BETWEEN 1 AND 365)
);
INSERT INTO rules VALUES (1, 7);
-- Empty: by the installation, by single sign-on, or before it was recorded.
ALTER TABLE people ADD COLUMN created_by uuid REFERENCES people;
CREATE TABLE invitations (
    id uuid PRIMARY KEY,
    person_id uuid NOT NULL REFERENCES people,
    -- Empty while it waits to be confirmed.
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
ALTER TABLE keys ADD COLUMN issued_by uuid REFERENCES people;
ALTER TABLE keys ADD COLUMN invitation_id uuid UNIQUE REFERENCES invitations
"""

FUNCTIONS = """
-- Follows both people to whoever created or invited them within the set time, and on to whoever did that to
-- these. They are independent if nobody is found from both.
CREATE FUNCTION independent(one uuid, other uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    WITH RECURSIVE window_start AS (
        SELECT now() - make_interval(days => independent_days) AS at FROM rules
    ), links AS (
        SELECT id AS person, created_by AS inviter FROM people, window_start WHERE created_at > at
        UNION SELECT person_id, issued_by FROM invitations, window_start WHERE used_at > at
        UNION SELECT person_id, confirmed_by FROM invitations, window_start WHERE used_at > at
        -- Keys from before there were invitations, which an admin saw: nobody knows which one.
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
-- A site starts when nobody could act as an admin yet: then the installation makes the first ones.
CREATE FUNCTION site_has_admin() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM people WHERE role = 'admin' AND (subject IS NOT NULL
        OR EXISTS (SELECT FROM keys WHERE person_id = people.id)))
$$;

-- Answers 'redeemed', or why not. A refusal is counted, so that a second use shows.
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
    -- Whoever has one of the older keys could be making another right now; add_own_key takes this lock too.
    PERFORM FROM people WHERE id = wanted.person_id FOR UPDATE;
    UPDATE keys SET revoked_at = now() WHERE person_id = wanted.person_id AND revoked_at IS NULL;
    UPDATE people SET disabled_at = NULL WHERE id = wanted.person_id AND disabled_at IS NOT NULL;
    INSERT INTO keys (id, person_id, label, digest, expires_at, issued_by, invitation_id)
        VALUES (key_id, wanted.person_id, key_label, key_digest, key_expires, wanted.issued_by, wanted.id);
    RETURN 'redeemed';
END $$;
-- A further key for whoever has a good one. False if `current` is none.
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
"""

GUARDS = """
CREATE FUNCTION people_begin() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_user = 'sluice_service' THEN
        NEW.created_at := now();
        -- People of single sign-on come without a creator; others only before a site has its first admin.
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
CREATE TRIGGER invitations_stay BEFORE DELETE OR TRUNCATE ON invitations
    FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written();

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
-- Rejecting opens nothing, so anybody but the owner may.
CREATE OR REPLACE FUNCTION reviews_follow() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
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
CREATE OR REPLACE FUNCTION approvals_follow() RETURNS trigger LANGUAGE plpgsql AS $$
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
END $$
"""

RIGHTS = """
REVOKE INSERT ON keys FROM sluice_service;
REVOKE ALL ON FUNCTION redeem_invitation(text, uuid, bytea, text, timestamptz) FROM PUBLIC;
REVOKE ALL ON FUNCTION add_own_key(text, uuid, bytea, text, timestamptz) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION redeem_invitation(text, uuid, bytea, text, timestamptz) TO sluice_service;
GRANT EXECUTE ON FUNCTION add_own_key(text, uuid, bytea, text, timestamptz) TO sluice_service;
GRANT SELECT ON rules TO sluice_service;
GRANT SELECT, INSERT ON invitations TO sluice_service;
GRANT UPDATE (digest, confirmed_by, expires_at, revoked_at) ON invitations TO sluice_service
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
    for statements in (TABLES, FUNCTIONS, GUARDS, RIGHTS, FIXED_PATH):
        op.execute(statements)
