"""A release as an analyst has it: downloaded, verified, loaded, sampled from. Loading never runs code.

release = Sluice(url, key).release("digits")        # or Release("digits") for a directory
release.download("digits")
release.verify()
x, y = release.load()
images = release.synthesizer().sample(100, label=3, seed=7).images
labels = release.classifier().predict(images)       # of a release that is a classifier
"""

import hashlib
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from sluice.client.api import Json, Sluice
from sluice.client.problems import CannotRun, NotVerified

if TYPE_CHECKING:
    from sluice.generators.classifier import Classifier
    from sluice.generators.image import ImageSynthesizer

_ATTEMPTS = 6
_PATIENCE = httpx.Timeout(60, connect=10)
_NAME = re.compile(r"[A-Za-z0-9_-][\w.-]*(/[A-Za-z0-9_-][\w.-]*)*", re.ASCII)

Tell = Callable[[int, int], None]


class Release:
    def __init__(
        self, directory: str | Path | None = None, *, service: Sluice | None = None, view: Json | None = None
    ) -> None:
        self._directory = Path(directory) if directory is not None else None
        self.service, self.view = service, view or {}

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise CannotRun("the release is not here yet: download(directory) it first")
        return self._directory

    def download(
        self,
        directory: str | Path,
        *,
        resume: bool = True,
        review: bool = False,
        tell: Tell = lambda _done, _all: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> Path:
        """Fetches the files that are not here yet; a cut one goes on where it ended. `tell` hears bytes.

        `review` fetches the bundle under review, which has no statement and no signature yet.
        """
        if self.service is None:
            raise CannotRun("a release in a directory is downloaded already")
        if self.view["state"] in ("withdrawing", "withdrawn"):
            from sluice.release.attest import ReleaseWithdrawn

            raise NotVerified(ReleaseWithdrawn(f"It was taken back: {self.view['reason']}"))
        if not self.view.get("files"):
            raise CannotRun(f"the release is {self.view.get('state')}: there are no files yet")
        from sluice.client.trust import pin_signing_keys

        pin_signing_keys(self.service)
        wanted = {each["path"] for each in self.view["files"]} | (set() if review else {"attestation.json"})
        sign = partial(self.service.downloads, self.view["id"], review=review)
        files = sign(sorted(wanted))
        total, done = sum(each["size"] for each in files), 0
        to = Path(directory)
        with httpx.Client(timeout=_PATIENCE) as store:
            for file in files:
                _fetch(
                    sign, store, file, to, resume, lambda here, before=done: tell(before + here, total), pause
                )
                done += file["size"]
                tell(done, total)
        self._directory = to
        return to

    def verify(self, **more: Any) -> Json:
        """What the release states, once all of it was checked; `NotVerified` if it does not hold."""
        from sluice.client.verify import verify

        return verify(self.directory, **more)

    @property
    def manifest(self) -> Json:
        return self._json("manifest.json")

    @property
    def privacy(self) -> Json:
        """What the release cost: event, epsilon by each accountant, delta, relation."""
        return self._json("privacy.json")

    @property
    def classes(self) -> list[str]:
        found: list[str] = self._json("schema.json")["classes"]
        return found

    @property
    def is_classifier(self) -> bool:
        """Whether it is a classifier, and not samples with their synthesizer."""
        return (self.directory / "classifier.json").exists()

    def load(self, kind: str = "numpy") -> Any:
        """The samples: `numpy` arrays (x, y), a `torch` Dataset of images in [0, 1] as C, H, W with their
        labels, or a `pandas` frame with image, label and label_index."""
        if self.is_classifier:
            raise CannotRun("this release is a classifier and has no samples: classifier() gives it")
        x, y = self._arrays()
        if kind == "numpy":
            return x, y
        if kind == "torch":
            import torch

            channels_last = x if x.ndim == 4 else x[..., None]
            images = torch.from_numpy(channels_last).permute(0, 3, 1, 2).float().div_(255)
            return torch.utils.data.TensorDataset(images, torch.from_numpy(y))
        if kind == "pandas":
            import pandas

            named = [self.classes[each] for each in y]
            return pandas.DataFrame({"image": list(x), "label": named, "label_index": y})
        raise CannotRun(f"{kind!r} is no way to load a release: say numpy, torch or pandas")

    def synthesizer(self) -> "ImageSynthesizer":
        """The trained generator, on this machine's processor: `.sample(count, seed=7, label=3)`."""
        from sluice.generators.image import ARCHITECTURE, WEIGHTS, ImageSynthesizer

        if self.is_classifier:
            raise CannotRun("this release is a classifier, which draws nothing: classifier() gives it")
        return ImageSynthesizer.from_files({name: self._bytes(name) for name in (ARCHITECTURE, WEIGHTS)})

    def classifier(self) -> "Classifier":
        """The adapted classifier, on this machine's processor: `.predict(images)`, uint8 as N, H, W, C."""
        from sluice.generators.classifier import ARCHITECTURE, WEIGHTS, Classifier

        if not self.is_classifier:
            raise CannotRun("this release is no classifier: it has samples, and a synthesizer to draw more")
        return Classifier.from_files({name: self._bytes(name) for name in (ARCHITECTURE, WEIGHTS)})

    def _arrays(self) -> Any:
        """Whichever of the formats is here."""
        import io

        import numpy as np

        if (self.directory / "data/images.npz").exists():
            with np.load(self.directory / "data/images.npz", allow_pickle=False) as held:
                return held["x"], held["y"]
        if (self.directory / "data/images.parquet").exists():
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(self.directory / "data/images.parquet")
            pictures, y = table["image"].to_pylist(), table["label_index"].to_numpy()
        else:
            import zipfile

            with zipfile.ZipFile(io.BytesIO(self._bytes("data/images.zip"))) as held:
                named = [(Path(name), held.read(name)) for name in held.namelist() if name.endswith(".png")]
            pictures = [picture for _, picture in named]
            # A folder is called by number and name: 003-cat.
            y = np.array([int(path.parent.name.split("-")[0]) for path, _ in named], dtype=np.int64)
        from PIL import Image

        return np.stack([np.asarray(Image.open(io.BytesIO(each))) for each in pictures]), y

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.directory / name).read_bytes()
        except OSError:
            raise CannotRun(f"{self.directory} has no {name}: download the release again") from None

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self._bytes(name))
        except ValueError:
            raise CannotRun(f"{name} is damaged: sluice verify {self.directory} says more") from None


