"""What `slotkeeper doctor` looks at: each part by itself, side by side, and none for longer than its time.

A check answers findings; one that fails, or does not end, is a finding too, so it works when everything is down.
"""

import os
import shutil
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from queue import Empty, Queue
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings

WITHIN_S = 10.0
_GIB = 1 << 30
_SLOW_S, _TOO_SLOW_S = 0.1, 1.0
_SKEW_MS = 2_000
_OLDEST_REDIS = (7, 0)
_SERVERS_WITHIN_S, _MOST_SERVERS = 6.0, 10
_TRIES = 3
_OURS = frozenset({"SLOTKEEPER_URL", "SLOTKEEPER_KEY"})  # which the client reads


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a part.  `level`: ok, warn or fail.  `remedy`: what to do, a sentence; "": nothing."""

    part: str
    level: str
    said: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]

# What the checks import, also what Celery and SQLAlchemy import on first use.
_MODULES = (
    "app.config",
    "celeryconfig",
    "slotkeeper.config",
    "routing.queries.process_list",
    "routing.queries.server_status",
    "slotkeeper.jobs.tables",
    "app.up.roles",
    "migrations.migrate",
    "slotkeeper.redis.suitability",
    "tasks.extensions.transport",
    "tasks.celery_app",
    "tasks.config",
    "tasks.server_adapters",
    "tasks.security.keyring",
    "tasks.ready",
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


def run_checks(checks: dict[str, Check], within_s: float = WITHIN_S) -> Iterator[Finding]:
    """All findings, as they come: all checks begin at once, and who has not answered in time is told as well."""
    load()
    return _side_by_side(checks, within_s)


def _side_by_side(checks: dict[str, Check], within_s: float) -> Iterator[Finding]:
    found: Queue[tuple[str, list[Finding]]] = Queue()
    for part, check in checks.items():
        threading.Thread(target=lambda part=part, check=check: found.put((part, _of(part, check))), daemon=True).start()
    missing, until = list(checks), time.monotonic() + within_s
    while missing:
        try:
            part, findings = found.get(timeout=max(until - time.monotonic(), 0.001))
        except Empty:
            break
        missing.remove(part)
        yield from findings
    for part in missing:
        said = f"It has not answered within {within_s:g} s."
        yield Finding(part, "fail", said, "See that it runs and can be reached from here, and ask again.")


def _of(part: str, check: Check) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        found.append(Finding(part, "fail", said, "See that it runs, and that the settings name the right place."))
    return found


def all_checks() -> dict[str, Check]:
    return {
        "settings": settings,
        "database": database,
        "disk": disk,
        "redis": redis,
        "broker": broker,
        "servers": servers,
        "workers": workers,
        "maintenance": maintenance,
        "logs": logs,
        "secret": secret,
        "port": port,
    }


# -- the parts -------------------------------------------------------------------------------------------------


def settings() -> Iterator[Finding]:
    """Each can be read, they go together, and none is misspelled."""
    kinds = _kinds()
    wrong = [problem for kind in kinds for problem in _wrong(kind)]
    for problem in wrong:
        yield Finding(
            "settings", "fail", problem, "Correct it, or unset it to have its default; see docs/reference/settings.md."
        )
    known = {_variable(kind, field) for kind in kinds for field in kind.model_fields}
    for name in sorted(it for it in os.environ if it.startswith("SLOTKEEPER_") and it not in known | _OURS):
        near = get_close_matches(name, known, n=1)
        remedy = (
            f"Did you mean {near[0]}?" if near else "Remove it; docs/reference/settings.md lists all that there are."
        )
        yield Finding("settings", "warn", f"{name} is no setting, and does nothing.", remedy)
    if not wrong:
        yield from _contradictions()


def _kinds() -> list[type[BaseSettings]]:
    from app.config import AppSettings
    from app.up.roles import UpSettings
    from routing.config import RoutingSettings
    from slotkeeper.config import DatabaseTimeouts, StorageSettings
    from tasks.config import EventSettings, TaskSettings

    return [AppSettings, DatabaseTimeouts, StorageSettings, UpSettings, RoutingSettings, EventSettings, TaskSettings]


def _variable(kind: type[BaseSettings], field: str) -> str:
    """Return the name of the environment variable that sets a field."""
    return f"{kind.model_config.get('env_prefix', '')}{field}".upper()


def _wrong(kind: type[BaseSettings]) -> Iterator[str]:
    try:
        kind()
    except ValidationError as error:
        for one in error.errors(include_url=False, include_input=False):
            name = "_".join(str(part) for part in one["loc"])
            prefix = str(kind.model_config.get("env_prefix", "")).lower()
            yield f"{_variable(kind, name.removeprefix(prefix))}: {one['msg']}."


def _contradictions() -> Iterator[Finding]:
    from app.config import AppSettings, is_loopback
    from tasks.config import TaskSettings

    door, tasks, said = AppSettings(), TaskSettings(), False
    try:
        door.check_exposure()
    except ValueError as error:
        said = True
        yield Finding("settings", "fail", f"{error}.", "The API does not start like this.")
    if door.metrics_key and not door.require_keys:
        said = True
        told = "SLOTKEEPER_METRICS_KEY is set, and no keys are asked for: it opens nothing."
        yield Finding("settings", "warn", told, "Set SLOTKEEPER_REQUIRE_KEYS=true, or unset it.")
    if not tasks.public_url and not is_loopback(door.host):
        said = True
        told = "The API serves the network, and servers are told to push results to 127.0.0.1."
        yield Finding("settings", "warn", told, "Set SLOTKEEPER_PUBLIC_URL to where servers reach the API.")
    if not said:
        yield Finding("settings", "ok", "They can be read, and go together.")


def database() -> Iterator[Finding]:
    """It answers, has this release's schema, and keeps what is written in a fair time."""
    from sqlalchemy import insert, update

    from migrations.migrate import check
    from slotkeeper.jobs.tables import counters
    from tasks.services import database as record

    found = record()
    if (problem := check(found.url)) is not None:
        yield Finding("database", "fail", problem, "Run `slotkeeper migrate` with the newest release.")
        return

    def write(tx: object) -> None:
        connection = tx.connection  # type: ignore[attr-defined]
        mark = {"value": time.time_ns() // 1_000_000}
        if connection.execute(update(counters).where(counters.c.name == "doctor").values(mark)).rowcount == 0:
            connection.execute(insert(counters), {"name": "doctor", **mark})

    took_s = _best_s(lambda: found.write(write))
    said = f"It answers, its schema is right, and a durable write takes {took_s * 1000:.0f} ms."
    level = "fail" if took_s > _TOO_SLOW_S else "warn" if took_s > _SLOW_S else "ok"
    remedy = "" if level == "ok" else "Each submit waits for this: see what else the disk or the server is doing."
    yield Finding("database", level, said, remedy)


def _best_s(act: Callable[[], object]) -> float:
    """Return how many seconds an act takes at best: one slow try may be chance, or other work on this host."""
    best = float("inf")
    for _ in range(_TRIES):
        began = time.monotonic()
        act()
        best = min(best, time.monotonic() - began)
        if best <= _SLOW_S:
            break
    return best


def disk() -> Iterator[Finding]:
    """There is room where the state lies."""
    from slotkeeper.config import StorageSettings

    home = StorageSettings().home.absolute()
    place = next(it for it in (home, *home.parents) if it.exists())
    usage = shutil.disk_usage(place)
    said = f"{usage.free / _GIB:.1f} GiB are free of {usage.total / _GIB:.1f} GiB at {place}."
    if usage.free < _GIB // 10:
        yield Finding("disk", "fail", said, "Make room now: a full disk refuses every submit.")
    elif usage.free < _GIB or usage.free < usage.total // 50:
        yield Finding("disk", "warn", said, "Make room, or shorten SLOTKEEPER_RETENTION_S.")
    else:
        yield Finding("disk", "ok", said)


def redis() -> Iterator[Finding]:
    """It answers, is new enough, keeps what it is given, and its clock goes with this host's."""
    from slotkeeper.redis.suitability import explain_no_persistence, explain_unsuitable
    from tasks.services import scripts

    client, problems = scripts().redis, 0
    info = client.info("server")
    version = str(info.get("valkey_version") or info.get("redis_version"))
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
        problems += 1
        yield Finding("redis", "fail", f"It is version {version}.", "Slotkeeper needs Redis 7.0 or Valkey.")
    for check, level in ((explain_unsuitable, "fail"), (explain_no_persistence, "warn")):
        if (advice := check(client)) is not None:
            problems += 1
            said, _, remedy = advice.partition(": ")
            yield Finding("redis", level, f"{said}.", f"{remedy[:1].upper()}{remedy[1:]}")
    seconds, micros = client.time()
    apart_ms = abs(seconds * 1000 + micros / 1000 - time.time() * 1000)
    if apart_ms > _SKEW_MS:
        problems += 1
        said = f"Its clock is {apart_ms / 1000:.1f} s from this host's."
        yield Finding("redis", "warn", said, "Have both set by NTP; leases go by the one, people by the other.")
    if not problems:
        libraries = len(client.execute_command("FUNCTION", "LIST"))
        yield Finding("redis", "ok", f"It answers (version {version}, {libraries} of our scripts are loaded).")


def broker() -> Iterator[Finding]:
    """It answers."""
    from tasks.celery_app import celery

    began = time.monotonic()
    with celery.connection_for_write(connect_timeout=3) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
        kind = connection.transport.driver_type
    yield Finding("broker", "ok", f"It answers ({kind}) in {(time.monotonic() - began) * 1000:.0f} ms.")


def workers() -> Iterator[Finding]:
    """Some live, canaries come through, and all processes are of one release."""
    from tasks.ready import worker_problem
    from tasks.services import processes

    found = [it for it in processes().read_all() if it.lives]
    mine = [it for it in found if it.role == "worker"]
    troubled = [why for it in mine if (why := worker_problem(it)) is not None]
    versions = sorted({str(it.facts.get("version")) for it in found})
    if not mine:
        said = "No worker says that it lives: jobs are accepted, and none starts."
        yield Finding("workers", "fail", said, "Start one: python -m tasks worker, as in the Procfile.")
    for why in troubled:
        yield Finding("workers", "warn", why, "See its log, and whether it reaches broker, Redis and database.")
    if len(versions) > 1:
        said = f"Processes of releases {', '.join(versions)} live together."
        yield Finding("workers", "warn", said, "That is right while you update; else restart the older ones.")
    if mine and not troubled:
        runs = sum(int(it.facts.get("runs") or 0) for it in mine)
        yield Finding("workers", "ok", f"{len(mine)} live, with {runs} runs under way.")


def servers() -> Iterator[Finding]:
    """Each registered server answers its health check, and its slots can be used."""
    from tasks.services import catalog

    snapshot = catalog().read()
    if not snapshot.servers:
        remedy = "Register one: `slotkeeper servers register MODEL NAME URL --slots 1`."
        yield Finding("servers", "warn", "No inference server is registered: jobs are accepted, and wait.", remedy)
        return
    asked = {it.name: _of_server(it, snapshot) for it in snapshot.servers.values() if it.state == "online"}
    troubled = [
        replace(it, part="servers", said=f"{it.part}: {it.said}") for it in _side_by_side(asked, _SERVERS_WITHIN_S)
    ]
    troubled += _of_slots(snapshot)
    yield from troubled
    stopped = len(snapshot.servers) - len(asked)
    if not troubled:
        slots = sum(it.slots for it in snapshot.servers.values() if it.name in asked)
        others = f"; {stopped} are stopped by an operator" if stopped else ""
        yield Finding("servers", "ok", f"{len(asked)} answer, with {slots} slots{others}.")


def _of_server(server: Any, snapshot: Any) -> Check:
    """Return the check of one server: a finding only where something is wrong."""

    def check() -> Iterator[Finding]:
        from tasks.server_adapters import health_adapter
        from tasks.servers import HealthKind, ServerSession, call_server

        speaker = health_adapter(snapshot, server)
        if speaker is None:
            if server.endpoints:
                said = "Its description cannot be used, so no job is sent there."
                yield Finding(server.name, "fail", said, f"See `slotkeeper servers check {server.name}`.")
            return
        health = call_server(speaker, ServerSession.health)
        where = f"It is registered at {speaker.endpoint}: see that it runs, and that this host reaches it."
        if health.kind is HealthKind.DOWN:
            yield Finding(server.name, "fail", f"Nobody answers its health check ({health.message}).", where)
        elif health.kind in (HealthKind.FOREIGN, HealthKind.GARBAGE):
            yield Finding(server.name, "warn", f"Its health check is not understood ({health.message}).", where)

    return check


def _of_slots(snapshot: Any) -> Iterator[Finding]:
    """Slots that no job can use, by what keeps them."""
    from routing.config import RoutingSettings
    from routing.queries.server_status import read_servers_of_fleets
    from routing.queue.slots import Slots
    from slotkeeper.jobs import quarantine
    from tasks.services import database, scripts

    rows = Counter(row.server for row in quarantine.list_all(database()))
    found = read_servers_of_fleets(Slots(scripts(), RoutingSettings()), sorted(snapshot.fleets()))
    known = {name: it for its in found.values() for name, it in its.items()}
    for server in snapshot.servers.values():
        remedy = f"See `slotkeeper servers check {server.name}`."
        now = known.get(server.name)
        said = []
        if now is not None and now.breaker != "closed":
            said.append(f"its breaker is {now.breaker.replace('_', ' ')}")
        if now is not None and now.cooling:
            said.append(f"{now.cooling} of its {server.slots} slots are in cooldown")
        if rows[server.name]:
            said.append(f"{rows[server.name]} of its {server.slots} slots are withheld")
        if said:
            yield Finding("servers", "warn", f"{server.name}: {', '.join(said)}.", remedy)


def maintenance() -> Iterator[Finding]:
    """It goes on, and each of its tasks has lately come to its end."""
    from routing.maintenance import task_runs
    from tasks.beat import PERIODS_S
    from tasks.services import scripts

    remedy = "See that beat and a worker of the queue `maintenance` run, and their logs."
    if task_runs.has_sweep_stopped(scripts()):
        said = f"It has not swept for {task_runs.SWEEP_MARK_TTL_S} s: deadlines, retries and lost jobs wait for it."
        yield Finding("maintenance", "fail", said, remedy)
        return
    runs = task_runs.read_task_runs(scripts())
    if late := task_runs.find_late_tasks(runs, PERIODS_S):
        named = ", ".join(f"{name} ({age_s:.0f} s ago)" for name, age_s in sorted(late.items()))
        said = f"These came to their end too long ago: {named}."
        yield Finding("maintenance", "warn", said, remedy)
    else:
        yield Finding("maintenance", "ok", f"It goes on; {len(runs)} tasks have run.")


def logs() -> Iterator[Finding]:
    """Each process's log is read as fast as it is written."""
    from tasks.services import processes

    dropped = {it.name: it.facts.get("log_lines_dropped", 0) for it in processes().read_all() if it.lives}
    if behind := {name: lines for name, lines in dropped.items() if lines}:
        named = ", ".join(f"{name} ({lines} lines)" for name, lines in sorted(behind.items()))
        said = f"Lines were dropped, because they were not read in time: {named}."
        yield Finding("logs", "warn", said, "See what reads the standard error of these processes, and its disk.")
    else:
        yield Finding("logs", "ok", "No process has dropped a line.")


def secret() -> Iterator[Finding]:
    """The installation's is there, for its owner's eyes only, and that of the other processes."""
    from slotkeeper.config import StorageSettings
    from tasks.config import TaskSettings

    if TaskSettings().secret:
        yield from _compared("It is set by SLOTKEEPER_SECRET")
        return
    path = StorageSettings().home.absolute() / "secret"
    if not path.exists():
        said = f"There is none yet at {path}; the first process makes one."
        remedy = "Where there are several hosts, give all the same SLOTKEEPER_SECRET."
        yield Finding("secret", "warn", said, remedy)
        return
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
        said = f"Others than its owner can read {path}, or it belongs to another user."
        yield Finding("secret", "fail", said, f"chown it to who runs Slotkeeper, and chmod 600 {path}")
        return
    yield from _compared("It is there, for its owner only")


def _compared(said: str) -> Iterator[Finding]:
    from redis.exceptions import RedisError

    from tasks.ready import processes_with_other_secret
    from tasks.security.keyring import fingerprints
    from tasks.services import processes, scripts

    try:
        known: Any = scripts().redis.get(scripts().keys.secret())
        others = processes_with_other_secret(processes().read_all())
    except RedisError:
        yield Finding("secret", "ok", f"{said}; whether others have the same is not known without Redis.")
        return
    remedy = "Give all hosts the same SLOTKEEPER_SECRET; the one before goes into SLOTKEEPER_FORMER_SECRET."
    if others:
        yield Finding("secret", "fail", f"It is not that of {', '.join(it.name for it in others)}.", remedy)
    elif known is not None and known.decode() not in fingerprints():
        yield Finding("secret", "fail", "It is not that of the processes before this one.", remedy)
    else:
        yield Finding("secret", "ok", f"{said}.")


def port() -> Iterator[Finding]:
    """Somebody listens at the API's address."""
    from app.config import AppSettings

    door = AppSettings()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(door.host, door.host)
    try:
        with socket.create_connection((host, door.port), 2):
            yield Finding("port", "ok", f"The API's port {door.port} is listened on.")
    except OSError:
        said = f"Nobody listens on {host}:{door.port}, the API's port."
        yield Finding("port", "warn", said, "Start `python -m app.server`, or set SLOTKEEPER_PORT to where it listens.")


def worst_level(found: Sequence[Finding]) -> str:
    """The worst level of all."""
    levels = {it.level for it in found}
    return next((level for level in ("fail", "warn") if level in levels), "ok")
