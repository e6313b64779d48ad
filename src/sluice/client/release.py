"""A release on this machine: download, verify, load, sample. Loading runs no code from the release.

release = Sluice(url, key).release("digits")        # or Release("digits") for a directory
release.download("digits")
release.verify()
x, y = release.load()
images = release.synthesizer().sample(100, label=3, seed=7).images
labels = release.classifier().predict(images)       # if the release is a classifier
"""

import hashlib
import io
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from sluice.client.api import Sluice
from sluice.client.http import Json
from sluice.client.problems import CannotRun, NotVerified

if TYPE_CHECKING:
    from sluice.generators.classifier import Classifier
    from sluice.generators.image import ImageSynthesizer

_ATTEMPTS = 6
_TIMEOUT = httpx.Timeout(60, connect=10)
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][\w.-]*(/[A-Za-z0-9_-][\w.-]*)*", re.ASCII)

OnProgress = Callable[[int, int], None]


class Release:
    """A release in a directory, or one of a service that can be downloaded into a directory."""

    def __init__(
        self, directory: str | Path | None = None, *, service: Sluice | None = None, view: Json | None = None
    ) -> None:
        self._directory = Path(directory) if directory is not None else None
        self.service, self.view = service, view or {}

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise CannotRun("the release is not on this machine yet: call download(directory) first")
        return self._directory

    def download(
        self,
        directory: str | Path,
        *,
        resume: bool = True,
        review: bool = False,
        on_progress: OnProgress = lambda _done, _total: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Path:
        """Downloads the files that are missing and resumes incomplete ones; `on_progress` gets byte counts.

        `review` downloads the bundle under review, which has no statement and no signature yet.
        """
        if self.service is None:
            raise CannotRun("a release in a directory is downloaded already")
        if self.view["state"] in ("withdrawing", "withdrawn"):
            from sluice.release.revocations import ReleaseWithdrawn

            raise NotVerified(ReleaseWithdrawn(f"It was withdrawn: {self.view['reason']}"))
        if not self.view.get("files"):
            raise CannotRun(f"the release is {self.view.get('state')}: there are no files yet")
        from sluice.client.trust import pin_signing_keys

        pin_signing_keys(self.service)
        paths = {file["path"] for file in self.view["files"]} | (set() if review else {"attestation.json"})
        sign = partial(self.service.downloads, self.view["id"], review=review)
        files = sign(sorted(paths))
        total, done = sum(file["size"] for file in files), 0
        target = Path(directory)
        with httpx.Client(timeout=_TIMEOUT) as store:
            for file in files:

                def report(size: int, before: int = done) -> None:
                    on_progress(before + size, total)

                _fetch(sign, store, file, target, resume, report, sleep)
                done += file["size"]
                on_progress(done, total)
        self._directory = target
        return target

    def verify(self, **options: Any) -> Json:
        """Same as `sluice.verify` for the directory of this release."""
        from sluice.client.verify import verify

        return verify(self.directory, **options)

    @property
    def manifest(self) -> Json:
        manifest: Json = self._json("manifest.json")
        return manifest

    @property
    def privacy(self) -> Json:
        """What the release cost: event, epsilon by each accountant, delta, relation."""
        privacy: Json = self._json("privacy.json")
        return privacy

    @property
    def classes(self) -> list[str]:
        classes: list[str] = self._json("schema.json")["classes"]
        return classes

    @property
    def is_classifier(self) -> bool:
        """Whether the release is a classifier instead of samples with their synthesizer."""
        return (self.directory / "classifier.json").exists()

    def load(self, kind: str = "numpy") -> Any:
        """The samples: `numpy` arrays (x, y), a `torch` dataset of images in [0, 1] as C, H, W with labels,
        or a `pandas` frame with image, label and label_index."""
        if self.is_classifier:
            raise CannotRun("this release is a classifier without samples: call classifier()")
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

            names = [self.classes[index] for index in y]
            return pandas.DataFrame({"image": list(x), "label": names, "label_index": y})
        raise CannotRun(f"a release cannot be loaded as {kind!r}: choose numpy, torch or pandas")

    def synthesizer(self) -> "ImageSynthesizer":
        """The trained generator, on this machine's CPU: `.sample(count, seed=7, label=3)`."""
        from sluice.generators.image import ARCHITECTURE, WEIGHTS, ImageSynthesizer

        if self.is_classifier:
            raise CannotRun("this release is a classifier, which generates nothing: call classifier()")
        return ImageSynthesizer.from_files({name: self._bytes(name) for name in (ARCHITECTURE, WEIGHTS)})

    def classifier(self) -> "Classifier":
        """The trained classifier, on this machine's CPU: `.predict(images)`, uint8 as N, H, W, C."""
        from sluice.generators.classifier import ARCHITECTURE, WEIGHTS, Classifier

        if not self.is_classifier:
            raise CannotRun("this release is not a classifier: call load() or synthesizer()")
        return Classifier.from_files({name: self._bytes(name) for name in (ARCHITECTURE, WEIGHTS)})

    def _arrays(self) -> Any:
        """Images and labels from whichever format the release has."""
        import numpy as np

        if (self.directory / "data/images.npz").exists():
            with np.load(self.directory / "data/images.npz", allow_pickle=False) as arrays:
                return arrays["x"], arrays["y"]
        if (self.directory / "data/images.parquet").exists():
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(self.directory / "data/images.parquet")
            pictures, y = table["image"].to_pylist(), table["label_index"].to_numpy()
        else:
            import zipfile

            with zipfile.ZipFile(io.BytesIO(self._bytes("data/images.zip"))) as archive:
                names = [name for name in archive.namelist() if name.endswith(".png")]
                pictures = [archive.read(name) for name in names]
            # Folders are named by number and class: 003-cat.
            y = np.array([int(Path(name).parent.name.split("-")[0]) for name in names], dtype=np.int64)
        from PIL import Image

        return np.stack([np.asarray(Image.open(io.BytesIO(picture))) for picture in pictures]), y

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
    on_progress: Callable[[int], None],
    sleep: Callable[[float], None],
) -> None:
    """Downloads one file into a .part file beside it, which replaces it once its hash is right."""
    if not _FILE_NAME.fullmatch(file["path"]):
        raise CannotRun(f"the service names a file {file['path']!r}, which is not a path inside a release")
    path = directory / file["path"]
    if path.is_file() and _sha256(path) == file["sha256"]:
        return
    # The name contains the hash: a download of another build is not resumed.
    part = path.with_name(f".{path.name}.{file['sha256'][:16]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            part.unlink(missing_ok=True)
        url, failures = file["url"], 0
        while failures < _ATTEMPTS:
            before = _size(part)
            if _receive(store, url, part, file["size"], on_progress):
                if _sha256(part) == file["sha256"]:
                    part.replace(path)
                    return
                part.unlink()
            # Repeated cuts are no failure as long as something arrives each time.
            failures = 0 if _size(part) > before else failures + 1
            sleep(0.5 * 2**failures)
            [signed] = sign([file["path"]])
            url = signed["url"]
    except OSError as problem:
        raise CannotRun(f"{path} cannot be written ({problem.strerror}): name another directory") from None
    raise CannotRun(f"{file['path']} did not arrive completely: run the same command again to resume")


def _receive(
    store: httpx.Client, url: str, part: Path, size: int, on_progress: Callable[[int], None]
) -> bool:
    """Appends what a .part file lacks; returns whether it is complete."""
    start = _size(part)
    if start > size:
        part.unlink()
        start = 0
    if start == size > 0:
        return True
    try:
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with store.stream("GET", url, headers=headers) as answer:
            if not answer.is_success:
                return False
            resumed = answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            with part.open("ab" if start and resumed else "wb") as out:
                for block in answer.iter_raw():  # raw, so that a cut connection loses nothing that arrived
                    out.write(block)
                    on_progress(out.tell())
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
