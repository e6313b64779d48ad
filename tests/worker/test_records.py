"""Records are the same by whichever format they came, and owe nothing to each other."""

import io
import zlib

import numpy as np
import pyarrow as pa
import pytest
import torch

from core.faults import Failure, Fault
from core.schema import CategoryColumn, ImageSchema, NumberColumn, TableSchema
from tests.worker import hostile
from tests.worker.hostile import CANARY, IMAGES, NAMES, TABLE, npy, npz, pixels
from worker.records import CODES, VALUES, Records, Report
from worker.records.images import read_images
from worker.records.layout import spans
from worker.records.reading import Allowance, Sink
from worker.records.tables import read_table

X, Y = pixels(6), np.array([0, 1, 1, 0, 1, 0])
COLOURS = ImageSchema(height=8, width=6, channels=3, classes=("cat", "dog"))
RGB = np.random.default_rng(7).integers(0, 256, (6, 8, 6, 3), dtype=np.uint8)


def read(data, schema, directory):
    """The reader itself, without the process around it; test_validate.py has that."""
    reader = read_images if isinstance(schema, ImageSchema) else read_table
    allowance = Allowance.of(size=len(data), disk_bytes=1 << 30)
    with (
        (directory / VALUES).open("wb") as values,
        (directory / CODES).open("wb") as codes,
        (directory / "spool").open("w+b") as spool,
    ):
        sink = Sink(values, codes, spool)
        report = reader(io.BytesIO(data), schema=schema, sink=sink, allowance=allowance)
    return Records(schema, directory), report


def folders(images):
    names = [f"{IMAGES.classes[y]}/{place}.png" for place, y in enumerate(Y)]
    return hostile.zipped({name: hostile.png(image) for name, image in zip(names, images, strict=True)})


def saved(save, **arrays):
    out = io.BytesIO()
    save(out, **arrays)
    return out.getvalue()


GREY_UPLOADS = {
    "npz": saved(np.savez, x=X, y=Y),
    "npz, packed": saved(np.savez_compressed, x=X, y=Y),
    "npz, y first": saved(np.savez, y=Y, x=X),
    "npz with a channel": npz(x=npy(X[..., None]), y=npy(Y)),
    "npz in Fortran order": npz(x=npy(np.asfortranarray(X)), y=npy(Y)),
    "npz of another version": npz(x=npy(X, version=(2, 0)), y=npy(Y, version=(3, 0))),
    "npz, big-endian y": npz(x=npy(X), y=npy(Y.astype(">i8"))),
    "npz, byte y": npz(x=npy(X), y=npy(Y.astype(np.uint8))),
    "png folders": folders(X),
    "idx pair": hostile.idx(hostile.idx_images(X), hostile.idx_labels(Y)),
    "idx pair, plain": hostile.zipped(
        {"t10k-labels-idx1-ubyte": hostile.idx_labels(Y), "t10k-images-idx3-ubyte": hostile.idx_images(X)}
    ),
}
COLOUR_UPLOADS = {
    "npz": npz(x=npy(RGB), y=npy(Y)),
    "npz in Fortran order": npz(x=npy(np.asfortranarray(RGB)), y=npy(Y)),
    "png folders": folders(RGB),
}

ROWS = ["0,-1000000,paris", "100,1000000,rome", "50,0,other", "25,5e5,rome"]
MATRIX = [[-1, -1, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 1], [-0.5, 0.5, 0, 1, 0]]
COLUMNS = {
    "age": [0, 100, 50, 25],
    "income": [-1e6, 1e6, 0.0, 5e5],
    "city": ["paris", "rome", "other", "rome"],
}
TABLE_UPLOADS = {
    "csv": hostile.csv_of(*ROWS),
    "csv, last line open": hostile.csv_of(*ROWS)[:-1],
    "csv of Windows": hostile.csv_of(*ROWS).replace(b"\n", b"\r\n"),
    "csv of a spreadsheet": b"\xef\xbb\xbf" + hostile.csv_of(*ROWS),
    "csv, quoted": hostile.csv_of(*(",".join(f'"{cell}"' for cell in row.split(",")) for row in ROWS)),
    "csv, other order": hostile.csv_of(
        *(",".join(reversed(row.split(","))) for row in ROWS), head="city,income,age"
    ),
    "parquet": hostile.parquet_of(COLUMNS),
    "parquet, other order": hostile.parquet_of(pa.table(dict(reversed(COLUMNS.items())))),
    "parquet, small row groups": hostile.parquet_of(COLUMNS, row_group_size=1, compression="zstd"),
    "parquet, narrow": hostile.parquet_of(
        COLUMNS
        | {"age": pa.array(COLUMNS["age"], pa.int8()), "city": pa.array(COLUMNS["city"]).dictionary_encode()}
    ),
    "parquet, decimal": hostile.parquet_of(
        COLUMNS | {"income": pa.array([-1000000, 1000000, 0, 500000]).cast(pa.decimal128(21, 2))}
    ),
}


