"""A restored backup refunds nothing: the ledger beside its witness, which lies outside the database."""

import itertools
import json
import os
import stat
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from botocore.exceptions import ClientError
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

import core.witness
from core import ledger
from core.stores import s3
from core.stores.witness import DirectoryWitness, S3Witness
from core.tables import Account, Witness
from core.witness import (
    LedgerAltered,
    LedgerBehindWitness,
    LedgerNotWitnessed,
    WitnessDamaged,
    WitnessLog,
    WitnessLost,
    charge_lost,
    compare,
    require_ledger_in_sync,
)
from tests.core.ledgers import DELTA, MOVE, ORDER, Books, closed_cost


class Board(DirectoryWitness):
    """A real directory, and a look into it."""

    def __init__(self, root):
        super().__init__(root)
        self.root, self.reads = root, 0

    def read(self, key):
        self.reads += 1
        return super().read(key)

    @property
    def entries(self):
        """Every entry of the log, in order."""
        return [json.loads(path.read_bytes()) for path in sorted(self.root.glob("ledger/*.json"))]

    @property
    def now(self):
        """What a process that starts now reads."""
        log = WitnessLog(self)
        log.catch_up()
        return log


@pytest.fixture
def books(database):
    books = Books(database)
    yield books
    books.close()


@pytest.fixture
def board(tmp_path):
    (tmp_path / "witness").mkdir()
    return Board(tmp_path / "witness")


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
        restored.__dict__ |= books.__dict__ | {"_engines": {}, "_lines": {}, "_datasets": {}}
        restored._url = lambda role: database(role).rsplit("/", 1)[0] + f"/{name}"
        made.append((name, restored))
        return restored

    yield copy
    with psycopg.connect(servers.owner_url.rsplit("/", 1)[0] + "/postgres", autocommit=True) as admin:
        for name, restored in made:
            restored.close()
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def look(books, store):
    """What a sweeper that was just started does on its round, with no right but its own."""
    with books.session("sweep") as session:
        compare(session, WitnessLog(store))


def level(books):
    with books.session() as session:
        require_ledger_in_sync(session)


def row(books):
    with books.session() as session:
        return session.scalars(select(Witness)).one()


def refused(books, problem=LedgerBehindWitness):
    with pytest.raises(problem) as refusal:
        level(books)
    assert refusal.value.status == 503
    return row(books).behind


def spend(books, account, noise=5.0):
    job = books.reserve(account, noise)
    books.open(job)
    books.settle(account, job)
    return job


def alter(books, change):
    """What nobody may do: a balance is changed without a row."""
    with books.session("owner") as session:
        session.execute(text("ALTER TABLE accounts DISABLE TRIGGER USER"))
        session.execute(text(f"UPDATE accounts SET {change}"))
        session.execute(text("ALTER TABLE accounts ENABLE TRIGGER USER"))


# ---- level


def test_a_new_database_makes_its_witness_and_is_level(books, board):
    with pytest.raises(LedgerNotWitnessed):
        level(books)
    look(books, board)
    level(books)
    assert board.entries == [{"generation": 1, "full": True, "accounts": {}}]


def test_the_witness_follows_a_ledger_that_moves_and_rests_when_it_rests(books, board):
    account, other = books.account(), books.account()
    look(books, board)
    spend(books, account)
    look(books, board)
    now = books.now(account)
    state = {
        "moves": 3, "head": now.head.hex(), "capacity": now.capacity, "spent": closed_cost(5.0),
        "terms": {"relation": "add_remove", "epsilon": 4.0, "delta": DELTA, "order": ORDER},
    }  # fmt: skip
    first, second = board.entries
    assert set(first["accounts"]) == {str(account.id), str(other.id)}
    assert second == {"generation": 2, "full": False, "accounts": {str(account.id): state}}
    assert board.now.accounts == first["accounts"] | second["accounts"]
    look(books, board)
    assert len(board.entries) == 2
    level(books)
    assert row(books).generation == 2


def test_a_promise_counts_as_spent_for_the_witness(books, board):
    account = books.account()
    books.reserve(account, 5.0)
    look(books, board)
    assert board.now.accounts[str(account.id)]["spent"] == closed_cost(5.0)


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


