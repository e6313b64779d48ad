"""A curator at work on a running stack, over HTTP."""

import hashlib
import time

import httpx

from tests.e2e.driving import PATIENCE
from tests.encrypting import encrypted
from tests.worker.conftest import SCHEMA, upload


class Site:
    """A running stack with two admins and a curator on it, whom the first admin invited."""

    def __init__(self, up, admin_key, second_admin):
        self.reach(up)
        self.admin = {"Authorization": f"Bearer {admin_key}"}
        self.second_admin = self.redeemed(second_admin)
        person = self.ask("POST", "/v1/admin/people", self.admin, json={"name": "carla", "role": "curator"})
        self.curator = self.redeemed(person["invitation"]["invitation"])

    def redeemed(self, invitation):
        answer = self.ask("POST", "/v1/invitations/redeem", {}, json={"invitation": invitation})
        return {"Authorization": f"Bearer {answer['key']}"}

    def reach(self, up):
        """The stack that is asked from now on: another start of the same one has another port."""
        self.up = up
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{up.port}", timeout=PATIENCE)

    def ask(self, method, path, headers=None, **more):
        """Asks until the service answers: parts of it are being killed."""
        end = time.monotonic() + PATIENCE
        headers = self.curator if headers is None else headers
        while True:
            try:
                answer = self.http.request(
                    method, path, headers=self.curator if headers is None else headers, **more
                )
                if answer.status_code < 500:
                    assert answer.status_code < 300, answer.text
                    return answer.json()
            except httpx.TransportError:
                pass
            assert time.monotonic() < end, "the service does not come back"
            time.sleep(0.2)

    def dataset(self, body=None):
        body = body or upload()
        budget = {"epsilon": 1000, "delta": 1e-5, "order": 4}
        declared = {"name": "two", "schema": SCHEMA, "nominal_size": 200, "budget": budget}
        id = self.ask("POST", "/v1/datasets", json=declared)["id"]
        begin, body = encrypted(self.ask("GET", "/.well-known/sluice-upload-key.json"), id, body)
        self.ask("POST", f"/v1/datasets/{id}/upload", json=begin)
        [part] = self.ask("POST", f"/v1/datasets/{id}/upload/urls", json={"numbers": [1]})["parts"]
        assert httpx.put(part["url"], content=body).status_code == 200
        sealed = {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        self.ask("POST", f"/v1/datasets/{id}/seal", json=sealed)
        self.wait(f"/v1/datasets/{id}", ("ready",))
        return id

    def job(self, dataset, *, steps, key):
        plan = {"kind": "dpgan", "sampling_prob": 0.05, "expected_batch": 10, "steps": steps}
        body = {"dataset": dataset, "plan": plan, "target": {"epsilon": 4}}
        quote = self.ask("POST", "/v1/quotes", json=body)
        assert quote["epsilon"]["renyi"] <= 4
        headers = self.curator | {"Idempotency-Key": key}
        return self.ask("POST", "/v1/jobs", headers, json=body)["id"]

    def wait(self, path, states, until=None):
        end = time.monotonic() + PATIENCE
        while True:
            view = self.ask("GET", path)
            if view["state"] in states or (until and until(view)):
                return view
            assert time.monotonic() < end, view
            time.sleep(0.1)

    def entries(self, job):
        account = self.ask("GET", f"/v1/jobs/{job}")["account"]
        shown = self.ask("GET", f"/v1/admin/ledger/{account}", self.admin)
        assert shown["chain"] == {"ok": True, "broken_row": None, "why": None}
        return [entry["kind"] for entry in shown["entries"] if entry["job"] == job]
