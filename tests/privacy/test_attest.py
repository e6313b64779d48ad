"""A release is what was signed, to the byte, or it is refused by name."""

import base64
import hashlib
import json
import random
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from sluice.privacy.account import capacity, cost_as_epsilon
from sluice.privacy.accountant import Accountant, cost
from sluice.privacy.events import PoissonGaussian, Query
from sluice.privacy.problems import Problem
from sluice.privacy.relation import Relation
from sluice.release.canonical import canonical
from sluice.release.manifest import MANIFEST, PRIVACY, SUMS, paths, release_statement, sums
from sluice.release.revocations import (
    ReleaseWithdrawn,
    RevocationsExpired,
    RevocationsRolledBack,
    open_revocations,
    require_current,
    revocations,
)
from sluice.release.statement import (
    REVOCATIONS_TYPE,
    STATEMENT_TYPE,
    BadSignature,
    SeedSigner,
    UnknownKey,
    open_envelope,
    sign,
)
from sluice.release.verify import (
    BundleAltered,
    EpsilonNotReproduced,
    OverBudget,
    OwnersDiffer,
    check_release,
    readable,
)

SIGNER, OTHER = SeedSigner(bytes(range(32))), SeedSigner(bytes(32))
KEYS = {SIGNER.key_id: SIGNER.public}
AUTHOR, REVIEWER = "a" * 8, "b" * 8
EVENT = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=2.0, sampling_prob=0.01, steps=100)
RELATION, DELTA = Relation.ADD_REMOVE, 1e-5
CODE = {"sluice": "0.1.0"}
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def sha256(body):
    return hashlib.sha256(body).hexdigest()


def total_of(spent, order=8):
    return {"cost": spent, "epsilon": cost_as_epsilon(spent, delta=DELTA, order=order)}


def privacy_of(event=EVENT, **changes):
    stated = {
        "unit": "one record",
        "relation": "add_remove",
        "delta": DELTA,
        "event": event.to_dict(),
        "cost": cost(event, order=8, relation=RELATION),
        "epsilon": {
            each.value: readable(each, event=event, delta=DELTA, relation=RELATION) for each in Accountant
        },
        "total": total_of(3 * cost(event, order=8, relation=RELATION)),
        "account": {"id": "c" * 8, "epsilon": 8.0, "delta": DELTA, "order": 8},
    }
    return stated | changes


PAID = privacy_of()


class Bundle:
    """The files of a release and its statement, any of which a test may change before it is signed."""

    def __init__(self, *, privacy=PAID, reviewers=2, approvals=None, signer=SIGNER, **manifested):
        self.formats = ["npz"]
        files = {path: path.encode() for path in paths(self.formats) - {MANIFEST, SUMS}}
        files[PRIVACY] = canonical(privacy)
        listed = [
            {"path": path, "size": len(body), "sha256": sha256(body)} for path, body in sorted(files.items())
        ]
        manifest = {
            "release": "r1", "code": CODE, "review": {"reviewers": reviewers}, "files": listed,
            "sample": {"formats": self.formats}, **manifested,
        }  # fmt: skip
        files[MANIFEST] = canonical(manifest)
        files[SUMS] = sums({path: sha256(body) for path, body in files.items()})
        self.files, self.digest = files, sha256(files[SUMS])
        people = [REVIEWER] if approvals is None else approvals
        approved = [{"person": each, "digest": self.digest, "at": "now"} for each in people]
        self.statement = release_statement(
            release="r1", bundle=self.digest, hashes=self.hashes(), privacy=privacy, code=CODE,
            review={"reviewers": reviewers, "author": AUTHOR, "approvals": approved}, published_at="now",
        )  # fmt: skip
        self.envelope = sign(self.statement, STATEMENT_TYPE, signer)

    def hashes(self):
        return {path: sha256(body) for path, body in self.files.items()}

    def check(self, *, envelope=None, keys=KEYS, listed=None):
        return check_release(
            envelope or self.envelope, hashes=self.hashes(), small=self.files, keys=keys, revocations=listed
        )


