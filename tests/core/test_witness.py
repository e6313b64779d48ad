"""A restored backup gives nothing back: the ledger beside its witness, which lies outside the database."""

import itertools
import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from botocore.exceptions import ClientError
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from core import ledger
from core.stores import s3
from core.stores import witness as witness_store
from core.stores.witness import WitnessShelf
from core.tables import Account, Witness
from core.witness import LedgerBehindWitness, LedgerNotWitnessed, compare, require_level
from tests.core.ledgers import MOVE, Books, closed_cost


class Board:
    """A shelf in memory that remembers every witness that ever lay on it."""

    def __init__(self):
        self.all = []

    def create(self, body):
        if self.all:
            return False
        self.all.append(body)
        return True

    def read(self):
        if not self.all:
            raise FileNotFoundError
        return self.all[-1]

    def write(self, body):
        self.all.append(body)

    @property
    def now(self):
        return json.loads(self.all[-1])


@pytest.fixture
def books(database):
    books = Books(database)
    yield books
    books.close()


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def backup(servers, database):
    """A copy of the test's database as it is now, to be restored later: gives books over the copy."""
    made = []

    def copy(books):
        books.close()  # a template must be unused while it is copied
        name = f"t_{uuid.uuid4().hex}"
        source = database("owner").rsplit("/", 1)[1]
        with psycopg.connect(servers.owner_url.rsplit("/", 1)[0] + "/postgres", autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name} TEMPLATE {source}")
        restored = Books.__new__(Books)
        restored.__dict__ |= books.__dict__ | {"_engines": {}, "_lines": {}}
        restored._url = lambda role: database(role).rsplit("/", 1)[0] + f"/{name}"
        made.append((name, restored))
        return restored

    yield copy
    with psycopg.connect(servers.owner_url.rsplit("/", 1)[0] + "/postgres", autocommit=True) as admin:
        for name, restored in made:
            restored.close()
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def look(books, shelf):
    """What the sweeper does on its round, with no right but its own."""
    with books.session("sweep") as session:
        compare(session, shelf)


def level(books):
    with books.session() as session:
        require_level(session)


def row(books):
    with books.session() as session:
        return session.scalars(select(Witness)).one()


def refused(books):
    with pytest.raises(LedgerBehindWitness) as problem:
        level(books)
    assert problem.value.status == 503
    assert problem.value.slug == "ledger-behind-witness"
    return row(books).behind


def spend(books, account, noise=5.0):
    job = books.reserve(account, noise)
    books.open(job)
    books.settle(account, job)
    return job


# ---- level


def test_a_new_database_makes_its_witness_and_is_level(books, board):
    with pytest.raises(LedgerNotWitnessed):
        level(books)
    look(books, board)
    level(books)
    assert board.now == {"generation": 1, "accounts": {}}


def test_the_witness_follows_a_ledger_that_moves_and_rests_when_it_rests(books, board):
    account = books.account()
    look(books, board)
    spend(books, account)
    look(books, board)
    now = books.now(account)
    assert board.now["accounts"] == {
        str(account.id): {"moves": 3, "head": now.head.hex(), "spent": closed_cost(5.0)}
    }
    written = len(board.all)
    look(books, board)
    assert len(board.all) == written
    level(books)
    generations = [json.loads(body)["generation"] for body in board.all]
    assert generations == sorted(set(generations))
    assert row(books).generation == generations[-1]


def test_a_promise_counts_as_spent_for_the_witness(books, board):
    account = books.account()
    books.reserve(account, 5.0)
    look(books, board)
    assert board.now["accounts"][str(account.id)]["spent"] == closed_cost(5.0)


@pytest.mark.parametrize("shift", ["- interval '61 seconds'", "+ interval '1 day'"])
def test_a_look_that_is_too_old_or_from_a_wrong_clock_does_not_count(shift, books, board):
    look(books, board)
    with books.session("owner") as session:
        session.execute(text(f"UPDATE witness SET checked_at = checked_at {shift}"))
    with pytest.raises(LedgerNotWitnessed) as problem:
        level(books)
    assert problem.value.status == 503
    look(books, board)
    level(books)


def test_a_shelf_that_does_not_answer_leaves_the_last_look_to_grow_old(books, board):
    look(books, board)
    seen = row(books).checked_at
    board.all.clear()
    with pytest.raises(FileNotFoundError):
        look(books, board)
    assert row(books).checked_at == seen
    assert board.all == [], "a witness that is gone is not quietly made anew"


# ---- behind


def test_a_restored_backup_is_refused(books, board, backup):
    account = books.account()
    spend(books, account)
    look(books, board)
    older = backup(books)
    spend(books, account)
    look(books, board)
    level(books)
    look(older, board)
    behind = refused(older)
    assert behind == {
        "generation": board.now["generation"],
        "accounts": {str(account.id): 2 * closed_cost(5.0)},
    }
    look(books, board)
    level(books)  # the one that is not behind goes on


