"""Accounts, their append-only entries, signs of life, and who may do what with them.

Going back is restoring a backup: a ledger has no way down.
"""

from alembic import op

revision = "0001"
down_revision = None

APPLICATION = ("sluice_service", "sluice_train", "sluice_publish", "sluice_sweep")
EVERYONE = ", ".join(APPLICATION)


def upgrade() -> None:
    for role in APPLICATION:
        # Roles belong to the whole server: another database of ours may have made them, even just now.
        op.execute(f"""
            DO $$ BEGIN
                CREATE ROLE {role} NOLOGIN;
            EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
            END $$""")

    op.execute("""
        CREATE TABLE accounts (
            id uuid PRIMARY KEY,
            relation text NOT NULL
                CONSTRAINT accounts_relation CHECK (relation IN ('add-remove', 'replace-one')),
            epsilon double precision NOT NULL CONSTRAINT accounts_epsilon CHECK (epsilon > 0),
            delta double precision NOT NULL CONSTRAINT accounts_delta CHECK (delta > 0 AND delta < 1),
            renyi_order smallint NOT NULL CONSTRAINT accounts_order CHECK (renyi_order BETWEEN 2 AND 1024),
            capacity bigint NOT NULL,
            held bigint NOT NULL DEFAULT 0,
            settled bigint NOT NULL DEFAULT 0,
            created_at timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT accounts_signs CHECK (capacity >= 0 AND held >= 0 AND settled >= 0),
            -- Written this way round the sum cannot overflow.
            CONSTRAINT accounts_within_capacity CHECK (held <= capacity - settled)
        )""")
    op.execute("""
        CREATE TABLE entries (
            account_id uuid NOT NULL REFERENCES accounts (id),
            number bigint NOT NULL CONSTRAINT entries_number CHECK (number >= 1),
            kind text NOT NULL CONSTRAINT entries_kind CHECK (kind IN ('grant', 'reserve', 'settle', 'void')),
            cost bigint NOT NULL CONSTRAINT entries_cost CHECK (cost >= 0),
            event jsonb,
            readings jsonb,
            actor text NOT NULL,
            reason text NOT NULL,
            at timestamptz NOT NULL DEFAULT now(),
            previous bytea NOT NULL CONSTRAINT entries_previous CHECK (length(previous) = 32),
            digest bytea NOT NULL CONSTRAINT entries_digest CHECK (length(digest) = 32),
            PRIMARY KEY (account_id, number)
        )""")
    op.execute("""
        CREATE FUNCTION stay_as_written() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'rows of % stay as they are', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
        END $$""")
    op.execute("""
        CREATE TRIGGER entries_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON entries
        FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written()""")
    op.execute("""
        CREATE TRIGGER accounts_stay BEFORE DELETE OR TRUNCATE ON accounts
        FOR EACH STATEMENT EXECUTE FUNCTION stay_as_written()""")
    op.execute("""
        CREATE TABLE parts (
            name text PRIMARY KEY,
            role text NOT NULL,
            version text NOT NULL,
            seen_at timestamptz NOT NULL DEFAULT now()
        )""")

    op.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
    op.execute(f"GRANT USAGE ON SCHEMA public TO {EVERYONE}")
    # The service grants and reserves, the train worker settles or voids; neither rewrites what is written,
    # and neither touches what an account was opened with.
    op.execute("GRANT SELECT, INSERT ON accounts, entries TO sluice_service")
    op.execute("GRANT UPDATE (capacity, held) ON accounts TO sluice_service")
    op.execute("GRANT SELECT ON accounts, entries TO sluice_train, sluice_publish, sluice_sweep")
    op.execute("GRANT INSERT ON entries TO sluice_train, sluice_sweep")
    op.execute("GRANT UPDATE (held, settled) ON accounts TO sluice_train, sluice_sweep")
    op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON parts TO {EVERYONE}")
    op.execute(f"GRANT SELECT ON alembic_version TO {EVERYONE}")