@pytest.fixture(scope="module")
def bundle():
    return Bundle()


def test_a_good_release_passes_with_the_epsilon_its_event_gives(bundle):
    checked = bundle.check()
    assert (checked.release, checked.bundle) == ("r1", bundle.digest)
    assert checked.epsilon == pytest.approx(PAID["epsilon"], rel=1e-9)
    assert 0 < checked.epsilon["pld"] < checked.epsilon["renyi"] < 1
    assert checked.privacy == PAID


def test_the_envelope_is_dsse_as_written_down(bundle):
    """Checked with nothing of ours: the bytes that DSSE 1.0 says are signed."""
    envelope = json.loads(bundle.envelope)
    body, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    message = (
        b"DSSEv1 " + str(len(kind)).encode() + b" " + kind + b" " + str(len(body)).encode() + b" " + body
    )
    [signature] = envelope["signatures"]
    Ed25519PublicKey.from_public_bytes(SIGNER.public).verify(base64.b64decode(signature["sig"]), message)
    assert signature["keyid"] == hashlib.sha256(SIGNER.public).hexdigest()[:16]
    assert json.loads(body) == bundle.statement
    assert sign(bundle.statement, STATEMENT_TYPE, SIGNER) == bundle.envelope


def test_every_single_byte_of_a_statement_matters(bundle):
    small = sign({"a": [1, 2.5, "ä"]}, REVOCATIONS_TYPE, SIGNER)
    everywhere = [(small, REVOCATIONS_TYPE, at, bit) for at in range(len(small)) for bit in range(8)]
    source = random.Random(1)
    somewhere = [
        (bundle.envelope, STATEMENT_TYPE, source.randrange(len(bundle.envelope)), source.randrange(8))
        for _ in range(1000)
    ]
    for raw, kind, at, bit in everywhere + somewhere:
        flipped = bytearray(raw)
        flipped[at] ^= 1 << bit
        with pytest.raises((BadSignature, UnknownKey)):
            open_envelope(bytes(flipped), kind, KEYS)


def test_other_bytes_of_the_same_meaning_are_refused(bundle):
    raw, envelope = bundle.envelope, json.loads(bundle.envelope)
    [signature] = envelope["signatures"]
    others = [
        raw + b"\n", b" " + raw, raw.rstrip(), raw[:-1] + b"\x00", b"\xef\xbb\xbf" + raw,
        json.dumps(envelope).encode(), raw.replace(b'"sig"', b'"\\u0073ig"'),
        raw.replace(b'{"payload":', b'{"payload":"","payload":', 1),
        canonical(envelope | {"more": 1}),
        canonical(envelope | {"signatures": [signature, signature]}),
        canonical(envelope | {"signatures": [signature | {"more": 1}]}),
        canonical(envelope | {"payload": envelope["payload"].rstrip("=") + "\n"}),
        b"", b"[]", b"{}", b"null", b"[" * 100_000, b"\xff",
    ]  # fmt: skip
    for other in others:
        with pytest.raises(BadSignature):
            open_envelope(other, STATEMENT_TYPE, KEYS)


def test_a_payload_that_is_signed_but_not_canonical_is_refused():
    body = b'{"b": 1}'
    message = b"DSSEv1 %d %s %d %s" % (len(REVOCATIONS_TYPE), REVOCATIONS_TYPE.encode(), len(body), body)
    sig = base64.b64encode(SIGNER.signature(message)).decode()
    envelope = {
        "payload": base64.b64encode(body).decode(), "payloadType": REVOCATIONS_TYPE,
        "signatures": [{"keyid": SIGNER.key_id, "sig": sig}],
    }  # fmt: skip
    with pytest.raises(BadSignature):
        open_envelope(canonical(envelope), REVOCATIONS_TYPE, KEYS)