@pytest.mark.parametrize("name", GREY_UPLOADS)
def test_grey_images_are_equal_by_every_format(tmp_path, name):
    records, report = read(GREY_UPLOADS[name], IMAGES, tmp_path)
    images, labels = records.take(np.arange(6))
    assert report == Report(clamped=0, mapped=0)
    assert images.shape == (6, 1, 8, 8)
    assert torch.equal(images, torch.from_numpy(X[:, None].astype(np.float32) / np.float32(127.5) - 1))
    assert labels.tolist() == Y.tolist()
    assert labels.dtype == torch.int64


def test_images_of_one_class_need_no_labels(tmp_path):
    body = io.BytesIO()
    np.savez(body, x=X)
    records, _ = read(body.getvalue(), IMAGES.model_copy(update={"classes": ("unknown",)}), tmp_path)
    assert len(records) == 6
    assert records.take(np.arange(6))[1].tolist() == [0] * 6


@pytest.mark.parametrize("name", COLOUR_UPLOADS)
def test_colour_images_are_equal_by_every_format(tmp_path, name):
    records, _ = read(COLOUR_UPLOADS[name], COLOURS, tmp_path)
    images, labels = records.take(np.arange(6))
    expected = torch.from_numpy(RGB.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(127.5) - 1)
    assert torch.equal(images, expected)
    assert images.is_contiguous()
    assert labels.tolist() == Y.tolist()


@pytest.mark.parametrize("name", TABLE_UPLOADS)
def test_tables_are_equal_by_every_format(tmp_path, name):
    records, report = read(TABLE_UPLOADS[name], TABLE, tmp_path)
    matrix, labels = records.take(np.arange(4))
    assert matrix.tolist() == MATRIX
    assert matrix.dtype == torch.float32
    assert labels.tolist() == [0, 1, 2, 1]
    assert report == Report(clamped=0, mapped=0)


def test_a_large_array_in_fortran_order_is_turned_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr("worker.records.images.CHUNK", 64 * 7)  # blocks of seven records
    x = pixels(100)
    records, _ = read(npz(x=npy(np.asfortranarray(x)), y=npy(hostile.labels(100))), IMAGES, tmp_path)
    images, _ = records.take(np.arange(100))
    assert torch.equal(images[:, 0], torch.from_numpy(x.astype(np.float32) / np.float32(127.5) - 1))


def test_whole_range_of_a_byte_becomes_minus_one_to_one(tmp_path):
    x = np.zeros((2, 8, 8), np.uint8)
    x[1] = 255
    records, _ = read(npz(x=npy(x), y=npy(hostile.labels(2))), IMAGES, tmp_path)
    images, _ = records.take(np.array([1, 0]))
    assert images.amin(dim=(1, 2, 3)).tolist() == images.amax(dim=(1, 2, 3)).tolist() == [1, -1]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_what_is_not_declared_is_clamped_or_mapped_and_counted(tmp_path, form):
    columns = {
        "age": [-5.0, 1e308, 50.4, 7],
        "income": [-1e308, 2e6, 0.0, 1.0],
        "city": ["=cmd|'/c calc'!A0", "Rome", "", "rome"],
    }
    rows = [f"{age!r},{income!r},{city}" for age, income, city in zip(*columns.values(), strict=True)]
    data = hostile.csv_of(*rows) if form == "csv" else hostile.parquet_of(columns)
    records, report = read(data, TABLE, tmp_path)
    matrix, labels = records.take(np.arange(4))
    assert report == Report(clamped=5, mapped=3)
    assert matrix[:3].tolist() == [[-1, -1, 0, 0, 1], [1, 1, 0, 0, 1], [0, 0, 0, 0, 1]]
    assert labels.tolist() == [2, 2, 2, 1]


