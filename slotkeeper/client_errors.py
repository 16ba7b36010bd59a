"""Errors of the REST client, apart from it: a command that catches them need not load an HTTP library."""

from collections.abc import Mapping
from typing import Any

_NO_KEY = "set SLOTKEEPER_KEY to a tenant's key; `slotkeeper tenants add NAME` on the API's machine makes one."


class ClientError(Exception):
    """A request failed.  `message` says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ApiUnreachable(ClientError):
    """Nothing answers at the address, so the outcome of the request is not known."""


class OutcomeUnknown(ClientError):
    """The API was away for too long while the client waited for a job, so the job's end is not known."""


class ApiError(ClientError):
    """The API refused the request, or failed.

    status: HTTP status.  code: the API's stable word, such as "unknown_model"; "" if something else answered.
    field: the field of the request that is wrong, or None.  remedy: the fault, and how to correct it.
    retry_after_s: seconds after which the API may accept the request, or None.  problem: the whole answer.
    """

    def __init__(self, status: int, problem: Mapping[str, Any], retry_after_s: float | None) -> None:
        self.status, self.problem, self.retry_after_s = status, problem, retry_after_s
        self.code, self.field = str(problem.get("code") or ""), problem.get("field")
        title = str(problem.get("title") or f"HTTP {status}")
        self.remedy = _NO_KEY if status == 401 else str(problem.get("detail") or "")
        super().__init__(f"{title}: {self.remedy}" if self.remedy else title)
