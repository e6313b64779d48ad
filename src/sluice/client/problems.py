"""What the command says when it cannot do what was asked: one sentence and a way out, no traceback."""

from typing import TYPE_CHECKING, Any

from sluice.client.terminal import inert

if TYPE_CHECKING:
    from sluice.privacy.problems import Problem


class CannotRun(Exception):
    """The message is shown as it is, after the program's name."""

    exit_code = 1

    def to_dict(self) -> dict[str, Any]:
        return {"slug": "cannot-run", "title": "The command cannot do this", "detail": str(self)}


class Refused(CannotRun):
    """A service said no: the problem it named, and every number in it that helps to ask again."""

    def __init__(self, *, status: int, slug: str, title: str, detail: str, **fields: Any) -> None:
        super().__init__(f"{title}: {detail}")
        self.status, self.slug, self.title, self.detail = status, slug, title, detail
        self.fields = fields

    def __str__(self) -> str:
        shown = {k: v for k, v in self.fields.items() if k != "request_id" or self.status >= 500}
        lines = f"{self.title}: {self.detail}", *(f"  {line}" for line in _lines(shown))
        return "\n".join(inert(line, lines=False) for line in lines)

    def to_dict(self) -> dict[str, Any]:
        named = {"status": self.status, "slug": self.slug, "title": self.title, "detail": self.detail}
        return named | self.fields


class UnexpectedAnswer(CannotRun):
    """An answer of another form than expected; says where that was noticed, and no value of it."""

    def __init__(self, url: str, problem: Exception) -> None:
        import traceback
        from pathlib import Path

        place = traceback.extract_tb(problem.__traceback__)[-1]
        at = f"{type(problem).__name__}, {Path(place.filename).name}:{place.lineno}"
        super().__init__(
            f"{url} gave an answer that this version does not understand ({at}): "
            "look at --url, or ask its operator which version it runs"
        )


class NotVerified(CannotRun):
    """A bundle is not what was signed, or was withdrawn; `slug` says which (src/sluice/release/attest.py)."""

    def __init__(self, problem: "Problem") -> None:
        super().__init__(f"{problem.title}: {problem.detail}")
        self.slug, self.problem = problem.slug, problem
        self.exit_code = 4 if problem.slug == "release-withdrawn" else 3

    def to_dict(self) -> dict[str, Any]:
        return self.problem.to_dict()


def _lines(fields: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in fields.items():
        if name == "errors" and isinstance(value, list):
            lines += [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in value]
        elif isinstance(value, dict):
            lines.append(
                f"{_words(name)}: " + ", ".join(f"{_words(k)} {_value(k, v)}" for k, v in value.items())
            )
        else:
            lines.append(f"{_words(name)}: {_value(name, value)}")
    return lines


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name == "cost":
        return f"{value / 1e9:.9f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
