"""Errors of the client. Each message is one sentence that says what is wrong and what to do."""

from typing import TYPE_CHECKING, Any

from sluice.client.terminal import inert

if TYPE_CHECKING:
    from sluice.privacy.problems import Problem


class CannotRun(Exception):
    """Base of all client errors. The command prints the message and ends with `exit_code`."""

    exit_code = 1

    def to_dict(self) -> dict[str, Any]:
        return {"slug": "cannot-run", "title": "The command cannot run", "detail": str(self)}


class Unreachable(CannotRun):
    """The service did not answer."""


class Refused(CannotRun):
    """The service refused a request: `slug` names the problem, `fields` has its values (docs/api.md)."""

    def __init__(self, *, status: int, slug: str, title: str, detail: str, **fields: Any) -> None:
        super().__init__(f"{title}: {detail}")
        self.status, self.slug, self.title, self.detail = status, slug, title, detail
        self.fields = fields

    def __str__(self) -> str:
        shown = {k: v for k, v in self.fields.items() if k != "request_id" or self.status >= 500}
        lines = f"{self.title}: {self.detail}", *(f"  {line}" for line in _field_lines(shown))
        return "\n".join(inert(line, lines=False) for line in lines)

    def to_dict(self) -> dict[str, Any]:
        standard = {"status": self.status, "slug": self.slug, "title": self.title, "detail": self.detail}
        return standard | self.fields


class UnexpectedAnswer(CannotRun):
    """An answer has another form than expected. The message says where, without quoting values."""

    def __init__(self, url: str, problem: Exception) -> None:
        import traceback
        from pathlib import Path

        frame = traceback.extract_tb(problem.__traceback__)[-1]
        place = f"{type(problem).__name__}, {Path(frame.filename).name}:{frame.lineno}"
        super().__init__(
            f"{url} gave an answer that this version does not understand ({place}): "
            "check --url, or ask its operator which version it runs"
        )


class NotVerified(CannotRun):
    """A release is not what was signed, or was withdrawn; `slug` says which."""

    def __init__(self, problem: "Problem") -> None:
        super().__init__(f"{problem.title}: {problem.text}")
        self.slug, self.problem = problem.slug, problem
        self.exit_code = 4 if problem.slug == "release-withdrawn" else 3

    def to_dict(self) -> dict[str, Any]:
        return self.problem.to_dict()


def _field_lines(fields: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in fields.items():
        if name == "errors" and isinstance(value, list):
            lines += [f"{'.'.join(map(str, error['loc'][1:]))}: {error['msg']}" for error in value]
        elif isinstance(value, dict):
            lines.append(
                f"{_words(name)}: " + ", ".join(f"{_words(k)} {_text(k, v)}" for k, v in value.items())
            )
        else:
            lines.append(f"{_words(name)}: {_text(name, value)}")
    return lines


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name == "cost":
        return f"{value / 1e9:.9f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
