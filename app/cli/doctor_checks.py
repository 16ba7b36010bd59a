"""The checks of `slotkeeper doctor`: one for each part, all at the same time, each with a time limit.

A check yields findings.  An exception and a timeout become findings too, so that doctor works when everything is down.
"""

import os
import shutil
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from queue import Empty, Queue
from typing import Any

from app.cli.findings import Finding
from app.cli.settings_checks import has_invalid_setting, settings

TIME_LIMIT_S = 10.0
_GIB = 1 << 30
_SLOW_S, _TOO_SLOW_S = 0.1, 1.0
_SKEW_MS = 2_000
_RECENT_STEP_MS = 24 * 3600 * 1000
_OLDEST_REDIS = (7, 0)
_SERVERS_WITHIN_S, _MOST_SERVERS = 6.0, 10
_TRIES = 3


Check = Callable[[], Iterator[Finding]]

# The modules that the checks import, and those that Celery and SQLAlchemy import on first use.
_MODULES = (
    "encodings.idna",  # imported by the first lookup of a host name
    "app.config",
    "celeryconfig",
    "slotkeeper.config",
    "routing.queries.process_list",
    "routing.queries.server_status",
    "slotkeeper.jobs.tables",
    "app.up.roles",
    "migrations.migrate",
    "slotkeeper.redis.connections",
    "tasks.extensions.transport",
    "tasks.celery_app",
    "tasks.config",
    "tasks.server_adapters",
    "tasks.security.keyring",
    "tasks.liveness",
    "tasks.services",
    "routing.maintenance.quarantined_slots",
    "routing.maintenance.task_runs",
)


def load() -> None:
    """Import what the checks use, in one thread: first imports in several threads at once fail at random."""
    for name in _MODULES:
        with suppress(Exception):  # The check that uses it reports it.
            import_module(name)
    with suppress(Exception):
        from tasks.celery_app import celery

        celery.connection_for_write().release()
    with suppress(Exception):
        from tasks.services import catalog, processes, scripts

        _ = catalog(), processes(), scripts()


def run_checks(checks: dict[str, Check], time_limit_s: float = TIME_LIMIT_S) -> Iterator[Finding]:
    """Run all checks at once and yield their findings as they arrive.

    A check that takes longer than `time_limit_s` seconds yields a finding of level "fail".  If a setting is wrong, only
    the settings are checked, because every other check reads them.
    """
    if has_invalid_setting():
        yield from _run_check("settings", settings)
        yield Finding("others", "fail", "The other parts were not checked, because their settings cannot be read.")
        return
    load()
    yield from _run_in_parallel(checks, time_limit_s)


