"""What the database itself refuses, whoever asks: rewriting the ledger, overspending, overreaching."""

import re
import uuid

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import core.database
from core.tables import DatasetState, JobState, ReleaseState
from tests.conftest import new_database

ACCOUNT = """INSERT INTO accounts (id, relation, epsilon, delta, renyi_order, capacity, head)
             VALUES (%s, 'add_remove', 8, 1e-5, 4, 0, decode(repeat('00', 32), 'hex'))"""
# {kind}, {cost}, {terms} and {number} are filled in; the chain itself is what `verify` looks at.
ENTRY = """INSERT INTO entries
               (account_id, number, kind, cost, job_id, terms, actor, reason, at, previous, digest)
           SELECT id, moves + {number}, '{kind}', {cost}, {job}, {terms}, 'someone', 'first', now(), head,
               decode(repeat(lpad((moves + 1)::text, 2, '0'), 32), 'hex') FROM accounts WHERE id = %s"""
TERMS = """'{{"relation": "add_remove", "epsilon": {epsilon}, "delta": 1e-5, "order": 4}}'"""
PERSON = "INSERT INTO people (id, name, role) VALUES (%s, gen_random_uuid()::text, 'curator')"
REPLY = "INSERT INTO replies (person_id, key, request) VALUES (%s, 'k', decode(repeat('03', 32), 'hex'))"

ADD = {"SELECT", "INSERT"}
SEE = {"SELECT"}
PROGRESS = {
    "state", "fault", "step", "fence", "lease_until", "checkpoint", "synthesizer_key", "synthesizer_sha256",
    "started_at", "opened_at", "finished_at",
}  # fmt: skip
# role → table → rights over whole tables, all of them.
RIGHTS = {
    "service": dict.fromkeys(
        ("people", "invitations", "entries", "datasets", "reviews", "jobs", "grants", "replies", "teams"), ADD
    )
    | dict.fromkeys(
        (
            "accounts",
            "witness",
            "signing_keys",
            "revocations",
            "diagnostics",
            "keys",
            "rules",
            "methods",
            "review_copies",
            "audit_log",
        ),
        SEE,
    )
    | {"releases": ADD, "approvals": ADD, "readers": ADD | {"DELETE"}},
    "train": {
        "accounts": ADD,
        "entries": ADD,
        "datasets": SEE,
        "reviews": SEE,
        "witness": SEE,
        "jobs": SEE,
        "diagnostics": ADD | {"UPDATE", "DELETE"},
        "releases": SEE,
    },
    "publish": dict.fromkeys(("accounts", "entries", "datasets", "jobs", "releases", "approvals"), SEE)
    | {"signing_keys": ADD, "revocations": ADD, "review_copies": ADD | {"DELETE"}},
    "sweep": {"entries": ADD}
    | dict.fromkeys(
        ("accounts", "datasets", "jobs", "witness", "releases", "revocations", "review_copies"), SEE
    ),
}
# role → table → the columns it may change, all of them.
COLUMNS = {
    "service": {
        "people": {"disabled_at", "role", "team_id"},
        "keys": {"revoked_at"},
        "invitations": {"digest", "confirmed_by", "expires_at", "revoked_at"},
        "datasets": {
            "state",
            "fault",
            "upload_id",
            "size",
            "sha256",
            "sealed_at",
            "team_id",
            "deleted_by",
            "deletion_reason",
            "declared_bytes",
            "key_id",
            "wrapped_key",
        },
        "jobs": {"state", "fault", "finished_at", "cancel_asked_at"},
        "teams": {"quota_bytes", "quota_jobs", "quota_job_seconds"},
        "grants": {"state", "decided_by", "decided_at"},
        "replies": {"status", "body"},
        "witness": {"acknowledged"},
        "releases": {
            "state",
            "fault",
            "build",
            "audience",
            "reason",
            "withdrawn_at",
            "lease_until",
            "digest",
            "done",
            "attempts",
        },
    },
    "train": {
        "datasets": {
            "state",
            "fault",
            "report",
            "checked_at",
            "account_id",
            "causes",
            "matches",
            "content_sha256",
            "attempts",
            "retry_at",
            "deletion_reason",
            "removed_at",
        },
        "jobs": PROGRESS | {"synthesizer_removed_at", "ran_seconds"},
    },
    "publish": {
        "releases": {
            "state",
            "fault",
            "fence",
            "attempts",
            "lease_until",
            "done",
            "digest",
            "files",
            "manifest",
            "privacy",
            "preview",
            "attestation",
            "built_at",
            "published_at",
            "withdrawn_at",
        },
    },
    "sweep": {
        "jobs": PROGRESS,
        "witness": {"checked_at", "generation", "behind"},
    },
}
TABLES = {
    "people", "keys", "accounts", "reviews", "datasets", "jobs", "entries", "grants", "replies", "witness",
    "parts", "alembic_version", "releases", "approvals", "readers", "signing_keys", "revocations",
    "diagnostics", "teams", "review_copies", "invitations", "rules", "audit_log", "methods",
}  # fmt: skip
ALL_RIGHTS = ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"]


