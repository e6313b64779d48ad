"""Every command against servers that answer anything: a sentence, an exit code, nothing a terminal obeys."""

import io
import json
import re
import ssl
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import typer

from service.app import create_app
from sluice.cli.main import app, main
from sluice.client import upload
from sluice.client.api import Sluice
from sluice.client.release import Release
from sluice.client.terminal import inert

ID, OTHER = str(uuid.UUID(int=5)), str(uuid.UUID(int=6))
NOT_ASKING = {  # a service: they work on this machine
    "up", "init", "restore", "demo", "check", "test", "verify", "releases sample", "releases classify",
    "releases verify",
}  # fmt: skip
COMMANDS = {
    "login": ["--key", "sl_x"],
    "train": [ID, "--epsilon", "1"],
    "datasets add": [
        "data.npz", "--name", "d", "--records", "10", "--epsilon", "1", "--delta", "1e-5", "--image", "8x8",
        "--classes", "a,b",
    ],
    "datasets upload": [ID, "data.npz"],
    "datasets list": [],
    "datasets review": [ID, "--reason", "r", "--accept"],
    "datasets show": [ID],
    "datasets delete": [ID],
    "jobs quote": [ID, "plan.json"],
    "jobs start": [ID, "plan.json"],
    "jobs diagnostics": [ID],
    "jobs list": [],
    "jobs show": [ID],
    "jobs watch": [ID],
    "jobs cancel": [ID],
    "releases create": [ID, "--name", "r"],
    "releases list": [],
    "releases show": [ID],
    "releases review": [ID],
    "releases approve": [ID, "--digest", "0" * 64],
    "releases rebuild": [ID],
    "releases discard": [ID],
    "releases publish": [ID],
    "releases withdraw": [ID, "--reason", "r"],
    "releases grant": [ID, "ada"],
    "releases download": [ID, "out"],
    "ledger show": [ID],
    "ledger export": [ID, "--out", "ledger.csv"],
    "ledger verify": [ID],
    "ledger grant": [ID, "--epsilon", "2", "--reason", "r"],
    "ledger grants": [ID],
    "ledger confirm": [ID, OTHER],
    "ledger withdraw": [ID, OTHER],
    "audit-log show": [],
    "audit-log export": ["--out", "audit.jsonl"],
    "audit-log verify": [],
    "people add": ["ada", "--role", "curator"],
    "people invite": ["ada"],
    "people confirm": [ID],
    "people invitations": [],
    "people withdraw": [ID],
    "people list": [],
    "people disable": ["ada"],
    "teams add": ["t"],
    "teams list": [],
    "teams quota": ["t"],
    "teams move": ["ada", "t"],
    "keys add": [],
    "keys list": [],
    "keys revoke": [ID],
}  # fmt: skip
# Made once: each run would make its own, which takes most of its time.
COMMAND, CONTEXT = typer.main.get_command(app), ssl.create_default_context()
VERDICTS = ("ledger verify", "audit-log verify")  # say what is broken on standard output
# Clears the screen, sets the title, colours, goes back, turns the writing; markup of rich, half a character.
EVIL = (
    "n\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202eevil\u2066 [red]x[/red] [link=http://evil]l[/link] \ud800\x7f"
)
SHOWN = EVIL.replace("\ud800", "")  # what even a careless program could print
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def asking_commands():
    def walk(command, names=()):
        if hasattr(command, "commands"):
            for name, each in command.commands.items():
                yield from walk(each, (*names, name))
        else:
            yield " ".join(names)

    return {name for name in walk(COMMAND) if not name.startswith("quote ")} - NOT_ASKING


def test_every_command_that_asks_a_service_is_here():
    assert asking_commands() == set(COMMANDS)


