"""The ledger's promises: nobody overspends, what touched records is not given back, no edit hides."""

import json
import math
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import errors
from psycopg.types.json import Json
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core import ledger
from core.tables import Account
from sluice.privacy.account import capacity, default_order
from sluice.privacy.events import PoissonGaussian, Query
from sluice.privacy.relation import Relation
from sluice.release.chain import GENESIS, Broken
from sluice.release.ledger import digest
from tests.conftest import new_database
from tests.core.ledgers import DELTA, MOVE, ORDER, READINGS, Books, closed_cost, gaussian


@pytest.fixture(scope="module")
def database(servers):
    """One for all tests here: each works on accounts of its own."""
    with new_database(servers) as url:
        yield url


@pytest.fixture(scope="module")
def books(database):
    with closing(Books(database)) as books:
        yield books


@pytest.fixture
def crowd(database):
    """Books of one test alone, which chooses how many connections it opens."""
    with closing(Books(database)) as books:
        yield books


@pytest.fixture(scope="module")
def unguarded(servers):
    """Books over a database of which `victim` takes all guards away."""
    with new_database(servers) as url, closing(Books(url)) as books:
        yield books


def balance(account):
    return account.capacity, account.held, account.settled, account.moves


# ---- the moves


def test_an_account_opens_with_what_its_epsilon_is_worth(books):
    account = books.account(4.0)
    # log((a-1)/a) - (log delta + log a) / (a-1) is what the conversion itself uses up.
    overhead = math.log((ORDER - 1) / ORDER) - math.log(DELTA * ORDER) / (ORDER - 1)
    assert account.capacity == pytest.approx((4.0 - overhead) * 1e9, abs=2)
    assert balance(account) == (account.capacity, 0, 0, 1)
    with books.session() as session:
        [row] = ledger.rows(session, account.id)
    assert row["kind"] == "grant"
    assert row["cost"] == account.capacity
    assert row["terms"] == {"relation": "add_remove", "epsilon": 4.0, "delta": DELTA, "order": ORDER}
    assert (row["actor"], row["reason"]) == ("someone", "a test")
    assert row["previous"] == GENESIS.hex()
    assert row["digest"] == account.head.hex() == digest(GENESIS, row).hex()


def test_a_job_is_reserved_opened_and_settled(books):
    account = books.account()
    job = books.reserve(account, 3.0)
    cost = closed_cost(3.0)
    assert balance(books.now(account)) == (account.capacity, cost, 0, 2)
    books.open(job)
    books.settle(account, job)
    assert balance(books.now(account)) == (account.capacity, 0, cost, 3)
    with books.session() as session:
        grant, reserve, settle = ledger.rows(session, account.id)
    assert reserve["event"] == gaussian(3.0).to_dict()
    assert reserve["readings"] == READINGS
    assert (reserve["job"], settle["job"]) == (str(job), str(job))
    assert (reserve["cost"], settle["cost"]) == (cost, cost)
    assert (settle["event"], settle["readings"], settle["terms"]) == (None, None, None)
    assert grant["at"] < reserve["at"] < settle["at"]
    assert reserve["previous"] == grant["digest"]
    assert settle["previous"] == reserve["digest"]
    assert books.broken(account) is None


def test_a_void_gives_all_of_it_back(books):
    account = books.account()
    job = books.reserve(account, 1.5)
    books.void(account, job)
    assert balance(books.now(account)) == (account.capacity, 0, 0, 3)
    books.reserve(account, 1.5)


def test_the_cost_is_read_at_the_account_s_order_and_relation(books):
    event = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=4.0, steps=10, sampling_prob=0.1)
    costs = set()
    for relation in Relation:
        for order in (2, 8):
            with books.session("train") as session:
                account = ledger.open_account(
                    session, relation=relation, epsilon=9.0, delta=0.01, order=order, move=MOVE
                )
                costs.add(ledger.price(event, account))
    assert len(costs) == 4


def test_what_does_not_fit_is_refused_with_what_was_asked_and_left(books):
    account = books.account()
    books.reserve(account, 1.5)
    with pytest.raises(ledger.BudgetExceeded) as refused:
        books.reserve(account, 1.5)
    fields = refused.value.fields
    assert fields["asked"] == {"cost": closed_cost(1.5), **READINGS}
    now = books.now(account)
    assert fields["left"] == {"cost": now.capacity - now.held}
    assert refused.value.status == 409
    assert books.broken(account) is None