def test_a_witness_that_does_not_answer_leaves_the_last_look_to_grow_old(books, board):
    look(books, board)
    seen = row(books).checked_at
    board.root.rename(board.root.with_name("not mounted"))
    with pytest.raises(FileNotFoundError):
        look(books, board)
    assert row(books).checked_at == seen
    assert not board.root.exists()


@pytest.mark.parametrize("kept", [0, 3], ids=["all", "the end"])
def test_a_witness_that_lost_entries_grants_nothing_until_they_are_back(kept, books, board, tmp_path):
    account = books.account()
    for _ in range(5):
        spend(books, account)
        look(books, board)
    (tmp_path / "lost").mkdir()
    files = sorted(board.root.glob("ledger/*"))
    assert len(files) == 5
    for file in files[kept:]:
        file.rename(tmp_path / "lost" / file.name)
    for _ in range(2):
        look(books, board)
        assert refused(books, WitnessLost) == {"generation": kept, "accounts": {}, "lost": True}
        assert len(board.entries) == kept, "a witness that is gone is not made anew"
    for file in files[kept:]:
        (tmp_path / "lost" / file.name).rename(file)
    look(books, board)
    level(books)


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"generation": 7, "full": true, "accounts": {}}'])
def test_an_entry_that_is_damaged_is_an_error(body, books, board):
    books.account()
    look(books, board)
    (board.root / "ledger/000000000001.json").write_bytes(body)
    with pytest.raises(WitnessDamaged, match=r"ledger/000000000001\.json"):
        look(books, board)


def test_a_process_that_starts_reads_few_entries_of_a_long_log(board, monkeypatch):
    monkeypatch.setattr(core.witness, "FULL_EVERY", 10)
    for length in (0, 1, 9, 10, 11, 99, 100, 487):
        log = board.now
        while log.generation < length:
            changed = {str(log.generation % 7): {"moves": log.generation}}
            assert log.append(log.accounts | changed)
        board.reads = 0
        again = board.now
        assert (again.generation, again.accounts) == (length, log.accounts)
        assert board.reads <= 10 + 1 + 2 * 7
    assert [e["generation"] for e in board.entries if e["full"]] == [1, *range(10, 487, 10)]


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
    known = board.now
    assert refused(older) == {
        "generation": known.generation,
        "accounts": {str(account.id): {"reason": "behind", **known.accounts[str(account.id)]}},
    }
    assert known.accounts[str(account.id)]["spent"] == 2 * closed_cost(5.0)
    look(books, board)
    level(books)  # the one that is not behind goes on


def test_every_older_state_is_refused_and_the_witness_stays_as_it_is(books, board, backup):
    account = books.account()
    states = [backup(books)]
    job = books.reserve(account, 5.0)
    states.append(backup(books))
    books.void(account, job)
    states.append(backup(books))
    books.raise_budget(account, 5.0)
    states.append(backup(books))
    spend(books, account)
    look(books, board)
    written = board.entries
    for older in states:
        look(older, board)
        look(older, board)
        refused(older)
    assert board.entries == written


def test_an_account_that_is_missing_is_behind(books, board, backup):
    older = backup(books)
    account = books.account()
    look(books, board)
    look(older, board)
    found = refused(older)["accounts"]
    assert set(found) == {str(account.id)}
    assert (found[str(account.id)]["reason"], found[str(account.id)]["spent"]) == ("behind", 0)


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


# ---- altered

ALTERED = [
    "capacity = capacity * 100",
    "capacity = capacity + 1",
    "held = 0",
    "settled = settled - 1",
    "settled = settled + 1",
    "epsilon = epsilon * 2",
    "delta = delta * 2",
    "renyi_order = 2",
    "relation = 'replace_one'",
]


