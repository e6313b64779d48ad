"""Digits that nobody wrote: drawn from strokes by the program itself, for the demo to treat as private.

A digit is a few curves in a unit square, written in one of several ways. Each image bends, slants, scales,
turns and moves them, chooses a pen and adds noise. The same seed draws the same images.
"""

import math

import numpy as np

SIZE = 28
_PIECES = 48  # of all strokes of a digit
_BLOCK = 512


def _arc(cx: float, cy: float, rx: float, ry: float, start: float, end: float) -> np.ndarray:
    """Part of an ellipse from one angle to another, in quarter turns; 0 is to the right, 1 is down."""
    at = np.linspace(start, end, 24) * math.pi / 2
    return np.stack([cx + rx * np.cos(at), cy + ry * np.sin(at)], 1)


def _line(*points: tuple[float, float]) -> np.ndarray:
    return np.array(points)


# Several ways to write each digit; x to the right, y down, both from 0 to 1.
FONTS: list[list[list[np.ndarray]]] = [
    [[_arc(0.5, 0.5, 0.3, 0.45, 0, 4)], [_arc(0.5, 0.5, 0.2, 0.45, 0, 4)], [_arc(0.5, 0.5, 0.36, 0.4, 0, 4)]],
    [
        [_line((0.5, 0.05), (0.5, 0.95))],
        [_line((0.3, 0.25), (0.52, 0.05), (0.52, 0.95))],
        [_line((0.32, 0.22), (0.5, 0.05), (0.5, 0.95)), _line((0.3, 0.95), (0.7, 0.95))],
    ],
    [
        [_arc(0.5, 0.3, 0.28, 0.25, -2, 0.6), _line((0.69, 0.5), (0.22, 0.95), (0.8, 0.95))],
        [_arc(0.48, 0.28, 0.27, 0.23, -1.8, 0.9), _line((0.52, 0.5), (0.2, 0.93), (0.5, 0.85), (0.82, 0.93))],
        [_line((0.2, 0.1), (0.75, 0.1), (0.75, 0.48), (0.22, 0.52), (0.22, 0.93), (0.8, 0.93))],
    ],
    [
        [_arc(0.45, 0.28, 0.28, 0.22, -1.7, 1), _arc(0.45, 0.72, 0.32, 0.23, -1, 1.8)],
        [_line((0.22, 0.06), (0.75, 0.06), (0.45, 0.42)), _arc(0.45, 0.68, 0.3, 0.26, -1, 1.8)],
        [_line((0.22, 0.08), (0.74, 0.08), (0.74, 0.94), (0.22, 0.94)), _line((0.32, 0.5), (0.74, 0.5))],
    ],
    [
        [_line((0.62, 0.95), (0.62, 0.05), (0.18, 0.66), (0.85, 0.66))],
        [_line((0.25, 0.05), (0.22, 0.52), (0.75, 0.52)), _line((0.68, 0.1), (0.66, 0.95))],
        [_line((0.5, 0.05), (0.2, 0.6), (0.8, 0.6)), _line((0.6, 0.38), (0.6, 0.95))],
    ],
    [
        [_line((0.75, 0.06), (0.28, 0.06), (0.25, 0.45)), _arc(0.45, 0.68, 0.32, 0.26, -1.5, 1.8)],
        [_line((0.76, 0.07), (0.25, 0.07), (0.25, 0.48), (0.74, 0.48), (0.74, 0.93), (0.22, 0.93))],
        [_arc(0.46, 0.67, 0.3, 0.27, -1.6, 1.7), _line((0.27, 0.5), (0.34, 0.06), (0.78, 0.08))],
    ],
    [
        [_arc(0.75, 0.5, 0.5, 0.45, -1.1, -2.2), _arc(0.5, 0.7, 0.26, 0.24, 0, 4)],
        [_line((0.62, 0.05), (0.28, 0.55)), _arc(0.5, 0.7, 0.27, 0.24, -1.8, 2.4)],
        [_line((0.72, 0.06), (0.25, 0.06), (0.25, 0.94), (0.74, 0.94), (0.74, 0.5), (0.25, 0.5))],
    ],
    [
        [_line((0.2, 0.07), (0.8, 0.07), (0.42, 0.95))],
        [_line((0.2, 0.07), (0.8, 0.07), (0.45, 0.95)), _line((0.35, 0.5), (0.75, 0.5))],
        [_line((0.22, 0.2), (0.22, 0.07), (0.76, 0.07), (0.7, 0.95))],
    ],
    [
        [_arc(0.5, 0.28, 0.24, 0.22, 1, 5), _arc(0.5, 0.73, 0.29, 0.23, -1, 3)],
        [_arc(0.5, 0.27, 0.22, 0.2, 0, 4), _arc(0.5, 0.7, 0.27, 0.25, 0, 4)],
        [_line((0.7, 0.5), (0.26, 0.5), (0.26, 0.07), (0.74, 0.07), (0.74, 0.94), (0.26, 0.94), (0.26, 0.5))],
    ],
    [
        [_arc(0.5, 0.3, 0.26, 0.24, 0, 4), _line((0.76, 0.3), (0.66, 0.95))],
        [_arc(0.48, 0.3, 0.26, 0.24, 0, 4), _arc(0.3, 0.4, 0.46, 0.54, -0.1, 1)],
        [_line((0.74, 0.48), (0.26, 0.48), (0.26, 0.07), (0.74, 0.07), (0.74, 0.94), (0.26, 0.94))],
    ],
]  # fmt: skip