def entry(kind, cost, *, epsilon=8, number=1, job="NULL"):
    """A statement that adds the next row of an account, as anybody who may insert one could write it."""
    terms = TERMS.format(epsilon=epsilon) if kind == "grant" else "NULL"
    return ENTRY.format(kind=kind, cost=cost, number=number, job=job, terms=terms)


@pytest.fixture(scope="module")
def database(servers):
    """One for all tests here: each works on accounts of its own."""
    with new_database(servers) as url:
        yield url


@pytest.fixture
def owner(database):
    with psycopg.connect(database("owner"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def account(owner):
    id, person = uuid.uuid4(), uuid.uuid4()
    owner.execute(ACCOUNT, [id])
    owner.execute(entry("grant", 1000), [id])
    owner.execute(PERSON, [person])
    owner.execute(REPLY, [person])
    return id


@pytest.mark.parametrize("role", RIGHTS)
def test_a_role_has_exactly_its_rights(role, database, owner):
    columns = {}
    for table, column in owner.execute(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
    ):
        columns.setdefault(table, set()).add(column)
    assert set(columns) == TABLES, "a new table needs a line in this test"
    everything = {"SELECT", "INSERT", "UPDATE", "DELETE"}
    rights = RIGHTS[role] | {"parts": everything, "alembic_version": SEE}
    with psycopg.connect(database(role)) as connection:

        def may(right, table, column=None):
            ask, what = ("has_column_privilege(%s, %s, %s)", [table, column, right])
            if column is None:
                ask, what = ("has_table_privilege(%s, %s)", [table, right])
            return connection.execute(f"SELECT {ask}", what).fetchone() == (True,)

        for table in TABLES:
            whole = rights.get(table, set())
            assert {right for right in ALL_RIGHTS if may(right, table)} == whole, table
            for right in ("SELECT", "INSERT", "UPDATE", "REFERENCES"):
                over = {column for column in columns[table] if may(right, table, column)}
                some = COLUMNS[role].get(table, set()) if right == "UPDATE" else set()
                assert over == (columns[table] if right in whole else some), (table, right)


@pytest.mark.parametrize("role", RIGHTS)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET cost = 0",
        "DELETE FROM entries",
        "TRUNCATE entries",
        "DELETE FROM accounts",
        "UPDATE accounts SET delta = 0.5",
        "UPDATE accounts SET renyi_order = 2",
        "UPDATE accounts SET capacity = capacity * 100",
        "UPDATE accounts SET epsilon = 100",
        "UPDATE accounts SET held = 0, settled = 0",
        "UPDATE accounts SET head = head, moves = moves",
        "SELECT FROM accounts FOR UPDATE",
        "DELETE FROM reviews",
        "DELETE FROM witness",
        "DELETE FROM jobs",
        "ALTER TABLE entries DISABLE TRIGGER ALL",
        "SET session_replication_role = replica",
    ],
)
def test_the_application_cannot_rewrite_the_ledger(role, statement, database, account):
    with psycopg.connect(database(role)) as connection, pytest.raises(errors.InsufficientPrivilege):
        connection.execute(statement)


