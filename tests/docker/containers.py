"""Containers without an engine: the files of an image, by its Dockerfile, run in namespaces."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.docker.compose import ROOT, SERVICES, instructions, secrets_of

SITE = Path(sysconfig.get_path("purelib"))  # where the packages of the locks are installed already
_VENV_SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
# What stands in for the base image: the programs and libraries of this machine, and this Python.
_BASE = [path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64") if Path(path).exists()]
_BASE += [path for path in (sys.base_prefix, str(SITE)) if not path.startswith("/usr/")]


def let_through():
    """What .dockerignore lets into a build, and what it keeps out of that."""
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    assert first == "*"
    return [line[1:] for line in rest if line[0] == "!"], [line for line in rest if line[0] != "!"]


def copy(source, target):
    """COPY of one file or directory, to the path that it gets."""
    allowed, ignored = let_through()
    assert any(source == path or source.startswith(f"{path}/") for path in allowed), f"{source} is ignored"
    assert ignored == ["**/__pycache__"]
    if (ROOT / source).is_dir():
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, target)


class Image:
    """What a Dockerfile makes, under a directory. Its packages are links to those that are installed here."""

    def __init__(self, dockerfile, root, build_arguments):
        self.root, self.stages = root, {}
        self.command, self.health, self.user = None, None, None
        for word, rest in instructions(dockerfile):
            getattr(self, f"_{word.lower()}")(rest, build_arguments)
        assert re.fullmatch(r"\d+:\d+", self.user)

    def _at(self, path):
        return self.files / os.path.normpath(os.path.join(self.where, path)).lstrip("/")

    def _from(self, rest, _):
        name = rest.split(" AS ")[1] if " AS " in rest else "final"
        self.files = self.root if name == "final" else self.root.with_name(f"{self.root.name}-{name}")
        self.files.mkdir(parents=True)
        self.stages[name] = self.files
        self.where, self.environment = "/", {"PATH": "/usr/local/bin:/usr/bin:/bin"}

    def _arg(self, rest, arguments):
        assert rest.split("=")[0] in arguments

    def _env(self, rest, _):
        for pair in shlex.split(rest):
            name, value = pair.split("=", 1)
            self.environment[name] = value.replace("$PATH", self.environment["PATH"])

    def _workdir(self, rest, _):
        self.where = rest

    def _user(self, rest, _):
        self.user = rest

    def _expose(self, rest, _):
        pass

    def _cmd(self, rest, _):
        self.command = json.loads(rest)

    def _healthcheck(self, rest, _):
        self.health = json.loads(rest.split("CMD", 1)[1])

    def _copy(self, rest, _):
        *sources, target = rest.split()
        if sources[0].startswith("--from="):
            stage, source = self.stages[sources[0].removeprefix("--from=")], sources[1]
            shutil.copytree(stage / source.lstrip("/"), self._at(target), symlinks=True)
            return
        for source in sources:
            copy(source, self._at(target) / Path(source).name if target.endswith("/") else self._at(target))

    def _run(self, rest, arguments):
        """The steps the Dockerfiles have. One that is not known here fails the test, and is then added."""
        if rest.startswith("case "):
            ((name, cases),) = re.findall(r'case "\$(\w+)" in (.*) esac', rest)
            rest = re.search(rf"{arguments[name]}\) (.*?) ;;", cases)[1]
        for step in rest.split(" && "):
            words = step.split()
            match words:
                case ["groupadd" | "useradd", *_]:
                    pass
                case ["python", "-m", "venv", path]:
                    command = [sys.executable, "-m", "venv", "--without-pip", self._at(path)]
                    subprocess.run(command, check=True)
                case ["/opt/sluice/bin/pip", "install", *_, "-r", lock]:
                    assert "--require-hashes" in words
                    assert "--no-deps" in words
                    self._link(self._at(lock))
                case ["/opt/sluice/bin/pip", "install", "--no-deps", "--no-build-isolation", "."]:
                    options = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--quiet"]
                    self._pip("install", *options, str(self._at(".")))
                case ["/opt/sluice/bin/pip", "check"]:
                    self._pip("check")
                case ["/opt/sluice/bin/pip", "uninstall", "--yes", *names]:
                    for name in names:
                        for path in (self.files / "opt/sluice" / _VENV_SITE).glob(f"{name}*"):
                            path.unlink()
                case _:
                    raise AssertionError(f"a step that this test does not know: {step}")

    def _pip(self, *arguments):
        python = str(self.files / "opt/sluice/bin/python")
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _link(self, lock):
        site = self.files / "opt/sluice" / _VENV_SITE
        for line in lock.read_text().splitlines():
            if line[0] == " ":
                continue
            requirement = Requirement(line.rstrip(" \\"))
            if requirement.marker and not requirement.marker.evaluate():
                continue
            distribution = metadata.distribution(requirement.name)
            assert requirement.specifier.contains(distribution.version), requirement
            tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
            for top in tops:
                if not (site / top).is_symlink():
                    (site / top).symlink_to(SITE / top)


class Container:
    """A service of the compose file on an image: its environment, secrets, configs, user and commands."""

    def __init__(self, name, image, secrets, replace):
        """`replace` maps words of the compose file to what takes their place here: ports that are free."""
        self.name, self.image, self.replace = name, image, replace
        service = SERVICES[name]
        self.command = [replace.get(word, word) for word in service.get("command", image.command)]
        check = service.get("healthcheck", {}).get("test")
        self.health = check[1:] if check else image.health
        values = {key: value for key, value in service["environment"].items() if value is not None}
        self.environment = image.environment | {
            key: replace.get(value, value) for key, value in values.items()
        }
        files = {f"/run/secrets/{target}": source for target, source in secrets_of(service).items()}
        files |= {config["target"]: "ca.crt" for config in service.get("configs", [])}
        self.mounts = {target: secrets / source for target, source in files.items()}
        assert service["read_only"]
        assert service["user"] == image.user

    def _script(self, command):
        root = self.image.root
        (root / "tmp").mkdir(exist_ok=True)
        # /tmp first: a checkout there, with its packages, is mounted into it.
        lines = ["set -e", "PATH=$PATH:/usr/sbin:/sbin", f"mount --bind {root} {root}"]
        lines.append(f"mount -t tmpfs tmpfs {root}/tmp")
        for path in _BASE:
            here = root / path[1:]
            if Path(path).is_symlink():
                if not here.is_symlink():
                    here.symlink_to(os.readlink(path))
            else:
                lines.append(f"mkdir -p {here} && mount --rbind {path} {here}")
        for path in ("dev", "proc", "old", "run/secrets", "etc/sluice"):
            (root / path).mkdir(parents=True, exist_ok=True)
        lines += [f"mount --rbind /{path} {root}/{path}" for path in ("dev", "proc")]
        (root / "etc/hosts").write_text("127.0.0.1 localhost postgres valkey s3\n")
        (root / "etc/nsswitch.conf").write_text("hosts: files\n")
        (root / "etc/ld.so.cache").write_bytes(Path("/etc/ld.so.cache").read_bytes())
        lines.append(f"mount -t tmpfs tmpfs {root}/run/secrets")
        for target, source in self.mounts.items():
            at = root / target[1:]
            if not target.startswith("/run/secrets"):
                at.touch()
            lines.append(f"touch {at} && mount --bind {source} {at}")
        # From here on its own files are all there is, and none of them but /tmp can be written.
        lines += [f"mount -o remount,bind,ro {root}", f"mount -o remount,ro {root}/run/secrets"]
        lines += [f"cd {root}", "pivot_root . old", "umount -l /old", f"cd {self.image.where}"]
        user, group = self.image.user.split(":")
        environment = [f"{key}={value}" for key, value in self.environment.items()]
        inner = ["unshare", "--user", f"--map-user={user}", f"--map-group={group}", "--"]
        # It dies with the test, as every server here does.
        inner += ["setpriv", "--pdeathsig", "KILL", "env", "-i"]
        return "\n".join([*lines, f"exec {shlex.join([*inner, *environment, *command])}"])

    def _start(self, command, **options):
        isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", self._script(command)]
        # Signals go to the process itself: every program before it has replaced itself by the next.
        return subprocess.Popen(isolated, stdin=subprocess.DEVNULL, text=True, **options)

    def run(self, command=None):
        """Runs a command in the container to its end; gives its exit code and all it said."""
        process = self._start(command or self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = process.communicate()[0]
        return process.returncode, said

    @contextmanager
    def running(self, log):
        with log.open("w") as out:
            process = self._start(self.command, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def healthy(self):
        return self.run([self._shifted(word) for word in self.health])

    def _shifted(self, word):
        for old, new in self.replace.items():
            word = re.sub(rf"\b{old}\b", new, word)
        return word
