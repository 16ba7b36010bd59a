"""The demonstration of `slotkeeper up`: three simulated servers, and jobs that show the work of the queue."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from app.config import AppSettings
from app.terminal import console, safe_json, styled
from app.up.plan import DemoServer
from slotkeeper.client import Client, is_final

Job = dict[str, Any]

_NEXT_END_TIMEOUT_S = 120.0  # how long to wait for the next job to end
_POLL_INTERVAL_S = 0.1
_POLLS_AT_ONCE = 50
_TENANT = "demo"
_ATTRIBUTES = {"pool": "demo", "memory": 24}  # for constraints of jobs
# Real servers are polled every 2 to 3 s; a run of a demo server ends within that time.
_POLLING = {
    "flux": {"poll_interval": 0.5, "max_poll_time": 1200},
    "trellis": {"poll_interval": 0.5, "max_poll_time": 600},
}
_PAYLOAD = '{"prompt": "a sunset"}'
_PROMPTS = (
    "a lighthouse in a storm",
    "a cat asleep on a warm GPU",
    "a sunset over a data centre",
    "a paper boat in the rain",
    "a night train through snow",
)


def mixed_jobs(count: int, models: Collection[str] = ("zimg", "flux", "trellis")) -> list[Job]:
    """Return jobs for these models with several priorities; one of them fails at its first attempt."""
    jobs = []
    turns = [model for model in ("zimg", "flux", "zimg", "trellis", "zimg") if model in models]
    for n in range(count):
        model = turns[n % len(turns)]
        payload: Job = {"prompt": _PROMPTS[n % len(_PROMPTS)]}
        if n == min(2, count - 1):
            payload |= {"fail": "error", "fail_attempts": 1}
        jobs.append({"model": model, "payload": payload, "priority": (5, 5, 1, 9)[n % 4]})
    return jobs


@contextmanager
def demo_key(settings: AppSettings) -> Iterator[str | None]:
    """Yield a key for the demonstration; None: the API requires none.  The key is removed afterwards."""
    key = os.environ.get("SLOTKEEPER_KEY")
    if key or not settings.require_keys:
        yield key
        return
    from slotkeeper.clock import now_ms
    from slotkeeper.errors import NotFound
    from slotkeeper.jobs.values import PRIORITY_MOST_URGENT
    from slotkeeper.registry.identity import Scope, Tenant
    from slotkeeper.registry.tenant_limits import TenantLimits
    from slotkeeper.registry.tenants import Tenants
    from tasks.services import database

    tenants = Tenants(database())

    def remove_tenant() -> None:
        with suppress(NotFound):
            tenants.remove(_TENANT)

    remove_tenant()
    try:
        limits = TenantLimits(most_urgent=PRIORITY_MOST_URGENT)  # It shows an urgent job.
        yield tenants.add(Tenant(_TENANT), now_ms(), {Scope.OPERATE}, limits=limits).key
    finally:
        remove_tenant()


def register(client: Client, servers: Sequence[DemoServer]) -> set[str]:
    """Register the demo servers, and return their models.  Raises ClientError.

    A model of the same name that has other servers is skipped: a demo server must not run its jobs.  Only new models
    are configured.
    """
    models = {model["model"]: model for model in client.get("/admin/models")["models"]}
    own_names = {server.name for server in servers}
    registered = set()
    for server in servers:
        model = models.get(server.model)
        if model is not None and not own_names.issuperset(model["servers"]):
            continue
        if model is None and server.model in _POLLING:
            config = {"model_type": "async", **_POLLING[server.model]}
            client.request("PUT", f"/admin/model-configs/{server.model}", body=config)
        body = {"model": server.model, "server": server.name, "endpoint": server.url + server.endpoint}
        client.post("/admin/register", {**body, "slots": server.slots, "attributes": _ATTRIBUTES})
        registered.add(server.model)
    return registered


def run_first_job(client: Client, command: str, say: Callable[[str], None], stop: threading.Event) -> int:
    """Run one job, print its result and how to repeat it, and return the exit status; 0: it completed.

    command: how `slotkeeper` is called from a second terminal.  Raises ClientError.
    """
    body: Job = {"model": "zimg", "payload": {"prompt": _PROMPTS[0]}}
    submitted = client.submit(**body, patience_s=30)
    job = next(_ended_jobs(client, [submitted["job_id"]], stop), None)
    if stop.is_set():
        return 1
    if job is None:
        say(f"First job {submitted['job_id']} has not ended within {_NEXT_END_TIMEOUT_S:.0f} s; look into the logs.")
        return 1
    say(f"First job {job['job_id']}: {job['status']} on {job['slot'] or 'no slot'}")
    if job["status"] != "completed":
        say(f"  {_error_of(job)}")
        return 1
    say(f"  result: {_compact(job['result'])}")
    say(f"  yours:  {command} submit zimg '{_PAYLOAD}' --wait")
    say("          (in this folder, from a second terminal)\n")
    return 0


def run_jobs(client: Client, count: int, models: Collection[str], stop: threading.Event) -> int:
    """Submit mixed jobs, show their progress, print a table, and return the exit status; 0: all jobs completed.

    Raises ClientError.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    ended = []
    with Progress(*columns, console=terminal) as progress:
        ids = [
            client.submit(**body, patience_s=60)["job_id"]
            for body in progress.track(mixed_jobs(count, models), description="submitted")
        ]
        for job in progress.track(_ended_jobs(client, ids, stop), total=count, description="ended    "):
            ended.append(job)
    if stop.is_set():
        return 1
    terminal.print(_table(ended))
    not_completed = [job for job in ended if job["status"] != "completed"]
    for job in not_completed:
        terminal.print(f"{job['job_id']}: {_error_of(job) or job['status']}")
    failed = len(not_completed) + count - len(ended)
    terminal.print(f"{count} jobs, {f'{failed} of them did not complete' if failed else 'all ended well'}.")
    return 1 if failed else 0


