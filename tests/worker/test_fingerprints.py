"""Which copies of records are recognised, and which strangers are not taken for copies."""

import io

import numpy as np
import pytest
from PIL import Image

from core.schema import CategoryColumn, ImageSchema, NumberColumn, TableSchema
from worker.records.fingerprints import FEW, LEAST, SHARE, Sketch, fingerprints
from worker.records.layout import category_columns, number_columns, scale

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


class Rows:
    """Records in memory, as far as fingerprints look at them."""

    def __init__(self, schema, values, codes):
        self.schema, self._values, self._codes = schema, values, codes

    def __len__(self):
        return len(self._codes)

    def raw(self, rows):
        return self._values[rows], self._codes[rows]


def images(pixels, labels=None):
    pixels = pixels if pixels.ndim == 4 else pixels[..., None]
    schema = ImageSchema(
        height=pixels.shape[1], width=pixels.shape[2], channels=pixels.shape[3], classes=("a", "b")
    )
    labels = np.zeros(len(pixels)) if labels is None else labels
    return fingerprints(Rows(schema, pixels.astype(np.uint8), labels.astype("<u2")[:, None]), KEY)


def pictures(count, seed, side=28):
    """Blurred shapes, as different from each other as photographs of one kind of thing."""
    drawn = np.random.default_rng(seed)
    coarse = drawn.normal(0, 70, (count, 5, 5))
    wide = np.stack(
        [np.asarray(Image.fromarray(one.astype(np.float32)).resize((side, side))) for one in coarse]
    )
    return np.clip(128 + wide, 0, 255).astype(np.uint8)


def jpeg(pixels, quality):
    def again(one):
        out = io.BytesIO()
        Image.fromarray(one).save(out, "JPEG", quality=quality)
        return np.asarray(Image.open(out))

    return np.stack([again(one) for one in pixels])


def noisy(pixels, seed=9):
    step = np.random.default_rng(seed).integers(-1, 2, pixels.shape)
    return np.clip(pixels.astype(int) + step, 0, 255).astype(np.uint8)


def one_pixel(pixels):
    changed = pixels.copy()
    changed[:, 7, 7] = 255 - changed[:, 7, 7]
    return changed


