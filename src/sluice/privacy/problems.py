"""What can be wrong with an event, a plan, a target or an account."""

from sluice.problems import Problem as BaseProblem


class Problem(BaseProblem):
    """Refused by the arithmetic, or by the verification of a release."""

    status = 422


class InvalidEvent(Problem):
    slug, title = "invalid-event", "Invalid event"


class UnknownEvent(Problem):
    slug, title = "unknown-event", "Unknown event kind, version or field"


class InvalidPlan(Problem):
    slug, title = "invalid-plan", "Invalid plan"


class NotCalibrated(Problem):
    slug, title = "not-calibrated", "The plan lacks its noise or its steps"


class InvalidTarget(Problem):
    slug, title = "invalid-target", "Invalid privacy target"


class TargetOutOfReach(Problem):
    slug, title = "target-out-of-reach", "No noise or number of steps meets the target"


class InvalidAccount(Problem):
    slug, title = "invalid-account", "The account has no capacity at this order"


class TooCostlyToAccount(Problem):
    slug, title = "too-costly-to-account", "Accounting exceeds the time or memory limit"


class EvaluationsDisagree(Problem):
    slug, title = "evaluations-disagree", "Two independent evaluations of a cost disagree"