def test_every_older_state_is_refused_and_the_witness_stays_as_it_is(books, board, backup):
    account = books.account()
    states = [backup(books)]
    job = books.reserve(account, 5.0)
    states.append(backup(books))
    books.void(account, job)
    states.append(backup(books))
    with books.session() as session:
        ledger.raise_budget(session, account, epsilon=5.0, move=MOVE)
    states.append(backup(books))
    spend(books, account)
    look(books, board)
    written = list(board.all)
    for older in states:
        look(older, board)
        look(older, board)
        refused(older)
    assert board.all == written


def test_an_account_that_is_missing_is_behind(books, board, backup):
    older = backup(books)
    account = books.account()
    look(books, board)
    look(older, board)
    assert refused(older)["accounts"] == {str(account.id): 0}


def test_a_database_made_anew_is_behind_the_witness_of_the_old_one(books, board, backup):
    empty = backup(books)
    spend(books, books.account())
    look(books, board)
    assert row(empty).generation == 0
    look(empty, board)
    refused(empty)


@pytest.mark.parametrize("further", [0, 1, 3])
def test_another_history_of_the_same_length_or_longer_is_behind(further, books, board, backup):
    account = books.account()
    look(books, board)
    fork = backup(books)
    spend(books, account)
    look(books, board)
    spend(fork, account)
    for _ in range(further):
        fork.reserve(account, 7.0)
    assert fork.now(account).moves == books.now(account).moves + further
    look(fork, board)
    assert set(refused(fork)["accounts"]) == {str(account.id)}


def test_rows_cut_off_by_a_superuser_are_noticed_though_the_chain_holds(books, board):
    account = books.account()
    before = books.now(account)
    books.reserve(account, 5.0)
    look(books, board)
    with books.session("owner") as session:
        session.execute(text("ALTER TABLE entries DISABLE TRIGGER ALL"))
        session.execute(text("ALTER TABLE accounts DISABLE TRIGGER ALL"))
        session.execute(text("DELETE FROM entries WHERE number = 2"))
        session.execute(text("UPDATE accounts SET held = 0, moves = 1, head = :head"), {"head": before.head})
    assert books.broken(account) is None
    look(books, board)
    refused(books)


def test_one_account_behind_shuts_the_whole_ledger(books, board, backup):
    one, _ = books.account(), books.account()
    look(books, board)
    older = backup(books)
    spend(books, one)
    look(books, board)
    look(older, board)
    assert set(refused(older)["accounts"]) == {str(one.id)}


# ---- acknowledged


def acknowledge(books, generation=None):
    """What an admin's acknowledgement comes to: what is lost is charged, then the generation is named."""
    with books.session() as session:
        seen = session.scalars(select(Witness)).one()
        ended = []
        for id, spent in seen.behind["accounts"].items():
            account = session.get(Account, uuid.UUID(id))
            if account is not None:
                cost = spent - account.held - account.settled
                ended += ledger.forfeit(session, account, cost=cost, move=MOVE)
        session.execute(update(Witness).values(acknowledged=generation or seen.behind["generation"]))
    return ended


def test_after_an_acknowledgement_what_was_lost_is_charged_and_the_ledger_goes_on(books, board, backup):
    account = books.account()
    spend(books, account)
    look(books, board)
    older = backup(books)
    for _ in range(3):
        spend(books, account)
    look(books, board)
    spent = books.now(account).settled
    look(older, board)
    acknowledge(older)
    with pytest.raises(LedgerBehindWitness):
        level(older)  # until the sweeper has been round
    look(older, board)
    level(older)
    now = older.now(account)
    assert (now.held, now.settled) == (0, spent)
    assert older.broken(account) is None
    assert board.now["accounts"][str(account.id)]["spent"] == spent
    look(books, board)
    refused(books)  # the old history is over: there is one ledger


def test_a_promise_that_may_have_been_kept_after_the_backup_is_not_given_back(books, board, backup):
    account = books.account()
    job = books.reserve(account, 3.0)
    look(books, board)
    older = backup(books)
    books.open(job)
    books.settle(account, job)  # and published, perhaps
    look(books, board)
    look(older, board)
    refused(older)
    assert acknowledge(older) == [job]
    look(older, board)
    with pytest.raises(ledger.NothingReserved):
        older.void(account, job)
    assert older.now(account).left == books.now(account).left


