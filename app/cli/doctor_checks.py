"""The checks of `slotkeeper doctor`: one for each part.

To add one, write its function, and add it to CHECKS; the help of `doctor` and docs/how-to name it.
"""

import asyncio
import encodings.idna  # noqa: F401  # imported by the first lookup of a host name
import os
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from http.client import NOT_FOUND
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from app.cli.findings import Check, Finding
from app.cli.output import api_url
from app.cli.settings_checks import settings
from app.up.valkey_server import OLDEST_VERSION
from migrations import migrate
from routing.config import RoutingSettings
from routing.maintenance import task_runs
from routing.queries.server_status import ServerStatus, read_servers_of_fleets
from routing.queue.presence import NodeState, Presence
from routing.queue.slots import Slots
from slotkeeper.clock import MAX_SKEW_MS, clock
from slotkeeper.config import StorageSettings
from slotkeeper.db.driver_errors import explain_refusal
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs import quarantine
from slotkeeper.redis.connections import explain_no_persistence, explain_refused_writes, explain_unsuitable
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import Server
from slotkeeper.state_folder import is_private_folder
from slotkeeper.urls import mask_url
from tasks import services
from tasks.celery_app import celery
from tasks.config import TaskSettings
from tasks.extensions.transport import count_unacknowledged
from tasks.gateway_ping import ping_node
from tasks.liveness import processes_with_other_secret, worker_problem
from tasks.periods import PERIODS_S
from tasks.security.keyring import fingerprints
from tasks.server_adapters import health_adapter
from tasks.servers import Health, HealthKind, HttpClient, ServerAdapter, ServerSession
from tasks.servers.session import run_with_http_client

_GIB = 1 << 30
_SLOW_S, _TOO_SLOW_S = 0.1, 1.0
_RECENT_STEP_MS = 24 * 3600 * 1000
_SERVERS_LIMIT_S, _GATEWAY_LIMIT_S = 6.0, 3.0
_TRIES = 3


def prepare() -> None:
    """Have Celery and SQLAlchemy import what they import on first use, which fails at random in several threads."""
    uses: list[Callable[[], object]] = [
        lambda: celery.connection_for_write().release(),
        services.catalog,
        services.processes,
        services.scripts,
    ]
    for use in uses:
        with suppress(Exception):  # The check that uses it reports it.
            use()


