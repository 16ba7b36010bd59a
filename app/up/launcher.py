"""`slotkeeper up`: the order in which everything starts, and what is said about it."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from urllib.parse import unquote

from app.up import ports, valkey_server
from app.up.errors import Stopped, UpError
from app.up.guardian import Guardian
from app.up.installation_folder import InstallationFolder, flower_password, redis_password, write_addresses
from app.up.managed_process import Role
from app.up.roles import UpPlan, read_plan, short_path
from app.up.signals import Signals
from app.up.supervisor import Supervisor
from tasks import process_files

_START_S = 60.0
_HERE = "127.0.0.1"
_LAST_TURN = 3
_MAX_NAMED = 5  # running jobs, when everything stops

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line asks for."""

    demo: bool = True
    demo_jobs: int = 0
    """0: one job, to show that all is well."""
    exit_after_demo: bool = False


def run_up(wishes: UpOptions, say: Say) -> int:
    """Start everything, and stay until Ctrl-C; the exit status.  Raises UpError when it cannot be started."""
    began = time.monotonic()
    plan = read_plan(wishes.demo)
    program = "" if plan.redis_url else valkey_server.find_valkey()
    with ExitStack() as stack:
        home = stack.enter_context(InstallationFolder(plan.home))
        ports.check_ports(plan.ports())
        if plan.redis_url:
            valkey_server.check_remote(plan.redis_url)
        if plan.broker_url:
            _check_broker(plan.broker_url)
        stop = threading.Event()
        signals = stack.enter_context(Signals())
        guardian = stack.enter_context(Guardian())
        supervisor = Supervisor(signals, guardian, plan.environment(), plan.home, home.logs, say)
        stack.callback(_stop, supervisor, plan, say)
        try:
            say("Starting ...")  # It takes seconds, and more where nothing is compiled yet.
            _start(plan, program, supervisor)
            say(_welcome(plan, time.monotonic() - began))
            if wishes.demo:
                status = supervisor.run_beside(lambda: _demonstrate(plan, wishes, say, stop), stop.set)
                if wishes.exit_after_demo:
                    return status
            say("Ctrl-C stops everything.")
            supervisor.supervise()
        except Stopped:
            say("")
            return 1 if wishes.exit_after_demo else 0


def _start(plan: UpPlan, program: str, supervisor: Supervisor) -> None:
    """Raises UpError, Stopped."""
    write_addresses(plan.home, plan.url, plan.redis_port if program else None)
    if program:
        password = redis_password(plan.home)
        supervisor.start(
            valkey_server.valkey_role(program, plan.redis_port, plan.home / "valkey", _LAST_TURN, password)
        )
    if (migration := plan.migration()) is not None:
        supervisor.run_to_end(migration)
    if program:
        supervisor.wait(lambda: valkey_server.is_ready(plan.redis_port, password), _START_S, "Valkey did not answer")
    flower_password(plan.home)
    start_staggered(plan.roles(), supervisor, _processors())
    supervisor.wait(_make_readiness_check(plan.url), _START_S, "The API did not become ready")
    supervisor.restarts = True


def start_staggered(roles: Sequence[Role], supervisor: Supervisor, at_once: int) -> None:
    """Start these, and return when all have begun.  Raises UpError, Stopped.

    A process that begins loads for most of a second, and keeps a processor busy meanwhile.  So no more of them do so at
    a time than there are processors: those that come first are at work sooner, and the last not later.
    """
    waiting, beginning = deque(roles), list[Role]()

    def has_one_begun() -> bool:
        return any(_has_begun(role, supervisor.pid(role)) for role in beginning)

    while waiting or beginning:
        while waiting and len(beginning) < at_once:
            beginning.append(waiting.popleft())
            _start_new(beginning[-1], supervisor)
        names = " and ".join(role.name for role in beginning)
        supervisor.wait(has_one_begun, _START_S, f"{names} did not begin")
        beginning = [role for role in beginning if not _has_begun(role, supervisor.pid(role))]


def _start_new(role: Role, supervisor: Supervisor) -> None:
    supervisor.start(role)
    if (pid := supervisor.pid(role)) is not None:
        process_files.remove_stale(role.name, pid)


def _has_begun(role: Role, pid: int | None) -> bool:
    if role.port is not None:
        return ports.is_open(_HERE, role.port)
    return pid is not None and process_files.has_started(role.name, pid)