def test_an_acknowledgement_is_good_once(books, board, backup):
    account = books.account()
    look(books, board)
    first, second = backup(books), backup(books)
    spend(books, account)
    look(books, board)
    look(first, board)
    acknowledge(first)
    look(first, board)
    level(first)
    # The same backup once more, with the acknowledgement of the first loss in it.
    look(second, board)
    with second.session() as session:
        session.execute(update(Witness).values(acknowledged=row(first).acknowledged))
    look(second, board)
    refused(second)


@pytest.mark.parametrize("ahead", [1, 10**6])
def test_nobody_acknowledges_in_advance(ahead, books, board, backup):
    account = books.account()
    look(books, board)
    older = backup(books)
    spend(books, account)
    look(books, board)
    look(older, board)
    acknowledge(older, generation=board.now["generation"] + ahead)
    look(older, board)
    refused(older)


def test_a_witness_that_was_itself_put_back_does_not_revive_an_acknowledgement(books, board, backup):
    account = books.account()
    look(books, board)
    early = list(board.all)
    older = backup(books)
    for _ in range(4):
        spend(books, account)
        look(books, board)
    look(older, board)
    acknowledge(older)
    look(older, board)
    level(older)
    board.all[:] = early  # the bucket is restored too, to the beginning
    for _ in range(8):
        spend(older, account, noise=20.0)
        look(older, board)
        level(older)
    generations = [json.loads(body)["generation"] for body in board.all[len(early) :]]
    assert row(older).acknowledged not in generations
    assert generations == sorted(set(generations))


# ---- two sweepers


def test_two_sweepers_at_once_keep_one_witness_that_only_goes_forward(books, board):
    account = books.account(40.0)
    look(books, board)
    stop, problems = threading.Event(), []

    def sweep():
        while not stop.is_set():
            try:
                look(books, board)
                level(books)
            except Exception as problem:
                problems.append(problem)

    sweepers = [threading.Thread(target=sweep) for _ in range(4)]
    for each in sweepers:
        each.start()
    for _ in range(40):
        spend(books, account, noise=10.0)
    stop.set()
    for each in sweepers:
        each.join()
    look(books, board)
    assert problems == []
    assert board.now["accounts"][str(account.id)]["head"] == books.now(account).head.hex()
    seen = [json.loads(body) for body in board.all]
    for before, after in itertools.pairwise(seen):
        assert after["generation"] == before["generation"] + 1
        for id, then in before["accounts"].items():
            assert after["accounts"][id]["moves"] >= then["moves"]
    assert len(seen) > 5


def test_while_one_sweeper_looks_another_goes_past(books, board):
    look(books, board)
    with Session(books.engine("sweep")) as first:
        compare(first, board)
        before = row(books).checked_at
        look(books, board)  # neither waits nor writes
        assert row(books).checked_at == before
        first.commit()
    assert row(books).checked_at > before


# ---- the shelf, on a real server with the sweeper's own identity


@pytest.fixture
def shelf(servers, monkeypatch):
    monkeypatch.setattr(witness_store, "KEY", f"witness/{uuid.uuid4().hex}.json")
    keys = servers.s3_identities["sweep"]
    client = s3.client(endpoint=servers.s3_endpoint, region="us-east-1", attempts=1, **keys)
    return WitnessShelf(client, "sluice-vault")


def test_a_shelf_is_created_once_read_and_replaced(shelf):
    with pytest.raises(ClientError):
        shelf.read()
    assert shelf.create(b"first") is True
    assert shelf.create(b"second") is False
    assert shelf.read() == b"first"
    shelf.write(b"third")
    assert shelf.read() == b"third"
    assert shelf.create(b"fourth") is False
    assert shelf.read() == b"third"


def test_of_many_that_create_at_once_one_does(shelf):
    bodies = [str(number).encode() for number in range(16)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        made = list(pool.map(shelf.create, bodies))
    assert sum(made) == 1
    assert shelf.read() == bodies[made.index(True)]


def test_a_shelf_nobody_lets_us_write_to_is_an_error_and_no_answer(servers, monkeypatch):
    monkeypatch.setattr(witness_store, "KEY", "elsewhere/ledger.json")
    keys = servers.s3_identities["sweep"]
    client = s3.client(endpoint=servers.s3_endpoint, region="us-east-1", attempts=1, **keys)
    shelf = WitnessShelf(client, "sluice-vault")
    for attempt in (lambda: shelf.create(b"x"), shelf.read, lambda: shelf.write(b"x")):
        with pytest.raises(ClientError):
            attempt()


def test_a_restored_backup_is_refused_on_the_real_shelf(books, shelf, backup):
    account = books.account()
    look(books, shelf)
    older = backup(books)
    spend(books, account)
    look(books, shelf)
    level(books)
    look(older, shelf)
    refused(older)
    acknowledge(older)
    look(older, shelf)
    level(older)
    assert older.now(account).settled == closed_cost(5.0)