@pytest.mark.parametrize("missing", [0, 1])
def test_the_last_unit_can_be_spent_and_not_one_more(missing, books):
    account, cost = books.account(), closed_cost(3.0)
    with books.session("owner") as session:
        session.execute(
            text("UPDATE accounts SET settled = :settled WHERE id = :id"),
            {"settled": account.capacity - cost + missing, "id": account.id},
        )
    if missing:
        with pytest.raises(ledger.BudgetExceeded):
            books.reserve(account, 3.0)
    else:
        books.reserve(account, 3.0)
        assert books.now(account).left == 0


def test_a_budget_only_grows(books):
    account = books.account(4.0)
    books.raise_budget(account, 5.0)
    assert books.now(account).capacity == capacity(5.0, DELTA, ORDER)
    assert books.now(account).epsilon == 5.0
    for epsilon in (5.0, 4.0, 4.999):
        with pytest.raises(ledger.BudgetNotRaised):
            books.raise_budget(account, epsilon)
    with books.session() as session:
        first, second = ledger.rows(session, account.id)
    assert first["cost"] + second["cost"] == books.now(account).capacity
    assert second["terms"]["epsilon"] == 5.0
    assert books.broken(account) is None


def test_the_default_account_holds_something(books):
    order = default_order(1.0, DELTA)
    with books.session("train") as session:
        account = ledger.open_account(
            session, relation=Relation.REPLACE_ONE, epsilon=1.0, delta=DELTA, order=order, move=MOVE
        )
    assert account.left > 10**8


def test_forfeiting_charges_what_is_left_at_most_and_ends_every_promise(books):
    account = books.account()
    settled, waiting, opened = (books.reserve(account, noise) for noise in (3.0, 4.0, 5.0))
    books.settle(account, settled)
    books.open(opened)
    with books.session() as session:
        stale = session.get_one(Account, account.id)
        books.reserve(account, 6.0, job=(late := uuid.uuid4()))  # while the admin looks at it
        ended = ledger.forfeit(session, stale, cost=10**18, move=MOVE)
    assert set(ended) == {waiting, opened, late}
    now = books.now(account)
    assert (now.held, now.settled, now.left) == (0, now.capacity, 0)
    for job in (waiting, opened, late):
        with pytest.raises((ledger.NothingReserved, ledger.RecordsOpened)):
            books.void(account, job)
    with pytest.raises(IntegrityError):
        books.open(waiting)
    assert books.broken(account) is None


# ---- L3: every state and every move

STATES = ("unreserved", "reserved", "opened", "settled", "opened and settled", "voided")
LEGAL = {
    ("unreserved", "reserve"),
    ("reserved", "open"),
    ("reserved", "settle"),  # charged for nothing: allowed, it gives nothing back
    ("reserved", "void"),
    ("opened", "settle"),
}
PAIRS = [(state, move) for state in STATES for move in ("reserve", "open", "settle", "void")]


def job_in(books, account, state):
    if state == "unreserved":
        job = uuid.uuid4()
        with books.session() as session:
            books.add_job(session, account, 3.0, id=job, cost=closed_cost(3.0))
        return job
    job = books.reserve(account, 3.0)
    if state.startswith("opened"):
        books.open(job)
    if state.endswith("settled"):
        books.settle(account, job)
    if state == "voided":
        books.void(account, job)
    return job


def through_the_ledger(books, account, job, move):
    if move == "open":
        return books.open(job)
    with books.session() as session:
        if move == "reserve":
            return ledger.reserve(session, account, gaussian(3.0), job=job, readings={}, move=MOVE)
        return getattr(ledger, move)(session, account.id, job=job, move=MOVE)


def by_hand(books, account, job, move, *, role, cost=None):
    """A row written past the ledger, as code that does not ask it would."""
    with books.session(role) as session:
        if move == "open":
            session.execute(text("UPDATE jobs SET opened_at = clock_timestamp() WHERE id = :id"), {"id": job})
            return
        session.execute(
            text("""INSERT INTO entries (account_id, number, kind, cost, job_id, actor, reason, at, previous,
                        digest)
                    SELECT :account, max(number) + 1, :kind, :cost, :job, 'x', 'y', now(), :link, :link
                    FROM entries WHERE account_id = :account"""),
            {
                "account": account.id,
                "kind": move,
                "cost": closed_cost(3.0) if cost is None else cost,
                "job": job,
                "link": bytes(32),
            },
        )


