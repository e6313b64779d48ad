"""TLS between the containers: the generated certificates and addresses, on real servers."""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import psycopg
import pytest
import redis
from botocore.exceptions import SSLError
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID
from kombu.exceptions import OperationalError
from redis.backoff import ExponentialWithJitterBackoff

from core.queue import celery_app
from core.settings import SettingsProblem, SweepSettings, load
from local.child import shim
from local.ports import free_port
from local.servers import Postgres
from tests.docker.compose import CA, FILE, ROOT, SERVICES, secrets_of
from tests.docker.servers import running, store
from tests.docker.tls import tls_front

SERVERS = {"postgres": "postgres", "valkey": "valkey", "s3": "seaweedfs"}  # certificate: container


# ---- certificates and who holds which


def read(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.mark.parametrize("server", SERVERS)
def test_each_server_has_a_certificate_for_its_name_alone_from_an_authority_without_a_key(server, made):
    certificate, authority = read(made / f"{server}.crt"), read(made / "ca.crt")
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [server]
    uses = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    # Only SeaweedFS's own may be shown to its inner ports.
    both = {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert uses == (both if server == "s3" else {ExtendedKeyUsageOID.SERVER_AUTH})
    assert not certificate.extensions.get_extension_for_oid(ExtensionOID.BASIC_CONSTRAINTS).value.ca
    assert authority.extensions.get_extension_for_oid(ExtensionOID.BASIC_CONSTRAINTS).value.path_length == 0
    assert (authority.not_valid_after_utc - authority.not_valid_before_utc).days == 3650
    for path in made.iterdir():
        if b"PRIVATE KEY" in path.read_bytes():
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
            assert key.public_key() != authority.public_key(), path.name


def test_a_key_is_mounted_by_its_own_server_and_the_authority_s_certificate_by_all_who_verify():
    holders = {
        name: {source for source in secrets_of(service).values() if source.endswith(".key")}
        for name, service in SERVICES.items()
    }
    expected = {container: {f"{server}.key"} for server, container in SERVERS.items()}
    assert holders == {name: expected.get(name, set()) for name in SERVICES}
    for name, service in SERVICES.items():
        mounts = {config["source"]: config["target"] for config in service.get("configs", [])}
        assert mounts.get("ca") == (None if name in ("postgres", "s3") else CA), name
    assert FILE["configs"]["ca"]["file"] == "./secrets/ca.crt"


def test_every_address_a_container_is_given_asks_for_tls_and_verifies(made):
    for path in made.iterdir():
        if path.name.endswith("_database_url"):
            assert path.read_text().endswith(f"?sslmode=verify-full&sslrootcert={CA}")
        if path.name.endswith("_queue_url"):
            assert path.read_text().startswith("rediss://")
            assert path.read_text().endswith(f"?ssl_cert_reqs=required&ssl_ca_certs={CA}")
    for service in SERVICES.values():
        environment = service.get("environment", {})
        if "SLUICE_S3_ENDPOINT" in environment:
            assert environment["SLUICE_S3_ENDPOINT"] == "https://s3:8333"
            assert environment["SLUICE_S3_CA"] == CA


def test_certificates_are_renewed_alone(made, tmp_path):
    secrets = tmp_path / "secrets"
    shutil.copytree(made, secrets)
    subprocess.run(["sh", ROOT / "docker/certificates.sh", secrets], check=True)
    before, after = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (made, secrets))
    assert set(before) == set(after)
    changed = {"ca.crt"} | {f"{server}.{end}" for server in SERVERS for end in ("crt", "key")}
    assert {name for name in before if before[name] != after[name]} == changed
    for server in SERVERS:
        read(secrets / f"{server}.crt").verify_directly_issued_by(read(secrets / "ca.crt"))
        assert (secrets / f"{server}.key").stat().st_mode & 0o777 == 0o600


def commands_of_the_manual(section):
    """The shell lines of a section of docs/deploy.md that change secrets."""
    page = (ROOT / "docs/deploy.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [line for line in page.splitlines() if re.match(r"(sed -i|mv secrets|cp -p) ", line)]


def test_commands_of_the_manual_name_servers_elsewhere(made, tmp_path):
    shutil.copytree(made, tmp_path / "secrets")
    database, queue = commands_of_the_manual("PostgreSQL, Redis or S3 elsewhere")
    for command in (database, queue):
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True)
    for role in ("service", "train", "publish", "sweep"):
        password = (made / f"{role}_password").read_text()
        assert (tmp_path / f"secrets/{role}_database_url").read_text() == (
            f"postgresql://sluice_{role}:{password}@db.example.org:5432/sluice"
            "?sslmode=verify-full&sslrootcert=system"
        )
        login = (made / f"{role}_queue_url").read_text().partition("@")[0]
        assert (tmp_path / f"secrets/{role}_queue_url").read_text() == (
            f"{login}@redis.example.org:6379/0?ssl_cert_reqs=required"
        )


def test_commands_of_the_manual_make_new_secrets_and_keep_what_must_not_change(made, tmp_path):
    """Also of a site from before there was TLS between the containers."""
    shutil.copytree(made, tmp_path / "secrets")
    url = tmp_path / "secrets/migrate_database_url"
    url.write_text(url.read_text().partition("?")[0])
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    for command in commands_of_the_manual("New secrets"):
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True, capture_output=True)
    before, after = ({p.name: p.read_bytes() for p in d.iterdir()} for d in (made, tmp_path / "secrets"))
    assert set(before) == set(after)
    kept = {name for name in before if before[name] == after[name]}
    assert kept == {"postgres_password", "migrate_database_url"} | {
        name for name in before if re.search("_key$", name) and "_s3_" not in name
    }