def test_missing_category_becomes_the_declared_other(tmp_path):
    schema = TableSchema(columns=(CategoryColumn(name="c", categories=("a", "rest", "b"), other="rest"),))
    data = hostile.parquet_of(pa.table({"c": ["a", None, "b", "z"]}))
    records, report = read(data, schema, tmp_path)
    assert records.take(np.arange(4))[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]]
    assert report == Report(mapped=2)


def test_categories_may_be_whole_numbers(tmp_path):
    schema = TableSchema(columns=(CategoryColumn(name="c", categories=("0", "1", "7")),))
    by_number, _ = read(hostile.parquet_of(pa.table({"c": [7, 0, 3]})), schema, tmp_path)
    first = by_number.take(np.arange(3))[0]
    by_text, _ = read(b"c\n7\n0\n3\n", schema, tmp_path)
    assert torch.equal(first, by_text.take(np.arange(3))[0])


@pytest.mark.parametrize("bounds", [(-1.7e308, 1.7e308), (0, 5e-324), (1e16, 1e16 + 2)])
def test_extreme_bounds_give_finite_records(tmp_path, bounds):
    schema = TableSchema(columns=(NumberColumn(name="n", low=bounds[0], high=bounds[1]),))
    records, _ = read(f"n\n{bounds[0]!r}\n{bounds[1]!r}\n0\n-1e308\n".encode(), schema, tmp_path)
    matrix = records.take(np.arange(4))[0]
    assert torch.isfinite(matrix).all()
    assert (matrix.abs() <= 1).all()


@pytest.mark.parametrize("outlier", ["0,0,rome", "100,1e308,paris", f"-3,-1e300,{CANARY}"])
def test_a_record_is_the_same_whoever_else_is_in_the_data(tmp_path, outlier):
    """Nothing is measured on the rows: changing one changes that one."""
    records, _ = read(hostile.csv_of(*ROWS, outlier), TABLE, tmp_path)
    assert records.take(np.arange(4))[0].tolist() == MATRIX


def test_an_image_is_the_same_whoever_else_is_in_the_data(tmp_path):
    dark = np.zeros((2, 8, 8), np.uint8)
    dark[0, 0, 0] = 40
    alone, _ = read(npz(x=npy(dark), y=npy(np.zeros(2, int))), IMAGES, tmp_path)
    before = alone.take(np.array([0]))
    dark[1] = 255
    together, _ = read(npz(x=npy(dark), y=npy(np.array([0, 1]))), IMAGES, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, together.take(np.array([0])), strict=True))


def test_a_first_column_may_be_called_pk(tmp_path):
    schema = TableSchema(columns=(NumberColumn(name="PK", low=0, high=4),))
    assert read(b"PK\n2\n4\n", schema, tmp_path)[0].take(np.arange(2))[0].tolist() == [[0], [1]]


def test_tables_longer_than_a_block_keep_their_order(tmp_path):
    schema = TableSchema(columns=(NumberColumn(name="n", low=0, high=19_999, integer=True),))
    expected = torch.linspace(-1, 1, 20_000, dtype=torch.float64).float()[:, None]
    text = "n\n" + "".join(f"{value}\n" for value in range(20_000))
    for data in (text.encode(), hostile.parquet_of(pa.table({"n": range(20_000)}))):
        records, _ = read(data, schema, tmp_path)
        assert torch.allclose(records.take(np.arange(20_000))[0], expected, atol=1e-6)


def test_spans_follow_the_declared_order():
    assert spans(TABLE) == [slice(0, 1), slice(1, 2), slice(2, 5)]


def test_records_print_only_their_schema(tmp_path):
    records, _ = read(GREY_UPLOADS["npz"], IMAGES, tmp_path)
    assert repr(records) == str(records) == f"Records({IMAGES!r})"
    assert len(records) == 6