def _processors() -> int:
    """How many of them this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_broker(url: str) -> None:
    """Raises UpError when a broker of one's own cannot be used."""
    from kombu import Connection

    try:
        with Connection(url, connect_timeout=5) as connection:
            connection.connect()
    except Exception as error:  # Each transport has errors of its own.
        said = _without_password(str(error), url)
        raise UpError(f"SLOTKEEPER_BROKER_URL does not answer ({said}): start that broker, or unset it.") from error


def _without_password(text: str, url: str) -> str:
    """A text in which the URL, or the user and password in it, may stand."""
    credentials = url.partition("://")[2].rpartition("@")[0]
    words = [credentials, credentials.partition(":")[2]]
    for word in filter(None, words):
        text = text.replace(word, "***").replace(unquote(word), "***")
    return text


def _make_readiness_check(url: str) -> Callable[[], bool]:
    """Whether the API is ready, each time it is asked."""
    from slotkeeper.client import Client, ClientError  # Here: it loads while our processes do, and not before them.

    client = Client(url, ca=False)

    def is_ready() -> bool:
        with suppress(ClientError):
            client.get("/health/ready")
            return True
        return False

    return is_ready


def _stop(supervisor: Supervisor, plan: UpPlan, say: Say) -> None:
    if not supervisor.running:
        return
    began = time.monotonic()
    say(f"Stopping ...{_explain_wait(_running_jobs(plan), plan.grace_s)}")
    killed = supervisor.stop()
    took = f"Stopped after {time.monotonic() - began:.1f} s."
    say(f"{took}  These took too long and were killed: {', '.join(killed)}." if killed else took)


def _running_jobs(plan: UpPlan) -> list[str] | None:
    """Return the jobs that run, each with its model; None: the API does not say, or requires a key."""
    from slotkeeper.client import Client, ClientError

    try:
        found = Client(plan.url, ca=False).get("/queue/jobs", status="running", limit=_MAX_NAMED + 1)
    except ClientError:
        return None
    return [f"{job['job_id']} ({job['model']})" for job in found["jobs"]]


def _explain_wait(running: list[str] | None, grace_s: float) -> str:
    """Return what is waited for, and how to wait no longer; "": nothing is."""
    if running == []:
        return ""
    more = ", ..." if len(running or ()) > _MAX_NAMED else ""
    named = f"running jobs: {', '.join(running[:_MAX_NAMED])}{more}" if running else "running jobs"
    return (
        f"  Waiting up to {grace_s:g} s for the end of {named}.  Ctrl-C again stops at once; "
        "they go on when Slotkeeper is started again."
    )


def _welcome(plan: UpPlan, took_s: float) -> str:
    home = short_path(plan.home)
    lines = [
        f"Slotkeeper is up, after {took_s:.1f} s.",
        "",
        f"  Page    {plan.url}/",
        f"  API     {plan.url}  (its documentation: {plan.url}/docs)",
        f"  Flower  {plan.flower_url}  (user slotkeeper, password in {home}/flower-password)",
        f"  State   {home}  (logs in {home}/logs)",
    ]
    lines += [
        f"  Server  {server.name}  (model {server.model}, {server.slots} slots, at {server.url})"
        for server in plan.demo
    ]
    if plan.app.require_keys:
        lines.append(f"  Keys    {plan.command()} tenants add NAME --admin  prints a key: export it as SLOTKEEPER_KEY")
    return "\n".join([*lines, ""])


def _demonstrate(plan: UpPlan, wishes: UpOptions, say: Say, stop: threading.Event) -> int:
    """Register the demo servers and run jobs on them; 0: all ended well."""
    from app.up import demonstration
    from slotkeeper.client import Client, ClientError

    with demonstration.demo_key(plan.app) as key:
        client = Client(plan.url, key, ca=False)  # of this machine, which no authority has a certificate for
        try:
            models = demonstration.register(client, plan.demo)
            if "zimg" not in models:
                say("No first job: the model zimg has servers of yours, and is left to them.")
                return 0
            if wishes.demo_jobs:
                return demonstration.run_jobs(client, wishes.demo_jobs, models, stop)
            return demonstration.run_first_job(client, plan.command(), say, stop)
        except ClientError as error:
            if not stop.is_set():
                say(f"The demonstration did not work: {error}")
            return 1