def test_a_statement_is_not_taken_for_a_list_nor_the_other_way_round(bundle):
    with pytest.raises(BadSignature):
        open_envelope(bundle.envelope, REVOCATIONS_TYPE, KEYS)
    with pytest.raises(BadSignature):
        bundle.check(envelope=sign(revocations(1, NOW, []), REVOCATIONS_TYPE, SIGNER))


def test_only_trusted_keys_count_and_an_id_belongs_to_its_key(bundle):
    with pytest.raises(UnknownKey):
        bundle.check(keys={})
    with pytest.raises(UnknownKey):
        Bundle(signer=OTHER).check()
    with pytest.raises(UnknownKey):
        bundle.check(keys={SIGNER.key_id: OTHER.public})


def test_any_file_changed_missing_or_added_is_found():
    whole = Bundle()
    for path in [*whole.files, "data/more.npz"]:
        kept = whole.files.get(path)
        for other in (None, b"", (kept or b"") + b"\n", bytes([(kept or b"a")[0] ^ 1]) + (kept or b"a")[1:]):
            whole.files.pop(path, None)
            if other is not None:
                whole.files[path] = other
            if whole.files.get(path) != kept:
                with pytest.raises(BundleAltered) as found:
                    whole.check()
                assert path in found.value.fields["paths"]
            whole.files.pop(path, None)
        if kept is not None:
            whole.files[path] = kept
    assert whole.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(bundle="0" * 64),
        lambda p: (p.update(bundle="0" * 64), p["review"]["approvals"][0].update(digest="0" * 64)),
        lambda p: p.update(release="another"),
        lambda p: p.update(more="unknown"),
        lambda p: p.pop("review"),
        lambda p: p["privacy"].update(delta=1e-6),
        lambda p: p["review"].update(approvals=[]),
        lambda p: p["review"].update(reviewers=1),
        lambda p: p["review"]["approvals"][0].update(digest="0" * 64),
        lambda p: p["review"]["approvals"][0].update(person=AUTHOR),
        lambda p: p["code"].update(sluice="9"),
    ],
)
def test_a_statement_that_contradicts_its_bundle_is_refused(change):
    whole = Bundle()
    statement = json.loads(json.dumps(whole.statement))
    change(statement["predicate"])
    with pytest.raises(BundleAltered):
        whole.check(envelope=sign(statement, STATEMENT_TYPE, SIGNER))


def test_four_eyes_are_needed_unless_the_bundle_says_one_person():
    for reviewers, approvals, good in [
        (2, [REVIEWER], True), (2, [AUTHOR, REVIEWER], True), (2, [AUTHOR], False), (2, [], False),
        (1, [AUTHOR], True), (1, [], False),
    ]:  # fmt: skip
        whole = Bundle(reviewers=reviewers, approvals=approvals)
        if good:
            assert whole.check().review["reviewers"] == reviewers
        else:
            with pytest.raises(BundleAltered):
                whole.check()


CHEAPER = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=1.9, sampling_prob=0.01, steps=100)


@pytest.mark.parametrize(
    "changes",
    [
        {"event": CHEAPER.to_dict()},
        {"epsilon": PAID["epsilon"] | {"renyi": PAID["epsilon"]["renyi"] * (1 - 1e-8)}},
        {"epsilon": PAID["epsilon"] | {"pld": PAID["epsilon"]["pld"] * 0.5}},
        {"epsilon": PAID["epsilon"] | {"pld": PAID["epsilon"]["pld"] * (1 + 1e-5)}},
        {"epsilon": PAID["epsilon"] | {"pld": None}},
        {"epsilon": PAID["epsilon"] | {"better": 0.1}},
        {"cost": PAID["cost"] - 10},
        {"account": PAID["account"] | {"delta": 1e-3}},
        {"event": {"kind": "none"}},
    ],
)
def test_an_epsilon_that_does_not_follow_from_the_event_is_refused(changes):
    with pytest.raises(EpsilonNotReproduced):
        Bundle(privacy=PAID | changes).check()


