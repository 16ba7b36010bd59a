"""The checks, carried out one by one against a server."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

import requests

from slotkeeper.conform.check_context import CheckContext, ProtocolViolation, ServerUnderTest, Skipped, wait_until
from slotkeeper.conform.gate import Gate
from slotkeeper.conform.protocol_checks import CHECKS, Check


class CheckStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How a check ended, and why: what was seen, or why it was left out."""

    check: Check
    ended: CheckStatus
    why: str = ""


def conform(
    served: ServerUnderTest, wanted: Callable[[Check], bool] = lambda _: True, host: str = "127.0.0.1"
) -> Iterator[CheckResult]:
    """Put the server to the checks that are wanted, in their order.  Raises Unfit: it cannot be put to any."""
    check_preconditions(served, host)
    for check in filter(wanted, CHECKS):
        yield run_check(check, served, host)


def run_check(check: Check, served: ServerUnderTest, host: str = "127.0.0.1") -> CheckResult:
    """Carry out one check; afterwards the server is idle again."""
    try:
        with closing(Gate(host)) as gate:
            check.act(CheckContext(served, gate))
        wait_until(served.is_idle, "an idle server, after the check,")
    except Skipped as why:
        return CheckResult(check, CheckStatus.SKIPPED, str(why))
    except ProtocolViolation as why:
        return CheckResult(check, CheckStatus.FAILED, str(why))
    except requests.RequestException as error:
        return CheckResult(check, CheckStatus.FAILED, f"the server could not be asked: {type(error).__name__}")
    except (KeyError, ValueError, TypeError) as error:
        return CheckResult(check, CheckStatus.FAILED, f"an answer is not as described: {type(error).__name__}: {error}")
    return CheckResult(check, CheckStatus.PASSED)


class CannotTest(Exception):
    """Why a server cannot be put to the protocol at all."""


def check_preconditions(served: ServerUnderTest, host: str = "127.0.0.1") -> None:
    """Raises Unfit unless the server is there, is idle, and wraps the model that waits at gates."""
    try:
        if not served.is_idle():
            raise CannotTest("it is not idle: /health says so")
        if served.slots < 1:
            raise CannotTest("it has no slots: /health says so")
        served.mode = served.mode or _mode_of(served)
        with closing(Gate(host)) as gate:
            CheckContext(served, gate).begin().finish()
    except requests.RequestException as error:
        raise CannotTest(f"{served.url} cannot be asked: {type(error).__name__}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise CannotTest(
            f"its /health, or its first answer, is not as described: {type(error).__name__}: {error}"
        ) from None
    except ProtocolViolation as why:
        raise CannotTest(f"{why}. It must wrap the model that slotkeeper/serve/gated.py describes") from None


def _mode_of(served: ServerUnderTest) -> str:
    said = served.dispatch({"prompt": "a cat"}).json()
    served.outcome_of(said)
    return "async" if "job_id" in said and "result" not in said else "sync"