@pytest.mark.parametrize("when", ["at rest", "and moved on", "before it was ever witnessed"])
@pytest.mark.parametrize("change", ALTERED)
def test_a_balance_changed_outside_the_ledger_shuts_it_until_it_is_put_right(change, when, books, board):
    account = books.account()
    look(books, board)
    if when == "before it was ever witnessed":
        account = books.account()
    spend(books, account)
    books.reserve(account, 7.0)
    if when != "before it was ever witnessed":
        look(books, board)
        level(books)
    columns = "capacity, held, settled, epsilon, delta, renyi_order, relation"
    with books.session("owner") as session:
        session.execute(text(f"CREATE TABLE was AS SELECT id, {columns} FROM accounts"))
    due = books.now(account)
    alter(books, f"{change} WHERE id = '{account.id}'")
    if when == "and moved on":
        books.reserve(account, 9.0)
        due.held += closed_cost(9.0)
    written = board.entries
    for _ in range(2):
        look(books, board)
        found = refused(books, LedgerAltered)
        assert board.entries == written
    [(id, told)] = found["accounts"].items()
    terms = {"relation": due.relation, "epsilon": due.epsilon, "delta": due.delta, "order": due.order}
    assert (id, told["reason"], told["terms"]) == (str(account.id), "altered", terms)
    assert (told["capacity"], told["spent"]) == (due.capacity, due.held + due.settled)
    # Saying yes to it does not help, by whatever way.
    with books.session() as session:
        session.execute(update(Witness).values(acknowledged=found["generation"]))
    look(books, board)
    refused(books, LedgerAltered)
    more = due.held if when == "and moved on" else "was.held"
    alter(
        books,
        f"""capacity = was.capacity, held = {more}, settled = was.settled, epsilon = was.epsilon,
            delta = was.delta, renyi_order = was.renyi_order, relation = was.relation
            FROM was WHERE was.id = accounts.id AND was.id = '{account.id}'""",
    )
    look(books, board)
    level(books)
    assert board.now.accounts[str(account.id)]["capacity"] == due.capacity


def test_an_account_that_moves_while_it_is_compared_is_not_altered(books, board):
    """Rows are read after accounts: those added in between are no difference."""
    account = books.account(40.0)
    look(books, board)
    stop, problems = threading.Event(), []

    def move():
        while not stop.is_set():
            try:
                spend(books, account, noise=20.0)
            except Exception as problem:
                return problems.append(problem)

    mover = threading.Thread(target=move)
    mover.start()
    log = WitnessLog(board)
    try:
        for _ in range(40):
            with books.session("sweep") as session:
                compare(session, log)
            level(books)
    finally:
        stop.set()
        mover.join()
    assert problems == []
    assert len(board.entries) > 5


# ---- charged


def charge(books, generation=None, role="owner"):
    """What a restore comes to: what is lost is charged, then the generation is named."""
    with books.session(role) as session:
        seen = session.scalars(select(Witness)).one()
        charge_lost(session, seen.behind["accounts"], MOVE)
        session.execute(update(Witness).values(acknowledged=generation or seen.behind["generation"]))


def state_of(books, job):
    with books.session() as session:
        return session.get_one(core.witness.Job, job).state


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
    charge(older)
    with pytest.raises(LedgerBehindWitness):
        level(older)  # until the sweeper has been round
    look(older, board)
    level(older)
    now = older.now(account)
    assert (now.held, now.settled) == (0, spent)
    assert older.broken(account) is None
    assert board.now.accounts[str(account.id)]["spent"] == spent
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
    charge(older)
    assert state_of(older, job) == "failed"
    look(older, board)
    with pytest.raises(ledger.NothingReserved):
        older.void(account, job)
    assert older.now(account).left == books.now(account).left


def test_an_account_that_the_backup_never_had_is_made_again_with_its_spending(books, board, backup):
    older = backup(books)
    account = books.account(6.0)
    spend(books, account)
    books.reserve(account, 7.0)
    look(books, board)
    look(older, board)
    refused(older)
    charge(older)
    look(older, board)
    level(older)
    was, now = books.now(account), older.now(account)
    assert (now.held, now.settled) == (0, was.held + was.settled)
    for name in ("relation", "epsilon", "delta", "order", "capacity"):
        assert getattr(now, name) == getattr(was, name)
    assert older.broken(account) is None


