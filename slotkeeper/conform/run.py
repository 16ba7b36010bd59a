"""The checks, carried out one by one against a server."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

import requests

from slotkeeper.conform.checks import CHECKS, Check
from slotkeeper.conform.gate import Gate
from slotkeeper.conform.stage import LeftOut, Served, Stage, Violated, until


class Ended(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a check ended, and why: what was seen, or why it was left out."""

    check: Check
    ended: Ended
    why: str = ""


def conform(
    served: Served, wanted: Callable[[Check], bool] = lambda _: True, host: str = "127.0.0.1"
) -> Iterator[Verdict]:
    """Put the server to the checks that are wanted, in their order.  Raises Unfit: it cannot be put to any."""
    look_at(served, host)
    for check in filter(wanted, CHECKS):
        yield judge(check, served, host)


def judge(check: Check, served: Served, host: str = "127.0.0.1") -> Verdict:
    """Carry out one check; afterwards the server is idle again."""
    try:
        with closing(Gate(host)) as gate:
            check.act(Stage(served, gate))
        until(served.is_idle, "an idle server, after the check,")
    except LeftOut as why:
        return Verdict(check, Ended.SKIPPED, str(why))
    except Violated as why:
        return Verdict(check, Ended.FAILED, str(why))
    except requests.RequestException as error:
        return Verdict(check, Ended.FAILED, f"the server could not be asked: {type(error).__name__}")
    except (KeyError, ValueError, TypeError) as error:
        return Verdict(check, Ended.FAILED, f"an answer is not as described: {type(error).__name__}: {error}")
    return Verdict(check, Ended.PASSED)


class Unfit(Exception):
    """Why a server cannot be put to the protocol at all."""


def look_at(served: Served, host: str = "127.0.0.1") -> None:
    """Raises Unfit unless the server is there, is idle, and wraps the model that waits at gates."""
    try:
        if not served.is_idle():
            raise Unfit("it is not idle: /health says so")
        if served.slots < 1:
            raise Unfit("it has no slots: /health says so")
        served.mode = served.mode or _mode_of(served)
        with closing(Gate(host)) as gate:
            Stage(served, gate).begin().finish()
    except requests.RequestException as error:
        raise Unfit(f"{served.url} cannot be asked: {type(error).__name__}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise Unfit(f"its /health, or its first answer, is not as described: {type(error).__name__}: {error}") from None
    except Violated as why:
        raise Unfit(f"{why}. It must wrap the model that slotkeeper/serve/gated.py describes") from None


def _mode_of(served: Served) -> str:
    said = served.dispatch({"prompt": "a cat"}).json()
    served.outcome_of(said)
    return "async" if "job_id" in said and "result" not in said else "sync"
