"""The ledger as a fold: what rows add up to, and that no row changes without being noticed."""

import hashlib
import json
import uuid
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.privacy.account import capacity
from sluice.release.chain import GENESIS, Broken
from sluice.release.ledger import Balance, digest, fold

ACCOUNT = "00000000-0000-4000-8000-000000000001"
TERMS = {"epsilon": 10.0, "delta": 1e-5, "order": 4, "relation": "add_remove"}
FIELDS = ("account", "number", "kind", "cost", "job", "event", "readings", "terms", "actor", "reason", "at")


def row(number, kind, cost, job=None, **fields):
    return {
        "account": ACCOUNT,
        "number": number,
        "kind": kind,
        "cost": cost,
        "job": job,
        "event": None,
        "readings": None,
        "terms": TERMS if kind == "grant" else None,
        "actor": "someone",
        "reason": "a test",
        "at": f"2026-01-01T00:00:{number:02d}.000000+00:00",
    } | fields


def chained(*rows):
    """The rows, each linked to the one before it."""
    head, linked = GENESIS, []
    for each in rows:
        after = digest(head, each)
        linked.append(each | {"previous": head.hex(), "digest": after.hex()})
        head = after
    return linked


HISTORY = chained(
    row(1, "grant", 100),
    row(2, "reserve", 30, "a", event={"kind": "gaussian", "noise_stddev": 2.5}, readings={"renyi": 0.5}),
    row(3, "reserve", 20, "b"),
    row(4, "settle", 30, "a"),
    row(5, "void", 20, "b"),
    row(6, "grant", 50, terms=TERMS | {"epsilon": 11.0}),
    row(7, "reserve", 60, "c"),
    row(8, "settle", 5),
)


def test_a_history_adds_up():
    balance, head, number, broken = fold(HISTORY)
    assert balance == Balance(capacity=150, held=60, settled=35)
    assert balance.left == 55
    assert (head.hex(), number, broken) == (HISTORY[-1]["digest"], 8, None)


def test_nothing_adds_up_to_nothing():
    assert fold([]) == (Balance(), GENESIS, 0, None)


@pytest.mark.parametrize(
    ("before", "move", "after"),
    [
        (Balance(), row(1, "grant", 7), Balance(capacity=7)),
        (Balance(capacity=9, held=1), row(1, "reserve", 7, "a"), Balance(capacity=9, held=8)),
        (
            Balance(capacity=9, held=8, settled=1),
            row(1, "settle", 7, "a"),
            Balance(capacity=9, held=1, settled=8),
        ),
        (Balance(capacity=9, held=8), row(1, "void", 7, "a"), Balance(capacity=9, held=1)),
        (Balance(capacity=9, held=1, settled=1), row(1, "settle", 7), Balance(capacity=9, held=1, settled=8)),
    ],
)
def test_each_move_does_its_part(before, move, after):
    assert before.after(move) == after


def test_there_is_no_other_move():
    with pytest.raises(ValueError, match="gift"):
        Balance().after(row(1, "gift", 7))
    assert fold(chained(row(1, "gift", 7)))[3] == Broken(number=1, why="is not a known move")


@pytest.mark.parametrize(
    ("moves", "first"),
    [
        ([row(1, "reserve", 1, "a")], 1),
        ([row(1, "grant", 10), row(2, "reserve", 6, "a"), row(3, "reserve", 5, "b")], 3),
        ([row(1, "grant", 10), row(2, "void", 1, "a")], 2),
        ([row(1, "grant", 10), row(2, "reserve", 5, "a"), row(3, "settle", 6, "a")], 3),
        ([row(1, "grant", 10), row(2, "settle", 11)], 2),
    ],
)
def test_a_chain_that_holds_but_moves_more_than_there_is_is_broken(moves, first):
    assert fold(chained(*moves))[3] == Broken(number=first, why="moves more than there is")


def test_grants_hold_no_more_than_the_budget_they_name():
    """To the unit: what the budget holds is granted, in one row or in several, and more is not."""
    most = capacity(10.0, 1e-5, 4)
    more = capacity(11.0, 1e-5, 4)
    raised = TERMS | {"epsilon": 11.0}
    assert fold(chained(row(1, "grant", most), row(2, "grant", more - most, terms=raised)))[3] is None
    for grants, first in (
        ([row(1, "grant", most + 11)], 1),
        ([row(1, "grant", 2 * most)], 1),
        ([row(1, "grant", most), row(2, "grant", more - most + 12, terms=raised)], 2),
        ([row(1, "grant", most), row(2, "grant", more - most)], 2),
        ([row(1, "grant", 11, terms=TERMS | {"epsilon": 1.0})], 1),  # nothing fits at this order
    ):
        assert fold(chained(*grants))[3] == Broken(number=first, why="grants more than its budget holds")


@pytest.mark.parametrize(
    "other", [{"order": 8}, {"delta": 1e-3}, {"relation": "replace_one"}], ids=["order", "delta", "relation"]
)
def test_all_grants_of_an_account_are_under_the_same_terms(other):
    rows = chained(row(1, "grant", 5), row(2, "reserve", 5, "a"), row(3, "grant", 5, terms=TERMS | other))
    assert fold(rows)[3] == Broken(
        number=3, why="grants under another relation, delta or order than the first grant"
    )


@pytest.mark.parametrize("terms", [None, {}, [], "terms", TERMS | {"epsilon": None}, TERMS | {"delta": 0}])
def test_a_grant_without_a_budget_is_broken(terms):
    assert fold(chained(row(1, "grant", 5, terms=terms)))[3] == Broken(
        number=1, why="grants without the terms of a budget"
    )