def test_spending_out_of_a_grant_that_was_forgotten_is_charged_in_full(books, board, backup):
    """Else the rest would be free as soon as somebody grants again."""
    account = books.account(2.0)
    look(books, board)
    older = backup(books)
    books.raise_budget(account, 6.0)
    spend(books, account, noise=1.2)
    look(books, board)
    was = books.now(account)
    assert was.settled > older.now(account).capacity
    look(older, board)
    charge(older)
    look(older, board)
    level(older)
    now = older.now(account)
    assert (now.capacity, now.settled, now.epsilon) == (was.capacity, was.settled, 6.0)
    assert older.broken(account) is None


@pytest.mark.parametrize("part", ["nothing", "too little", "and left the promise"])
def test_an_acknowledgement_without_the_charge_counts_for_nothing(part, books, board, backup):
    """With the service's own login, by SQL: the row alone opens nothing."""
    account = books.account()
    job = books.reserve(account, 5.0)
    look(books, board)
    older = backup(books)
    books.open(job)
    books.settle(account, job)
    spend(books, account)
    look(books, board)
    look(older, board)
    with older.session() as session:
        session.execute(update(Witness).values(acknowledged=board.now.generation))
        mine = session.get_one(Account, account.id)
        if part == "too little":
            ledger.forfeit(session, mine, cost=closed_cost(5.0) - 1, move=MOVE)
    if part == "and left the promise":
        spend(older, account, noise=4.0)
        assert older.now(account).held + older.now(account).settled >= books.now(account).settled
    look(older, board)
    refused(older)
    charge(older)
    look(older, board)
    level(older)


@pytest.mark.parametrize("change", ["capacity = capacity * 100", "settled = settled + 1", "renyi_order = 2"])
def test_a_restored_balance_that_was_also_changed_is_not_acknowledged(change, books, board, backup):
    account = books.account()
    look(books, board)
    older = backup(books)
    spend(books, account)
    look(books, board)
    look(older, board)
    charge(older)
    was = older.now(account)
    alter(older, change)
    look(older, board)
    told = refused(older, LedgerAltered)["accounts"][str(account.id)]
    assert (told["reason"], told["capacity"], told["spent"]) == ("altered", was.capacity, was.settled)
    alter(older, f"capacity = {was.capacity}, settled = {was.settled}, renyi_order = {was.order}")
    look(older, board)
    level(older)


@pytest.mark.parametrize("terms", [{"relation": "replace_one"}, {"order": 16}, {"delta": 1e-3}])
def test_an_account_made_again_on_other_terms_is_not_accepted(terms, books, board, backup):
    """Costs at another order or relation are no costs of this account."""
    older = backup(books)
    account = books.account()
    spend(books, account)
    look(books, board)
    look(older, board)
    seen = refused(older)["accounts"]
    seen[str(account.id)]["terms"] |= terms
    with older.session("owner") as session:
        charge_lost(session, seen, MOVE)
        session.execute(update(Witness).values(acknowledged=board.now.generation))
    assert older.now(account).settled >= seen[str(account.id)]["spent"]
    look(older, board)
    refused(older)


def test_an_acknowledgement_is_good_once(books, board, backup):
    account = books.account()
    look(books, board)
    first, second = backup(books), backup(books)
    spend(books, account)
    look(books, board)
    look(first, board)
    charge(first)
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
    charge(older, generation=board.now.generation + ahead)
    look(older, board)
    refused(older)


# ---- two sweepers


def test_two_sweepers_at_once_keep_one_witness_that_only_goes_forward(books, board):
    account = books.account(40.0)
    look(books, board)
    stop, problems = threading.Event(), []

    def sweep():
        log = WitnessLog(board)
        while not stop.is_set():
            try:
                with books.session("sweep") as session:
                    compare(session, log)
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
    assert board.now.accounts[str(account.id)]["head"] == books.now(account).head.hex()
    for before, after in itertools.pairwise(board.entries):
        assert after["generation"] == before["generation"] + 1
        assert after["accounts"][str(account.id)]["moves"] > before["accounts"][str(account.id)]["moves"]
    assert len(board.entries) > 5


def test_while_one_sweeper_looks_another_goes_past(books, board):
    look(books, board)
    with Session(books.engine("sweep")) as first:
        compare(first, WitnessLog(board))
        before = row(books).checked_at
        look(books, board)  # neither waits nor writes
        assert row(books).checked_at == before
        first.commit()
    assert row(books).checked_at > before