@pytest.mark.parametrize("role", ["service", "train", "sweep"])
@pytest.mark.parametrize(
    ("row", "why"),
    [
        (("grant", 99_000), "gives no more than its epsilon|nobody confirmed"),
        (("grant", 1, 800), "nobody confirmed"),
        (("grant", 10**12, 8), "gives no more than its epsilon"),
        (("grant", 1, 7), "keeps the terms"),
        (("reserve", 1001), "less left"),
        (("settle", 1001), "less left"),
        (("settle", 1), ""),  # spending what nobody promised is possible, and harmless
    ],
)
def test_a_row_moves_a_balance_only_as_it_may(role, row, why, database, owner, account):
    """The application may add rows: none of them raises a capacity that two people did not agree on."""
    kind, cost, *epsilon = row
    before = owner.execute("SELECT capacity, held, settled FROM accounts WHERE id = %s", [account]).fetchone()
    statement = entry(
        kind,
        cost,
        epsilon=epsilon[0] if epsilon else 8,
        job="gen_random_uuid()" if kind == "reserve" else "NULL",
    )
    with psycopg.connect(database(role)) as connection:
        if why:
            with pytest.raises((errors.RestrictViolation, errors.CheckViolation), match=why):
                connection.execute(statement, [account])
        else:
            connection.execute(statement, [account])
            connection.commit()
    after = owner.execute("SELECT capacity, held, settled FROM accounts WHERE id = %s", [account]).fetchone()
    assert after == (before if why else (1000, 0, cost))


@pytest.mark.parametrize("number", [0, 2])
def test_a_row_follows_the_last_one_of_its_account(number, database, account):
    with (
        psycopg.connect(database("service")) as connection,
        pytest.raises((errors.RestrictViolation, errors.UniqueViolation)),
    ):
        connection.execute(entry("settle", 1, number=number), [account])


@pytest.mark.parametrize("role", RIGHTS)
def test_no_role_may_make_temporary_tables(role, servers):
    """A temporary table is found before ours by whoever does not say where to look."""
    with psycopg.connect(servers.environments[role]["SLUICE_DATABASE_URL"]) as connection:
        for right in ("TEMPORARY", "CREATE"):
            asked = connection.execute("SELECT has_database_privilege(current_database(), %s)", [right])
            assert asked.fetchone() == (False,), right
        assert connection.execute("SELECT has_schema_privilege('public', 'CREATE')").fetchone() == (False,)
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("CREATE TEMPORARY TABLE jobs (id uuid)")


def test_every_function_says_where_it_looks_for_tables(owner):
    loose = owner.execute(
        """SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace
           AND NOT 'search_path=pg_catalog, public, pg_temp' = ANY (coalesce(proconfig, '{}'))"""
    ).fetchall()
    assert loose == []


@pytest.mark.parametrize("role", RIGHTS)
def test_the_application_is_no_superuser_and_makes_no_tables(role, database):
    with psycopg.connect(database(role)) as connection:
        powers = """SELECT rolsuper, rolcreaterole, rolcreatedb, rolbypassrls
                    FROM pg_roles WHERE rolname = current_user"""
        assert connection.execute(powers).fetchone() == (False, False, False, False)
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("CREATE TABLE mine (x int)")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET cost = 0",
        "UPDATE entries SET reason = reason",
        "DELETE FROM entries",
        "TRUNCATE entries",
        "DELETE FROM accounts",
        "TRUNCATE accounts CASCADE",
        "DELETE FROM reviews",
        "TRUNCATE reviews",
        "DELETE FROM replies",
        "TRUNCATE replies",
    ],
)
def test_not_even_the_owner_rewrites_the_ledger_by_accident(statement, owner, account):
    with pytest.raises(errors.RestrictViolation, match="stay as they are"):
        owner.execute(statement)
    assert owner.execute("SELECT count(*) FROM entries WHERE account_id = %s", [account]).fetchone() == (1,)


@pytest.mark.parametrize(
    "move",
    [
        "held = 1001",
        "settled = 1001",
        "held = 600, settled = 401",
        "held = -1",
        "held = 9223372036854775807, settled = 9223372036854775807",
    ],
)
def test_no_balance_leaves_its_bounds(move, owner, account):
    with pytest.raises(errors.CheckViolation):
        owner.execute(f"UPDATE accounts SET {move} WHERE id = %s", [account])