MINE, OTHERS = pictures(400, 1), pictures(400, 2)
COPIES = {
    "the same": lambda x: x,
    "in another order": lambda x: x[::-1],
    "each twice": lambda x: np.repeat(x, 2, axis=0),
    "a subset": lambda x: x[:25],
    "a superset": lambda x: np.concatenate([x, pictures(4000, 3)]),
    "one pixel": one_pixel,
    "one grey level of noise": noisy,
    "jpeg, quality 90": lambda x: jpeg(x, 90),
    "jpeg, quality 75": lambda x: jpeg(x, 75),
    "a little brighter": lambda x: np.clip(x.astype(int) + 3, 0, 255),
    "mirrored": lambda x: x[:, :, ::-1],
    "turned": lambda x: np.rot90(x, 1, axes=(1, 2)),
    "in negative": lambda x: 255 - x,
    "twice as large": lambda x: np.kron(x, np.ones((1, 2, 2), np.uint8)),
    "in colour": lambda x: np.repeat(x[..., None], 3, axis=3),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_of_images_are_recognised_both_ways(copy):
    copied = images(COPIES[copy](MINE))
    assert copied.overlap(images(MINE).sketch()) > SHARE
    if copy not in ("mirrored", "turned", "in negative"):  # looked for when the copy comes second
        assert images(MINE).overlap(copied.sketch()) > SHARE


def test_other_images_are_not_taken_for_copies():
    assert images(OTHERS).overlap(images(MINE).sketch()) == 0


def test_what_is_not_recognised_is_said_in_the_guarantees():
    """The limits that docs/guarantees.md names: if one of these is found one day, the page should say so."""
    shifted = np.roll(MINE, 2, axis=2)
    assert images(shifted).overlap(images(MINE).sketch()) == 0


def test_another_label_is_no_other_person():
    assert images(MINE, np.ones(len(MINE))).overlap(images(MINE).sketch()) == 1.0


@pytest.mark.parametrize("shared", [LEAST - 1, LEAST, 40])
def test_a_few_records_in_common_do_not_tell(shared):
    """Who guesses fewer than LEAST people, among others of their own, learns nothing."""
    guess = np.concatenate([MINE[:shared], OTHERS[: FEW - LEAST]])
    assert (images(guess).overlap(images(MINE).sketch()) > 0) is (shared >= LEAST)
    large = np.concatenate([MINE[:shared], pictures(1000, 5)])
    known = np.concatenate([MINE[:shared], pictures(1000, 6)])
    assert (images(large).overlap(images(known).sketch()) > 0) is (shared > SHARE * 1000)


def test_small_datasets_are_known_to_be_small():
    assert images(MINE[: FEW - 1]).few
    assert images(np.repeat(MINE[: FEW - 1], 50, axis=0)).few  # copies of one person are one person
    assert not images(MINE[:FEW]).few


def test_a_fingerprint_needs_the_key():
    pixels = MINE[..., None]
    schema = ImageSchema(height=28, width=28, channels=1, classes=("a",))
    rows = Rows(schema, pixels, np.zeros((len(pixels), 1), "<u2"))
    one, two = fingerprints(rows, KEY), fingerprints(rows, OTHER_KEY)
    assert not np.isin(one.exact, two.exact).any()
    assert two.overlap(one.sketch()) == 0
    assert (fingerprints(rows, KEY).exact == one.exact).all()


def test_a_sketch_reads_back_and_holds_no_order():
    mine = images(MINE)
    body = mine.sketch().to_bytes(dataset="d")
    assert body == images(MINE[::-1]).sketch().to_bytes(dataset="d")
    again = Sketch.from_bytes(body)
    assert Sketch.facts_of(body) == {"kind": "image", "dataset": "d"}
    assert again.size == 400
    assert mine.overlap(again) == 1.0


# -- tables

NUMBERS = {
    "age": (0, 110),
    "income": (0, 200_000),
    "weight": (30, 200),
    "visits": (0, 300),
    "distance": (0, 90),
}
WORDS = {"ward": 9, "diagnosis": 60, "insurer": 12, "region": 25, "doctor": 80}


def people(count, seed):
    drawn = np.random.default_rng(seed)
    rows = {name: drawn.uniform(low, high, count).round(1) for name, (low, high) in NUMBERS.items()}
    rows["visits"] = rows["visits"].round()
    return rows | {name: drawn.integers(0, most, count) for name, most in WORDS.items()}


def table(rows, *, wide=1.0, backwards=False, names=None):
    """Declared with bounds `wide` times as far, and categories in either order."""
    columns, numbers, codes = [], [], []
    for name in names or rows:
        if name in NUMBERS:
            low, high = NUMBERS[name]
            column = NumberColumn(name=name, low=low - wide, high=high * wide, integer=name == "visits")
            numbers.append(scale(column, rows[name]))
        else:
            texts = [f"{name} {i}" for i in range(WORDS.get(name, 3))]
            order = texts[::-1] if backwards else texts
            column = CategoryColumn(name=name, categories=tuple(order))
            codes.append(np.array([order.index(texts[i]) for i in rows[name]], "<u2"))
        columns.append(column)
    schema = TableSchema(columns=tuple(columns))
    assert len(number_columns(schema)) == len(numbers)
    assert len(category_columns(schema)) == len(codes)
    values = np.stack(numbers, 1).astype("<f4")
    return fingerprints(Rows(schema, values, np.stack(codes, 1)), KEY)


PATIENTS = people(600, 1)


def changed(name, seed=7):
    return PATIENTS | {name: people(600, seed)[name]}


TABLES = {
    "the same": lambda: table(PATIENTS),
    "rows in another order": lambda: table({n: v[::-1] for n, v in PATIENTS.items()}),
    "columns in another order": lambda: table(PATIENTS, names=[*reversed(PATIENTS)]),
    "a subset": lambda: table({n: v[:30] for n, v in PATIENTS.items()}),
    "a superset": lambda: table({n: np.concatenate([v, people(6000, 3)[n]]) for n, v in PATIENTS.items()}),
    "other bounds": lambda: table(PATIENTS, wide=1.7),
    "categories in another order": lambda: table(PATIENTS, backwards=True),
    "one column more": lambda: table(PATIENTS | {"extra": np.arange(600) % 3}),
    **{f"another {n}": (lambda n=n: table(changed(n))) for n in PATIENTS},
    **{
        f"without {n}": (lambda n=n: table(PATIENTS, names=[m for m in PATIENTS if m != n])) for n in PATIENTS
    },
}


@pytest.mark.parametrize("copy", TABLES)
def test_copies_of_tables_are_recognised_both_ways(copy):
    copied = TABLES[copy]()
    assert copied.overlap(table(PATIENTS).sketch()) > SHARE
    assert table(PATIENTS).overlap(copied.sketch()) > SHARE


def test_other_people_are_not_taken_for_copies():
    assert table(people(600, 2)).overlap(table(PATIENTS).sketch()) == 0


def test_cells_that_many_people_have_are_nobodys():
    """Six coarse columns and one number that tells people apart: strangers differ in that number alone."""

    def crowd(seed):
        drawn = np.random.default_rng(seed)
        coarse = {
            name: drawn.integers(0, 3, 5000) for name in ("ward", "region", "insurer", "doctor", "x", "z")
        }
        return table(coarse | {"income": drawn.uniform(0, 200_000, 5000).round()})

    assert crowd(1).overlap(crowd(2).sketch()) == 0
    assert crowd(1).overlap(crowd(1).sketch()) == 1.0


def test_a_table_is_no_image():
    assert table(PATIENTS).overlap(images(MINE).sketch()) == 0


def test_coarse_tables_are_recognised_when_copied_whole():
    """Rows that many people share are nobody's; still, the same table again is the same people."""
    drawn = np.random.default_rng(1)
    coarse = {"age": drawn.integers(0, 11, 5000) * 10.0, "ward": drawn.integers(0, 9, 5000)}
    assert table(coarse).overlap(table({n: v[::-1] for n, v in coarse.items()}).sketch()) == 1.0
