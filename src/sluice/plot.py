"""Line plots as SVG text: nothing to install, readable in a browser and by a screen reader."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 720, 120, 30


def line_plot(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x_name: str = "steps", from_zero: bool = False
) -> str:
    """Draws one panel per series, one below the other, from its (x, y) points; x starts at 0.

    The y axis runs from the smallest value to the largest, or from 0 with `from_zero`. Each panel's caption
    states both ranges, and all captions together are the text alternative.
    """
    panel_height = _HEIGHT + 2 * _MARGIN
    captions, panels = [], []
    for i, (name, points) in enumerate(series.items()):
        last, high = max(x for x, _ in points), max(y for _, y in points)
        low = 0 if from_zero else min(y for _, y in points)
        captions.append(escape(f"{name}: {low:.3g} to {high:.3g} over {last:,g} {x_name}"))
        left, right, top = _MARGIN, _WIDTH - _MARGIN, _MARGIN + i * panel_height
        x_scale, y_scale = (right - left) / (last or 1), _HEIGHT / ((high - low) or 1)
        line = " ".join(
            f"{left + x * x_scale:.1f},{top + _HEIGHT - (y - low) * y_scale:.1f}" for x, y in points
        )
        panels.append(
            f'<text x="{left}" y="{top - 8}">{captions[-1]}</text>\n'
            f'<path d="M{left} {top}V{top + _HEIGHT}H{right}" fill="none" stroke="#888"/>\n'
            f'<polyline points="{line}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>\n'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {len(panels) * panel_height}" '
        f'role="img" font-family="sans-serif" font-size="12">\n<title>{"; ".join(captions)}</title>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{"".join(panels)}</svg>\n'
    )