@pytest.mark.parametrize(("state", "move"), PAIRS)
def test_a_move_is_made_exactly_where_it_is_legal(state, move, books):
    account = books.account()
    job = job_in(books, account, state)
    before = balance(books.now(account))
    if (state, move) in LEGAL:
        through_the_ledger(books, account, job, move)
        assert move == "open" or balance(books.now(account)) != before
    else:
        named = (ledger.NothingReserved, ledger.RecordsOpened)
        with pytest.raises(named if move in ("settle", "void") else IntegrityError):
            through_the_ledger(books, account, job, move)
        assert balance(books.now(account)) == before
    assert books.broken(account) is None


@pytest.mark.parametrize(("state", "move"), [pair for pair in PAIRS if pair not in LEGAL])
@pytest.mark.parametrize("role", ["train", "sweep", "owner"])
def test_the_database_refuses_it_by_itself(role, state, move, books):
    account = books.account()
    job = job_in(books, account, state)
    with pytest.raises(IntegrityError):
        by_hand(books, account, job, move, role=role)
    assert books.broken(account) is None


@pytest.mark.parametrize("move", ["settle", "void"])
@pytest.mark.parametrize("cost", [0, 1, closed_cost(3.0) - 1, closed_cost(3.0) + 1])
def test_a_promise_ends_with_the_cost_it_began_with(move, cost, books):
    account = books.account()
    job = books.reserve(account, 3.0)
    with pytest.raises(IntegrityError, match="needs its reserve"):
        by_hand(books, account, job, move, role="train", cost=cost)


@pytest.mark.parametrize("move", ["settle", "void"])
def test_a_promise_ends_in_the_account_that_made_it(move, books):
    account, other = books.account(), books.account()
    job = books.reserve(account, 3.0)
    with pytest.raises(IntegrityError, match="needs its reserve"):
        by_hand(books, other, job, move, role="train")
    with books.session() as session, pytest.raises(ledger.NothingReserved):
        getattr(ledger, move)(session, other.id, job=job, move=MOVE)


@pytest.mark.parametrize("wrong", ["account", "cost", "nothing"])
def test_a_promise_and_its_job_say_the_same(wrong, books):
    account, other = books.account(), books.account()
    with Session(books.engine()) as session:
        job, named = uuid.uuid4(), other if wrong == "account" else account
        cost = ledger.reserve(session, account, gaussian(3.0), job=job, readings={}, move=MOVE)
        if wrong != "nothing":
            books.add_job(session, named, 3.0, id=job, cost=cost - (wrong == "cost"))
        with pytest.raises(IntegrityError, match="entries_of_job"):
            session.commit()
    assert balance(books.now(account)) == balance(account)


def test_a_job_is_not_born_with_open_records(books, database):
    account = books.account()
    job = books.reserve(account, 3.0)
    with psycopg.connect(database("owner")) as owner, pytest.raises(errors.RestrictViolation, match="closed"):
        owner.execute(
            """INSERT INTO jobs (id, dataset_id, account_id, owner_id, plan, event, cost, readings, state,
                    steps, opened_at)
               SELECT gen_random_uuid(), dataset_id, account_id, owner_id, plan, event, cost, readings, state,
                    steps, now() FROM jobs WHERE id = %s""",
            [job],
        )


@pytest.mark.parametrize(
    "change",
    [
        "opened_at = NULL",
        "opened_at = now() + interval '1 day'",
        "state = 'queued'",
        "fence = fence - 1",
        "cost = 0",
        "event = '{}'",
        "plan = '{\"steps\": 1}'",
        "id = gen_random_uuid()",
        "account_id = (SELECT id FROM accounts WHERE id <> account_id LIMIT 1)",
    ],
)
def test_what_is_fixed_about_a_job_stays(change, books, database):
    account, _ = books.account(), books.account()
    job = books.reserve(account, 3.0)
    books.open(job)
    with psycopg.connect(database("owner"), autocommit=True) as owner:
        owner.execute("UPDATE jobs SET fence = 3, state = 'trained' WHERE id = %s", [job])
        with pytest.raises(errors.RestrictViolation, match="stays as it is"):
            owner.execute(f"UPDATE jobs SET {change} WHERE id = %s", [job])


