"""Runs the checks of `slotkeeper doctor`: all at the same time, each with a time limit.

A check yields findings.  An exception and a timeout become findings too, so that doctor works when everything is down.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from queue import Empty, Queue

from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy.exc import SQLAlchemyError

from app.cli.findings import Check, Finding
from app.cli.settings_checks import has_invalid_setting, settings
from routing.config import RoutingSettings
from slotkeeper.errors import DatabaseUnavailable, SlotkeeperError
from tasks.config import TaskSettings

_TIME_LIMIT_S = 10.0


def run_all_checks() -> Iterator[Finding]:
    """Run all checks at once and yield their findings as they arrive.

    If a setting is wrong, only the settings are checked, because every other check reads them.
    """
    if has_invalid_setting():
        yield from run_check("settings", settings)
        yield Finding("others", "fail", "The other parts were not checked, because their settings cannot be read.")
        return
    from app.cli import doctor_checks  # Celery reads its settings as soon as it is imported.

    doctor_checks.prepare()
    yield from run_in_parallel(doctor_checks.CHECKS)


def run_in_parallel(checks: Mapping[str, Check], time_limit_s: float = _TIME_LIMIT_S) -> Iterator[Finding]:
    """Run checks at once; one that takes longer than the limit yields a finding of level "fail"."""
    results: Queue[tuple[str, list[Finding]]] = Queue()
    for part, check in checks.items():
        threading.Thread(
            target=lambda part=part, check=check: results.put((part, run_check(part, check))), daemon=True
        ).start()
    unfinished, until_s = list(checks), time.monotonic() + time_limit_s
    while unfinished:
        try:
            part, findings = results.get(timeout=max(until_s - time.monotonic(), 0.001))
        except Empty:
            break
        unfinished.remove(part)
        yield from findings
    for part in unfinished:
        message = f"The check got no answer within {time_limit_s:g} s."
        yield Finding(part, "fail", message, "Check that it runs and that this host can reach it, then try again.")


def run_check(part: str, check: Check) -> list[Finding]:
    """Run one check and return its findings.  An exception becomes a finding."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as error:
        findings.append(_finding_of_error(part, error))
    return findings


def _finding_of_error(part: str, error: Exception) -> Finding:
    """Return the finding of a check that raised an exception.

    If another part caused the error, the finding is a warning, because the check of that part reports the fault.
    """
    if isinstance(error, DatabaseUnavailable | SQLAlchemyError) and part != "database":
        return Finding(part, "warn", "Not checked: that needs the database, which cannot be used.")
    if isinstance(error, RedisError) and part not in ("redis", "broker"):
        return Finding(part, "warn", "Not checked: that needs Redis, which does not answer.")
    is_embedded = part in ("redis", "broker") and not RoutingSettings().redis_url
    if part == "broker" and is_embedded and not TaskSettings().broker_url:
        return Finding(part, "warn", "Not checked: the broker is the same Redis.")
    text = error.detail if isinstance(error, SlotkeeperError) else f"{type(error).__name__}: {error}"
    message = " ".join(text.split())[:300]
    if isinstance(error, AuthenticationError):
        remedy = "Another Redis listens there, or its password has changed: set SLOTKEEPER_REDIS_URL to the right one."
    elif isinstance(error, RedisConnectionError) and is_embedded:
        remedy = "Slotkeeper does not run here: start it with `slotkeeper up`, or set SLOTKEEPER_REDIS_URL."
    elif "SLOTKEEPER_" in message:  # The message says what to do.
        remedy = ""
    else:
        remedy = "Check that it runs and that the settings have its address."
    return Finding(part, "fail", message, remedy)