def test_what_another_owner_paid_follows_from_its_event_too():
    assert Bundle(privacy=PAID | {"others": [PAID, PAID]}).check()
    with pytest.raises(EpsilonNotReproduced):
        Bundle(privacy=PAID | {"others": [PAID, PAID | {"event": CHEAPER.to_dict()}]}).check()


def test_owners_of_one_release_have_one_delta_and_one_relation():
    """Their epsilons stand side by side and are added up, so they have to be of the same kind."""
    at = {"delta": 1e-6, "account": PAID["account"] | {"delta": 1e-6}}
    replaced = cost(EVENT, order=8, relation=Relation.REPLACE_ONE)
    others = [
        stated(delta=1e-6)
        | at
        | {"total": {"cost": 10**9, "epsilon": cost_as_epsilon(10**9, delta=1e-6, order=8)}},
        stated(relation=Relation.REPLACE_ONE)
        | {"relation": "replace_one", "cost": replaced, "total": total_of(replaced)},
    ]
    for other in others:
        assert Bundle(privacy=other | {"others": []}).check()  # true by itself
        with pytest.raises(OwnersDiffer):
            Bundle(privacy=PAID | {"others": [PAID, other]}).check()
        with pytest.raises(OwnersDiffer):
            Bundle(privacy=other | {"others": [PAID]}).check()


def stated(delta=DELTA, relation=RELATION):
    """The same event, read at another delta or under another relation."""
    read = {each.value: readable(each, event=EVENT, delta=delta, relation=relation) for each in Accountant}
    return PAID | {"epsilon": read}


MOST = capacity(8.0, DELTA, 8)


def test_a_total_is_worked_out_again_from_its_cost():
    assert Bundle(privacy=privacy_of(total=total_of(PAID["cost"]))).check()
    good = total_of(MOST)
    assert Bundle(privacy=privacy_of(total=good)).check().privacy["total"] == good
    for total in (
        good | {"epsilon": good["epsilon"] * (1 - 1e-8)},
        good | {"epsilon": 0.1},
        good | {"epsilon": None},
        total_of(PAID["cost"] - 1),  # less than the release itself
        good | {"cost": float(MOST)},
    ):
        with pytest.raises(EpsilonNotReproduced):
            Bundle(privacy=privacy_of(total=total)).check()


def test_a_total_beyond_the_budget_of_its_account_is_refused():
    tight = PAID["account"] | {"epsilon": 1.0}
    assert 1.0 < PAID["total"]["epsilon"] < 8
    for privacy in (
        privacy_of(account=tight),
        privacy_of(total=total_of(MOST + 10)),
        PAID | {"others": [PAID, privacy_of(account=tight)]},
    ):
        with pytest.raises(OverBudget) as refused:
            Bundle(privacy=privacy).check()
        assert refused.value.fields["total"] > refused.value.fields["budget"]
    with pytest.raises(EpsilonNotReproduced):
        Bundle(privacy=privacy_of(account=PAID["account"] | {"epsilon": 0.0})).check()


def older(**total_after):
    """As versions before this one signed it: readings of everything paid for, and no total."""
    kept = {name: value for name, value in PAID.items() if name != "total"}
    return kept | {"total_after": total_after}


def test_statements_of_older_versions_still_hold_unless_they_are_over_budget():
    assert Bundle(privacy=older(renyi=3.2, pld=3.0)).check()
    assert Bundle(privacy=older(renyi=8.1, pld=7.9)).check()  # both are upper bounds
    assert Bundle(privacy=older(renyi=3.2, pld=None) | {"others": [older(renyi=8.0, pld=None)]}).check()
    budget = {"account": PAID["account"] | {"epsilon": 1.0}}
    for privacy in (
        older(renyi=3.2, pld=3.1) | budget,
        older(renyi=3.2, pld=3.1) | {"others": [older(renyi=3.2, pld=3.1) | budget]},
        older(renyi=8.1, pld=None),
        older(renyi=None, pld=None),
    ):
        with pytest.raises(OverBudget):
            Bundle(privacy=privacy).check()
    with pytest.raises(BundleAltered):  # no version signed one without either
        Bundle(privacy={name: value for name, value in PAID.items() if name != "total"}).check()


