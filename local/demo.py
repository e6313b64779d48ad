"""`sluice demo`: from an empty directory to a release that an analyst verified, as it goes in production.

Two curators, an analyst, a dataset that the program drew itself, a training within a budget, four eyes, a
signature, a download; then a classifier that saw synthetic images only is asked about freshly drawn ones.
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
from types import FrameType
from typing import Any, Self

from local.digits import SIZE, draw
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
SEEDS = {"private": 1, "fresh": 2}  # what is drawn is the demo's; the noise of the training has no seed
FRESH = 2_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much of everything; the tests take little."""

    images: int = 20_000
    epsilon: float = 10.0
    samples: int = 10_000
    method: str | None = None  # the recommended one
    options: Json = field(default_factory=lambda: {"recipe": "demo"})


class Demo:
    """The stages, in order. Everything is under one directory; without `keep` only the release stays."""

    def __init__(self, settings: Settings, *, port: int = 8000, keep: Path | None = None) -> None:
        self.settings, self.say = settings, output().print
        self.directory = keep or Path(tempfile.mkdtemp(prefix="sluice-demo-"))
        self.kept = keep is not None
        self.began, self.times = time.monotonic(), {}
        if (self.directory / "release").exists():
            raise CannotRun(f"{self.directory} holds a demo already: name another directory with --keep")
        # The people of the demo keep their keys here, not where you keep yours.
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
            with suppress(OSError):  # only if nothing came of it
                self.directory.rmdir()

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        began = time.monotonic()
        self.say(f"\n{len(self.times) + 1}. {title}")
        yield
        self.times[title] = time.monotonic() - began
        self.say(f"   {self.times[title]:.1f} s")

    def start(self) -> None:
        with self.stage("PostgreSQL, Valkey, SeaweedFS, the service and its workers start on this machine"):
            self.stack.start()
            # Two admins: each invites one curator and puts the other's into the team, so that nobody could be
            # two of these people.
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
        with self.stage(f"Carla draws {count:,} digits, declares them with a budget, uploads and seals them"):
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
            with self.stage("Her budget is above the cap, so the admin who did not invite her confirms it"):
                self.second_admin.review_dataset(made["id"], "accept", reason="it is a demonstration")
                self.dataset = self.curator.wait_checked(made["id"])
        if self.dataset["state"] != "ready":
            raise CannotRun(f"the dataset was {self.dataset['state']}: {self.dataset['fault']}")

    def train(self) -> None:
        with self.stage(f"She asks what a training within epsilon {self.settings.epsilon:g} would cost"):
            request: Json = {
                "method": self.settings.method,
                "options": self.settings.options,
                "target": {"epsilon": self.settings.epsilon},
            }
            quote = self.curator.quote(self.dataset["id"], **request)
            show_quote(quote)
        with self.stage("The budget is charged; then the private side opens the records and trains"):
            job = self.curator.start_job(self.dataset["id"], **request)
            follow(self.curator.watch(job["id"]))
            self.job = self.curator.job(job["id"])
            if self.job["state"] != "trained":
                raise CannotRun(f"the training ended as {self.job['state']}: {self.job['fault']}")
        self.trained_in = list(self.times.values())[-1]

    def release(self) -> None:
        with self.stage(f"The public side draws {self.settings.samples:,} samples and builds the bundle"):
            body = {
                "job": self.job["id"], "name": "synthetic digits", "count": self.settings.samples,
                "audience": "everyone", "formats": ["parquet", "npz"],
            }  # fmt: skip
            made = self.curator.create_release(body)
            with bar("samples") as update:
                built = self.curator.wait_built(
                    made["id"],
                    lambda one: update(one["state"], one["progress"]["done"], one["progress"]["count"]),
                )
            if built["state"] != "in_review":
                raise CannotRun(f"the bundle is {built['state']}: {built['fault']}")
        with self.stage("Dora looks at it and approves that digest; Carla publishes; it is signed"):
            self.second.preview(built["id"])
            self.second.review(built["id"])
            self.second.approve(built["id"], built["digest"], "looks like digits, and like nobody's")
            self.curator.publish(built["id"])
            self.released = self.curator.wait_published(built["id"])
            show_release(self.released)
            if self.released["state"] != "published":
                raise CannotRun(f"the release is {self.released['state']}: {self.released['fault']}")

    def analyse(self) -> None:
        with self.stage("Anna finds it in the catalogue, downloads it and verifies every byte"):
            self.found: Release = self.analyst.release("synthetic digits")
            self.found.download(self.directory / "release")
            self.verified = self.found.verify()
            show_verified(self.verified)
            self.preview = self.directory / "release/preview.png"
        with self.stage("She trains a classifier on it and asks it about digits drawn just now"):
            self.accuracy = accuracy(self.found)

    def conclude(self) -> Json:
        from rich.table import Table

        seconds = {"all": time.monotonic() - self.began, "training": self.trained_in}
        relation = self.verified["relation"].replace("_", "-")
        table = Table(show_header=False)
        table.add_row("epsilon", readings(self.verified["epsilon"]))
        table.add_row("delta, relation", f"{self.verified['delta']:g}, {relation}")
        table.add_row("accuracy on real digits", f"{self.accuracy:.1%}, trained on synthetic ones alone")
        table.add_row("time", f"{seconds['all']:.0f} s in all, {seconds['training']:.0f} s of it training")
        table.add_row("preview", str(self.preview))
        self.say(table)
        data = f" --data {self.directory / 'data'}" if self.kept else ""
        self.say(f"sluice up{data} runs a service to keep; it describes its API at {self.stack.url}/docs")
        kept = {"preview": str(self.preview), "directory": str(self.directory / "release")}
        return self.verified | kept | {"accuracy": self.accuracy, "seconds": seconds}


def accuracy(release: Release) -> float:
    """How many of some freshly drawn digits a small network knows that saw synthetic ones only."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small that threads would only wait for each other
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, len(DIGITS)),
    )  # fmt: skip
    x, y = release.load("torch").tensors
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    images, labels = draw(FRESH, seed=SEEDS["fresh"])
    with torch.inference_mode():
        told = model(torch.from_numpy(images)[:, None].float() / 255).argmax(1)
    return float((told == torch.from_numpy(labels)).float().mean())


def run(settings: Settings, *, port: int, keep: Path | None) -> Json:
    """All stages; what came of it is printed, and given back."""
    with _interruptible(), Demo(settings, port=port, keep=keep) as demo:
        for stage in (demo.start, demo.register, demo.train, demo.release, demo.analyse):
            stage()
        _open(demo.preview)
        return demo.conclude()


def _open(picture: Path) -> None:
    """With what this desktop opens pictures with, where there is one."""
    viewer = {"darwin": "open", "win32": None}.get(sys.platform, "xdg-open")
    there = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if viewer and there and shutil.which(viewer) and sys.stdout.isatty():
        subprocess.Popen([viewer, str(picture)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first signal ends the demo, which then stops everything in order; further ones do not hurry it."""

    def ask(_signal: int, _frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before: dict[Any, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