@pytest.fixture(scope="module")
def server():
    """Answers each request with what `server.reply` gives for its method and path: status, headers, bytes."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, body = self.server.reply(self.command, self.path.partition("?")[0])
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.daemon_threads = True
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        httpd.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        yield httpd
        httpd.shutdown()
        thread.join()


@pytest.fixture
def sluice(server, monkeypatch, capsys, tmp_path):
    """Runs a command in an empty directory; gives exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(
        "sluice.cli.connection._is_terminal", lambda: True
    )  # elsewhere bytes are left as they came
    monkeypatch.setattr("sluice.cli.main.app", COMMAND)
    monkeypatch.setattr("httpx._transports.default.create_ssl_context", lambda *_, **__: CONTEXT)
    monkeypatch.chdir(tmp_path)
    for waiting in (Sluice.__init__, Release.download, upload.upload):
        monkeypatch.setitem(waiting.__kwdefaults__, "sleep", lambda _: None)
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.zeros(4, np.int64))
    (tmp_path / "plan.json").write_text('{"kind": "swd_one_shot", "directions": 10}')
    mine = {"home", "data.npz", "plan.json"}

    def run(name, *more):
        where = {"SLUICE_HOME": str(tmp_path / "home"), "SLUICE_URL": server.url}
        where |= {} if name == "login" else {"SLUICE_KEY": "sl_x"}
        arguments = [*name.split(), *COMMANDS[name], *more]
        monkeypatch.setattr(sys, "argv", ["sluice", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for one, value in where.items():
                patch.setenv(one, value)
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code or 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        assert not OBEYED.search(out), (name, more, out)
        assert not OBEYED.search(err), (name, more, err)
        left = {path.name for path in tmp_path.iterdir()} - mine
        return code, out, err, left

    return run


def of(body, **headers):
    return lambda *_: (200, {"Content-Type": "application/json"} | headers, body)


JSON = {
    "null": b"null", "number": b"7", "text": b'"x"', "list": b"[]", "object": b"{}", "NaN": b"NaN",
    "list of null": b"[null]", "empty page": b'{"items": null, "next": 3}',
    "the same page for ever": b'{"items": [], "next": "x"}', 
    "items of null": b'{"items": [null], "next": null}',
    "deep": b"[" * 50_000 + b"]" * 50_000, "truncated": b'{"items": [{"id": "x', "two": b"{} {}",
    "wrong types": json.dumps(
        {each: [{"id": 5}] for each in ("items", "next", "id", "name", "state", "files", "key", "parts")}
    ).encode(),
}  # fmt: skip
MALFORMED = {name: of(body) for name, body in JSON.items()} | {
    "nothing": of(b""),
    "no content": lambda *_: (204, {}, b""),
    "html": of(b"<html><body>It works!</body></html>", **{"Content-Type": "text/html"}),
    "not UTF-8": of(b'{"id": "\xff\xfe"}'),
    "binary": of(bytes(range(256)) * 16, **{"Content-Type": "application/octet-stream"}),
    "bad gzip": of(b"not gzip", **{"Content-Encoding": "gzip"}),
    "cut": of(b'{"id"', **{"Content-Length": "1000", "Connection": "close"}),
    "redirect": lambda *_: (302, {"Location": "http://127.0.0.1:1/"}, b""),
    "500 in html": lambda *_: (500, {"Content-Type": "text/html"}, b"<h1>oops</h1>"),
    "a problem of wrong types": lambda *_: (
        422, {}, b'{"status": "x", "slug": 1, "title": [], "detail": {}, "errors": [{"loc": 5}]}',
    ),
    "a problem that is not finite": lambda *_: (
        409, {}, b'{"status": 409, "slug": "s", "title": "t", "detail": "d", "left": {"cost": NaN}}',
    ),
    "a problem in a list": lambda *_: (404, {}, b"[1]"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_answer_is_one_sentence_and_leaves_nothing_behind(case, server, sluice, tmp_path):
    server.reply = MALFORMED[case]
    turn = list(MALFORMED).index(case)
    for number, name in enumerate(COMMANDS):
        for more in [("--json",) if (number + turn) % 2 else ()]:  # each way for half of them, to save time
            code, out, err, left = sluice(name, *more)
            assert "Traceback" not in err, (name, err)
            if code and name in VERDICTS and out:
                assert "BROKEN" in out or json.loads(out)
            elif code:
                sentence = [line for line in err.splitlines() if line.startswith("sluice: ")]
                assert len(sentence) == 1, (name, err)
                assert len(err.splitlines()) <= 8, (name, err)
                if more:
                    assert json.loads(out.splitlines()[-1])["problem"], (name, out)
                assert left == set(), (name, left)
            else:  # it asked for nothing that this answer lacks
                assert left <= {"ledger.csv", "audit.jsonl", "out"}, (name, left)
            for path in left:
                one = tmp_path / path
                [file.unlink() for file in one.rglob("*") if file.is_file()] if one.is_dir() else one.unlink()
        if name == "login":
            assert not (tmp_path / "home/login.json").exists(), case


def test_an_answer_without_an_end_is_not_kept_in_memory(server, sluice, monkeypatch):
    monkeypatch.setattr("sluice.client.http._MAX_ANSWER_BYTES", 1 << 20)
    server.reply = of(b"[" + b"1," * (1 << 20) + b"1]")
    for name in ("datasets list", "ledger show", "login", "audit-log export"):
        code, _, err, left = sluice(name)
        assert (code, "not from a Sluice service" in err, left) == (1, True, set())


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://", "file:///etc/passwd", "http://127.0.0.1:1/x", 7, None]
)
def test_a_bad_signed_address_is_one_sentence(url, server, sluice, examples):
    def reply(method, path):
        if path.endswith(("/downloads", "/upload/urls")):
            file = {"path": "manifest.json", "size": 2, "sha256": "0" * 64, "url": url}
            body = {"files": [file], "expires_in": 9, "parts": [{"number": 1, "url": url}]}
            return 200, {}, json.dumps(body).encode()
        return examples(method, path)

    server.reply = reply
    for name in ("releases download", "datasets upload"):
        code, _, err, _ = sluice(name)
        assert code == 1, (name, err)
        assert err.startswith("sluice: ") or "\nsluice: " in err
        assert "Traceback" not in err


@pytest.fixture
def examples(service_settings):
    """Answers of the right form, made from the service's own document, with SHOWN wherever there is text."""
    document = create_app(service_settings).openapi()

    def example(schema, name=""):
        if "$ref" in schema:
            return example(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], name)
        if "anyOf" in schema:
            return example(next(one for one in schema["anyOf"] if one.get("type") != "null"), name)
        if "enum" in schema or "const" in schema:
            return schema.get("const", (schema.get("enum") or [None])[0])
        match schema.get("type"):
            case "object":
                return {key: example(each, key) for key, each in schema.get("properties", {}).items()} or {
                    "renyi": 1.0, "pld": 0.5, "x": SHOWN,
                }  # fmt: skip
            case "array":
                return [example(schema.get("items", {}), name)]
            case "integer":
                return 1
            case "number":
                return 0.5
            case "boolean":
                return True
            case "string" if name.endswith("at"):
                return "2026-01-02T03:04:05+00:00"
            case "string":
                fixed = {"date-time": "2026-01-02T03:04:05+00:00", "uuid": ID}
                return fixed.get(schema.get("format", ""), {"state": "ready", "next": None}.get(name, SHOWN))
        return SHOWN

    def reply(method, path):
        for pattern, verbs in document["paths"].items():
            if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path) and method.lower() in verbs:
                for status, answer in verbs[method.lower()]["responses"].items():
                    if status.startswith("2"):
                        kinds = answer.get("content", {})
                        if "application/json" in kinds:
                            body = example(kinds["application/json"]["schema"])
                            body = (
                                body | {"next": None} if isinstance(body, dict) and "next" in body else body
                            )
                            return int(status), {}, json.dumps(body).encode()
                        return int(status), {}, SHOWN.encode() + b"\n"
        return 404, {}, b"{}"

    return reply


def test_no_text_of_an_answer_reaches_a_terminal_raw(server, sluice, examples):
    server.reply = examples
    shown = []
    for name in COMMANDS:
        if name != "jobs watch":  # has no end in a state that nobody knows
            for more in ((), ("--json",)):
                _, out, err, _ = sluice(name, *more)
                assert "Traceback" not in err
                shown.append((name, more, ("\\u001b[2J" if more else "\\x1b[2J") in out + err))
    plain = {name for name, more, found in shown if found and not more}
    as_json = {name for name, more, found in shown if found and more}
    # Enough of them printed the text for this to have been a test of it.
    both = {
        "datasets list", "jobs list", "jobs show", "ledger show", "ledger grants", "audit-log show",
        "people list", "keys list", "keys add", "teams list",
    }  # fmt: skip
    assert plain >= both | {"jobs diagnostics"}, sorted(plain)
    assert as_json >= both, sorted(as_json)


def test_no_text_of_a_problem_reaches_a_terminal_raw(server, sluice):
    problem = {"status": 409, "slug": EVIL, "title": EVIL, "detail": EVIL, EVIL: EVIL, "left": {EVIL: EVIL}}
    problem["errors"] = [{"loc": ["body", EVIL], "msg": EVIL}]
    server.reply = lambda *_: (409, {}, json.dumps(problem).encode())
    for name in COMMANDS:
        for more in ((), ("--json",)):
            code, _, err, left = sluice(name, *more)
            assert (code, left) == (1, set())
            assert "\\x1b[2J" in err
            assert "[red]x[/red]" in err  # as it was sent: no markup


def test_text_keeps_what_is_no_command():
    assert inert("Ärzte – 医院\tأطباء\n[b]") == "Ärzte – 医院\tأطباء\n[b]"
    assert inert("a\nb\tc", lines=False) == "a\\nb c"
    assert inert(EVIL).startswith("n\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\x0d\\x08\\u202eevil")
