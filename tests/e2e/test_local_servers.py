"""Another user of the machine that runs `sluice up`: no socket of its servers serves them."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest
import redis

from core.settings import PublishSettings, ServiceSettings, SweepSettings, TrainSettings
from core.stores import s3
from local import state as data_directory
from local.certificate import self_signed
from local.child import check_port
from local.servers import Seaweed
from local.stack import Stack
from sluice.client.api import Sluice
from sluice.client.problems import CannotRun
from tests.conftest import served
from tests.e2e import outsider
from tests.e2e.driving import Up, plain_environment
from tests.service.test_oidc import Issuer

WEED = Path(sysconfig.get_path("scripts")) / "weed"
NOBODY = 65534
SECRET = os.urandom(20_000)  # incompressible, so that it is found in a volume as it is
OBJECT = {"Bucket": "sluice-private", "Key": "uploads/sealed"}


@pytest.fixture(scope="module")
def issuer():
    issuer = Issuer()
    with served(issuer.app) as client:
        issuer.url = str(client.base_url).rstrip("/")
        yield issuer


@pytest.fixture(scope="module")
def up(tmp_path_factory, issuer):
    place = tmp_path_factory.mktemp("up")
    for name, text in zip(("cert", "key"), self_signed("127.0.0.1"), strict=True):
        (place / f"{name}.pem").write_text(text)
    environment = {
        "SLUICE_TLS_CERT": str(place / "cert.pem"),
        "SLUICE_TLS_KEY": str(place / "key.pem"),
        "SLUICE_OIDC_ISSUER": issuer.url,
        "SLUICE_OIDC_AUDIENCE": "a site",
        "SLUICE_OIDC_ROLE_CLAIM": "groups",
        "SLUICE_OIDC_ROLES": '{"doctors": "analyst"}',
        "SLUICE_REQUESTS_PER_MINUTE": "1",
    }
    # With this mask every file and socket that relies on the caller's is open to all.
    up = Up(place / "data", umask=0, environment=environment)
    up.certificate, up.url = place / "cert.pem", f"https://127.0.0.1:{up.port}"
    try:
        up.expect("Ctrl-C stops", seconds=300)
        yield up
    finally:
        up.stop()
        up.process.stdout.close()


@pytest.fixture(scope="module")
def state(up):
    return data_directory.read(up.data)


@pytest.fixture(scope="module")
def admin(state):
    keys = state["s3"]["admin"]
    return s3.client(endpoint=f"http://127.0.0.1:{state['ports'][8]}", region="us-east-1", attempts=1, **keys)


class Outsider:
    """Runs programs as somebody without our files: another user if we may become one."""

    def __init__(self):
        self.home = Path(tempfile.mkdtemp(prefix="outsider-"))
        self.environment = {"HOME": str(self.home), "PATH": os.defpath}
        self.user = {}
        if os.geteuid() == 0:
            self.user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(self.home, NOBODY, NOBODY)

    def start(self, *command, insider=None):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        who = insider or self.user | {"env": self.environment}
        return subprocess.Popen([str(part) for part in command], cwd=self.home, **pipes, **who)

    def run(self, *command, text=b"", insider=None):
        with self.start(*command, insider=insider) as process:
            return process.communicate(text)[0]

    def has(self, secret):
        return any(secret in path.read_bytes() for path in self.home.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def someone():
    someone = Outsider()
    try:
        someone.run(WEED, "version")
    except PermissionError:
        pytest.skip("another user cannot run the programs of this checkout")
    yield someone
    shutil.rmtree(someone.home)


def sockets_of(up):
    """Every address that a process of the stack has bound: [host, port] of a listener, or a path."""
    found = set()
    for process in [up.process, *up.family()]:
        for connection in psutil.Process(process.pid).net_connections("all"):
            if connection.status == psutil.CONN_LISTEN:
                found.add(tuple(connection.laddr))
            elif isinstance(connection.laddr, str) and connection.laddr:
                found.add(connection.laddr)
    return found


def test_every_listening_socket_refuses_another_user(up, state, someone):
    ports = state["ports"]
    postgres, valkey, store, api = (("127.0.0.1", port) for port in (*ports[:2], ports[8], up.port))
    inner = {("127.0.0.1", port) for port in ports[2:] if port != ports[8]}
    grpc = {
        f"/tmp/seaweedfs-{part}-grpc-{port}.sock"
        for part, port in zip(("master", "volume", "filer", "s3", "admin"), ports[3::2], strict=True)
    }
    found = sockets_of(up)
    closed = {path for path in found - grpc if isinstance(path, str)}
    assert found - closed == {postgres, valkey, store, api} | inner | grpc

    # Their certificate is like ours, but for the key.
    for name, text in zip(("cert", "key"), self_signed("127.0.0.1"), strict=True):
        (someone.home / name).write_text(text)

    def ask(addresses):
        command = [sys.executable, "-I", outsider.__file__, someone.home / "cert", someone.home / "key"]
        asked = subprocess.run(
            [*command, str(NOBODY)],
            input=json.dumps(addresses),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return dict(zip(addresses, json.loads(asked.stdout), strict=True))

    ours = up.data / "s3/tls.pem", up.data / "s3/tls.key"
    certificate = ssl.PEM_cert_to_DER_cert(ours[0].read_text()).hex()
    everywhere = sorted(inner) + sorted(grpc)
    insider = dict(zip(everywhere, outsider.ask(everywhere, *ours), strict=True))
    for address, answer in ask(everywhere).items():
        assert answer["peer"] == certificate, address
        assert answer["plain"] == "" or "HTTP request to an HTTPS server" in answer["plain"], address
        assert (answer["tls"], answer["own"]) == ("", ""), address
        assert insider[address]["own"], address  # with our key the same question is answered

    # Sockets without TLS lie in a directory that is closed to others; locks of ports listen to nobody.
    locks = {path for path in closed if path.startswith("@")}
    assert len(closed - locks) == 2
    for path in closed - locks:
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700, path
    if someone.user:
        assert {answer["plain"] for answer in ask(sorted(closed - locks)).values()} == {None}
    assert {answer["plain"] for answer in ask(sorted("\0" + name[1:] for name in locks)).values()} == {None}

    anonymous = ask([store, api])
    assert anonymous[store]["plain"].splitlines()[0] == "HTTP/1.0 200 OK"  # that it runs, and no more
    assert anonymous[store]["plain"].endswith("\r\n\r\n")
    assert anonymous[api]["plain"] == ""
    assert "404" in anonymous[api]["tls"].splitlines()[0]
    for user in ("sluice", "sluice_service", "postgres"):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(host="127.0.0.1", port=postgres[1], user=user, dbname="sluice", password="guess")
    with redis.Redis(port=valkey[1]) as queue, pytest.raises(redis.AuthenticationError):
        queue.execute_command("KEYS", "*")


def test_tools_of_seaweedfs_get_and_change_nothing_for_another_user(up, state, admin, someone):
    ports = state["ports"]
    master, filer = (f"127.0.0.1:{ports[n]}.{ports[n + 1]}" for n in (2, 6))
    admin.put_object(**OBJECT, Body=SECRET)
    own = someone.home / "file"
    own.write_bytes(b"something else")
    name = f"/buckets/{OBJECT['Bucket']}/{OBJECT['Key']}"
    shell = (WEED, "shell", f"-master={master}", f"-filer={filer}")
    backup = (WEED, "backup", f"-server={master}", "-collection=sluice-private", f"-dir={someone.home}")
    orders = f"volume.list\nfs.cat {name}\nfs.rm {name}\n".encode()
    insider = {"env": someone.environment | Seaweed(up.data, state).security()}
    volumes = re.findall(
        r"volume Id:(\d+), .*Collection:sluice-private,",
        someone.run(*shell, text=b"volume.list\n", insider=insider).decode(),
    )
    assert volumes

    with someone.start(*shell) as hopeful:  # it tries again for ever, and writes nothing about it
        hopeful.stdin.write(orders)
        hopeful.stdin.flush()
        for volume in volumes:
            someone.run(*backup, f"-volumeId={volume}")
        assert b'"fid"' not in someone.run(WEED, "upload", f"-master={master}", own)
        someone.run(WEED, "filer.copy", own, f"http://{filer}/buckets/sluice-public/")
        tail = someone.run(WEED, "filer.meta.tail", f"-filer={filer}", "-timeAgo=1h")
        assert OBJECT["Key"].encode() not in tail
        assert not someone.has(SECRET)
        assert admin.list_objects_v2(Bucket="sluice-public")["KeyCount"] == 0
        assert admin.get_object(**OBJECT)["Body"].read() == SECRET

        # With our certificate the same commands work: they were refused for want of it.
        for volume in volumes:
            someone.run(*backup, f"-volumeId={volume}", insider=insider)
        assert someone.has(SECRET)
        assert b'"fid"' in someone.run(WEED, "upload", f"-master={master}", own, insider=insider)
        assert SECRET in someone.run(*shell, text=orders, insider=insider)
        hopeful.kill()
        assert hopeful.communicate()[0] == b""


def test_the_api_speaks_https_with_the_certificate_it_is_given(up, monkeypatch):
    # `up` is ready, so its own health probes have passed.
    with Sluice(up.url, sleep=lambda _: None) as stranger, pytest.raises(CannotRun, match="SSL_CERT_FILE"):
        stranger.signing_keys()
    with Sluice(f"http://127.0.0.1:{up.port}", sleep=lambda _: None) as plain, pytest.raises(CannotRun):
        plain.signing_keys()
    monkeypatch.setenv("SSL_CERT_FILE", str(up.certificate))
    with Sluice(up.url) as service:
        assert service.signing_keys()
    command = [sys.executable, "-m", "core.probe", str(up.port)]  # the container's health check
    assert subprocess.run(command, env=plain_environment(SLUICE_TLS_CERT=str(up.certificate))).returncode == 0
    wrong = plain_environment(SLUICE_TLS_CERT=str(up.data / "s3/tls.pem"))
    assert subprocess.run(command, env=wrong, stderr=subprocess.DEVNULL).returncode != 0


def test_a_key_of_another_certificate_is_refused_before_the_service_starts(up, servers):
    mixed = {"SLUICE_TLS_CERT": str(up.certificate), "SLUICE_TLS_KEY": str(up.data / "s3/tls.key")}
    ran = subprocess.run(
        [sys.executable, "-m", "service", "--port", "1"],
        env=plain_environment() | servers.environments["service"] | mixed,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("sluice: SLUICE_TLS_CERT and SLUICE_TLS_KEY are not a certificate and its")


def test_settings_of_the_site_reach_the_service(up, issuer):
    verified = ssl.create_default_context(cafile=up.certificate)
    token = issuer.token(aud="a site", sub="u1", name="ann", groups=["doctors"])
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=up.url, headers=headers, verify=verified) as client:
        first = client.get("/v1/me")
        assert (first.status_code, first.json()["role"]) == (200, "analyst")
        # A minute may end between two requests, but not between each of them.
        assert any(client.get("/v1/me").status_code == 429 for _ in range(30))


def test_every_setting_of_a_role_is_handed_on_or_chosen_by_the_stack(tmp_path, monkeypatch):
    kinds = {"service": ServiceSettings, "train": TrainSettings}
    kinds |= {"publish": PublishSettings, "sweep": SweepSettings}
    stack = Stack(tmp_path / "data", witness=tmp_path / "witness")
    try:
        for role, kind in kinds.items():
            names = {f"SLUICE_{name}".upper() for name in kind.model_fields if not name.endswith("_bucket")}
            for name in names - {"SLUICE_S3_REGION", "SLUICE_S3_CA"}:  # they are those of the local store
                monkeypatch.setenv(name, "a setting of the site")
            handed_on = stack.environment(role)
            assert names - set(handed_on) == {"SLUICE_S3_REGION", "SLUICE_S3_CA"}, role
            others = {name for name in handed_on if "a setting of the site" in handed_on[name]}
            assert not {name for name in others if re.search("DATABASE|QUEUE|S3|WITNESS", name)}, role
    finally:
        stack.stop()


def test_sockets_without_tls_are_in_a_directory_that_nobody_made_before(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"sluice-{os.getpid()}"
    taken.mkdir(mode=0o777)
    seaweed = Seaweed(tmp_path, data_directory.load(tmp_path))
    option = next(word for word in seaweed.child().command if word.startswith("-filer.localSocket="))
    directory = Path(option.partition("=")[2]).parent
    assert directory != taken
    assert directory.stat().st_mode & 0o777 == 0o700
    seaweed.clean()
    assert not directory.exists()


def test_it_does_not_get_ready_when_seaweedfs_runs_without_tls(tmp_path):
    (tmp_path / "log").mkdir()
    seaweed = Seaweed(tmp_path, data_directory.load(tmp_path))
    child = seaweed.child()
    # As a version would that names its settings otherwise: it goes on without TLS.
    child.environment = {k: v for k, v in child.environment.items() if "GRPC" not in k and "HTTPS" not in k}
    child.start()
    try:
        open_ports = set()
        while len(open_ports) < len(seaweed.ports) and not child.died():
            for port in seaweed.ports:
                with suppress(OSError):
                    check_port(port)
                    open_ports.add(port)
        with pytest.raises(ssl.SSLError):
            child.probe()
    finally:
        child.stop()
        seaweed.clean()