def _pieces(strokes: list[np.ndarray]) -> np.ndarray:
    """The strokes of one digit as `_PIECES` short lines, longer strokes in more: pieces, 2 ends, 2."""
    lengths = [np.linalg.norm(np.diff(stroke, axis=0), axis=1).cumsum() for stroke in strokes]
    total, left, found = sum(each[-1] for each in lengths), _PIECES, []
    for stroke, length in zip(strokes, lengths, strict=True):
        count = left if stroke is strokes[-1] else round(_PIECES * length[-1] / total)
        at = np.linspace(0, length[-1], count + 1)
        along = np.stack([np.interp(at, [0, *length], stroke[:, axis]) for axis in (0, 1)], 1)
        found.append(np.stack([along[:-1], along[1:]], 1))
        left -= count
    return np.concatenate(found).astype(np.float32)


def draw(count: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 as N, 28, 28, and which digit each shows; white on black."""
    rng = np.random.default_rng(seed)
    shapes = [np.stack([_pieces(way) for way in ways]) for ways in FONTS]
    labels = rng.integers(0, len(FONTS), count)
    images = np.empty((count, SIZE, SIZE), dtype=np.uint8)
    for start in range(0, count, _BLOCK):
        block = labels[start : start + _BLOCK]
        chosen = np.stack([rng.choice(shapes[digit]) for digit in block])
        images[start : start + len(block)] = _rendered(_bent(chosen, rng), rng)
    return images, labels.astype(np.int64)


def _bent(ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Strokes, N, pieces, 2, 2 in the unit square, into pixels of an image each in its own way."""

    def each(spread: float, middle: float = 0.0) -> np.ndarray:
        return rng.normal(middle, spread, (len(ends), 1, 1)).astype(np.float32)

    x, y = ends[..., 0] - 0.5, ends[..., 1] - 0.5
    # A wave along either axis: hands are not straight.
    x = x + each(0.03) * np.sin(2 * math.pi * (y + each(1)))
    y = y + each(0.03) * np.sin(2 * math.pi * (x + each(1)))
    turn, slant = each(0.1), each(0.15, -0.08)
    x = x - slant * y
    x, y = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    height = np.clip(each(1.2, 19), 15, 22)
    width = height * np.clip(each(0.1, 0.95), 0.7, 1.2)
    middle = (SIZE - 1) / 2
    return np.stack([x * width + middle + each(0.8), y * height + middle + each(0.8)], -1)


def _rendered(ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every pixel by its distance to the nearest piece of a stroke: a pen with soft edges."""
    count = len(ends)
    pixels = np.stack(np.meshgrid(np.arange(SIZE), np.arange(SIZE)), -1).reshape(-1, 2).astype(np.float32)
    nearest = np.full((count, SIZE * SIZE), np.inf, dtype=np.float32)
    for piece in range(ends.shape[1]):
        begin, end = ends[:, piece, 0], ends[:, piece, 1]
        along = end - begin
        square = np.maximum((along**2).sum(1), 1e-6)
        dx, dy = pixels[:, 0] - begin[:, :1], pixels[:, 1] - begin[:, 1:]
        share = np.clip((dx * along[:, :1] + dy * along[:, 1:]) / square[:, None], 0, 1)
        far = (dx - share * along[:, :1]) ** 2 + (dy - share * along[:, 1:]) ** 2
        np.minimum(nearest, far, out=nearest)
    pen = rng.uniform(0.7, 1.7, (count, 1)).astype(np.float32)
    ink = np.clip(pen + 0.7 - np.sqrt(nearest), 0, 1) * rng.uniform(0.8, 1, (count, 1)).astype(np.float32)
    ink += (rng.normal(0, 0.04, ink.shape) * (ink > 0)).astype(np.float32)
    return (np.clip(ink, 0, 1) * 255).round().astype(np.uint8).reshape(count, SIZE, SIZE)
