"""The client on the wire: refusals keep their names, lost requests are sent again, files arrive whole."""

import base64
import hashlib
import json
import os
import stat
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sluice.client.api import Sluice
from sluice.client.problems import CannotRun, Refused
from sluice.client.trust import upload_key
from sluice.client.upload import upload
from sluice.envelope import OAEP, Stream, WrappingKey, encrypted_size

JOB = {"id": "j", "state": "running", "progress": {"step": 1, "steps": 10}}


def talking_to(handler):
    """A client whose every request goes to this function, and the pauses it made."""
    pauses = []
    return Sluice(
        "http://sluice.test", "sl_x", transport=httpx.MockTransport(handler), sleep=pauses.append
    ), pauses


def refusing(status=409, **fields):
    body = {
        "type": "urn:x",
        "slug": "budget-exceeded",
        "title": "No",
        "status": status,
        "detail": "Ask for less.",
    }
    return httpx.Response(status, json=body | fields)


# -- refusals


def test_a_refusal_keeps_its_name_its_numbers_and_the_way_out():
    left = {"cost": 5, "epsilon": 0.25}
    service, _ = talking_to(lambda _: refusing(left=left, largest_epsilon=0.2, request_id="r"))
    with pytest.raises(Refused) as caught:
        service.start_job("d", {})
    problem = caught.value
    assert (problem.status, problem.slug, problem.title) == (409, "budget-exceeded", "No")
    assert problem.fields == {"left": left, "largest_epsilon": 0.2, "request_id": "r"}
    assert str(problem).splitlines() == [
        "No: Ask for less.",
        "  left: cost 0.000000005, epsilon 0.25",
        "  largest epsilon: 0.2",
    ]


def test_a_broken_service_gives_its_request_id_to_tell():
    service, _ = talking_to(lambda _: refusing(500, request_id="r-17"))
    with pytest.raises(Refused, match="request id: r-17"):
        service.me()


def test_wrong_fields_are_named():
    errors = [{"loc": ["body", "budget", "epsilon"], "type": "x", "msg": "Input should be larger"}]
    service, _ = talking_to(lambda _: refusing(422, errors=errors))
    with pytest.raises(Refused, match=r"budget\.epsilon: Input should be larger"):
        service.register({})


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(502, text="<html>Bad gateway</html>"),
        httpx.Response(500, json={"error": "other"}),
        httpx.Response(404, json=["not", "a", "problem"]),
        httpx.Response(200, text="hello"),
    ],
)
def test_what_is_no_answer_of_ours_is_said_to_be_none(answer):
    service, _ = talking_to(lambda _: answer)
    with pytest.raises(Refused, match="not from a Sluice service"):
        service.me()


@pytest.mark.parametrize("url", ["", "sluice.example.org", "ftp://x", "http://", "/v1"])
def test_an_address_that_is_none(url):
    with pytest.raises(CannotRun, match="is not an address"):
        Sluice(url, "sl_x")


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "schlüssel"])
def test_a_key_that_is_none_is_not_sent_nor_shown(key):
    with pytest.raises(CannotRun, match="not an API key") as caught:
        Sluice("http://sluice.test", key)
    assert not key or key not in str(caught.value)


def test_an_id_cannot_reach_another_address():
    seen = []
    service, _ = talking_to(lambda r: seen.append(r.url.raw_path) or httpx.Response(200, json={}))
    service.dataset("../admin/people?x=#y")
    assert seen == [b"/v1/datasets/..%2Fadmin%2Fpeople%3Fx%3D%23y"]


# -- lost requests


def failing(times, problem, then):
    """Fails so often, then answers; keeps what it was sent."""
    seen = []

    def handler(request):
        seen.append(request)
        if len(seen) <= times:
            raise problem("lost", request=request)
        return then(request)

    return handler, seen


def ok(_):
    return httpx.Response(200, json={"id": "x"})


