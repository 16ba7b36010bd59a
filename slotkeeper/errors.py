"""Broken promises and refusals, each with a stable code, the facts, and the remedy.

An expected "no" (a lost lease, an empty queue) is a value, not one of these.
"""

from typing import Any


class SlotkeeperError(Exception):
    """Base of every error that a caller may be shown.  The docstring of a subclass is its title."""

    code = "error"
    retry_after_s: float | None = None

    def __init__(self, detail: str, **facts: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.facts = facts


class InvalidSetting(SlotkeeperError):
    """A setting has a value with which this process does not start."""

    code = "invalid_setting"


class Unauthorized(SlotkeeperError):
    """No valid key."""

    code = "unauthorized"


class ScopeMissing(SlotkeeperError):
    """Not allowed."""

    code = "scope_missing"


class InvalidRequest(SlotkeeperError):
    """The request cannot be accepted as it is."""

    code = "invalid_job"  # the word that clients have always had for it

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail, field=field)
        self.field = field


class InvalidJob(InvalidRequest):
    """The job cannot be accepted as it is."""


class UnknownModel(InvalidJob):
    """No such model is registered."""

    code = "unknown_model"


class JobNotFound(SlotkeeperError):
    """There is no such job."""

    code = "job_not_found"


class NotFound(SlotkeeperError):
    """The requested object does not exist."""

    code = "not_found"


class Conflict(SlotkeeperError):
    """The current state does not allow this."""

    code = "conflict"


class IdempotencyConflict(Conflict):
    """This Idempotency-Key was used for another request."""

    code = "idempotency_conflict"


class TooManyRequests(SlotkeeperError):
    """The request exceeds a limit."""

    code = "too_many_requests"
    rates: tuple[Any, ...] = ()
    """What is left of the sender's rates, see routing/admission/submit_limits.py: LimitStatus."""

    def __init__(self, detail: str, retry_after_s: float, **facts: object) -> None:
        super().__init__(detail, **facts)
        self.retry_after_s = retry_after_s


class InsufficientCredits(SlotkeeperError):
    """The tenant has too few credits."""

    code = "insufficient_credits"


class DatabaseUnavailable(SlotkeeperError):
    """The database cannot be reached; nothing was stored."""

    code = "record_unavailable"
    retry_after_s = 2.0


class ClockWasSet(DatabaseUnavailable):
    """The clock was set since the times of this write were taken; nothing was stored."""

    code = "clock_was_set"


class CommitUnknown(DatabaseUnavailable):
    """The database did not answer; whether it stored the request is not known."""

    code = "record_uncertain"
