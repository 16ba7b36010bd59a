"""`slotkeeper up`: starts everything in order, and prints the progress."""

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
from app.up.plan import VALKEY_STOP_ORDER, UpPlan, read_plan, short_path
from app.up.supervisor import Signals, Supervisor
from tasks import process_files

_START_S = 60.0
_LOOPBACK = "127.0.0.1"
_MAX_NAMED = 5  # running jobs that the message of a stop names

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of the command line."""

    demo: bool = True
    demo_jobs: int = 0
    """0: one job, which shows that the installation works."""
    exit_after_demo: bool = False


def run_up(options: UpOptions, say: Say) -> int:
    """Start everything, run until Ctrl-C, and return the exit status.  Raises UpError if the start fails."""
    began = time.monotonic()
    plan = read_plan(options.demo)
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
            say("Starting ...")  # The start takes seconds, and longer if Python must compile its modules first.
            _start(plan, program, supervisor)
            say(_welcome(plan, time.monotonic() - began))
            if options.demo:
                status = supervisor.run_beside(lambda: _demonstrate(plan, options, say, stop), stop.set)
                if options.exit_after_demo:
                    return status
            say("Ctrl-C stops everything.")
            supervisor.supervise()
        except Stopped:
            say("")
            return 1 if options.exit_after_demo else 0


def _start(plan: UpPlan, program: str, supervisor: Supervisor) -> None:
    """Start all processes.  `program`: the Valkey to start; "": none.  Raises UpError, Stopped."""
    write_addresses(plan.home, plan.url, plan.redis_port if program else None)
    if program:
        password = redis_password(plan.home)
        supervisor.start(
            valkey_server.valkey_role(program, plan.redis_port, plan.home / "valkey", VALKEY_STOP_ORDER, password)
        )
    if (migration := plan.migration()) is not None:
        supervisor.run_to_end(migration)
    if program:
        supervisor.wait(lambda: valkey_server.is_ready(plan.redis_port, password), _START_S, "Valkey did not answer")
    flower_password(plan.home)
    start_staggered(plan.roles(), supervisor, _count_processors())
    supervisor.wait(_make_readiness_check(plan.url), _START_S, "The API did not become ready")
    supervisor.restarts = True


def start_staggered(roles: Sequence[Role], supervisor: Supervisor, at_once: int) -> None:
    """Start roles, `at_once` of them at a time, and return when all have started.  Raises UpError, Stopped.

    A process keeps a processor busy for most of a second while it loads.  With one loading process per processor, the
    first processes are ready sooner, and the last ones are not ready later.
    """
    waiting, starting = deque(roles), list[Role]()

    def has_one_started() -> bool:
        return any(_has_started(role, supervisor.pid(role)) for role in starting)

    while waiting or starting:
        while waiting and len(starting) < at_once:
            starting.append(waiting.popleft())
            _start_role(starting[-1], supervisor)
        names = " and ".join(role.name for role in starting)
        supervisor.wait(has_one_started, _START_S, f"{names} did not begin")
        starting = [role for role in starting if not _has_started(role, supervisor.pid(role))]


def _start_role(role: Role, supervisor: Supervisor) -> None:
    """Start a role, and remove the file with which a former process of the role showed that it had started."""
    supervisor.start(role)
    if (pid := supervisor.pid(role)) is not None:
        process_files.remove_stale(role.name, pid)


def _has_started(role: Role, pid: int | None) -> bool:
    if role.port is not None:
        return ports.is_open(_LOOPBACK, role.port)
    return pid is not None and process_files.has_started(role.name, pid)


def _count_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_broker(url: str) -> None:
    """Check that the broker of the settings can be used.  Raises UpError."""
    from kombu import Connection

    try:
        with Connection(url, connect_timeout=5) as connection:
            connection.connect()
    except Exception as error:  # Each transport has its own exceptions.
        reason = _without_password(str(error), url)
        raise UpError(f"SLOTKEEPER_BROKER_URL does not answer ({reason}): start that broker, or unset it.") from error


def _without_password(text: str, url: str) -> str:
    """Return the text with the user and password of the URL masked."""
    credentials = url.partition("://")[2].rpartition("@")[0]
    words = [credentials, credentials.partition(":")[2]]
    for word in filter(None, words):
        text = text.replace(word, "***").replace(unquote(word), "***")
    return text


def _make_readiness_check(url: str) -> Callable[[], bool]:
    """Return a function that returns whether the API is ready."""
    from slotkeeper.client import (
        Client,
        ClientError,
    )  # Imported here: it loads while the processes start, and does not delay them.

    client = Client(url, ca=False)

    def is_ready() -> bool:
        with suppress(ClientError):
            client.get("/health/ready")
            return True
        return False

    return is_ready


def _stop(supervisor: Supervisor, plan: UpPlan, say: Say) -> None:
    """Stop all processes, and print what they wait for and how long it took."""
    if not supervisor.running:
        return
    began = time.monotonic()
    say(f"Stopping ...{_explain_wait(_running_jobs(plan), plan.grace_s)}")
    killed = supervisor.stop()
    took = f"Stopped after {time.monotonic() - began:.1f} s."
    say(f"{took}  These took too long and were killed: {', '.join(killed)}." if killed else took)


def _running_jobs(plan: UpPlan) -> list[str] | None:
    """Return the running jobs, each with its model; None: the API is not available, or requires a key."""
    from slotkeeper.client import Client, ClientError

    try:
        page = Client(plan.url, ca=False).get("/queue/jobs", status="running", limit=_MAX_NAMED + 1)
    except ClientError:
        return None
    return [f"{job['job_id']} ({job['model']})" for job in page["jobs"]]


def _explain_wait(running: list[str] | None, grace_s: float) -> str:
    """Return a sentence about the jobs that the stop waits for, and how to stop at once; "": there are none."""
    if running == []:
        return ""
    more = ", ..." if len(running or ()) > _MAX_NAMED else ""
    jobs = f"running jobs: {', '.join(running[:_MAX_NAMED])}{more}" if running else "running jobs"
    return (
        f"  Waiting up to {grace_s:g} s for the end of {jobs}.  Ctrl-C again stops at once; "
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
        f"  Server  {server.name}  (model {server.model}, slots: {server.slots}, at {server.url})"
        for server in plan.demo
    ]
    if plan.app.require_keys:
        lines.append(f"  Keys    {plan.command()} tenants add NAME --operate  prints a key for SLOTKEEPER_KEY")
    return "\n".join([*lines, ""])


def _demonstrate(plan: UpPlan, options: UpOptions, say: Say, stop: threading.Event) -> int:
    """Register the demo servers, run jobs on them, and return the exit status; 0: all jobs completed."""
    from app.up import demonstration
    from slotkeeper.client import Client, ClientError

    with demonstration.demo_key(plan.app) as key:
        client = Client(plan.url, key, ca=False)  # No authority has certified the address of this machine.
        try:
            models = demonstration.register(client, plan.demo)
            if "zimg" not in models:
                say("No first job: the model zimg has servers of yours.")
                return 0
            if options.demo_jobs:
                return demonstration.run_jobs(client, options.demo_jobs, models, stop)
            return demonstration.run_first_job(client, plan.command(), say, stop)
        except ClientError as error:
            if not stop.is_set():
                say(f"The demonstration did not work: {error}")
            return 1