@pytest.mark.parametrize("role", ["service", "train", "sweep"])
def test_a_temporary_table_does_not_stand_in_for_the_jobs(role, books, database):
    """Records were opened; a void is refused, whatever a table of jobs of the session's own says."""
    account = books.account()
    job = books.reserve(account, 3.0)
    books.open(job)
    with psycopg.connect(database("owner"), autocommit=True) as owner:
        owner.execute(
            f"GRANT TEMPORARY ON DATABASE {owner.info.dbname} TO PUBLIC"
        )  # as if it was never revoked
    with psycopg.connect(database(role)) as connection:
        connection.execute("CREATE TEMPORARY TABLE jobs (id uuid, opened_at timestamptz)")
        connection.execute("INSERT INTO pg_temp.jobs VALUES (%s, NULL)", [job])
        connection.execute("SET search_path = pg_temp, public")
        with pytest.raises(errors.RestrictViolation, match="nothing is given back"):
            connection.execute(
                """INSERT INTO public.entries
                       (account_id, number, kind, cost, job_id, actor, reason, at, previous, digest)
                   SELECT id, moves + 1, 'void', held, %s, 'x', 'x', now(), head, head
                   FROM public.accounts WHERE id = %s""",
                [job, account.id],
            )
    assert books.now(account).held == closed_cost(3.0)


# ---- races


def at_once(count, action):
    """Runs action(0) ... action(count - 1) in as many threads, let go together; results or problems."""
    ready = threading.Barrier(count)

    def one(number):
        ready.wait()
        try:
            return action(number)
        except Exception as problem:
            return problem

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def noise_for(room, count):
    """Noise of which exactly `count` releases fit into the room."""
    noise = math.sqrt(ORDER / 2 / (room / 1e9 / (count + 0.5)))
    assert count * closed_cost(noise) <= room < (count + 1) * closed_cost(noise)
    return noise


def test_two_hundred_jobs_race_for_room_for_ten_and_ten_win(crowd):
    crowd.engine(pool_size=40)
    for _ in range(2):
        account = crowd.account()
        noise = noise_for(account.capacity, 10)

        def five(_, account=account, noise=noise):
            lefts = []
            for _ in range(5):
                try:
                    crowd.reserve(account, noise)
                except ledger.BudgetExceeded as refused:
                    lefts.append(refused.fields["left"]["cost"])
            return lefts

        refusals = [left for part in at_once(40, five) for left in part]
        assert len(refusals) == 190
        assert max(refusals) < closed_cost(noise)
        assert balance(crowd.now(account)) == (account.capacity, 10 * closed_cost(noise), 0, 11)
        assert crowd.broken(account) is None


def test_jobs_of_all_sizes_race_and_whatever_still_fits_is_let_in(crowd):
    crowd.engine(pool_size=40)
    pick = random.Random(4)
    for _ in range(2):
        account = crowd.account()
        noises = [pick.uniform(1.5, 12.0) for _ in range(200)]

        def five(number, account=account, noises=noises):
            won, lost = [], []
            for noise in noises[number::40]:
                try:
                    crowd.reserve(account, noise)
                    won.append(closed_cost(noise))
                except ledger.BudgetExceeded:
                    lost.append(closed_cost(noise))
            return won, lost

        results = at_once(40, five)
        won = [cost for part, _ in results for cost in part]
        lost = [cost for _, part in results for cost in part]
        now = crowd.now(account)
        assert len(won) + len(lost) == 200
        assert now.held == sum(won) <= account.capacity
        assert all(cost > now.left for cost in lost), "refused though there was room"
        assert crowd.broken(account) is None