def test_a_certificate_file_that_is_not_there_stops_a_process_by_name(monkeypatch, tmp_path):
    values = {
        "DATABASE_URL": "postgresql://u:f3Kq9zlonGenough@db:5432/sluice",
        "QUEUE_URL": "redis://u:f3Kq9zlonGenough@queue:6379/0",
        "S3_ACCESS_KEY": "SL0123456789",
        "S3_SECRET_KEY": "f3Kq9zlonGenoughToo",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"SLUICE_{name}", value)
    monkeypatch.setenv("SLUICE_S3_CA", str(tmp_path / "nothing"))
    with pytest.raises(SettingsProblem, match="SLUICE_S3_CA is neither a file nor the word system"):
        load(SweepSettings)
    monkeypatch.setenv("SLUICE_S3_CA", "system")
    assert load(SweepSettings).s3_ca == "system"


# ---- PostgreSQL


def initialised(binaries, made, tmp_path):
    """A data directory as the image's entry point makes it, and the compose command on it."""
    data, port = tmp_path / "postgres", free_port()
    command = [str(binaries / "initdb"), "-D", str(data), "-U", "sluice", "-A", "scram-sha-256", "--no-sync"]
    command += ["--pwfile", str(made / "postgres_password"), "-E", "UTF8", "--locale=C.UTF-8"]
    root = os.geteuid() == 0
    subprocess.run(
        shim(command, nobody=root, death_signal=signal.SIGKILL), check=True, stdout=subprocess.DEVNULL
    )
    program, *options = SERVICES["postgres"]["command"]
    assert program == "postgres"
    options = [
        option.replace("/run/secrets", str(made)).replace("/etc/sluice", str(ROOT / "docker"))
        for option in options
    ]
    options += ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
    url = (made / "migrate_database_url").read_text().replace(CA, str(made / "ca.crt"))
    url = url.replace("@postgres:5432/sluice?", f"@postgres:{port}/postgres?hostaddr=127.0.0.1&")
    return [binaries / "postgres", "-D", data, *options], url, root


def with_tls():
    """Binaries of a PostgreSQL on this machine that was built with TLS, as the one from the wheel is not."""
    on_path = [Path(found).resolve() for found in [shutil.which("postgres")] if found]
    for server in [*on_path, *sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)]:
        if b"SSL_CTX_new" in server.read_bytes() and server.with_name("initdb").exists():
            return server.parent
    pytest.skip("no PostgreSQL with TLS on this machine")