def test_a_lost_submission_is_repeated_under_the_same_key():
    handler, seen = failing(2, httpx.ReadError, ok)
    service, pauses = talking_to(handler)
    assert service.start_job("d", {}) == {"id": "x"}
    assert len(seen) == 3
    assert len(pauses) == 2
    assert len({request.headers["Idempotency-Key"] for request in seen}) == 1
    service.start_job("d", {})
    assert seen[-1].headers["Idempotency-Key"] != seen[0].headers["Idempotency-Key"]


def test_what_may_have_been_done_and_cannot_be_repeated_is_not():
    handler, seen = failing(1, httpx.ReadError, ok)
    service, _ = talking_to(handler)
    with pytest.raises(CannotRun):
        service.add_key(label="x", days=1)
    assert len(seen) == 1


def test_what_was_never_sent_is_sent_again():
    handler, seen = failing(1, httpx.ConnectError, ok)
    service, _ = talking_to(handler)
    service.add_key(label="x", days=1)
    assert len(seen) == 2


def test_out_of_reach_is_one_sentence():
    handler, _ = failing(99, httpx.ConnectError, ok)
    service, _ = talking_to(handler)
    with pytest.raises(CannotRun, match=r"^cannot reach http://sluice\.test: [^\n]*--url[^\n]*$"):
        service.me()


def test_too_many_requests_waits_as_told():
    answers = iter([httpx.Response(429, headers={"Retry-After": "7"}), httpx.Response(200, json={})])
    service, pauses = talking_to(lambda _: next(answers))
    service.me()
    assert pauses == [7.0]


def test_too_many_requests_for_long_is_said():
    service, pauses = talking_to(lambda _: httpx.Response(429, headers={"Retry-After": "3000"}, json={}))
    with pytest.raises(Refused):
        service.me()
    assert pauses == []


def test_lists_go_through_all_pages():
    def page(request):
        at = int(request.url.params.get("cursor", 0))
        return httpx.Response(200, json={"items": [{"id": at}], "next": str(at + 1) if at < 4 else None})

    service, _ = talking_to(page)
    assert [one["id"] for one in service.datasets()] == [0, 1, 2, 3, 4]


# -- watching


class Cut(httpx.SyncByteStream):
    """Some server-sent events, then a cut line."""

    def __init__(self, *jobs, whole=False):
        self.jobs, self.whole = jobs, whole

    def __iter__(self):
        for job in self.jobs:
            yield b": still here\n\n"
            yield f"event: job\ndata: {json.dumps(job)}\n\n".encode()
        if not self.whole:
            yield b'event: job\ndata: {"half'
            raise httpx.ReadError("cut")


def test_watching_goes_on_after_a_cut_line_and_repeats_nothing():
    second, last = JOB | {"progress": {"step": 5, "steps": 10}}, JOB | {"state": "trained"}
    streams = iter(
        [
            httpx.Response(200, stream=Cut(JOB)),
            httpx.Response(503),
            httpx.Response(200, stream=Cut(JOB, second)),
            httpx.Response(200, stream=Cut(second, last, whole=True)),
        ]
    )
    service, pauses = talking_to(lambda _: next(streams))
    assert list(service.watch("j")) == [JOB, second, last]
    assert len(pauses) == 3


def test_watching_gives_up_when_nobody_answers_any_more():
    handler, seen = failing(99, httpx.ConnectError, ok)
    service, _ = talking_to(handler)
    with pytest.raises(CannotRun, match="cannot reach"):
        list(service.watch("j"))
    assert len(seen) == 11


def test_watching_what_is_not_yours_is_refused_at_once():
    service, pauses = talking_to(lambda _: refusing(404))
    with pytest.raises(Refused):
        list(service.watch("j"))
    assert pauses == []


# -- uploads


