"""Text of a server as a terminal may show it: as characters, never as commands."""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Controls but tab and line feed, the marks that turn the direction of writing, and halves of a character.
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb]"
)


def inert(text: object, *, lines: bool = True) -> str:
    """Shows what would move a cursor, change colours or reorder text by its number, as in \\x1b.

    Without `lines` it also stays on one line.
    """
    shown = _ACTIVE.sub(lambda found: _number(ord(found[0])), str(text))
    return shown if lines else shown.replace("\n", "\\n").replace("\t", " ")


def _number(point: int) -> str:
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}"


def console(*, stderr: bool = False) -> "Console":
    """A console that prints what it is given: no markup, and nothing that a terminal would obey."""
    from rich.console import Console
    from rich.text import Text

    class Inert(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(inert(text), **options)

    return Inert(stderr=stderr, markup=False, highlight=False, emoji=False)


def dumps(value: Any) -> str:
    """JSON in ASCII, where every control is written as its number."""
    return json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f")