@pytest.mark.server
def test_postgres_answers_over_tls_to_those_who_verify_and_to_nobody_without(made, others, tmp_path):
    command, url, root = initialised(with_tls(), made, tmp_path)

    def connect(url):
        with psycopg.connect(url, connect_timeout=60) as connection:
            return connection.execute(
                "SELECT ssl, version FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            ).fetchone()

    with running(command, tmp_path / "log", nobody=root, answers=lambda: connect(url)):
        assert connect(url) == (True, "TLSv1.3")
        with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
            connect(url.replace(str(made), str(others)))
        with pytest.raises(psycopg.OperationalError, match='does not match host name "valkey"'):
            connect(url.replace("@postgres:", "@valkey:"))
        with pytest.raises(psycopg.OperationalError, match=r"no pg_hba\.conf entry .* no encryption"):
            connect(re.sub("sslmode=verify-full&sslrootcert=.*", "sslmode=disable", url))


@pytest.mark.server
def test_postgres_of_the_compose_file_s_version_has_no_line_for_a_connection_without_tls(made, tmp_path):
    """This build has no TLS, so nobody at all gets in; what the file allows is tested above and below."""
    binaries = Postgres(tmp_path, {"ports": [0], "database": {"owner": ""}}, durable=False).binaries
    command, url, root = initialised(binaries, made, tmp_path)
    command = [part for part in command if not str(part).startswith("--ssl")]
    plain = re.sub("sslmode=verify-full&sslrootcert=.*", "sslmode=disable", url)

    def refused():
        with pytest.raises(psycopg.OperationalError, match=r"no pg_hba\.conf entry"):
            psycopg.connect(plain, connect_timeout=60)

    with running(command, tmp_path / "log", nobody=root, answers=refused):
        refused()


def test_each_role_s_database_address_verifies_who_answers(made, others, servers):
    """With the servers of the test run, behind a certificate of ours, and one of another site."""
    at = psycopg.conninfo.conninfo_to_dict(servers.owner_url)
    for site in (made, others):
        with tls_front(site, "postgres", int(at["port"])) as port:
            for role in ("migrate", "service", "train", "publish", "sweep"):
                url = (made / f"{role}_database_url").read_text()
                url = url.replace(CA, str(made / "ca.crt")).replace("@postgres:5432/", f"@postgres:{port}/")
                reason = "password authentication failed" if site == made else "certificate verify failed"
                with pytest.raises(psycopg.OperationalError, match=reason):
                    psycopg.connect(url, hostaddr="127.0.0.1", connect_timeout=60)


# ---- Valkey


def test_valkey_listens_with_tls_only():
    command = SERVICES["valkey"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert (options["--port"], options["--tls-port"]) == ("0", "6379")
    assert options["--tls-cert-file"] == "/run/secrets/valkey.crt"
    assert options["--tls-key-file"] == "/run/secrets/valkey.key"
    assert options["--tls-protocols"] == "TLSv1.3"
    assert "--tls --cacert" in SERVICES["valkey"]["healthcheck"]["test"][1]


def test_clients_of_the_queue_verify_who_answers(made, others, servers, monkeypatch):
    """The worker's heartbeat client and Celery's, on the Valkey of the test run behind certificates."""
    monkeypatch.setattr(ExponentialWithJitterBackoff, "compute", lambda *_: 0)  # try again at once
    user = servers.environments["train"]["SLUICE_QUEUE_URL"]
    login, at = user.removeprefix("redis://").split("@")
    at = int(at.removesuffix("/0").rpartition(":")[2])
    query = (made / "train_queue_url").read_text().partition("?")[2]
    query = query.replace(CA, str(made / "ca.crt"))
    for site, name, good in (
        (made, "valkey", True),
        (others, "valkey", False),
        (made, "postgres", False),
    ):
        with tls_front(site, "valkey", at) as port:
            url = f"rediss://{login}@{name}:{port}/0?{query}"
            with redis.Redis.from_url(url) as connection, celery_app("train", url) as app:
                if good:
                    assert connection.ping()
                    with app.connection_for_write() as celery:
                        celery.ensure_connection(max_retries=1)
                    continue
                with pytest.raises(redis.exceptions.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                    connection.ping()
                celery = app.connection_for_write()
                celery.transport_options |= {"max_retries": 1, "interval_start": 0, "interval_step": 0}
                with celery, pytest.raises(OperationalError, match="CERTIFICATE_VERIFY_FAILED"):
                    celery.default_channel.client.ping()


# ---- S3


def test_s3_takes_objects_over_tls_from_those_who_verify(made, others, seaweedfs, monkeypatch):
    store(made, seaweedfs).put_object(Bucket="sluice-public", Key="a", Body=b"released")
    monkeypatch.setenv("SSL_CERT_FILE", str(made / "ca.crt"))  # as docs/deploy.md says for clients
    assert httpx.get(f"https://s3:{seaweedfs['s3.port']}/healthz").status_code == 200
    for ca in ("system", str(others / "ca.crt")):
        with pytest.raises(SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            store(made, seaweedfs, ca=ca).put_object(Bucket="sluice-public", Key="a", Body=b"released")


def test_s3_takes_nothing_without_tls(seaweedfs):
    answer = httpx.get(f"http://127.0.0.1:{seaweedfs['s3.port']}/healthz")
    assert (answer.status_code, answer.text) == (400, "Client sent an HTTP request to an HTTPS server.\n")


@pytest.mark.parametrize("part", ["master", "volume", "filer", "s3", "admin"])
def test_the_inner_ports_of_s3_answer_only_to_its_own_certificate(part, made, others, seaweedfs):
    """A gRPC server greets a client with its settings, once it has accepted the client's certificate."""

    def greeted(certificate):
        context = ssl.create_default_context(cafile=made / "ca.crt")
        context.set_alpn_protocols(["h2"])
        if certificate:
            context.load_cert_chain(certificate.with_suffix(".crt"), certificate.with_suffix(".key"))
        with (
            socket.create_connection(("127.0.0.1", seaweedfs[f"{part}.port.grpc"])) as connection,
            context.wrap_socket(connection, server_hostname="s3") as secured,
        ):
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            return secured.recv(9)[3:4] == b"\x04"

    assert greeted(made / "s3")
    for wrong in (None, made / "postgres", others / "s3"):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            greeted(wrong)
    with socket.create_connection(("127.0.0.1", seaweedfs[f"{part}.port.grpc"])) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        assert plain.recv(9)[3:4] != b"\x04"
