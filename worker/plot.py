"""A small line plot as SVG, for the curator's diagnostics."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _EDGE = 720, 120, 30


def lines(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """One panel for each name, one under the other: (step, value) from left to right."""
    each = _HEIGHT + 2 * _EDGE
    panels = [_panel(name, series[name], _EDGE + i * each) for i, name in enumerate(series)]
    tall = len(panels) * each
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {tall}" font-family="sans-serif">'
    return f'{head}<rect width="100%" height="100%" fill="#fff"/>{"".join(panels)}</svg>\n'


def _panel(name: str, points: Sequence[tuple[float, float]], top: int) -> str:
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high, last = min(values), max(values), max(steps) or 1
    room = (high - low) or 1.0
    path = " ".join(
        f"{_EDGE + (_WIDTH - 2 * _EDGE) * step / last:.1f},{top + _HEIGHT * (1 - (value - low) / room):.1f}"
        for step, value in points
    )
    label = f"{escape(name)}: {low:.3g} to {high:.3g}"
    return (
        f'<text x="{_EDGE}" y="{top - 8}" font-size="12">{label}</text>'
        f'<polyline points="{path}" fill="none" stroke="#2a6f97" stroke-width="1.2"/>'
    )
