"""What the database itself refuses, whoever asks: rewriting the ledger, overspending, overreaching."""

import uuid

import psycopg
import pytest
from psycopg import errors

ACCOUNT = """INSERT INTO accounts (id, relation, epsilon, delta, renyi_order, capacity)
             VALUES (%s, 'add-remove', 8, 1e-5, 4, 1000)"""
ENTRY = """INSERT INTO entries (account_id, number, kind, cost, actor, reason, previous, digest)
           VALUES (%s, %s, 'grant', 0, 'someone', 'first', decode(repeat('00', 32), 'hex'),
                   decode(repeat('01', 32), 'hex'))"""
# role → table → rights, the whole of it.
RIGHTS = {
    "service": {"accounts": {"SELECT", "INSERT"}, "entries": {"SELECT", "INSERT"}},
    "train": {"accounts": {"SELECT"}, "entries": {"SELECT", "INSERT"}},
    "publish": {"accounts": {"SELECT"}, "entries": {"SELECT"}},
    "sweep": {"accounts": {"SELECT"}, "entries": {"SELECT", "INSERT"}},
}
COLUMNS = {
    "service": {"capacity", "held"},
    "train": {"held", "settled"},
    "publish": set(),
    "sweep": {"held", "settled"},
}
ALL_RIGHTS = ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"]


@pytest.fixture
def owner(database):
    with psycopg.connect(database("owner"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def account(owner):
    id = uuid.uuid4()
    owner.execute(ACCOUNT, [id])
    owner.execute(ENTRY, [id, 1])
    return id


@pytest.mark.parametrize("role", RIGHTS)
def test_a_role_has_exactly_its_rights(role, database, owner):
    tables = {
        name for (name,) in owner.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    }
    everywhere = {"parts": {"SELECT", "INSERT", "UPDATE", "DELETE"}, "alembic_version": {"SELECT"}}
    expected = RIGHTS[role] | everywhere
    assert tables == set(expected), "a new table needs a line in this test"
    with psycopg.connect(database(role)) as connection:
        for table in tables:
            has = {
                right
                for right in ALL_RIGHTS
                if connection.execute("SELECT has_table_privilege(%s, %s)", [table, right]).fetchone()
                == (True,)
            }
            assert has == expected[table], table
        columns = owner.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'accounts'"
        ).fetchall()
        updatable = {
            column
            for (column,) in columns
            if connection.execute(
                "SELECT has_column_privilege('accounts', %s, 'UPDATE')", [column]
            ).fetchone()
            == (True,)
        }
        assert updatable == COLUMNS[role]


@pytest.mark.parametrize("role", RIGHTS)
@pytest.mark.parametrize(
    "statement",
    ["UPDATE entries SET cost = 0", "DELETE FROM entries", "TRUNCATE entries", "DELETE FROM accounts"],
)
def test_the_application_cannot_rewrite_the_ledger(role, statement, database, account):
    with psycopg.connect(database(role)) as connection, pytest.raises(errors.InsufficientPrivilege):
        connection.execute(statement)


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
        "settled = -1",
        "capacity = -1",
        "held = 9223372036854775807, settled = 9223372036854775807",
    ],
)
def test_no_balance_leaves_its_bounds(move, owner, account):
    with pytest.raises(errors.CheckViolation):
        owner.execute(f"UPDATE accounts SET {move} WHERE id = %s", [account])


def test_a_balance_may_be_used_up_to_the_last_unit(owner, account):
    owner.execute("UPDATE accounts SET held = 600, settled = 400 WHERE id = %s", [account])
    assert owner.execute("SELECT held + settled FROM accounts WHERE id = %s", [account]).fetchone() == (1000,)


def test_migrating_twice_changes_nothing_and_a_newer_database_is_refused(database, owner):
    from migrations import DatabaseIsNewer, migrate

    migrate(database("owner"), {})
    owner.execute("UPDATE alembic_version SET version_num = 'from-the-future'")
    with pytest.raises(DatabaseIsNewer, match="from-the-future"):
        migrate(database("owner"), {})


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
