"""Writes samples to files, some thousands in memory at a time; every image is marked as synthetic."""

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from core.schema import ImageSchema
from sluice.generators.image import ImageSynthesizer, Sample
from sluice.release.manifest import DATA
from worker.bundle.facts import Facts

GROUP = 16  # chunks of samples in memory at a time
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # so that a file does not depend on when it was made
COLUMNS = 10
XMP = """<?xpacket begin="" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about=""
xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
Iptc4xmpExt:DigitalSourceType="http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"/>
</rdf:RDF></x:xmpmeta><?xpacket end="r"?>"""

Add = Callable[[Sample, list[bytes]], None]


def write_samples(
    directory: Path, facts: Facts, synthesizer: ImageSynthesizer, on_progress: Callable[[int], None]
) -> bytes:
    """Draws samples into the data files of every format; returns the preview."""
    marks = PngInfo()
    marks.add_text("Comment", "Synthetic: drawn from a generator trained under differential privacy")
    marks.add_text("Source", f"Sluice release {facts.release}")
    shown: dict[int, list[np.ndarray]] = {label: [] for label in range(len(facts.schema.classes))[:COLUMNS]}
    done = 0
    with ExitStack() as stack:
        writers = [
            stack.enter_context(WRITERS[format](directory / DATA[format], facts)) for format in facts.formats
        ]
        draws = synthesizer.draws(facts.count, seed=facts.seed, balanced=True)
        while group := list(islice(draws, GROUP)):
            sample = Sample(
                np.concatenate([chunk.images for chunk in group]),
                np.concatenate([chunk.labels for chunk in group]),
            )
            wanted = {"parquet", "png"} & {*facts.formats}
            pictures = [_png(image, marks) for image in sample.images] if wanted else []
            for add in writers:
                add(sample, pictures)
            for label, row in shown.items():
                row += list(sample.images[sample.labels == label][: COLUMNS - len(row)])
            done += len(sample.labels)
            on_progress(done)
    return _preview(facts.schema, list(shown.values()))


def _png(image: np.ndarray, marks: PngInfo) -> bytes:
    body = io.BytesIO()
    Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).save(body, "PNG", pnginfo=marks)
    return body.getvalue()


def _preview(schema: ImageSchema, rows: list[list[np.ndarray]]) -> bytes:
    """A row of images per class, on white, large enough to see."""
    scale, gap = max(1, 48 // max(schema.height, schema.width)), 2
    down, across = schema.height * scale + gap, schema.width * scale + gap
    sheet = np.full((len(rows) * down + gap, COLUMNS * across + gap, schema.channels), 255, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            top, left = gap + i * down, gap + j * across
            large = image.repeat(scale, 0).repeat(scale, 1)
            sheet[top : top + down - gap, left : left + across - gap] = large
    marks = PngInfo()
    marks.add_itxt("XML:com.adobe.xmp", XMP)
    return _png(sheet, marks)


@contextmanager
def _parquet(path: Path, facts: Facts) -> Iterator[Add]:
    columns = pa.schema([("image", pa.binary()), ("label", pa.string()), ("label_index", pa.int64())])
    with pq.ParquetWriter(path, columns, compression="zstd", write_statistics=False) as file:

        def add(sample: Sample, pictures: list[bytes]) -> None:
            names = [facts.schema.classes[label] for label in sample.labels]
            file.write_table(pa.table([pictures, names, sample.labels], schema=columns))

        yield add


@contextmanager
def _npz(path: Path, facts: Facts) -> Iterator[Add]:
    """An archive for `numpy.load`, written without having all images in memory."""
    schema, labels = facts.schema, [np.empty(0, np.int64)]
    channels = (schema.channels,) if schema.channels > 1 else ()

    def head(file: Any, descr: str, shape: tuple[int, ...]) -> None:
        about = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, about)

    with zipfile.ZipFile(path, "w") as archive:
        with archive.open(_entry("x.npy", zipfile.ZIP_DEFLATED), "w", force_zip64=True) as file:
            head(file, "|u1", (facts.count, schema.height, schema.width, *channels))

            def add(sample: Sample, _: list[bytes]) -> None:
                file.write(sample.images.tobytes())
                labels.append(sample.labels)

            yield add
        with archive.open(_entry("y.npy", zipfile.ZIP_DEFLATED), "w") as file:
            head(file, "<i8", (facts.count,))
            file.write(np.concatenate(labels).astype("<i8").tobytes())


@contextmanager
def _folders(path: Path, facts: Facts) -> Iterator[Add]:
    """A zip with a folder per class; class names may have characters that folder names may not."""
    plain = [re.sub(r"[^A-Za-z0-9_-]", "_", name) for name in facts.schema.classes]
    folders = [f"{i:03d}-{name}" for i, name in enumerate(plain)]
    number = iter(range(facts.count))
    with zipfile.ZipFile(path, "w") as archive:

        def add(sample: Sample, pictures: list[bytes]) -> None:
            for label, picture in zip(sample.labels, pictures, strict=True):
                archive.writestr(_entry(f"{folders[label]}/{next(number):07d}.png"), picture)

        yield add


def _entry(name: str, method: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, ZIP_EPOCH)
    entry.compress_type, entry.external_attr = method, 0o644 << 16
    return entry


WRITERS = {"parquet": _parquet, "npz": _npz, "png": _folders}