@pytest.mark.parametrize("first", ["open", "settle", "void"])
@pytest.mark.parametrize("second", ["void", "settle"])
def test_two_ends_of_one_job_race_and_the_books_still_agree(first, second, books):
    account = books.account(40.0)
    wins = []
    for _ in range(25):
        job = books.reserve(account, 5.0)
        moves = (first, second)
        results = at_once(
            2, lambda n, job=job, moves=moves: through_the_ledger(books, account, job, moves[n])
        )
        failed = [r for r in results if isinstance(r, Exception)]
        named = (ledger.NothingReserved, ledger.RecordsOpened, IntegrityError)
        assert all(isinstance(problem, named) for problem in failed), failed
        if (first, second) == ("open", "settle"):
            assert results[1] is None  # settling always succeeds; opening may have come too late
        else:
            assert len(failed) == 1, results
        wins.append(results[0] is None)
        if (first, second) == ("open", "void"):
            with books.session() as session:
                opened, kinds = session.execute(
                    text("""SELECT opened_at, (SELECT array_agg(kind) FROM entries WHERE job_id = jobs.id)
                            FROM jobs WHERE id = :id"""),
                    {"id": job},
                ).one()
            assert (opened is not None) is not ("void" in kinds)
    assert books.broken(account) is None


def test_the_same_job_reserved_by_many_at_once_is_charged_once(crowd):
    crowd.engine(pool_size=20)
    account = crowd.account(40.0)
    job = uuid.uuid4()
    results = at_once(20, lambda _: crowd.reserve(account, 5.0, job=job))
    assert [r for r in results if not isinstance(r, Exception)] == [job]
    assert all(isinstance(r, IntegrityError | uuid.UUID) for r in results)
    assert crowd.now(account).held == closed_cost(5.0)
    assert crowd.broken(account) is None


def test_checking_an_account_that_moves_meanwhile_finds_nothing_wrong(books):
    account = books.account(40.0)
    stop = threading.Event()
    found = []

    def look():
        with Session(books.engine()) as session:
            mine = session.get_one(Account, account.id)
            while not stop.is_set():
                found.append(ledger.verify(session, mine))
                session.commit()

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(60):
        books.void(account, books.reserve(account, 5.0))
    stop.set()
    looking.join()
    assert len(found) > 5
    assert set(found) == {None}


