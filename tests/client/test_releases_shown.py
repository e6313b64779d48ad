"""What `sluice releases` prints of a relay: every owner, and the sum for a person who is with several."""

import pytest

from sluice.cli import releases
from sluice.release import owners

ONE = {"epsilon": {"renyi": 0.948, "pld": 0.9}, "delta": 1e-6, "relation": "add_remove"}
TWO = ONE | {"epsilon": {"renyi": 4.6, "pld": None}}


def view(*owners, together=None):
    return {
        "id": "r1", "kind": "images", "name": "scans", "state": "published", "fault": None, "reason": None,
        "count": 10, "seed": 1, "licence": "CC0", "audience": "everyone", "reviewers": 2, "digest": None,
        "progress": {"done": 10, "count": 10}, "created_at": "2026-01-02T03:04:05+00:00",
        "owners": list(owners), "together": together,
    }  # fmt: skip


RELAY = view(ONE, TWO, together={"epsilon": 5.5, "delta": 2e-6})


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")


@pytest.mark.parametrize("shown", [lambda: releases.show_one(RELAY), lambda: releases.show_many([RELAY])])
def test_every_owner_of_a_relay_has_a_line(shown, capsys):
    shown()
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    for owner, epsilon in (("owner 1", "0.9480 by Rényi, 0.9000 by PLD"), ("owner 2", "4.6000 by Rényi")):
        told = " ".join(line for line in lines if owner in line)
        assert epsilon in told
        assert "1e-06" in told
    assert any("covered by the sum of their epsilons" in line for line in lines)


def test_a_relay_of_an_older_version_is_shown_with_the_delta_and_relation_of_each(capsys):
    """They are refused now, but one may be in the catalogue; what cannot be added is not."""
    stated = ONE | {"others": [TWO | {"delta": 1e-3, "relation": "replace_one"}]}
    assert owners.together(stated) == {"epsilon": None, "delta": 1e-3 + 1e-6}
    releases.show_one(view(*owners.of(stated), together=owners.together(stated)))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "delta, relation, owner 1 1e-06, add-remove" in lines
    assert "delta, relation, owner 2 0.001, replace-one" in lines
    assert any("epsilon unknown at delta 0.001" in line for line in lines)


def test_the_sum_is_that_of_epsilons_and_of_deltas(capsys):
    releases.show_one(RELAY)
    assert "with all 2, epsilon 5.5000 at delta 2e-06" in capsys.readouterr().out


@pytest.mark.parametrize("release", [view(ONE), view()])
def test_a_release_of_one_owner_says_nothing_of_owners(release, capsys):
    releases.show_one(release)
    releases.show_many([release])
    out = capsys.readouterr().out
    assert "owner" not in out
    assert ("0.9480 by Rényi, 0.9000 by PLD" in out) == bool(release["owners"])
