"""The containers, as far as they can be checked without an engine: references, credentials, the ACL."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from kombu import Consumer

from core.queue import celery_app, wake_worker
from core.settings import load
from core.stores.access import ROLES, Buckets, policy
from tests.docker.compose import (
    CA,
    COMPOSE,
    DOCKERFILES,
    FILE,
    KINDS,
    ROLE,
    ROOT,
    SERVICES,
    TOOLS,
    VARIABLE,
    copied,
    dockerfile_of,
    instructions,
    secrets_of,
)

# ---- the compose file


def test_compose_file_follows_the_specification():
    command = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_variable_has_a_default_and_is_documented():
    manual = (ROOT / "docs/deploy.md").read_text()
    found = list(VARIABLE.finditer(COMPOSE.read_text()))
    assert found
    assert COMPOSE.read_text().count("$") == len(found), "a variable in another form than ${NAME:-default}"
    # An empty value is no value (core.settings), so a setting that may be missing may have none here.
    fields = [item for kind in KINDS.values() for item in kind.model_fields.items()]
    optional = {f"SLUICE_{field.upper()}" for field, info in fields if not info.is_required()}
    for variable in found:
        assert variable["default"] or variable["name"] in optional, variable["name"]
        assert f"`{variable['name']}`" in manual, variable["name"]


def test_every_reference_resolves_and_nothing_is_left_over():
    used = {"secrets": set(), "networks": set(), "configs": set()}
    for service in SERVICES.values():
        used["secrets"] |= set(secrets_of(service).values())
        used["networks"] |= set(service["networks"])
        used["configs"] |= {config["source"] for config in service.get("configs", [])}
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        assert all(mount["type"] == "bind" for mount in service.get("volumes", []))
    for kind, names in used.items():
        assert names == set(FILE[kind]), kind
    for config in FILE["configs"].values():
        assert config["file"].startswith("./secrets/") or (ROOT / config["file"]).is_file()


def test_what_is_waited_for_can_happen():
    for name, service in SERVICES.items():
        for other, wait in service.get("depends_on", {}).items():
            target = SERVICES[other]
            if wait["condition"] == "service_completed_successfully":
                assert target["restart"] == "no", (name, other)
            else:
                assert wait["condition"] == "service_healthy"
                assert target["healthcheck"]["test"], (name, other)
            # A server that runs elsewhere is not started here, and then not waited for.
            elsewhere = set(target.get("profiles", [])) - set(service.get("profiles", []))
            assert wait.get("required", True) is not bool(elsewhere), (name, other)


def test_what_runs_on_is_watched_and_started_again():
    for name, service in SERVICES.items():
        if service["restart"] == "no":
            continue
        assert service["restart"] == "unless-stopped"
        dockerfile = dockerfile_of(service)
        image_has_one = dockerfile and any(word == "HEALTHCHECK" for word, _ in instructions(dockerfile))
        assert image_has_one or service["healthcheck"]["test"], name


@pytest.mark.parametrize("name", SERVICES)
def test_containers_have_no_more_than_they_need(name):
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"]
    assert "privileged" not in service
    assert not {"cap_add", "network_mode", "pid", "env_file"} & set(service)
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:")


def reachable(name):
    """Whom a container can open a connection to, by its networks; both kinds of training are one."""
    networks = set(SERVICES[name]["networks"])
    others = {other for other, service in SERVICES.items() if networks & set(service["networks"])}
    return {other.removesuffix("-cpu") for other in others} - {name.removesuffix("-cpu")}


def test_containers_reach_whom_the_manual_says_and_nobody_else():
    page = (ROOT / "docs/deploy.md").read_text().split("### Who reaches whom")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line][2:]
    told = {
        re.findall("`(.+?)`", name)[0]: (set(re.findall("`(.+?)`", others)), out == "yes", ports.split())
        for name, others, out, ports in rows
    }
    ways_out = {
        net for net, options in FILE["networks"].items() if options.get("internal") not in (True, "true")
    }
    assert told == {
        name: (
            reachable(name),
            bool(ways_out & set(service["networks"])),
            [port.rpartition(":")[2] for port in service.get("ports", [])],
        )
        for name, service in SERVICES.items()
        if name != "train-cpu"
    }
    assert reachable("train") == reachable("train-cpu")


def test_roles_reach_the_servers_they_have_an_address_of_and_no_other_role():
    for name, kind in KINDS.items():
        needed = {"database_url": "postgres", "queue_url": "valkey", "s3_endpoint": "s3"}
        assert reachable(name) == {server for field, server in needed.items() if field in kind.model_fields}
    assert reachable("seaweedfs") == {"s3"}
    assert {name for name in SERVICES if "front" in SERVICES[name]["networks"]} == {"api", "s3"}
    assert all("ports" not in SERVICES[name] for name in set(SERVICES) - {"api", "s3"})


def test_only_training_reserves_a_gpu_and_cpu_training_is_the_same_without():
    train, plain = dict(SERVICES["train"]), dict(SERVICES["train-cpu"])
    (device,) = train.pop("deploy")["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    assert not any("deploy" in service for name, service in SERVICES.items() if name != "train")
    assert train.pop("build")["args"] == {"TORCH": "cuda"}
    assert plain.pop("build")["args"] == {"TORCH": "cpu"}
    for service in (train, plain):
        del service["profiles"], service["image"]
    assert train == plain


# ---- each role's settings, from what its container is given


@pytest.mark.parametrize("name", KINDS)
def test_container_is_given_its_role_s_settings_and_no_other_s(name, made, tmp_path, monkeypatch):
    service, kind = SERVICES[name], KINDS[name]
    environment, files = dict(service["environment"]), secrets_of(service)
    assert environment.pop("SLUICE_SECRETS_DIR") == "/run/secrets"

    fields = {f"sluice_{field}" for field in kind.model_fields}
    required = {f"sluice_{field}" for field, info in kind.model_fields.items() if info.is_required()}
    environment = {key: value for key, value in environment.items() if value is not None}  # passed on if set
    given = {key.lower() for key in service["environment"] if key != "SLUICE_SECRETS_DIR"} | set(files)
    assert given <= fields
    # A directory needs a mount and a KMS further secrets; docs/deploy.md and docs/operations.md say how they
    # are added. Everything else can be set in .env.
    assert fields - given <= {"sluice_witness_dir", "sluice_kms_access_key", "sluice_kms_secret_key"}
    assert required <= set(files), "what has no default is a secret here"

    for target, source in files.items():
        path = made / Path(FILE["secrets"][source]["file"]).relative_to("secrets")
        shutil.copy(path, tmp_path / target)
    for key in [key for key in os.environ if key.startswith("SLUICE_")]:
        monkeypatch.delenv(key)
    for key, value in environment.items():
        # The one path that is no secret: where the certificate of the authority is mounted.
        monkeypatch.setenv(key, str(made / "ca.crt") if value == CA else value)
    monkeypatch.setenv("SLUICE_SECRETS_DIR", str(tmp_path))
    settings = load(kind)

    (database,) = settings.database_url.hosts()
    assert database["host"] == "postgres"
    assert database["username"] == ("sluice" if name == "migrate" else f"sluice_{ROLE[name]}")
    if name != "migrate":
        assert settings.queue_url.username == ROLE[name]
        assert settings.queue_url.host == "valkey"
    if "s3_endpoint" in kind.model_fields:
        assert settings.s3_endpoint.host == "s3"
    buckets = {
        f: getattr(settings, f"{f}_bucket") for f in vars(Buckets()) if hasattr(settings, f"{f}_bucket")
    }
    assert buckets == {f: getattr(Buckets(), f) for f in buckets}


def test_no_container_holds_another_role_s_secret():
    owners = {secret: set() for secret in FILE["secrets"]}
    for name, service in SERVICES.items():
        for source in secrets_of(service).values():
            owners[source].add(ROLE.get(name, name))
    for source, roles in owners.items():
        first = source.split("_")[0]
        expected = {"migrate"} if re.fullmatch(r"(service|train|publish|sweep)_password", source) else {first}
        if re.match("valkey|s3|postgres", source):  # a server's own: its users, its key
            expected = {{"s3": "seaweedfs"}.get(first := re.match("[a-z0-9]+", source)[0], first)}
        assert roles == expected, source


def test_no_secret_is_written_into_the_files():
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|KEY|TOKEN|URL", key):
                assert not value or value.startswith("/run/secrets"), (name, key)
        assert "@" not in str(service.get("command")), name
    for dockerfile in DOCKERFILES:
        assert not re.search("password|token|secret", dockerfile.read_text(), re.IGNORECASE)


# ---- the images


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfile_is_clean(dockerfile):
    ran = subprocess.run([TOOLS / "hadolint", dockerfile], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "hadolint ignore" not in dockerfile.read_text()


def test_images_of_others_are_named_by_tag_and_digest():
    named = [service["image"] for service in SERVICES.values() if "build" not in service]
    named += [rest.split()[0] for path in DOCKERFILES for word, rest in instructions(path) if word == "FROM"]
    for image in named:
        assert re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image
    assert len({image.split("@")[0] for image in named}) == len(set(named)) == 5


def test_digests_are_written_anew_by_one_command(tmp_path):
    """With a stand-in for `docker`, which gives every image another digest, and a bad one for one of them."""
    files = ["docker-compose.yml", *(f"docker/{path.name}" for path in DOCKERFILES), "docker/pin.sh"]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    path = {"PATH": f"{docker.parent}:{os.environ['PATH']}"}

    def pin(program):
        docker.write_text(f"#!/bin/sh\n{program}\n")
        docker.chmod(0o755)
        return subprocess.run(["sh", tmp_path / "docker/pin.sh"], env=path, capture_output=True, text=True)

    # docker buildx imagetools inspect IMAGE --format FORMAT
    done = pin('printf "sha256:%s" "$(printf %s "$4" | sha256sum | cut -d" " -f1)"')
    assert done.returncode == 0, done.stderr
    for file in files[:-1]:
        before, after = ((place / file).read_text() for place in (ROOT, tmp_path))
        digest = "@sha256:[0-9a-f]{64}"
        assert re.sub(digest, "", before) == re.sub(digest, "", after)
        for image, found in re.findall(r"(?:FROM|image:) (\S+)@sha256:(\w+)", after):
            assert found == hashlib.sha256(image.encode()).hexdigest(), image
    done = pin("echo not-found")
    assert (done.returncode, "no digest for" in done.stderr) == (1, True)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfile_copies_what_exists_and_is_let_through(dockerfile):
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for source in copied(dockerfile):
        assert (ROOT / source).exists(), source
        assert source in let_through or str(Path(source).parent) in let_through, source


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_image_runs_as_nobody_special_and_keeps_no_build_stage(dockerfile):
    words = instructions(dockerfile)
    last = max(index for index, (word, _) in enumerate(words) if word == "FROM")
    final = words[last:]
    assert ["USER", "10001:10001"] in final
    assert all(rest.startswith("python:3.12-slim@") for word, rest in words if word == "FROM")
    assert not any(word == "RUN" and re.search("pip|apt", rest) for word, rest in final)


@pytest.mark.parametrize(
    ("dockerfile", "packages"),
    [("service", {"core", "migrations", "service"}), ("worker", {"core", "worker"})],
)
def test_image_holds_its_own_packages_and_no_others(dockerfile, packages):
    sources = set(copied(ROOT / f"docker/{dockerfile}.Dockerfile"))
    servers = {"core", "migrations", "service", "worker", "local", "tests", "bench"}
    assert sources & servers == packages
    assert "src" in sources


def test_the_wheel_holds_the_library_alone(tmp_path):
    for source in ("pyproject.toml", "README.md", "LICENSE", "src", "core", "service", "worker", "local"):
        put = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        put(ROOT / source, tmp_path / source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", tmp_path / "out", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sluice"}


def test_every_command_resolves():
    commands = [service["command"] for name, service in SERVICES.items() if name in KINDS]
    commands += [
        json.loads(rest.rpartition("CMD ")[2])
        for word, rest in instructions(ROOT / "docker/service.Dockerfile")
        if word in ("CMD", "HEALTHCHECK")
    ]
    for command in commands:
        assert command[:2] == ["python", "-m"]
        module = command[2]
        spec = importlib.util.find_spec(module)
        assert spec, module
        if spec.submodule_search_locations:
            assert importlib.util.find_spec(f"{module}.__main__"), module
    for name, service in SERVICES.items():
        test = service.get("healthcheck", {}).get("test", [])
        if "/opt/sluice/alive.py" in test:
            assert test == ["CMD", "python", "/opt/sluice/alive.py", ROLE[name]]
            assert "docker/alive.py" in copied(dockerfile_of(service))


# ---- generated secrets and policies


@pytest.mark.parametrize("role", ROLES)
def test_policy_documents_say_what_the_code_says(role):
    assert json.loads((ROOT / f"docker/iam/{role}.json").read_text()) == policy(role)


def test_the_policy_of_the_witness_bucket_takes_rights_away_and_gives_none():
    """Puts that could replace an entry, and deletion, are denied to everybody; AWS alone evaluates it."""
    document = json.loads((ROOT / "docker/iam/witness-bucket.json").read_text())
    assert all(
        (each["Effect"], each["Principal"], each["Resource"])
        == ("Deny", "*", [f"arn:aws:s3:::{Buckets().witness}/*"])
        for each in document["Statement"]
    )
    denied = {action: each.get("Condition") for each in document["Statement"] for action in each["Action"]}
    assert denied == {
        "s3:PutObject": {"Null": {"s3:if-none-match": "true"}},
        "s3:DeleteObject": None,
        "s3:DeleteObjectVersion": None,
    }


def test_secrets_are_ours_alone_long_and_all_different(made):
    mounted = {entry["file"] for kind in ("secrets", "configs") for entry in FILE[kind].values()}
    assert {f"./secrets/{path.name}" for path in made.iterdir()} == {
        file for file in mounted if file.startswith("./secrets/")
    }
    assert made.stat().st_mode & 0o777 == 0o700
    for path in made.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path.name
    random = [p.read_text() for p in made.iterdir() if re.search("(password|access_key|secret_key)$", p.name)]
    assert len(set(random)) == len(random) == 13
    assert min(map(len, random)) >= 20


def test_secrets_are_never_written_over(made):
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    ran = subprocess.run(["sh", ROOT / "docker/secrets.sh", made, made.parent / "data"], capture_output=True)
    assert ran.returncode == 1
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before
    assert [path.name for path in made.parent.iterdir() if path.name.startswith("secrets")] == ["secrets"]


def test_s3_identities_have_their_policy_and_nothing_else(made):
    document = json.loads((made / "s3_identities.json").read_text())
    assert set(document) == {"identities", "policies"}
    assert {p["name"]: json.loads(p["content"]) for p in document["policies"]} == {
        r: policy(r) for r in ROLES
    }
    for identity, role in zip(document["identities"], ROLES, strict=True):
        keys = {key: (made / f"{role}_s3_{key}_key").read_text() for key in ("access", "secret")}
        assert identity == {
            "name": role,
            "actions": [],
            "policyNames": [role],
            "credentials": [{"accessKey": keys["access"], "secretKey": keys["secret"]}],
        }


def test_bundled_s3_makes_the_buckets_of_the_policies():
    (option,) = [o for o in SERVICES["seaweedfs"]["command"] if o.startswith("-bucket=")]
    assert set(option.removeprefix("-bucket=").split(",")) == set(vars(Buckets()).values())


# ---- the ACL, on a real Valkey started with the options of the compose file, over TLS


@pytest.fixture(scope="module")
def queue_urls(made, valkey):
    roles = ("service", "train", "publish", "sweep")
    urls = {role: (made / f"{role}_queue_url").read_text() for role in roles}
    return {
        role: url.replace("@valkey:6379", f"@valkey:{valkey}").replace(CA, str(made / "ca.crt"))
        for role, url in urls.items()
    } | {"nobody": f"rediss://valkey:{valkey}/0?ssl_ca_certs={made}/ca.crt"}


def refused(url, *command):
    with redis.Redis.from_url(url) as connection:
        try:
            connection.execute_command(*command)
        except (redis.exceptions.NoPermissionError, redis.exceptions.AuthenticationError):
            return True
    return False


@pytest.mark.parametrize("queue", ["train", "publish"])
@pytest.mark.parametrize("sender", ["service", "sweep"])
def test_worker_hears_who_rings(queue_urls, queue, sender):
    sent = uuid4()
    with celery_app(queue, queue_urls[sender]) as sending:
        wake_worker(sending, f"{queue}.run", sent)
    heard = []
    with celery_app(queue, queue_urls[queue]) as app, app.connection_for_read() as connection:
        channel = connection.channel()
        waiting = app.amqp.queues[queue](channel)
        waiting.declare()

        def hear(body, message):
            heard.append(body[0][0])
            if len(heard) == 1:
                message.requeue()  # as a worker does that stops, or finds a message it cannot take
            else:
                message.ack()

        with Consumer(channel, [waiting], callbacks=[hear], accept=["json"]):
            while len(heard) < 2:
                connection.drain_events(timeout=60)
        channel.qos.restore_visible(interval=1)  # what was taken by a worker that died comes back this way
        assert waiting.get() is None
    assert heard == [str(sent), str(sent)]


@pytest.mark.parametrize(("role", "other"), [("train", "publish"), ("publish", "train")])
def test_worker_cannot_touch_the_other_queue(queue_urls, role, other):
    for command in (("LPUSH", f"{other}:{other}", "x"), ("RPOP", f"{other}:{other}"), ("GET", f"{other}:x")):
        assert refused(queue_urls[role], *command), command


@pytest.mark.parametrize("role", ["service", "sweep"])
def test_who_rings_cannot_take(queue_urls, role):
    for queue in ("train", "publish"):
        assert refused(queue_urls[role], "RPOP", f"{queue}:{queue}")
        assert refused(queue_urls[role], "BRPOP", f"{queue}:{queue}", "1")
        assert refused(queue_urls[role], "DEL", f"{queue}:{queue}")


@pytest.mark.parametrize("role", ["service", "train", "publish", "sweep", "nobody"])
def test_nobody_leaves_its_keys_or_governs_the_server(queue_urls, role):
    for command in (
        ("GET", "other"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("PUBLISH", "x", "y"),
        ("SCRIPT", "FLUSH"),
    ):
        assert refused(queue_urls[role], *command), command
    assert refused(queue_urls[role], "PING") is (role == "nobody")