def test_who_is_late_with_an_entry_reads_the_other_one_and_compares_again(books, board):
    """Two databases of one site at once: the second to append finds the first's entry and is behind it."""
    books.account()
    late = WitnessLog(board)
    late.catch_up()
    look(books, board)
    books.account()
    assert late.append({}) is False
    late.catch_up()
    assert late.generation == 1
    assert late.accounts == board.now.accounts


# ---- where it lies: a directory, and a bucket with the sweeper's own identity


def bucket_of(servers, identity="sweep", bucket="sluice-witness"):
    keys = servers.s3_identities[identity]
    client = s3.client(endpoint=servers.s3_endpoint, region="us-east-1", attempts=1, **keys)
    return S3Witness(client, bucket)


@pytest.fixture(params=["directory", "bucket"])
def store(request, servers, board):
    return board if request.param == "directory" else bucket_of(servers)


def new_key():
    return f"ledger/{uuid.uuid4().hex}.json"


def test_what_is_created_is_read_and_never_replaced(store):
    key = new_key()
    assert store.read(key) is None
    assert store.create(key, b"first") is True
    assert store.create(key, b"second") is False
    assert store.read(key) == b"first"


def test_of_many_that_create_at_once_one_does(store):
    key, bodies = new_key(), [str(number).encode() for number in range(16)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        made = list(pool.map(lambda body: store.create(key, body), bodies))
    assert sum(made) == 1
    assert store.read(key) == bodies[made.index(True)]


@pytest.mark.parametrize("key", ["", "../x", "/x", "a//b", "a/../b", "A", "a b", "a\0", ".x", "a/"])
def test_keys_are_plain(key, store):
    for attempt in (lambda: store.create(key, b"x"), lambda: store.read(key)):
        with pytest.raises(ValueError, match="not a key"):
            attempt()


def test_a_bucket_that_refuses_or_is_not_there_is_an_error_and_no_answer(servers):
    elsewhere = bucket_of(servers, bucket="sluice-vault")
    nowhere = bucket_of(servers, "admin", "no-such-bucket")
    for store in (elsewhere, nowhere, bucket_of(servers, "publish")):
        for attempt in (lambda store=store: store.create(new_key(), b"x"), lambda s=store: s.read(new_key())):
            with pytest.raises(ClientError):
                attempt()


@pytest.mark.parametrize(("marker", "missing"), [({}, True), ({"x-amz-delete-marker": "true"}, False)])
def test_an_object_that_was_deleted_is_not_one_that_never_was(marker, missing):
    """As AWS says it of a bucket with versions; the bundled server does not tell the two apart."""

    class Client:
        def get_object(self, **_):
            answer = {"Error": {"Code": "NoSuchKey"}, "ResponseMetadata": {"HTTPHeaders": marker}}
            raise ClientError(answer, "GetObject")

    store = S3Witness(Client(), "any")
    if missing:
        assert store.read("a") is None
    else:
        with pytest.raises(ClientError):
            store.read("a")


def test_a_directory_is_its_owner_s_alone_and_has_whole_files_only(board, monkeypatch):
    key = new_key()

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", die)
        with pytest.raises(KeyboardInterrupt):
            board.create(key, b"first")
    assert board.read(key) is None
    assert board.create(key, b"second")
    assert stat.S_IMODE((board.root / key).stat().st_mode) == 0o600
    assert stat.S_IMODE((board.root / "ledger").stat().st_mode) == 0o700
    assert [path.name for path in (board.root / "ledger").iterdir()] == [key.split("/")[1]]


def test_a_restored_backup_is_refused_with_the_witness_in_a_bucket(books, servers, backup, monkeypatch):
    prefix = f"ledger/{uuid.uuid4().hex}"  # the bucket is shared with other tests
    monkeypatch.setattr(core.witness, "_key", lambda generation: f"{prefix}/{generation:012d}.json")
    store = bucket_of(servers)
    account = books.account()
    look(books, store)
    older = backup(books)
    spend(books, account)
    look(books, store)
    level(books)
    look(older, store)
    refused(older)
    charge(older)
    look(older, store)
    level(older)
    assert older.now(account).settled == closed_cost(5.0)
