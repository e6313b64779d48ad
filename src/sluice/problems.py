"""The base class of everything that is refused for a reason the caller can act on."""

from typing import Any, ClassVar


class Problem(Exception):
    """A refusal. The class has an HTTP status, a slug that programs test for, and a title; `detail` says what
    is wrong and what to do.

    `given` is the value that was refused. Command lines show it to whoever typed it; the service never sends
    it. `fields` are further facts, sent and shown. None of them may hold anything private.
    """

    status: ClassVar[int] = 400
    slug: ClassVar[str] = "bad-request"
    title: ClassVar[str] = "The request cannot be served"

    def __init__(self, detail: str, *, given: object = None, **fields: Any) -> None:
        super().__init__(detail)
        self.detail, self.given, self.fields = detail, given, fields

    @property
    def text(self) -> str:
        """The detail together with the refused value, for whoever gave it."""
        return self.detail if self.given is None else f"{self.detail} Given: {self.given!r}"

    def to_dict(self) -> dict[str, Any]:
        """What commands print with --json."""
        return {"slug": self.slug, "title": self.title, "detail": self.text, **self.fields}