def _ended_jobs(client: Client, ids: Sequence[str], stop: threading.Event) -> Iterator[Job]:
    """Yield each job when it has ended.  Stops early after a timeout without an ended job, or when `stop` is set."""
    pending = deque(ids)
    deadline = time.monotonic() + _NEXT_END_TIMEOUT_S
    while pending and time.monotonic() < deadline:
        for _ in range(min(len(pending), _POLLS_AT_ONCE)):
            job = client.get(f"/queue/jobs/{pending[0]}")
            if is_final(job):
                pending.popleft()
                deadline = time.monotonic() + _NEXT_END_TIMEOUT_S
                yield job
            else:
                pending.rotate(-1)
        if pending and stop.wait(_POLL_INTERVAL_S):
            return


def _table(jobs: Sequence[Job]) -> Any:
    """Return a table of the jobs in the order in which they started."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    titles = ("order", "job", "model", "priority", "status", "attempts", "slot", "waited", "ran")
    table = Table(*titles, box=SIMPLE_HEAD, padding=0)  # It fits 80 columns.
    for column in (0, 3, 5, 7, 8):
        table.columns[column].justify = "right"
    by_start = sorted(jobs, key=lambda job: job.get("started_at") or "~")
    for order, job in enumerate(by_start, 1):
        style = "green" if job["status"] == "completed" else "red"
        waited = _seconds(job.get("created_at"), job.get("started_at"))
        ran = _seconds(job.get("started_at"), job.get("completed_at"))
        row = [str(order), job["job_id"][-7:], job["model"], str(job["priority"])]
        row += [str(job["attempts"]), job.get("slot") or "-", waited, ran]
        table.add_row(*row[:4], styled(job["status"], style), *row[4:])
    return table


def _seconds(since: str | None, until: str | None) -> str:
    if not since or not until:
        return "-"
    return f"{(datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds():.2f}s"


def _error_of(job: Job) -> str:
    error = job.get("error") or {}
    return f"{error.get('code')}: {error.get('message')}" if error else ""


def _compact(value: Any) -> str:
    return safe_json(value)