def test_the_fold_stops_at_the_first_broken_row_and_tells_what_stood_before_it():
    rows = [dict(each) for each in HISTORY]
    rows[3]["reason"] = "another"
    balance, head, number, broken = fold(rows)
    assert broken == Broken(number=4, why="was changed after it was written")
    assert (balance, head.hex(), number) == (Balance(capacity=100, held=50), HISTORY[2]["digest"], 3)


@pytest.mark.parametrize("at", range(len(HISTORY)))
@pytest.mark.parametrize("field", [*FIELDS, "previous", "digest"])
def test_every_field_of_every_row_counts(at, field):
    old = HISTORY[at][field]
    others = {
        "account": str(uuid.UUID(int=2)), "number": at + 2, "kind": "void" if old != "void" else "settle",
        "cost": HISTORY[at]["cost"] + 1, "job": "z", "event": {"kind": "other"}, "readings": {}, "terms": {},
        "actor": "someone else", "reason": "", "at": "2026-01-01T00:00:00.000001+00:00",
        "previous": "11" * 32, "digest": "11" * 32,
    }  # fmt: skip
    for new in (others[field], None):
        if new == old:
            continue
        rows = [dict(each) for each in HISTORY]
        rows[at][field] = new
        broken = fold(rows)[3]
        assert broken is not None
        assert broken.number == at + 1


@pytest.mark.parametrize("at", range(len(HISTORY) - 1))
def test_a_row_left_out_repeated_or_moved_is_noticed_there(at):
    rows = list(HISTORY)
    assert fold(rows[:at] + rows[at + 1 :])[3].number == at + 1
    assert fold(rows[: at + 1] + rows[at:])[3].number == at + 2
    rows[at], rows[at + 1] = rows[at + 1], rows[at]
    assert fold(rows)[3].number == at + 1


def test_rows_of_another_account_do_not_fit_in():
    theirs = chained(*({**each, "account": str(uuid.UUID(int=2))} for each in map(plain, HISTORY)))
    mixed = [*HISTORY[:4], *theirs[4:]]
    assert fold(mixed)[3] == Broken(number=5, why="is not linked to the row before it")


def plain(linked):
    return {name: linked[name] for name in FIELDS}


def test_the_canonical_form_stays_what_it_was():
    """Written down once: a change here would make every ledger there is look broken."""
    text = (
        '{"account":"00000000-0000-4000-8000-000000000001","actor":"someone","at":"2026-01-01T00:00:02.000000'
        '+00:00","cost":30,"event":{"kind":"gaussian","noise_stddev":2.5},"job":"a","kind":"reserve","number":2,'
        '"readings":{"renyi":0.5},"reason":"a test","terms":null}'
    )
    assert digest(GENESIS, plain(HISTORY[1])) == hashlib.sha256(bytes(32) + text.encode()).digest()


numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    numbers | st.booleans() | st.none() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(readings=st.dictionaries(st.text(max_size=4), values, max_size=3))
def test_a_row_that_went_through_json_has_the_same_digest(readings):
    here = row(1, "reserve", 3, "a", readings=readings)
    assert digest(GENESIS, json.loads(json.dumps(here))) == digest(GENESIS, here)


@pytest.mark.parametrize(
    ("one", "other"), [(1e16, 10**16), (4.281734609254179e16, 42817346092541790), (-0.0, 0), (2.0, 2)]
)
def test_a_number_counts_by_its_value_however_it_is_written(one, other):
    readings = [row(1, "grant", 3, readings={"x": {"y": [value]}}) for value in (one, other)]
    assert digest(GENESIS, readings[0]) == digest(GENESIS, readings[1])


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (0, False), (1, "1"), (0, None), (0.1, 0.1 + 1e-17 * 2)]
)
def test_values_of_other_kinds_are_other_values(one, other):
    digests = {digest(GENESIS, row(1, "grant", 3, readings={"x": value})) for value in (one, other)}
    assert len(digests) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"bytes"])
def test_what_has_no_canonical_form_is_not_hashed_and_not_believed(value):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        digest(GENESIS, row(1, "grant", 3, readings={"x": value}))
    rows = [HISTORY[0] | {"readings": {"x": value}}]
    assert fold(rows)[3] == Broken(number=1, why="was changed after it was written")


moves = st.lists(
    st.tuples(st.sampled_from(["grant", "reserve", "settle", "void"]), st.integers(0, 20)), max_size=25
)


@settings(max_examples=300)
@given(moves)
def test_a_fold_is_the_sums_of_its_rows(drawn):
    """Legal histories of any shape: each end takes the oldest promise that stands."""
    rows, standing = [], []
    capacity = held = settled = 0
    for kind, amount in drawn:
        job = None
        if kind == "grant":
            capacity += amount
        elif kind == "reserve":
            amount = min(amount, capacity - held - settled)
            job = f"job {len(rows)}"
            standing.append((job, amount))
            held += amount
        elif standing:
            job, amount = standing.pop(0)
            held -= amount
            settled += amount * (kind == "settle")
        else:
            continue
        rows.append(row(len(rows) + 1, kind, amount, job))
    balance, _, number, broken = fold(chained(*rows))
    assert balance == replace(Balance(), capacity=capacity, held=held, settled=settled)
    assert balance.left >= 0
    assert (number, broken) == (len(rows), None)
