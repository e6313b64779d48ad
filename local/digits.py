"""Draws the digits that the demo treats as private data: Pillow's built-in font, randomly distorted."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 28
_SCALE = 3  # glyphs are drawn this much larger and scaled down together with the distortion
_GLYPH_SIZES = (72, 78, 84)


def _glyphs() -> list[list[Image.Image]]:
    """Each digit in a few sizes and stroke widths, white on black."""
    side = SIZE * _SCALE

    def glyph(digit: int, size: int, stroke: int) -> Image.Image:
        image = Image.new("L", (side, side))
        font = ImageFont.load_default(size)
        ImageDraw.Draw(image).text(
            (side / 2, side / 2), str(digit), 255, font, anchor="mm", stroke_width=stroke
        )
        return image

    shapes = [(size, stroke) for size in _GLYPH_SIZES for stroke in (0, 1, 2)]
    return [[glyph(digit, *shape) for shape in shapes] for digit in range(10)]


def draw(count: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 as N, 28, 28, and the digit that each shows. The same seed draws the same images."""
    rng = np.random.default_rng(seed)
    glyphs = _glyphs()
    labels = rng.integers(0, 10, count)
    images = np.empty((count, SIZE, SIZE), dtype=np.uint8)
    for i, digit in enumerate(labels):
        glyph = glyphs[digit][rng.integers(len(glyphs[digit]))]
        affine = _distortion(rng)
        images[i] = glyph.transform((SIZE, SIZE), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
    noise = rng.normal(0, 12, images.shape).astype(np.float32) * (images > 0)
    return np.clip(images + noise, 0, 255).astype(np.uint8), labels.astype(np.int64)


def _distortion(rng: np.random.Generator) -> tuple[float, ...]:
    """A random rotation, slant, scale and shift, from pixels of the image to pixels of the glyph."""
    turn, slant = rng.normal(0, 0.12), rng.normal(0.08, 0.15)
    scale = _SCALE * rng.uniform(0.85, 1.15, 2)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    matrix = np.diag(scale) @ np.array([[1, slant], [0, 1]]) @ rotation
    centre = (SIZE - 1) / 2 + rng.normal(0, 0.8, 2)
    shift = np.full(2, SIZE * _SCALE / 2) - matrix @ centre
    return (matrix[0, 0], matrix[0, 1], shift[0], matrix[1, 0], matrix[1, 1], shift[1])
