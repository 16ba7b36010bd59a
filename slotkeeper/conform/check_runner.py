"""The runner of the checks: it runs them against a server, one after the other."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

import requests

from slotkeeper.conform.check_context import (
    CheckContext,
    ProtocolViolation,
    ServerUnderTest,
    Skipped,
    is_stream,
    wait_until,
)
from slotkeeper.conform.gate import Gate
from slotkeeper.conform.protocol_checks import CHECKS, Check


class CheckStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.  `why`: what the check observed if it failed, or why it was skipped."""

    check: Check
    ended: CheckStatus
    why: str = ""


def conform(
    served: ServerUnderTest, wanted: Callable[[Check], bool] = lambda _: True, host: str = "127.0.0.1"
) -> Iterator[CheckResult]:
    """Run the wanted checks in order, and yield their results.  Raises CannotTest if the server is not testable."""
    check_preconditions(served, host)
    for check in filter(wanted, CHECKS):
        yield run_check(check, served, host)


def run_check(check: Check, served: ServerUnderTest, host: str = "127.0.0.1") -> CheckResult:
    """Run one check and return its result.  The check fails also if the server does not become idle again."""
    try:
        with closing(Gate(host)) as gate:
            check.act(CheckContext(served, gate))
        wait_until(served.is_idle, "an idle server, after the check,")
    except Skipped as error:
        return CheckResult(check, CheckStatus.SKIPPED, str(error))
    except ProtocolViolation as error:
        return CheckResult(check, CheckStatus.FAILED, str(error))
    except requests.RequestException as error:
        return CheckResult(check, CheckStatus.FAILED, f"the server could not be asked: {type(error).__name__}")
    except (KeyError, ValueError, TypeError) as error:
        return CheckResult(check, CheckStatus.FAILED, f"an answer is not as described: {type(error).__name__}: {error}")
    return CheckResult(check, CheckStatus.PASSED)


class CannotTest(Exception):
    """The server cannot be tested at all; the message has the reason."""


def check_preconditions(served: ServerUnderTest, host: str = "127.0.0.1") -> None:
    """Raise CannotTest unless the server responds, is idle, and serves the test model, which waits at gates.

    Detects `served.mode` if it is not set.
    """
    try:
        if not served.is_idle():
            raise CannotTest("it is not idle: /health says so")
        if served.slots < 1:
            raise CannotTest("it has no slots: /health says so")
        served.mode = served.mode or _detect_mode(served)
        with closing(Gate(host)) as gate:
            CheckContext(served, gate).begin().finish()
    except requests.RequestException as error:
        raise CannotTest(f"{served.url} cannot be asked: {type(error).__name__}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise CannotTest(
            f"its /health, or its first answer, is not as described: {type(error).__name__}: {error}"
        ) from None
    except ProtocolViolation as error:
        raise CannotTest(f"{error}. It must wrap the model that slotkeeper/serve/gated.py describes") from None


def _detect_mode(served: ServerUnderTest) -> str:
    answer = served.dispatch({"prompt": "a cat"})
    if is_stream(answer):
        return "stream"
    body = answer.json()
    served.outcome_of(body)  # the server must be idle again
    return "async" if "job_id" in body and "result" not in body else "sync"
