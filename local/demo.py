"""`sluice demo`: makes a release from an empty directory to verification, in the same steps as in production.

Two admins, two curators and an analyst; a dataset of drawn digits, a training within a budget, a review, a
signature and a download. Then a classifier trained on the release alone is tested on newly drawn digits.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from local.digits import SIZE, draw
from local.run import on_signals
from local.stack import Stack
from sluice.cli.connection import bar, output
from sluice.cli.jobs import follow, readings, show_quote
from sluice.cli.releases import show_one as show_release
from sluice.cli.verify import show as show_verified
from sluice.client.api import Json, Sluice
from sluice.client.problems import CannotRun
from sluice.client.release import Release
from sluice.client.upload import upload

DELTA = 1e-5
DIGITS = [str(digit) for digit in range(10)]
SEEDS = {"private": 1, "fresh": 2}  # for drawing digits only: the noise of the training has no seed
FRESH = 2_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the demo; tests use smaller ones."""

    images: int = 20_000
    epsilon: float = 10.0
    samples: int = 10_000
    method: str | None = None  # the recommended one
    options: Json = field(default_factory=lambda: {"recipe": "demo"})


class Demo:
    """The stages, in order. All files are in one directory; without `keep` only the release remains."""

    def __init__(self, settings: Settings, *, port: int = 8000, keep: Path | None = None) -> None:
        self.settings, self.say = settings, output().print
        self.directory = keep or Path(tempfile.mkdtemp(prefix="sluice-demo-"))
        self.kept = keep is not None
        self.began = time.monotonic()
        self.times: dict[str, float] = {}
        if (self.directory / "release").exists():
            raise CannotRun(f"{self.directory} holds a demo already: name another directory with --keep")
        # The demo's people store their keys here, not in your own configuration.
        self.home = os.environ.get("SLUICE_HOME")
        os.environ["SLUICE_HOME"] = str(self.directory / "home")
        self.stack = Stack(self.directory / "data", port=port, witness=self.directory / "witness")
        self.clients = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.close()
        self.stack.stop()
        os.environ.pop("SLUICE_HOME")
        if self.home is not None:
            os.environ["SLUICE_HOME"] = self.home
        if not self.kept:
            for name in ("data", "home", "witness"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
            with suppress(OSError):  # only if it is empty
                self.directory.rmdir()

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        began = time.monotonic()
        self.say(f"\n{len(self.times) + 1}. {title}")
        yield
        self.times[title] = time.monotonic() - began
        self.say(f"   {self.times[title]:.1f} s")

    def start(self) -> None:
        with self.stage("Start PostgreSQL, Valkey, SeaweedFS, the service and its workers on this machine"):
            self.stack.start()
            # Each admin invites one curator and puts the other's curator into the team, so that author and
            # reviewer are independent (docs/security.md).
            self.admin = self.client(self.stack.first_key or "")
            self.second_admin = self.redeemed(self.stack.invitation or "")
            team = self.admin.add_team("demo")["id"]
            self.curator = self.person(self.admin, "carla", "curator", team)
            self.second = self.person(self.second_admin, "dora", "curator", team)
            self.analyst = self.person(self.admin, "anna", "analyst")

    def client(self, key: str | None = None) -> Sluice:
        return self.clients.enter_context(Sluice(self.stack.url, key))

    def redeemed(self, invitation: str) -> Sluice:
        return self.client(self.client().redeem(invitation, label="demo", days=1)["key"])

    def person(self, admin: Sluice, name: str, role: str, team: str | None = None) -> Sluice:
        added = admin.add_person(name=name, role=role)
        if team:
            other = self.second_admin if admin is self.admin else self.admin
            other.move_person(added["id"], team)
        return self.redeemed(added["invitation"]["invitation"])

    def register(self) -> None:
        import numpy as np

        count, epsilon = self.settings.images, self.settings.epsilon
        with self.stage(
            f"Carla, a curator, draws {count:,} digits, declares them with a budget and uploads them"
        ):
            file = self.directory / "digits.npz"
            images, labels = draw(count, seed=SEEDS["private"])
            np.savez_compressed(file, x=images, y=labels)
            schema = {"kind": "image", "height": SIZE, "width": SIZE, "channels": 1, "classes": DIGITS}
            body = {
                "name": "drawn digits", "schema": schema, "nominal_size": count, "relation": "add_remove",
                "budget": {"epsilon": 2 * epsilon, "delta": DELTA},
            }  # fmt: skip
            made = self.curator.register(body)
            upload(self.curator, made["id"], file)
            file.unlink()
            self.dataset = self.curator.wait_checked(made["id"])
        if self.dataset["state"] == "held":
            with self.stage(
                "The budget is above the site's cap, so an admin who did not invite Carla accepts it"
            ):
                self.second_admin.review_dataset(made["id"], "accept", reason="it is a demonstration")
                self.dataset = self.curator.wait_checked(made["id"])
        if self.dataset["state"] != "ready":
            raise CannotRun(f"the dataset was {self.dataset['state']}: {self.dataset['fault']}")

    def train(self) -> None:
        with self.stage(f"Carla asks what a training with epsilon {self.settings.epsilon:g} would cost"):
            request: Json = {
                "method": self.settings.method,
                "options": self.settings.options,
                "target": {"epsilon": self.settings.epsilon},
            }
            quote = self.curator.quote(self.dataset["id"], **request)
            show_quote(quote)
        with self.stage("The budget is charged; then the train worker reads the records and trains"):
            job = self.curator.start_job(self.dataset["id"], **request)
            follow(self.curator.watch(job["id"]))
            self.job = self.curator.job(job["id"])
            if self.job["state"] != "trained":
                raise CannotRun(f"the training ended as {self.job['state']}: {self.job['fault']}")
        self.trained_in = list(self.times.values())[-1]

    def release(self) -> None:
        with self.stage(
            f"The publish worker generates {self.settings.samples:,} samples and builds the bundle"
        ):
            body = {
                "job": self.job["id"], "name": "synthetic digits", "count": self.settings.samples,
                "audience": "everyone", "formats": ["parquet", "npz"],
            }  # fmt: skip
            made = self.curator.create_release(body)
            with bar("samples") as update:
                built = self.curator.wait_built(
                    made["id"],
                    lambda view: update(view["state"], view["progress"]["done"], view["progress"]["count"]),
                )
            if built["state"] != "in_review":
                raise CannotRun(f"the bundle is {built['state']}: {built['fault']}")
        with self.stage(
            "Dora, another curator, reviews and approves the bundle; Carla publishes it; it is signed"
        ):
            self.second.preview(built["id"])
            self.second.review(built["id"])
            self.second.approve(built["id"], built["digest"], "looks like digits")
            self.curator.publish(built["id"])
            self.released = self.curator.wait_published(built["id"])
            show_release(self.released)
            if self.released["state"] != "published":
                raise CannotRun(f"the release is {self.released['state']}: {self.released['fault']}")

    def analyse(self) -> None:
        with self.stage("Anna, an analyst, finds the release, downloads it and verifies every byte"):
            self.found: Release = self.analyst.release("synthetic digits")
            self.found.download(self.directory / "release")
            self.verified = self.found.verify()
            show_verified(self.verified)
            self.preview = self.directory / "release/preview.png"
        with self.stage("Anna trains a classifier on the release and tests it on newly drawn digits"):
            self.accuracy = accuracy(self.found)

    def conclude(self) -> Json:
        from rich.table import Table

        seconds = {"all": time.monotonic() - self.began, "training": self.trained_in}
        relation = self.verified["relation"].replace("_", "-")
        table = Table(show_header=False)
        table.add_row("epsilon", readings(self.verified["epsilon"]))
        table.add_row("delta, relation", f"{self.verified['delta']:g}, {relation}")
        table.add_row("accuracy on new digits", f"{self.accuracy:.1%}, trained on synthetic images only")
        table.add_row("time", f"{seconds['all']:.0f} s in total, {seconds['training']:.0f} s of it training")
        table.add_row("preview", str(self.preview))
        self.say(table)
        data = f" --data {self.directory / 'data'}" if self.kept else ""
        self.say(f"sluice up{data} starts a permanent service; its API is described at {self.stack.url}/docs")
        kept = {"preview": str(self.preview), "directory": str(self.directory / "release")}
        return self.verified | kept | {"accuracy": self.accuracy, "seconds": seconds}


def accuracy(release: Release) -> float:
    """Accuracy on newly drawn digits of a small network that was trained on the release."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)  # too small for more
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, len(DIGITS)),
    )  # fmt: skip
    x, y = release.load("torch").tensors
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        for batch in torch.split(torch.randperm(len(x)), 100):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x[batch]), y[batch]))
            optimizer.step()
    images, labels = draw(FRESH, seed=SEEDS["fresh"])
    with torch.inference_mode():
        predicted = model(torch.from_numpy(images)[:, None].float() / 255).argmax(1)
    return float((predicted == torch.from_numpy(labels)).float().mean())


def _interrupt() -> None:
    """Ends the demo, which then stops everything in order; further signals are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(settings: Settings, *, port: int, keep: Path | None) -> Json:
    """Runs all stages; prints and returns the result."""
    with on_signals(_interrupt), Demo(settings, port=port, keep=keep) as demo:
        for stage in (demo.start, demo.register, demo.train, demo.release, demo.analyse):
            stage()
        _open(demo.preview)
        return demo.conclude()


def _open(picture: Path) -> None:
    """Opens the picture in the desktop's viewer, if there is a desktop."""
    viewer = {"darwin": "open", "win32": None}.get(sys.platform, "xdg-open")
    has_display = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if viewer and has_display and shutil.which(viewer) and sys.stdout.isatty():
        subprocess.Popen([viewer, str(picture)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