# ---- L9: what a superuser cannot hide

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**30), 10**30)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
values = st.recursive(
    numbers | st.booleans() | st.none() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(readings=st.dictionaries(texts, values, max_size=4), reason=texts, actor=texts)
def test_whatever_a_row_holds_it_reads_back_as_it_was_hashed(books, readings, reason, actor):
    with Session(books.engine("train")) as session:
        move = ledger.Move(actor=actor, reason=reason)
        account = ledger.open_account(
            session, relation=Relation.ADD_REMOVE, epsilon=4.0, delta=DELTA, order=ORDER, move=move
        )
        ledger.reserve(session, account, gaussian(3.0), job=uuid.uuid4(), readings=readings, move=move)
        session.expire_all()
        assert ledger.verify(session, account) is None


GUARDS = """
ALTER TABLE entries DISABLE TRIGGER ALL;
ALTER TABLE accounts DISABLE TRIGGER ALL;
ALTER TABLE entries DROP CONSTRAINT entries_kind, DROP CONSTRAINT entries_cost,
    DROP CONSTRAINT entries_number, DROP CONSTRAINT entries_previous, DROP CONSTRAINT entries_digest,
    DROP CONSTRAINT entries_job, DROP CONSTRAINT entries_terms, DROP CONSTRAINT entries_of_job,
    DROP CONSTRAINT entries_account_id_fkey, DROP CONSTRAINT entries_pkey,
    ALTER actor DROP NOT NULL, ALTER reason DROP NOT NULL;
DROP INDEX entries_reserved_once, entries_ended_once;
ALTER TABLE accounts DROP CONSTRAINT accounts_signs, DROP CONSTRAINT accounts_within_capacity,
    DROP CONSTRAINT accounts_relation, DROP CONSTRAINT accounts_epsilon, DROP CONSTRAINT accounts_delta,
    DROP CONSTRAINT accounts_order, DROP CONSTRAINT accounts_head
"""


@pytest.fixture(scope="module")
def victim(unguarded):
    """An account with every kind of row, in a database without guards. Tests roll back what they change."""
    books = unguarded
    account, other = books.account(), books.account()
    books.raise_budget(account, 9.0)
    for number in range(6):
        job = books.reserve(account, 3.0 + number)
        if number % 3 == 0:
            books.open(job)
            books.settle(account, job)
        elif number % 3 == 1:
            books.void(account, job)
    with books.session() as session:
        ledger.forfeit(session, account, cost=7, move=ledger.Move(actor="admin", reason="a loss"))
    books.reserve(account, 5.0)
    books.reserve(other, 5.0)
    assert books.broken(account) is None
    with books.session("owner") as session:
        for statement in GUARDS.split(";"):
            session.execute(text(statement))
    return account, other


def leaves(value, at=()):
    if isinstance(value, dict):
        return [leaf for name, each in value.items() for leaf in leaves(each, (*at, name))]
    return [(at, value)]


def other_json(document, pick):
    """The document with one thing in it different: a leaf, a leaf less or a leaf more."""
    if document is None:
        return {"version": 1}
    changed = json.loads(json.dumps(document))
    at, leaf = pick.choice(leaves(changed))
    inner = changed
    for name in at[:-1]:
        inner = inner[name]
    match pick.randrange(6):
        case 0:
            del inner[at[-1]]
        case 1:
            changed["more"] = pick.randrange(10)
        case 2:
            return None
        case _ if isinstance(leaf, str):
            inner[at[-1]] = leaf + pick.choice("ab ")
        case _:
            inner[at[-1]] = pick.choice([leaf * 2 + 1, leaf + 1e-9, None, "0", -leaf - 1])
    return changed


def other_text(value, pick):
    at = pick.randrange(len(value) + 1)
    return pick.choice([value[:at] + pick.choice("xé \n") + value[at:], value.upper() + "!", "", None])


def edited(row, pick, other):
    """A column of the row and another value for it, of any kind that the column can hold."""
    column = pick.choice(list(row))
    old = row[column]
    match column:
        case "account_id":
            return column, other.id
        case "number" | "cost":
            return column, pick.choice(
                [old + 1, old - 1, old * 2 + 1, -old, 0, 2**62, pick.randrange(10**10)]
            )
        case "kind":
            return column, pick.choice(["grant", "reserve", "settle", "void", "gift", ""])
        case "job_id":
            return column, pick.choice([uuid.uuid4(), None])
        case "event" | "readings" | "terms":
            new = other_json(old, pick)
            return column, None if new is None else Json(new)
        case "actor" | "reason":
            return column, other_text(old, pick)
        case "at":
            return column, old + timedelta(microseconds=pick.choice([1, -1, 10**6, -(10**12), 3600 * 10**6]))
        case "previous" | "digest":
            flipped = bytearray(old)
            flipped[pick.randrange(32)] ^= 1 << pick.randrange(8)
            return column, pick.choice([bytes(flipped), bytes(32), b"", old[:31]])
    raise AssertionError(column)


def test_a_thousand_edits_of_single_fields_are_all_found_in_the_right_row(unguarded, victim):
    account, other = victim
    pick = random.Random(9)
    found, columns = 0, set()
    with Session(unguarded.engine("owner"), expire_on_commit=False) as session:
        connection = session.connection()
        rows = connection.execute(
            text("SELECT * FROM entries WHERE account_id = :id ORDER BY number"), {"id": account.id}
        )
        rows = [dict(row) for row in rows.mappings()]
        driver = connection.connection.driver_connection
        while found < 1000:
            row = pick.choice(rows)
            column, new = edited(row, pick, other)
            plain = new.obj if isinstance(new, Json) else new
            if plain == row[column]:
                continue  # nothing was edited
            driver.execute("SAVEPOINT whole")
            driver.execute(
                f"UPDATE entries SET {column} = %s WHERE account_id = %s AND number = %s",
                [new, account.id, row["number"]],
            )
            broken = ledger.verify(session, account)
            assert broken is not None, (column, row[column], plain)
            if column == "number":
                assert broken.number in {row["number"], plain, 1}, (column, plain, broken)
            else:
                assert broken.number == row["number"], (column, plain, broken)
            driver.execute("ROLLBACK TO whole")
            found += 1
            columns.add(column)
        assert columns == set(rows[0])
        assert ledger.verify(session, account) is None, "nothing of it was left behind"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_that_are_taken_out_are_missed_wherever_they_were(count, unguarded, victim):
    account, _ = victim
    with Session(unguarded.engine("owner"), expire_on_commit=False) as session:
        moves = session.get_one(Account, account.id).moves
        for first in range(1, moves + 1):
            with session.begin_nested() as savepoint:
                session.execute(
                    text("DELETE FROM entries WHERE account_id = :id AND number BETWEEN :a AND :b"),
                    {"id": account.id, "a": first, "b": first + count - 1},
                )
                assert ledger.verify(session, account).number == first
                savepoint.rollback()
        with session.begin_nested() as savepoint:
            session.execute(text("DELETE FROM entries WHERE account_id = :id"), {"id": account.id})
            assert ledger.verify(session, account).number == 1
            savepoint.rollback()


def test_rows_that_change_places_are_noticed(unguarded, victim):
    account, _ = victim
    with Session(unguarded.engine("owner"), expire_on_commit=False) as session:
        moves = session.get_one(Account, account.id).moves
        for a in range(1, moves + 1):
            for b in range(a + 1, moves + 1):
                with session.begin_nested() as savepoint:
                    session.execute(
                        text("""UPDATE entries SET number = CASE number WHEN :a THEN :b ELSE :a END
                                WHERE account_id = :id AND number IN (:a, :b)"""),
                        {"id": account.id, "a": a, "b": b},
                    )
                    assert ledger.verify(session, account).number == a
                    savepoint.rollback()


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_a_row_that_is_slipped_in_is_noticed(linked, counted, unguarded, victim):
    """Even one that is linked and hashed as it should be, and counted in the account: the sums tell."""
    account, _ = victim
    with Session(unguarded.engine("owner"), expire_on_commit=False) as session:
        now = session.get_one(Account, account.id)
        *_, last = ledger.rows(session, account.id)
        row = last | {"number": now.moves + 1, "kind": "void", "previous": now.head.hex()}
        row["digest"] = digest(now.head, row).hex() if linked else "00" * 32
        session.execute(
            text("""INSERT INTO entries (account_id, number, kind, cost, job_id, event, readings, terms,
                        actor, reason, at, previous, digest)
                    SELECT account_id, number + 1, 'void', cost, job_id, event, readings, terms,
                        actor, reason, at, decode(:previous, 'hex'), decode(:digest, 'hex')
                    FROM entries WHERE account_id = :id AND number = :last"""),
            {"id": account.id, "last": now.moves, "previous": row["previous"], "digest": row["digest"]},
        )
        if counted:
            session.execute(
                text("UPDATE accounts SET moves = moves + 1, head = decode(:head, 'hex') WHERE id = :id"),
                {"id": account.id, "head": row["digest"]},
            )
        broken = ledger.verify(session, account)
        assert broken is not None
        assert broken.number in (row["number"], row["number"] + 1)
        session.rollback()


def test_a_grant_of_more_than_its_budget_is_found(books):
    """Linked, hashed and counted as it should be: its own terms tell."""
    account = books.account(4.0)
    with Session(books.engine("owner"), expire_on_commit=False) as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        [grant] = ledger.rows(session, account.id)
        grant["cost"] *= 3
        values = {"id": account.id, "cost": grant["cost"], "head": digest(GENESIS, grant)}
        session.execute(
            text("UPDATE entries SET cost = :cost, digest = :head WHERE account_id = :id"), values
        )
        session.execute(text("UPDATE accounts SET capacity = :cost, head = :head WHERE id = :id"), values)
        assert ledger.verify(session, account) == Broken(number=1, why="grants more than its budget holds")
        session.rollback()
        assert ledger.verify(session, account) is None


@pytest.mark.parametrize(
    "change",
    [
        "capacity = capacity + 1",
        "capacity = capacity - 1",
        "held = 0",
        "held = held + 1",
        "settled = 0",
        "settled = settled - 1",
        "held = held - 1, settled = settled + 1",
        "moves = moves + 1",
        "moves = moves - 1",
        "moves = 0, head = decode(repeat('00', 32), 'hex')",
        "head = decode(repeat('00', 32), 'hex')",
        "epsilon = epsilon + 1",
        "delta = delta / 2",
        "renyi_order = 2",
        "relation = 'replace_one'",
    ],
)
def test_an_account_that_was_edited_is_noticed(change, unguarded, victim):
    account, _ = victim
    with Session(unguarded.engine("owner"), expire_on_commit=False) as session:
        stale = session.get_one(Account, account.id)
        session.execute(text(f"UPDATE accounts SET {change} WHERE id = :id"), {"id": account.id})
        assert ledger.verify(session, stale) is not None
        session.rollback()
        assert ledger.verify(session, stale) is None