class Store:
    """An S3 of ours that does what a test tells it with each PUT: a status, or cut the line."""

    def __init__(self):
        self.parts, self.headers, self.script, self.wrapped_key = {}, [], [], None
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                act = store.script.pop(0) if store.script else 200
                store.headers.append(dict(self.headers))
                length = int(self.headers["Content-Length"])
                if act == "cut":
                    self.rfile.read(length // 2)
                    return self.connection.close()
                body = self.rfile.read(length)
                if len(body) < length:  # the client went away
                    return self.connection.close()
                if act == 200:
                    store.parts[int(self.path[1:])] = body
                self.send_response(act)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


class Service:
    """As much of a service as an upload needs."""

    def __init__(self, store, part_bytes):
        self.store, self.part_bytes, self.signed = store, part_bytes, []
        self.url = "https://sluice.example"

    def upload_key(self):
        return {"id": WRAPPING.id, "public": WRAPPING.pem}

    def begin_upload(self, _, *, key_id, wrapped_key):
        assert key_id == WRAPPING.id
        if self.store.wrapped_key != wrapped_key:
            self.store.wrapped_key, self.store.parts = wrapped_key, {}
        return {"part_bytes": self.part_bytes, "arrived": sorted(self.store.parts)}

    def sign_parts(self, _, numbers, *, size):
        self.signed += numbers
        return {number: f"{self.store.url}/{number}" for number in numbers}

    def seal(self, _, *, size, sha256):
        return {"size": size, "sha256": sha256}


@pytest.fixture
def store():
    store = Store()
    thread = threading.Thread(target=store.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield store
    store.server.shutdown()
    store.server.server_close()
    thread.join()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "records.npz"
    path.write_bytes(os.urandom(5 * (1 << 20) + 12_345))
    return path


PRIVATE = rsa.generate_private_key(65537, 3072)
WRAPPING = WrappingKey(
    PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def arrived(store):
    """What the private side makes of the parts."""
    key = PRIVATE.decrypt(base64.b64decode(store.wrapped_key), OAEP)
    return Stream(key, "upload/d").decrypt(ciphertext(store))


def ciphertext(store):
    return b"".join(store.parts[number] for number in sorted(store.parts))


def sealed(store):
    body = ciphertext(store)
    return {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}


PART = (3 << 20) // 2  # not a multiple of the block that is read


def test_a_file_arrives_whole_and_its_hash_is_right(store, file):
    told = []
    assert upload(Service(store, PART), "d", file, on_progress=told.append) == sealed(store)
    assert arrived(store) == file.read_bytes()
    assert told == sorted(told)
    assert told[-1] == file.stat().st_size
    assert all("Authorization" not in headers for headers in store.headers)


def test_a_file_longer_than_the_site_takes_is_not_sent(store, file):
    service = Service(store, PART)
    most = encrypted_size(file.stat().st_size) - 1
    service.begin_upload = lambda *_, **__: {"part_bytes": PART, "most_bytes": most, "arrived": []}
    with pytest.raises(CannotRun, match=r"SLUICE_UPLOAD_BYTES_MAX"):
        upload(service, "d", file)
    assert (store.parts, service.signed) == ({}, [])


@pytest.mark.parametrize("script", [[503], ["cut"], [403, 200], [200, "cut", 500, "cut"]])
def test_a_part_that_got_lost_is_sent_again_with_a_new_signature(store, file, script):
    pauses, failures = [], sum(each != 200 for each in script)
    store.script = list(script)
    service = Service(store, PART)
    assert upload(service, "d", file, sleep=pauses.append) == sealed(store)
    assert arrived(store) == file.read_bytes()
    assert len(service.signed) == 4 + failures
    assert len(pauses) == failures


def cut(store, file):
    """An upload that is interrupted after two parts."""

    def stop(done):
        if done > 2 * PART:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(Service(store, PART), "d", file, on_progress=stop)
    assert sorted(store.parts) == [1, 2]


def test_what_is_sent_tells_nothing_of_the_file(store, tmp_path):
    """The same lines over and over: none of it arrives, and no two uploads are alike."""
    file = tmp_path / "records.csv"
    file.write_bytes(b"name,diagnosis\nCANARY-Jane,CANARY-flu\n" * 100_000)
    seals = []
    for _ in range(2):
        store.parts = {}
        seals.append(upload(Service(store, PART), "d", file))
        assert arrived(store) == file.read_bytes()
        assert b"CANARY" not in ciphertext(store)
        assert len(zlib.compress(ciphertext(store))) > file.stat().st_size
    assert seals[0]["sha256"] != seals[1]["sha256"]
    assert hashlib.sha256(file.read_bytes()).hexdigest() not in str(seals)


def test_the_data_key_is_kept_for_its_owner_until_the_upload_is_sealed(store, file, home):
    cut(store, file)
    [kept] = (home / "uploads").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    upload(Service(store, PART), "d", file)
    assert list((home / "uploads").iterdir()) == []


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("{}")])
def test_an_upload_whose_key_is_lost_starts_over_with_a_new_one(store, file, home, damage):
    cut(store, file)
    [kept] = (home / "uploads").iterdir()
    damage(kept)
    again = Service(store, PART)
    assert upload(again, "d", file) == sealed(store)
    assert again.signed == [1, 2, 3, 4]
    assert arrived(store) == file.read_bytes()


def test_a_changed_key_of_the_service_is_not_used_before_the_next_login(store, file, monkeypatch):
    upload(Service(store, PART), "d", file)
    other = rsa.generate_private_key(65537, 3072).public_key()
    changed = WrappingKey(other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())
    monkeypatch.setitem(globals(), "WRAPPING", changed)
    store.parts = {}
    with pytest.raises(CannotRun, match=rf"another key .*{changed.id}.* sluice login"):
        upload(Service(store, PART), "d", file)
    assert store.parts == {}
    upload_key(Service(store, PART), accept_changes=True)
    upload(Service(store, PART), "d", file)


def test_a_service_without_a_proper_key_gets_nothing(store, file, monkeypatch):
    short = rsa.generate_private_key(65537, 2048).public_key()
    pem = short.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    for answer in ({"public": pem}, {"public": "x"}, {"public": 1}, {}):
        monkeypatch.setattr(Service, "upload_key", lambda _, answer=answer: answer)
        with pytest.raises(CannotRun, match="no key to encrypt uploads for"):
            upload(Service(store, PART), "d", file)
    assert store.parts == {}


def test_a_cut_upload_goes_on_with_the_parts_that_are_missing(store, file):
    cut(store, file)
    again = Service(store, PART)
    assert upload(again, "d", file) == sealed(store)
    assert again.signed == [3, 4]
    assert arrived(store) == file.read_bytes()


@pytest.mark.parametrize(("script", "attempts"), [([404], 1), ([500] * 9, 6), (["cut"] * 9, 6)])
def test_a_store_that_does_not_take_it_is_said_with_a_way_to_go_on(store, file, script, attempts):
    store.script = script
    service = Service(store, PART)
    with pytest.raises(CannotRun, match=r"part 1 of .* did not reach the store .* sluice datasets upload d "):
        upload(service, "d", file, sleep=lambda _: None)
    assert len(service.signed) == attempts


def test_a_file_that_changes_meanwhile_is_not_sealed(store, file):
    def write(done):
        if done == 2 * PART:
            with file.open("r+b") as out:
                out.write(b"other")

    with pytest.raises(CannotRun, match="changed while it was sent"):
        upload(Service(store, PART), "d", file, on_progress=write)


def test_a_file_that_shrinks_meanwhile_is_not_sealed(store, file):
    def cut(done):
        if done == PART:
            os.truncate(file, 2 * PART - 5)

    with pytest.raises(CannotRun, match="became shorter"):
        upload(Service(store, PART), "d", file, on_progress=cut, sleep=lambda _: None)


def test_another_file_cannot_go_on_where_one_stopped(store, file):
    cut(store, file)
    os.truncate(file, PART - 1000)
    with pytest.raises(CannotRun, match="shorter than what arrived"):
        upload(Service(store, PART), "d", file)


@pytest.mark.parametrize("what", ["missing", "empty", "directory"])
def test_a_file_that_is_none(store, tmp_path, what):
    path = tmp_path / what
    path.mkdir() if what == "directory" else path.touch() if what == "empty" else None
    with pytest.raises(CannotRun, match=r"cannot be read|is empty"):
        upload(Service(store, PART), "d", path)