def _run_in_parallel(checks: dict[str, Check], time_limit_s: float) -> Iterator[Finding]:
    results: Queue[tuple[str, list[Finding]]] = Queue()
    for part, check in checks.items():
        threading.Thread(
            target=lambda part=part, check=check: results.put((part, _run_check(part, check))), daemon=True
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


def _run_check(part: str, check: Check) -> list[Finding]:
    """Run one check and return its findings.  An exception becomes a finding."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except Exception as error:
        findings.append(_finding_of(part, error))
    return findings


def _finding_of(part: str, error: Exception) -> Finding:
    """Return the finding of a check that raised an exception.

    If another part caused the error, the finding is a warning, because the check of that part reports the fault.
    """
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import RedisError
    from sqlalchemy.exc import SQLAlchemyError

    from routing.config import RoutingSettings
    from slotkeeper.errors import DatabaseUnavailable, SlotkeeperError
    from tasks.config import TaskSettings

    if isinstance(error, DatabaseUnavailable | SQLAlchemyError) and part != "database":
        return Finding(part, "warn", "Not checked: that needs the database, which cannot be used.")
    if isinstance(error, RedisError) and part not in ("redis", "broker"):
        return Finding(part, "warn", "Not checked: that needs Redis, which does not answer.")
    is_embedded = part in ("redis", "broker") and not RoutingSettings().redis_url
    if part == "broker" and is_embedded and not TaskSettings().broker_url:
        return Finding(part, "warn", "Not checked: the broker is the same Redis.")
    text = error.detail if isinstance(error, SlotkeeperError) else f"{type(error).__name__}: {error}"
    message = " ".join(text.split())[:300]
    if isinstance(error, RedisConnectionError) and is_embedded:
        remedy = "Slotkeeper does not run here: start it with `slotkeeper up`, or set SLOTKEEPER_REDIS_URL."
    elif "SLOTKEEPER_" in message:  # The message says what to do.
        remedy = ""
    else:
        remedy = "Check that it runs and that the settings have its address."
    return Finding(part, "fail", message, remedy)


def all_checks() -> dict[str, Check]:
    """Return every check by the name of its part."""
    return {
        "settings": settings,
        "database": database,
        "folder": folder,
        "disk": disk,
        "clocks": clocks,
        "redis": redis,
        "broker": broker,
        "servers": servers,
        "workers": workers,
        "maintenance": maintenance,
        "logs": logs,
        "secret": secret,
        "port": port,
    }


# -- the checks ------------------------------------------------------------------------------------------------


def database() -> Iterator[Finding]:
    """Check that the database answers, has this release's schema, and commits a write fast enough."""
    from migrations.migrate import check
    from slotkeeper.db.driver_errors import explain_refusal
    from slotkeeper.errors import DatabaseUnavailable
    from tasks.services import database as open_database

    job_store = open_database()
    if (problem := check(job_store.url)) is not None:
        yield Finding("database", "fail", problem)  # The message says what to do.
        return

    try:
        took_s = _measure_fastest_s(lambda: job_store.check_writable(durable=True))
    except DatabaseUnavailable as error:
        if (refusal := explain_refusal(error)) is None:
            raise
        remedy = "Until then submits are refused, and workers keep the results of their runs."
        yield Finding("database", "fail", f"It answers and takes no writes: {refusal}.", remedy)
        return
    message = f"It answers, its schema is right, and a durable write takes {took_s * 1000:.0f} ms."
    level = "fail" if took_s > _TOO_SLOW_S else "warn" if took_s > _SLOW_S else "ok"
    remedy = "" if level == "ok" else "Each submit waits for such a write: check what else uses the disk or the server."
    yield Finding("database", level, message, remedy)


def _measure_fastest_s(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few calls; the first fast one ends the measurement."""
    # One slow call may be due to other work on this host.
    best_s = float("inf")
    for _ in range(_TRIES):
        began_s = time.monotonic()
        action()
        best_s = min(best_s, time.monotonic() - began_s)
        if best_s <= _SLOW_S:
            break
    return best_s


def folder() -> Iterator[Finding]:
    """Check that the state folder exists, is private, and can be written to."""
    from routing.config import RoutingSettings
    from slotkeeper.config import StorageSettings
    from slotkeeper.state_folder import is_private_folder
    from tasks.config import TaskSettings

    storage = StorageSettings()
    home = storage.home.absolute()
    if storage.database_url and RoutingSettings().redis_url and TaskSettings().secret:
        yield Finding("folder", "ok", "No state folder is needed: database, Redis and secret are elsewhere.")
    elif not home.is_dir():
        remedy = "Set SLOTKEEPER_HOME to the state folder of this installation; for a new one run `slotkeeper migrate`."
        yield Finding("folder", "fail", f"There is no state folder {home}.", remedy)
    elif not os.access(home, os.W_OK | os.X_OK):
        remedy = "Run Slotkeeper as the user who owns it, or give it to this user with chown."
        yield Finding("folder", "fail", f"This user cannot write to the state folder {home}.", remedy)
    elif not is_private_folder(home):
        remedy = f"Slotkeeper keeps secrets there: chmod 700 {home}, and let its user own it."
        yield Finding("folder", "fail", f"Other users can enter the state folder {home}.", remedy)
    else:
        yield Finding("folder", "ok", f"The state folder {home} is private, and can be written to.")


def disk() -> Iterator[Finding]:
    """Check that the disk with the state folder has free space."""
    from slotkeeper.config import StorageSettings

    home = StorageSettings().home.absolute()
    folder = next(path for path in (home, *home.parents) if path.exists())
    usage = shutil.disk_usage(folder)
    message = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB are free at {folder}."
    if usage.free < _GIB // 10:
        yield Finding("disk", "fail", message, "Free space now: with a full disk every submit fails.")
    elif usage.free < _GIB or usage.free < usage.total // 50:
        yield Finding("disk", "warn", message, "Free space, or lower SLOTKEEPER_RETENTION_S.")
    else:
        yield Finding("disk", "ok", message)


def clocks() -> Iterator[Finding]:
    """Check that this host has the database's time, and that the time was not set lately."""
    from slotkeeper.clock import MAX_SKEW_MS, clock
    from tasks.services import catalog

    catalog().get_version()  # The request measures the offset of the clock.
    problems = 0
    if abs(clock.skew_ms) > MAX_SKEW_MS:
        problems += 1
        message = f"This host's clock is {clock.skew_ms / 1000:+.1f} s from the database's."
        remedy = "Set both by NTP.  With SQLite, Slotkeeper follows a clock that was set a minute later."
        yield Finding("clocks", "warn", message, remedy)
    for step in clock.steps:
        if clock.now_ms() - step.at_ms < _RECENT_STEP_MS:
            problems += 1
            at = datetime.fromtimestamp(step.at_ms / 1000).astimezone().isoformat(" ", "seconds")
            message = f"The clock was set by {step.by_ms / 1000:+.1f} s, and Slotkeeper has followed it at {at}."
            remedy = "Start Slotkeeper only when the host has the time: after time-sync.target, with systemd."
            yield Finding("clocks", "warn", message, remedy)
    if not problems:
        yield Finding("clocks", "ok", "This host has the database's time.")


def redis() -> Iterator[Finding]:
    """Check that Redis answers, is new enough, keeps its keys, and has the same time as this host."""
    from slotkeeper.redis.connections import explain_no_persistence, explain_refused_writes, explain_unsuitable
    from tasks.services import scripts

    client, problems = scripts().redis, 0
    if (advice := explain_refused_writes(client, scripts().keys.write_check())) is not None:
        message, _, remedy = advice.partition(": ")
        yield Finding("redis", "fail", f"{message}.", f"{remedy[:1].upper()}{remedy[1:]}")
        return
    info = client.info("server")
    version = str(info.get("valkey_version") or info.get("redis_version"))
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
        problems += 1
        yield Finding("redis", "fail", f"It is version {version}.", "Slotkeeper needs Redis 7.0 or Valkey.")
    for check, level in ((explain_unsuitable, "fail"), (explain_no_persistence, "warn")):
        if (advice := check(client)) is not None:
            problems += 1
            message, _, remedy = advice.partition(": ")
            yield Finding("redis", level, f"{message}.", f"{remedy[:1].upper()}{remedy[1:]}")
    seconds, micros = client.time()
    offset_ms = abs(seconds * 1000 + micros / 1000 - time.time() * 1000)
    if offset_ms > _SKEW_MS:
        problems += 1
        message = f"The clocks of Redis and of this host differ by {offset_ms / 1000:.1f} s."
        yield Finding(
            "redis", "warn", message, "Set both by NTP; leases use the clock of Redis, logs that of the host."
        )
    if not problems:
        libraries = len(client.execute_command("FUNCTION", "LIST"))
        yield Finding("redis", "ok", f"It answers (version {version}, {libraries} function libraries are loaded).")


def broker() -> Iterator[Finding]:
    """Check that the broker answers, and that no worker has died while it held messages."""
    from tasks.celery_app import celery
    from tasks.extensions.transport import count_unacknowledged

    began_s = time.monotonic()
    with celery.connection_for_write(connect_timeout=3) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
        kind = connection.transport.driver_type
        channel: Any = connection.default_channel
        unacknowledged = count_unacknowledged(channel.client) if kind == "redis" else 0
    if unacknowledged:
        message = f"{unacknowledged} messages were taken by workers that have not acknowledged them, and may have died."
        yield Finding(
            "broker", "warn", message, "The broker delivers them again within a minute; check that workers run."
        )
    yield Finding("broker", "ok", f"It answers ({kind}) in {(time.monotonic() - began_s) * 1000:.0f} ms.")


def workers() -> Iterator[Finding]:
    """Check that workers are alive, run canaries, and that all processes have the same release."""
    from tasks.liveness import worker_problem
    from tasks.services import processes

    alive = [process for process in processes().read_all() if process.is_alive]
    alive_workers = [process for process in alive if process.role == "worker"]
    problems = [problem for worker in alive_workers if (problem := worker_problem(worker)) is not None]
    versions = sorted({str(process.facts.get("version")) for process in alive})
    if not alive_workers:
        message = "No worker reports that it is alive: the API accepts jobs, but none starts."
        yield Finding("workers", "fail", message, "Start one: python -m tasks worker, as in the Procfile.")
    for problem in problems:
        yield Finding(
            "workers", "warn", problem, "Read its log; check that it reaches the broker, Redis and the database."
        )
    if len(versions) > 1:
        message = f"Processes of releases {', '.join(versions)} run at the same time."
        yield Finding("workers", "warn", message, "This is normal during an update; otherwise restart the older ones.")
    if alive_workers and not problems:
        runs = sum(int(worker.facts.get("runs") or 0) for worker in alive_workers)
        yield Finding("workers", "ok", f"Alive: {len(alive_workers)}, with {runs} jobs in progress.")


def servers() -> Iterator[Finding]:
    """Check that each registered server answers its health check, and that jobs can use its slots."""
    from tasks.services import catalog

    snapshot = catalog().read()
    if not snapshot.servers:
        remedy = "Register one: `slotkeeper servers register MODEL NAME URL --slots 1`."
        yield Finding(
            "servers", "warn", "No inference server is registered: the API accepts jobs, but none starts.", remedy
        )
        return
    online = [server for server in snapshot.servers.values() if server.state == "online"]
    checks = {server.name: _server_check(server, snapshot) for server in online}
    problems = [
        replace(finding, part="servers", message=f"{finding.part}: {finding.message}")
        for finding in _run_in_parallel(checks, _SERVERS_WITHIN_S)
    ]
    problems += _find_unusable_slots(snapshot)
    yield from problems
    stopped = len(snapshot.servers) - len(online)
    if not problems:
        slots = sum(server.slots for server in online)
        others = f"; {stopped} are stopped by an operator" if stopped else ""
        yield Finding("servers", "ok", f"Answering: {len(online)}, with {slots} slots{others}.")


def _server_check(server: Any, snapshot: Any) -> Check:
    """Return the check of one server, which yields only problems."""

    def check() -> Iterator[Finding]:
        from tasks.server_adapters import health_adapter
        from tasks.servers import HealthKind, ServerSession, call_server

        adapter = health_adapter(snapshot, server)
        if adapter is None:
            if server.endpoints:
                message = "Its description is invalid, so it gets no job."
                yield Finding(server.name, "fail", message, f"See `slotkeeper servers check {server.name}`.")
            return
        health = call_server(adapter, ServerSession.health)
        remedy = f"It is registered at {adapter.endpoint}: check that it runs and that this host can reach it."
        if health.kind is HealthKind.DOWN and health.answered:
            message = f"Its health check says that it cannot run jobs ({health.message})."
            yield Finding(server.name, "fail", message, "Read its log; restart it after you have removed the cause.")
        elif health.is_silent:
            message = "It does not answer its health check in time; it gets jobs only if no other server can run them."
            yield Finding(server.name, "warn", message, "If it is not busy with a job, restart it.")
        elif health.kind is HealthKind.DOWN:
            yield Finding(server.name, "fail", f"It does not answer its health check ({health.message}).", remedy)
        elif health.kind in (HealthKind.FOREIGN, HealthKind.GARBAGE):
            yield Finding(server.name, "warn", f"Its health check has an unknown form ({health.message}).", remedy)

    return check


def _find_unusable_slots(snapshot: Any) -> Iterator[Finding]:
    """Yield a finding for each server with slots that no job can use, with the reason."""
    from routing.config import RoutingSettings
    from routing.queries.server_status import read_servers_of_fleets
    from routing.queue.slots import Slots
    from slotkeeper.jobs import quarantine
    from tasks.services import database, scripts

    quarantined = Counter(row.server for row in quarantine.list_all(database()))
    fleets = read_servers_of_fleets(Slots(scripts(), RoutingSettings()), sorted(snapshot.fleets()))
    statuses = {name: status for fleet in fleets.values() for name, status in fleet.items()}
    for server in snapshot.servers.values():
        remedy = f"See `slotkeeper servers check {server.name}`."
        status = statuses.get(server.name)
        reasons = []
        if status is not None and status.breaker != "closed":
            reasons.append(f"its breaker is {status.breaker.replace('_', ' ')}")
        if status is not None and status.cooling:
            reasons.append(f"{status.cooling} of its {server.slots} slots are in cooldown")
        if quarantined[server.name]:
            reasons.append(f"{quarantined[server.name]} of its {server.slots} slots are quarantined")
        if reasons:
            yield Finding("servers", "warn", f"{server.name}: {', '.join(reasons)}.", remedy)


def maintenance() -> Iterator[Finding]:
    """Check that maintenance runs and that each of its tasks has ended recently."""
    from routing.maintenance import task_runs
    from tasks.periods import PERIODS_S
    from tasks.services import scripts

    remedy = "Check that beat and a worker of the queue `maintenance` run, and read their logs."
    if task_runs.has_sweep_stopped(scripts()):
        message = f"The task sweep has not run for {task_runs.SWEEP_MARK_TTL_S} s: deadlines and retries are late."
        yield Finding("maintenance", "fail", message, remedy)
        return
    runs = task_runs.read_task_runs(scripts())
    if late := task_runs.find_late_tasks(runs, PERIODS_S):
        listed = ", ".join(f"{name} ({age_s:.0f} s ago)" for name, age_s in sorted(late.items()))
        yield Finding("maintenance", "warn", f"The last run of these tasks ended too long ago: {listed}.", remedy)
    else:
        yield Finding("maintenance", "ok", f"It runs; {len(runs)} tasks have run on time.")


def logs() -> Iterator[Finding]:
    """Check that no process has dropped log lines because its standard error is read too slowly."""
    from tasks.services import processes

    alive = [process for process in processes().read_all() if process.is_alive]
    dropped = {process.name: process.facts.get("log_lines_dropped", 0) for process in alive}
    if behind := {name: lines for name, lines in dropped.items() if lines}:
        listed = ", ".join(f"{name} ({lines} lines)" for name, lines in sorted(behind.items()))
        message = f"These processes dropped log lines, because their standard error is read too slowly: {listed}."
        yield Finding("logs", "warn", message, "Check which program reads it, and whether its disk is full or slow.")
    else:
        yield Finding("logs", "ok", "No process has dropped a log line.")


def secret() -> Iterator[Finding]:
    """Check that the secret exists, only its owner can read it, and all processes have the same one."""
    from slotkeeper.config import StorageSettings
    from tasks.config import TaskSettings

    if TaskSettings().secret:
        yield from _compare_secrets("SLOTKEEPER_SECRET sets it")
        return
    path = StorageSettings().home.absolute() / "secret"
    if not path.exists():
        message = f"{path} does not exist yet; the first process creates it."
        remedy = "With several hosts, set the same SLOTKEEPER_SECRET on all of them."
        yield Finding("secret", "warn", message, remedy)
        return
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        message = f"Other users can read {path}, or it belongs to another user."
        yield Finding("secret", "fail", message, f"Run chown to the user who runs Slotkeeper, and chmod 600 {path}.")
        return
    yield from _compare_secrets("The file exists, and only its owner can read it")


def _compare_secrets(source: str) -> Iterator[Finding]:
    """Check that all processes have the secret of this host.

    source: the message if they have, without its full stop.
    """
    from redis.exceptions import RedisError

    from tasks.liveness import processes_with_other_secret
    from tasks.security.keyring import fingerprints
    from tasks.services import processes, scripts

    try:
        stored: Any = scripts().redis.get(scripts().keys.secret())
        others = processes_with_other_secret(processes().read_all())
    except RedisError:
        yield Finding("secret", "ok", f"{source}.  Redis does not answer, so other hosts could not be compared.")
        return
    remedy = "Set the same SLOTKEEPER_SECRET on all hosts, and the previous one as SLOTKEEPER_FORMER_SECRET."
    if others:
        names = ", ".join(process.name for process in others)
        yield Finding("secret", "fail", f"These processes have another secret than this host: {names}.", remedy)
    elif stored is not None and stored.decode() not in fingerprints():
        yield Finding("secret", "fail", "The processes that started before have another secret than this host.", remedy)
    else:
        yield Finding("secret", "ok", f"{source}.")


def port() -> Iterator[Finding]:
    """Check that a process listens at the API's address, unless the API runs on other hosts."""
    from redis.exceptions import RedisError

    from app.config import AppSettings
    from tasks.services import processes

    api, hosts = AppSettings(), set[str]()
    with suppress(RedisError):
        hosts = {process.host for process in processes().read_all() if process.role == "web"}
    if hosts and socket.gethostname() not in hosts:
        yield Finding("port", "ok", f"The API runs on {', '.join(sorted(hosts))}.")
        return
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(api.host, api.host)
    try:
        with socket.create_connection((host, api.port), 2):
            yield Finding("port", "ok", f"A process listens on the API's port {api.port}.")
    except OSError:
        message = f"No process listens on {host}:{api.port}, the API's port."
        yield Finding("port", "warn", message, "Start `python -m app.server`, or set SLOTKEEPER_PORT to its port.")