def _fetch(
    sign: Callable[[list[str]], list[Json]],
    store: httpx.Client,
    file: Json,
    directory: Path,
    resume: bool,
    tell: Callable[[int], None],
    pause: Callable[[float], None],
) -> None:
    """One file, beside its place until it is whole and its hash is right."""
    if not _NAME.fullmatch(file["path"]):
        raise CannotRun(f"the service names a file {file['path']!r}, which does not belong into a directory")
    place = directory / file["path"]
    if place.is_file() and _sha256(place) == file["sha256"]:
        return
    # By its hash: what was begun of another build is not gone on with.
    part = place.with_name(f".{place.name}.{file['sha256'][:16]}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            part.unlink(missing_ok=True)
        url, failures = file["url"], 0
        while failures < _ATTEMPTS:
            before = _size(part)
            if _receive(store, url, part, file["size"], tell):
                if _sha256(part) == file["sha256"]:
                    part.replace(place)
                    return
                part.unlink()
            # A line that is cut again and again still gets there, as long as each time something arrives.
            failures = 0 if _size(part) > before else failures + 1
            pause(0.5 * 2**failures)
            [fresh] = sign([file["path"]])
            url = fresh["url"]
    except OSError as problem:
        raise CannotRun(f"{place} cannot be written ({problem.strerror}): name another directory") from None
    raise CannotRun(
        f"{file['path']} did not arrive whole: what did is kept, the same command goes on from there"
    )


def _receive(store: httpx.Client, url: str, part: Path, size: int, tell: Callable[[int], None]) -> bool:
    """Adds to a part what it lacks; says whether all is there."""
    begun = _size(part)
    if begun > size:
        part.unlink()
        begun = 0
    if begun == size > 0:
        return True
    try:
        wanted = {"Range": f"bytes={begun}-"} if begun else {}
        with store.stream("GET", url, headers=wanted | {"Accept-Encoding": "identity"}) as answer:
            if not answer.is_success:
                return False
            going_on = answer.headers.get("Content-Range", "").startswith(f"bytes {begun}-")
            with part.open("ab" if begun and going_on else "wb") as out:
                for block in answer.iter_raw():  # as it comes: a cut loses nothing that arrived
                    out.write(block)
                    tell(out.tell())
                    if out.tell() > size:
                        break
    except httpx.TransportError:
        return False
    return _size(part) == size


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
