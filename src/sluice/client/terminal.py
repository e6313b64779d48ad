"""Prints text from a server so that a terminal shows it as characters and never executes it."""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Control characters except tab and line feed, marks that change the writing direction, and surrogates.
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb]"
)


def inert(text: object, *, lines: bool = True) -> str:
    """Replaces characters that move the cursor, change colours or reorder text by escapes such as \\x1b.

    With `lines=False` the result is a single line.
    """
    shown = _ACTIVE.sub(lambda match: _escape(ord(match[0])), str(text))
    return shown if lines else shown.replace("\n", "\\n").replace("\t", " ")


def _escape(point: int) -> str:
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}"


def console(*, stderr: bool = False) -> "Console":
    """A console without markup, highlighting or emoji codes, which escapes control characters."""
    from rich.console import Console
    from rich.text import Text

    class Inert(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(inert(text), **options)

    return Inert(stderr=stderr, markup=False, highlight=False, emoji=False)


def dumps(value: Any) -> str:
    """JSON in ASCII with all control characters escaped."""
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")