def database() -> Iterator[Finding]:
    """Check that the database answers, has this release's schema, and commits a write fast enough."""
    job_database = services.database()
    if (problem := migrate.check(job_database.url)) is not None:
        yield Finding("database", "fail", problem)  # The message says what to do.
        return

    try:
        took_s = _measure_fastest_s(lambda: job_database.check_writable(durable=True))
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
    storage = StorageSettings()
    home = storage.home.absolute()
    if storage.database_url and RoutingSettings().redis_url and TaskSettings().secret:
        message = "No state folder is needed: database, Redis and secret are elsewhere."
        if is_private_folder(home):
            yield Finding("folder", "ok", message)
        else:
            remedy = "Set SLOTKEEPER_HOME to a folder that only this user can enter (mkdir -m 700)."
            yield Finding("folder", "warn", f"{message}  But without one no worker's death can be proved.", remedy)
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
    services.catalog().get_version()  # The request measures the offset of the clock.
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
    client, problems = services.scripts().redis, 0
    if (advice := explain_refused_writes(client, services.scripts().keys.write_check())) is not None:
        message, _, remedy = advice.partition(": ")
        yield Finding("redis", "fail", f"{message}.", f"{remedy[:1].upper()}{remedy[1:]}")
        return
    info = client.info("server")
    version = str(info.get("valkey_version") or info.get("redis_version"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
        problems += 1
        yield Finding("redis", "fail", f"It is version {version}.", "Slotkeeper needs Redis 7.0 or Valkey.")
    for check, level in ((explain_unsuitable, "fail"), (explain_no_persistence, "warn")):
        if (advice := check(client)) is not None:
            problems += 1
            message, _, remedy = advice.partition(": ")
            yield Finding("redis", level, f"{message}.", f"{remedy[:1].upper()}{remedy[1:]}")
    seconds, micros = client.time()
    offset_ms = abs(seconds * 1000 + micros / 1000 - time.time() * 1000)
    if offset_ms > MAX_SKEW_MS:
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
    alive = [process for process in services.processes().read_all() if process.is_alive]
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
    """Check that each registered server answers its health check, and that jobs can use its slots.

    A node that is not connected is no problem: its owner may switch it off.
    """
    snapshot = services.catalog().read()
    if not snapshot.servers:
        remedy = "Register one: `slotkeeper servers register MODEL NAME URL --slots 1`."
        yield Finding(
            "servers", "warn", "No inference server is registered: the API accepts jobs, but none starts.", remedy
        )
        return
    fleets = read_servers_of_fleets(Slots(services.scripts(), RoutingSettings()), sorted(snapshot.fleets()))
    statuses = {name: status for fleet in fleets.values() for name, status in fleet.items()}
    absent = {name for name, status in statuses.items() if status.absent}
    online = [server for server in snapshot.servers.values() if server.state == "online"]
    answering = [server for server in online if server.name not in absent]
    problems = list(_find_server_problems(answering, snapshot))
    problems += _find_unusable_slots(snapshot, statuses)
    yield from problems
    if not problems:
        slots = sum(server.slots for server in answering)
        stopped = len(snapshot.servers) - len(online)
        others = f"; {stopped} are stopped by an operator" if stopped else ""
        others += f"; {len(online) - len(answering)} are nodes that are not connected" if answering != online else ""
        yield Finding("servers", "ok", f"Answering: {len(answering)}, with {slots} slots{others}.")


def gateways() -> Iterator[Finding]:
    """Check that nodes can connect, and that this host reaches each gateway, as workers have to."""
    enrolled = [node for node in services.nodes().list_all() if node.revoked_ms is None]
    connections = Presence(services.scripts()).read()
    alive = [gateway for gateway in connections.gateways.values() if connections.is_alive(gateway.name)]
    if enrolled and not alive:
        message = f"No gateway runs, so none of the {len(enrolled)} enrolled nodes can connect."
        remedy = "Start one: `python -m app.gateway` with SLOTKEEPER_NODE_PORT, or set that for `slotkeeper up`."
        yield Finding("gateways", "fail", message, remedy)
    # It knows no node of this name, and says so only to this installation.
    unreachable = [gateway for gateway in alive if ping_node(gateway.address, "n_0", _GATEWAY_LIMIT_S) != NOT_FOUND]
    for gateway in unreachable:
        message = f"{gateway.name}: It does not answer this host at {mask_url(gateway.address)}."
        remedy = "Workers reach nodes there: set SLOTKEEPER_GATEWAY_BIND and SLOTKEEPER_GATEWAY_ADDRESS of the gateway."
        yield Finding("gateways", "fail", message, remedy)
    if alive and not unreachable:
        states = Counter(state.state for node in enrolled if (state := connections.state_of(node.id)) is not None)
        connected = states.total() - states[NodeState.ABSENT]
        message = f"Answering: {len(alive)}; nodes connected: {connected} of {len(enrolled)}."
        yield Finding("gateways", "ok", message)


def _find_server_problems(online: Iterable[Server], snapshot: CatalogSnapshot) -> Iterator[Finding]:
    """Ask all servers for their health at once, and yield a finding for each problem."""
    adapters = {server.name: health_adapter(snapshot, server) for server in online if server.endpoints}
    usable = {name: adapter for name, adapter in adapters.items() if adapter is not None}
    for name in adapters.keys() - usable.keys():
        message = f"{name}: Its description is invalid, so it gets no job."
        yield Finding("servers", "fail", message, f"See `slotkeeper servers check {name}`.")
    for name, health in run_with_http_client(lambda http: _read_health(usable, http)).items():
        finding = _server_finding(usable[name].endpoint, health)
        if finding is not None:
            yield replace(finding, message=f"{name}: {finding.message}")


async def _read_health(adapters: Mapping[str, ServerAdapter], http: HttpClient) -> dict[str, Health | None]:
    """Return the health of each server; None: it has not answered in time."""
    tasks = {name: asyncio.create_task(ServerSession(adapter, http).health()) for name, adapter in adapters.items()}
    if tasks:
        await asyncio.wait(tasks.values(), timeout=_SERVERS_LIMIT_S)
    found = {name: task.result() if task.done() else None for name, task in tasks.items()}
    for task in tasks.values():
        task.cancel()
    return found


def _server_finding(endpoint: str, health: Health | None) -> Finding | None:
    """Return what is wrong with a server by its health; None: nothing."""
    remedy = f"It is registered at {endpoint}: check that it runs and that this host can reach it."
    if health is None:
        return Finding("servers", "fail", f"It did not answer within {_SERVERS_LIMIT_S:g} s.", remedy)
    if health.kind is HealthKind.DOWN and health.answered:
        message = f"Its health check says that it cannot run jobs ({health.message})."
        return Finding("servers", "fail", message, "Read its log; restart it after you have removed the cause.")
    if health.is_silent:
        message = "It does not answer its health check in time; it gets jobs only if no other server can run them."
        return Finding("servers", "warn", message, "If it is not busy with a job, restart it.")
    if health.kind is HealthKind.DOWN:
        return Finding("servers", "fail", f"It does not answer its health check ({health.message}).", remedy)
    if health.kind in (HealthKind.FOREIGN, HealthKind.GARBAGE):
        return Finding("servers", "warn", f"Its health check has an unknown form ({health.message}).", remedy)
    return None


def _find_unusable_slots(snapshot: CatalogSnapshot, statuses: Mapping[str, ServerStatus]) -> Iterator[Finding]:
    """Yield a finding for each server with slots that no job can use, with the reason."""
    quarantined = Counter(row.server for row in quarantine.list_all(services.database()))
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
    remedy = "Check that beat and a worker of the queue `maintenance` run, and read their logs."
    if task_runs.has_sweep_stopped(services.scripts()):
        message = f"The task sweep has not run for {task_runs.SWEEP_MARK_TTL_S} s: deadlines and retries are late."
        yield Finding("maintenance", "fail", message, remedy)
        return
    runs = task_runs.read_task_runs(services.scripts())
    if late := task_runs.find_late_tasks(runs, PERIODS_S):
        listed = ", ".join(f"{name} ({age_s:.0f} s ago)" for name, age_s in sorted(late.items()))
        yield Finding("maintenance", "warn", f"The last run of these tasks ended too long ago: {listed}.", remedy)
    else:
        yield Finding("maintenance", "ok", f"It runs; {len(runs)} tasks have run on time.")


def logs() -> Iterator[Finding]:
    """Check that no process has dropped log lines because its standard error is read too slowly."""
    alive = [process for process in services.processes().read_all() if process.is_alive]
    dropped = {process.name: process.facts.get("log_lines_dropped", 0) for process in alive}
    if behind := {name: lines for name, lines in dropped.items() if lines}:
        listed = ", ".join(f"{name} ({lines} lines)" for name, lines in sorted(behind.items()))
        message = f"These processes dropped log lines, because their standard error is read too slowly: {listed}."
        yield Finding("logs", "warn", message, "Check which program reads it, and whether its disk is full or slow.")
    else:
        yield Finding("logs", "ok", "No process has dropped a log line.")


def secret() -> Iterator[Finding]:
    """Check that the secret exists, only its owner can read it, and all processes have the same one."""
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
    try:
        stored: Any = services.scripts().redis.get(services.scripts().keys.secret())
        others = processes_with_other_secret(services.processes().read_all())
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
    url, hosts = urlsplit(api_url()), set[str]()
    with suppress(RedisError):
        hosts = {process.host for process in services.processes().read_all() if process.role == "web"}
    if hosts and socket.gethostname() not in hosts:
        yield Finding("port", "ok", f"The API runs on {', '.join(sorted(hosts))}.")
        return
    try:
        with socket.create_connection((url.hostname or "", url.port or (443 if url.scheme == "https" else 80)), 2):
            yield Finding("port", "ok", f"A process listens at {url.geturl()}, the API's address.")
    except OSError:
        remedy = "Start it with `slotkeeper up`, or a role `web`; or set SLOTKEEPER_URL to where it listens."
        yield Finding("port", "warn", f"No process listens at {url.geturl()}, the API's address.", remedy)


CHECKS: Mapping[str, Check] = {
    "settings": settings,
    "database": database,
    "folder": folder,
    "disk": disk,
    "clocks": clocks,
    "redis": redis,
    "broker": broker,
    "servers": servers,
    "gateways": gateways,
    "workers": workers,
    "maintenance": maintenance,
    "logs": logs,
    "secret": secret,
    "port": port,
}
"""Each check by the name of its part."""
