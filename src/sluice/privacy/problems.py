"""What can be wrong with a plan, an event or a target, each with a name and a way out."""

from typing import ClassVar


class Problem(Exception):
    """A refusal. The class has a slug and a title; the instance says what was wrong and what to do."""

    slug: ClassVar[str] = "problem"
    title: ClassVar[str] = "The request cannot be served"

    def __init__(self, detail: str, **fields: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields

    def to_dict(self) -> dict[str, object]:
        return {"slug": self.slug, "title": self.title, "detail": self.detail, **self.fields}


class InvalidEvent(Problem):
    slug = "invalid-event"
    title = "The event does not describe a mechanism"


class UnknownEvent(Problem):
    slug = "unknown-event"
    title = "The event is of a kind, version or shape that is not known here"


class InvalidPlan(Problem):
    slug = "invalid-plan"
    title = "The plan cannot be trained as written"


class NotCalibrated(Problem):
    slug = "not-calibrated"
    title = "The plan still lacks a number that decides its cost"


class InvalidTarget(Problem):
    slug = "invalid-target"
    title = "The privacy target is out of range"


class TargetOutOfReach(Problem):
    slug = "target-out-of-reach"
    title = "No setting of this plan meets the target"


class InvalidAccount(Problem):
    slug = "invalid-account"
    title = "The account has no room at this order"


class TooCostlyToAccount(Problem):
    slug = "too-costly-to-account"
    title = "The event cannot be accounted for within limits"


class EvaluationsDisagree(Problem):
    slug = "evaluations-disagree"
    title = "Two independent evaluations of one cost differ"