def test_an_empty_batch_is_an_ordinary_batch(tmp_path):
    images, labels = read(GREY_UPLOADS["npz"], IMAGES, tmp_path)[0].take(np.arange(0))
    assert images.shape == (0, 1, 8, 8)
    assert labels.shape == (0,)
    matrix, labels = read(TABLE_UPLOADS["csv"], TABLE, tmp_path)[0].take(np.arange(0))
    assert matrix.shape == (0, 5)
    assert labels.shape == (0,)


@pytest.mark.parametrize("indices", [[-1], [0, 6], [2**40], [True, False], [0.0]])
def test_an_index_of_no_record_is_refused_without_telling_how_many_there_are(tmp_path, indices):
    records, _ = read(GREY_UPLOADS["npz"], IMAGES, tmp_path)
    with pytest.raises(IndexError, match=r"^not the index of a record$"):
        records.take(np.array(indices))


def test_a_table_without_a_label_has_one_class(tmp_path):
    schema = TABLE.model_copy(update={"label": None})
    records, _ = read(TABLE_UPLOADS["csv"], schema, tmp_path)
    assert records.take(np.array([3, 0]))[1].tolist() == [0, 0]


def test_arrays_that_do_not_fit_the_schema_are_not_opened(tmp_path):
    read(GREY_UPLOADS["npz"], IMAGES, tmp_path)
    for schema in (COLOURS, TABLE, IMAGES.model_copy(update={"classes": ("cat",)})):
        with pytest.raises(Failure) as caught:
            Records(schema, tmp_path)
        assert caught.value.fault is Fault.SCHEMA_MISMATCH


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_an_archive_leads_nowhere(tmp_path, name):
    with pytest.raises(Failure) as caught:
        read(hostile.with_name(name), IMAGES, tmp_path)
    assert caught.value.fault in (Fault.UNSAFE_CONTENT, Fault.LABEL_MISMATCH)
    assert CANARY not in str(caught.value)
    assert {path.name for path in tmp_path.rglob("*")} == {VALUES, CODES, "spool"}


def test_names_in_other_scripts_are_welcome(tmp_path):
    data = hostile.zipped({"cat/": b"", "cat/café 1 (2).png": hostile.png(), "dog/犬.png": hostile.png()})
    assert len(read(data, IMAGES, tmp_path)[0]) == 2


def test_what_a_png_says_besides_pixels_is_not_parsed(tmp_path):
    """Text that unpacks to 30 MB, a profile that is none: both are left out before the decoder looks."""
    bomb = hostile.chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(30_000_000), 9))
    profile = hostile.chunk(b"iCCP", b"p\0\0" + CANARY.encode())
    records, _ = read(hostile.folders(a=hostile.with_chunk(bomb + profile)), IMAGES, tmp_path)
    images, _ = records.take(np.arange(2))
    assert torch.equal(images[0], images[1])


@pytest.mark.parametrize("name", ["npz", "png folders", "idx pair", "parquet"])
def test_a_file_cut_anywhere_is_refused(tmp_path, name):
    data, schema = (TABLE_UPLOADS, TABLE) if name == "parquet" else (GREY_UPLOADS, IMAGES)
    for part in hostile.truncations(data[name], 40):
        with pytest.raises((Failure, OSError, ValueError)):  # the process turns all of them into a slug
            read(part, schema, tmp_path)


@pytest.mark.parametrize("name", ["npz", "npz, packed", "png folders", "idx pair", "csv"])
def test_a_file_with_a_changed_byte_is_refused_or_still_fits_the_schema(tmp_path, name):
    data, schema = (TABLE_UPLOADS, TABLE) if name == "csv" else (GREY_UPLOADS, IMAGES)
    random = np.random.default_rng(0)
    for at in random.integers(0, len(data[name]), 60):
        changed = bytearray(data[name])
        changed[at] ^= 1 << random.integers(8)
        try:
            records, _ = read(bytes(changed), schema, tmp_path)
        except Exception:  # the process turns any of them into a slug
            continue
        values, labels = records.take(np.arange(len(records)))
        assert torch.isfinite(values).all()
        assert (values.abs() <= 1).all()
        assert (labels < 3).all()
