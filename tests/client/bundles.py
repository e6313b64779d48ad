"""Real bundles, signed with a key of the tests, and a small service that has them to download."""

import base64
import hashlib
import json
import threading
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from core.schema import ImageSchema
from sluice.generators.classifier import Classifier, ClassifierShape
from sluice.generators.dcgan import DCGAN
from sluice.generators.image import ImageSynthesizer
from sluice.privacy.account import cost_as_epsilon
from sluice.privacy.accountant import Accountant, cost
from sluice.privacy.events import PoissonGaussian, Query
from sluice.privacy.relation import Relation
from sluice.release.manifest import release_statement
from sluice.release.revocations import revocations
from sluice.release.statement import REVOCATIONS_TYPE, STATEMENT_TYPE, SeedSigner, sign
from sluice.release.verify import readable
from worker.bundle import Facts, build

SIGNER = SeedSigner(bytes(range(32)))
SCHEMA = ImageSchema(height=8, width=8, channels=1, classes=("cat", "dog", "a/b"))
EVENT = PoissonGaussian(query=Query.SUM, bound=1.0, noise_stddev=2.0, sampling_prob=0.01, steps=100)
DELTA, RELATION = 1e-5, Relation.ADD_REMOVE
EPSILON = {each.value: readable(each, event=EVENT, delta=DELTA, relation=RELATION) for each in Accountant}
COST = cost(EVENT, order=8, relation=RELATION)
PRIVACY = {
    "unit": "one record", "relation": "add_remove", "delta": DELTA, "event": EVENT.to_dict(),
    "cost": COST, "epsilon": EPSILON,
    "total": {"cost": COST, "epsilon": cost_as_epsilon(COST, delta=DELTA, order=8)},
    "account": {"id": "a", "epsilon": 8.0, "delta": DELTA, "order": 8},
    "entry": {"number": 2, "digest": "00"}, "head": {"number": 3, "digest": "11"}, "others": [],
    "sources": [],
}  # fmt: skip


def bundle(
    directory,
    *,
    name="pets",
    release=None,
    seed=7,
    formats=("npz", "parquet"),
    count=90,
    signer=SIGNER,
    privacy=PRIVACY,
):
    """A published release in a directory, of a classifier if in no format; gives the digest of its bundle."""
    directory.mkdir(parents=True)
    torch.manual_seed(1)
    shape = {"height": 8, "width": 8, "channels": 1, "classes": 3, "latent": 4, "features": 4}
    trained = ImageSynthesizer(DCGAN(**shape)) if formats else Classifier(ClassifierShape(**shape))
    if isinstance(trained, Classifier):
        trained.network.head.bias.data.zero_()  # else it says the same of every image
        trained.network.encoder.latent.bias.data.zero_()
    release = release or str(uuid.uuid5(uuid.NAMESPACE_URL, f"{name}{seed}"))
    facts = Facts(
        release=release, name=name, note="", licence="CC-BY-4.0", created_at="2026-01-02T03:04:05+00:00",
        reviewers=2, count=count, seed=seed, formats=formats, schema=SCHEMA, privacy=privacy,
    )  # fmt: skip
    made = build(directory, facts, trained.to_files(), on_progress=lambda _: None)
    digest = made.digest.hex()
    statement = release_statement(
        release=release, bundle=digest, hashes={each["path"]: each["sha256"] for each in made.files},
        privacy=privacy, code=made.manifest["code"], published_at="2026-01-03T00:00:00+00:00",
        review={
            "reviewers": 2, "author": "carla",
            "approvals": [{"person": "dora", "digest": digest, "at": "2026-01-02T04:00:00+00:00"}],
        },
    )  # fmt: skip
    (directory / "attestation.json").write_bytes(sign(statement, STATEMENT_TYPE, signer))
    return release, digest


def listed(number, *withdrawn, signer=SIGNER):
    """A signed list of withdrawn releases."""
    rows = [
        {"release": release, "bundle": digest, "at": "2026-02-01T00:00:00+00:00", "reason": "a mistake"}
        for release, digest in withdrawn
    ]
    return sign(revocations(number, issued_at(number), rows), REVOCATIONS_TYPE, signer)


STARTED = datetime.now(UTC).replace(microsecond=0)


def issued_at(number):
    """Lists of tests are of the last hour."""
    return STARTED - timedelta(hours=1) + timedelta(minutes=number)


def keys_json(*signers):
    keys = [
        {
            "id": each.key_id,
            "algorithm": "ed25519",
            "public": base64.b64encode(each.public).decode(),
            "since": "",
        }
        for each in signers or (SIGNER,)
    ]
    return {"keys": keys}


class Service:
    """What a release needs of a service and of a store, on a real port; a test may make it misbehave."""

    def __init__(self, directory, release, name="pets"):
        self.directory, self.keys, self.revocations = directory, keys_json(), listed(1)
        self.files = [self.described(path) for path in sorted(self.contents())]
        self.view = {"id": release, "name": name, "state": "published", "files": self.files}
        self.asked, self.ranges, self.signed = [], [], 0
        self.has_ranges = True
        self.cut_after = None  # bytes the store gives before it hangs up
        self.expired = set()  # numbers of signatures that no longer work
        self.instead = {}  # path → other bytes

    def contents(self):
        return [str(f.relative_to(self.directory)) for f in self.directory.rglob("*") if f.is_file()]

    def described(self, path):
        body = (self.directory / path).read_bytes()
        return {"path": path, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}

    def answer(self, method, path, body):
        if path == "/.well-known/sluice-keys.json":
            return json.dumps(self.keys).encode()
        if path == "/.well-known/sluice-revocations.json":
            return self.revocations
        if path.endswith("/downloads"):
            self.signed += 1
            files = [
                each | {"url": f"{self.url}/store/{self.signed}/{each['path']}"}
                for each in self.files
                if each["path"] in body["paths"]
            ]
            return json.dumps({"files": files, "expires_in": 900}).encode()
        if path.startswith("/v1/releases?"):
            return json.dumps({"items": [self.view], "next": None}).encode()
        return json.dumps(self.view).encode() if path.startswith("/v1/releases/") else None

    @contextmanager
    def serving(self):
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                service.asked.append(self.path)
                if self.path.startswith("/store/"):
                    return self.store(*self.path.removeprefix("/store/").split("/", 1))
                self.reply(service.answer("GET", self.path, None))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(service.answer("POST", self.path, body))

            def reply(self, body, status=200, **headers):
                self.send_response(status if body is not None else 404)
                for name, value in {"Content-Length": str(len(body or b"")), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(body or b"")

            def store(self, number, path):
                if int(number) in service.expired:
                    return self.reply(b"expired", 403)
                body = service.instead.get(path) or Path(service.directory, path).read_bytes()
                start = 0
                if (wanted := self.headers.get("Range")) and service.has_ranges:
                    start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                    service.ranges.append((path, start))
                if service.cut_after is not None and len(body) - start > service.cut_after:
                    self.send_response(206 if start else 200)
                    self.send_header("Content-Length", str(len(body) - start))
                    if start:
                        self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                    self.end_headers()
                    self.wfile.write(body[start : start + service.cut_after])
                    self.close_connection = True
                    return None
                span = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
                return self.reply(body[start:], 206 if start else 200, **span)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