@pytest.mark.parametrize("balance", [(-1, 0, 0), (1000, 0, 0), (0, -1, 0), (0, 0, -1), (1000, 600, 401)])
def test_no_account_starts_with_a_balance(balance, owner):
    with pytest.raises(errors.RestrictViolation, match="starts empty"):
        owner.execute(
            """INSERT INTO accounts (id, relation, epsilon, delta, renyi_order, head, capacity, held, settled)
               VALUES (%s, 'add_remove', 8, 1e-5, 4, decode(repeat('00', 32), 'hex'), %s, %s, %s)""",
            [uuid.uuid4(), *balance],
        )


@pytest.mark.parametrize(
    "change",
    [
        "id = gen_random_uuid()",
        "relation = 'replace_one'",
        "delta = delta * 2",
        "renyi_order = 2",
        "created_at = now() + interval '1 day'",
        "capacity = capacity - 1",
        "settled = settled - 1",
        "moves = moves - 1",
    ],
)
def test_what_an_account_was_opened_with_stays(change, owner, account):
    owner.execute("UPDATE accounts SET settled = 1 WHERE id = %s", [account])
    with pytest.raises(errors.RestrictViolation, match="stays as it is"):
        owner.execute(f"UPDATE accounts SET {change} WHERE id = %s", [account])


def test_a_balance_may_be_used_up_to_the_last_unit(owner, account):
    owner.execute("UPDATE accounts SET held = 600, settled = 400 WHERE id = %s", [account])
    assert owner.execute("SELECT held + settled FROM accounts WHERE id = %s", [account]).fetchone() == (1000,)


def test_a_process_that_freezes_in_a_transaction_lets_go_of_what_it_locked(
    database, owner, account, monkeypatch
):
    """A stopped worker must not keep everybody else from a row; it finds its own connection gone."""
    monkeypatch.setattr(core.database, "FROZEN_SECONDS", 1)
    frozen = core.database.connect(database("service"), pool_size=1)
    with frozen.connect() as held:
        held.execute(text("SELECT lock_account(:id)"), {"id": account})
        owner.execute("SET statement_timeout = '20s'")
        owner.execute("UPDATE accounts SET held = held WHERE id = %s", [account])  # waits for the lock
        with pytest.raises(DBAPIError):
            held.execute(text("SELECT 1"))
    frozen.dispose()


def test_the_locks_of_a_frozen_process_last_half_a_minute(database):
    engine = core.database.connect(database("train"), pool_size=1)
    with engine.connect() as connection:
        shown = connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar_one()
    engine.dispose()
    assert shown == "30s"


@pytest.mark.parametrize(
    ("revision", "way_out"),
    [("from-the-future", "the version of Sluice that wrote it"), ("0009", r"0\.1\.0")],
)
def test_migrating_twice_changes_nothing_and_an_unknown_revision_is_refused(servers, revision, way_out):
    from migrations import UnknownRevision, migrate

    with new_database(servers) as database:
        migrate(database("owner"), {})
        with psycopg.connect(database("owner")) as owner:
            owner.execute("UPDATE alembic_version SET version_num = %s", [revision])
        with pytest.raises(UnknownRevision, match=f"revision {revision}.*{way_out}"):
            migrate(database("owner"), {})


@pytest.mark.parametrize(
    ("constraint", "states"),
    [("datasets_state", DatasetState), ("jobs_state", JobState), ("releases_state", ReleaseState)],
)
def test_the_states_of_a_row_are_those_of_its_enum(owner, constraint, states):
    query = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = %s"
    [definition] = owner.execute(query, [constraint]).fetchone()
    assert sorted(re.findall(r"'(\w+)'", definition)) == sorted(states)


def test_the_models_describe_the_tables_that_migrations_make(database):
    from sqlalchemy import inspect

    from core.database import connect
    from core.tables import Base

    engine = connect(database("owner"))
    found = inspect(engine)
    for table in Base.metadata.tables.values():
        made = {(c["name"], c["type"].python_type, c["nullable"]) for c in found.get_columns(table.name)}
        assert {(c.name, c.type.python_type, c.nullable) for c in table.columns} == made
    engine.dispose()
