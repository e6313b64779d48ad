"""Secrets planted in records, labels, names of files and of columns come out nowhere, whatever happens.

Nowhere includes the disk of the store.
"""

import base64
import hashlib
import io
import secrets
import zipfile

import httpx
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from core.stores import s3
from tests.e2e.test_up import state_of
from tests.encrypting import encrypted
from tests.worker import hostile

KINDS_OF_FAILURE = 20


def images(planted):
    """PNG folders of declared classes; the canaries are in pixels, in text chunks and in file names."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        for number in range(60):
            text = planted[number % len(planted)]
            pixels = np.frombuffer((text * 4).encode()[:64], np.uint8).reshape(8, 8)
            note, png = PngInfo(), io.BytesIO()
            note.add_text("patient", text)
            Image.fromarray(pixels).save(png, "png", pnginfo=note)
            archive.writestr(f"{('cat', 'dog')[number % 2]}/{text}-{number}.png", png.getvalue())
    return body.getvalue()


def visits(planted):
    """A table whose unknown categories, mapped to `other`, are the canaries."""
    lines = ["age,income,city", *(f"{20 + n},{n},{text}" for n, text in enumerate(planted))]
    return "\n".join(lines).encode()


class Everything:
    """All that anybody outside the private side is told, as it is told."""

    def __init__(self, site):
        self.site, self.told = site, []
        site.http.event_hooks["response"] = [self.heard]

    def heard(self, answer):
        answer.read()
        self.told.append(repr(answer.headers.raw).encode() + answer.content)

    def places(self):
        """What is known in each place outside the private side, and how many objects are public."""
        site, state = self.site, state_of(self.site.up.data)
        places = {"answers": self.told, "screen": ["\n".join(site.up.seen).encode()]}
        places["logs"] = [path.read_bytes() for path in (site.up.data / "log").iterdir()]
        for path in ("/metrics", "/readyz", "/openapi.json", "/.well-known/sluice-revocations.json"):
            places.setdefault("open pages", []).append(site.http.get(path).content)
        # The log of all that was ever put into the queue.
        places["queue"] = [p.read_bytes() for p in (site.up.data / "valkey").rglob("*") if p.is_file()]
        admin = s3.client(
            endpoint=f"http://127.0.0.1:{state['ports'][8]}", region="us-east-1", **state["s3"]["admin"]
        )
        listed = admin.list_objects_v2(Bucket="sluice-public").get("Contents", [])
        places["public bucket"] = [each["Key"].encode() for each in listed]
        for each in listed:
            body = admin.get_object(Bucket="sluice-public", Key=each["Key"])["Body"].read()
            places["public bucket"].append(body)
            if zipfile.is_zipfile(io.BytesIO(body)):
                with zipfile.ZipFile(io.BytesIO(body)) as inner:
                    places["public bucket"] += [inner.read(name) + name.encode() for name in inner.namelist()]
        # What a thief of the disk has: every object, and the files that the store keeps them in.
        for bucket in ("sluice-private", "sluice-vault"):
            for each in admin.list_objects_v2(Bucket=bucket)["Contents"]:
                body = admin.get_object(Bucket=bucket, Key=each["Key"])["Body"].read()
                places.setdefault(bucket, []).append(body)
        places["the store's disk"] = [p.read_bytes() for p in (site.up.data / "s3").rglob("*") if p.is_file()]
        admin.close()
        assert all(places.values()), {name: len(found) for name, found in places.items()}
        return places, len(listed)


def places_with(planted, places):
    forms = {form for text in planted for form in ways_to_write(text)}
    return {name for name, told in places.items() if any(form in each for each in told for form in forms)}


def ways_to_write(text):
    plain = text.encode()
    yield from (plain, plain.hex().encode(), text.encode("utf-16-le"), plain[::-1])
    for shift in range(3):  # inside longer base64, at each place
        yield base64.b64encode(b"x" * shift + plain)[4 : -4 or None]


def send(site, schema, body, *, sealed_as=None):
    declared = {
        "name": "scans", "schema": schema.model_dump(mode="json"), "nominal_size": 60,
        "budget": {"epsilon": 100, "delta": 1e-5, "order": 4},
    }  # fmt: skip
    id = site.ask("POST", "/v1/datasets", json=declared)["id"]
    begin, body = encrypted(site.ask("GET", "/.well-known/sluice-upload-key.json"), id, body)
    site.ask("POST", f"/v1/datasets/{id}/upload", json=begin)
    [part] = site.ask("POST", f"/v1/datasets/{id}/upload/urls", json={"numbers": [1]})["parts"]
    assert httpx.put(part["url"], content=body).status_code == 200
    sha256 = hashlib.sha256(sealed_as or body).hexdigest()
    site.ask("POST", f"/v1/datasets/{id}/seal", json={"size": len(body), "sha256": sha256})
    return id


def checked(site, id):
    return site.wait(f"/v1/datasets/{id}", ("ready", "held", "rejected"))


def failing(tmp_path):
    """One hostile upload of each kind of fault, then others, each with a canary of its own."""
    chosen = {}
    for name, case in hostile.CASES.items():
        chosen.setdefault((case.fault, case.schema.kind), name)
    names = [*chosen.values(), *(name for name in hostile.CASES if name not in chosen.values())]
    for name in names[: KINDS_OF_FAILURE + 1]:
        case, canary = hostile.CASES[name], secrets.token_hex(10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hostile, "CANARY", canary)
            body = case.make(tmp_path)
        if body:  # nothing cannot be sealed
            yield name, case, canary, body


def test_fifty_canaries_come_out_nowhere(site, tmp_path):
    everything = Everything(site)
    planted = [secrets.token_hex(10) for _ in range(30)]

    sent = {}
    for name, case, canary, body in failing(tmp_path):
        planted.append(canary)
        sent[name] = send(site, case.schema, body)
    wrong = send(site, hostile.IMAGES, images(planted[:8]), sealed_as=b"something else")
    few = send(site, hostile.TABLE, visits(planted[14:20]))
    dataset = send(site, hostile.IMAGES, images(planted[:30]))
    for name, id in sent.items():
        assert checked(site, id)["state"] == "rejected", name
    wrong, few, dataset = (checked(site, id) for id in (wrong, few, dataset))
    assert (wrong["state"], wrong["fault"]) == ("rejected", "hash-mismatch")
    for path, body in (
        ("/v1/datasets", {"name": "x", planted[8]: planted[9]}),
        ("/v1/quotes", {"dataset": planted[10], "plan": {"kind": planted[11]}}),
        ("/v1/jobs", {"plan": planted[12]}),
        ("/v1/releases", {"job": planted[13], "name": {}}),
    ):
        assert site.http.post(path, json=body, headers=site.curator).status_code == 422
    assert (few["state"], few["report"]["mapped"]) == ("held", 6)
    assert dataset["state"] == "ready"

    job = site.job(dataset["id"], steps=5, key="canary")
    assert site.wait(f"/v1/jobs/{job}", ("trained", "failed"))["state"] == "trained"
    formats = ["parquet", "npz", "png"]
    asked = {"job": job, "name": "scans", "count": 40, "audience": "everyone", "formats": formats}
    id = site.ask("POST", "/v1/releases", json=asked)["id"]
    digest = site.wait(f"/v1/releases/{id}", ("in_review", "failed"))["digest"]
    site.ask("POST", f"/v1/releases/{id}/approve", site.second_admin, json={"digest": digest})
    site.ask("POST", f"/v1/releases/{id}/publish")
    site.wait(f"/v1/releases/{id}", ("published", "failed"))
    assert site.http.get(f"/v1/jobs/{job}/diagnostics", headers=site.curator).status_code == 200

    assert len(set(planted)) == 50
    places, objects = everything.places()
    assert objects >= 13
    assert places_with(planted, places) == set()
    # The search would have found one: it does where one was put.
    everything.told.append(b"... " + base64.b64encode(b"ab" + planted[0].encode()) + b" ...")
    assert places_with(planted, {"answers": everything.told}) == {"answers"}