def test_manifest_and_privacy_name_the_same_sources():
    source = {"name": "pictures", "sha256": "ab" * 32}
    assert Bundle(privacy=PAID | {"sources": [source]}, sources=[source]).check()
    for privacy, sources in ((PAID | {"sources": [source]}, []), (PAID | {"sources": []}, [source])):
        with pytest.raises(BundleAltered, match="sources"):
            Bundle(privacy=privacy, sources=sources).check()


def entry(bundle, release="r1"):
    return {"release": release, "bundle": bundle, "at": "then", "reason": "wrong data"}


def listing(number, *withdrawn):
    return sign(revocations(number, NOW, withdrawn), REVOCATIONS_TYPE, SIGNER)


def test_what_is_on_the_list_is_refused_by_release_and_by_bundle(bundle):
    for each in (entry("0" * 64), entry(bundle.digest, "another")):
        with pytest.raises(ReleaseWithdrawn, match="wrong data"):
            bundle.check(listed=open_revocations(listing(2, each), KEYS))
    assert bundle.check(listed=open_revocations(listing(2, entry("0" * 64, "another")), KEYS))


def test_a_list_that_goes_back_or_forgets_is_refused():
    seen = open_revocations(listing(5, entry("1"), entry("2")), KEYS)
    assert open_revocations(listing(5, entry("1"), entry("2")), KEYS, seen=seen) == seen
    assert open_revocations(listing(6, entry("1"), entry("2"), entry("3")), KEYS, seen=seen)["number"] == 6
    for raw in (
        listing(4, entry("1"), entry("2")),
        listing(5, entry("1"), entry("2"), entry("3")),
        listing(6, entry("1")),
        listing(6),
    ):
        with pytest.raises(RevocationsRolledBack):
            open_revocations(raw, KEYS, seen=seen)
    for payload in ({}, {"number": 7, "withdrawn": []}, revocations(1, NOW, []) | {"version": 2}):
        with pytest.raises(BadSignature):
            open_revocations(sign(payload, REVOCATIONS_TYPE, SIGNER), KEYS)


@pytest.mark.parametrize("dated", [True, False])
def test_a_list_is_good_for_a_week_and_ten_minutes(dated):
    """One of an older version, which names no expiry, for as long after it was signed."""
    listed = open_revocations(listing(5), KEYS)
    assert listed["expires_at"] == "2026-05-08T12:00:00+00:00"
    if not dated:
        listed.pop("expires_at")
    minute = timedelta(minutes=1)
    for passes in (NOW - 9 * minute, NOW, NOW + timedelta(days=7), NOW + timedelta(days=7) + 9 * minute):
        require_current(listed, passes)
    with pytest.raises(RevocationsExpired, match="List 5 expired at 2026-05-08T12:00:00"):
        require_current(listed, NOW + timedelta(days=7) + 11 * minute)
    with pytest.raises(RevocationsExpired, match="set the clock"):
        require_current(listed, NOW - 11 * minute)
    for odd in ({"issued_at": "now"}, {"issued_at": None}, {"issued_at": "2026-05-01T12:00:00"}):
        with pytest.raises(BadSignature):
            require_current(listed | odd | ({"expires_at": "soon"} if dated else {}), NOW)


def test_slugs_are_those_that_others_know():
    slugs = {each.slug for each in Problem.__subclasses__() if each.__module__.startswith("sluice.release.")}
    assert slugs == {
        "bad-signature", "unknown-key", "bundle-altered", "epsilon-not-reproduced", "over-budget",
        "owners-differ", "release-withdrawn", "revocations-rolled-back", "revocations-expired", "not-signed",
    }  # fmt: skip
