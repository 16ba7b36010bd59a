"""Run one drill, from the start of a cluster to the score card."""

import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.up.errors import Stopped
from app.up.guardian import Guardian
from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs import credits, ledger
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Event
from tools.cluster.cluster import Cluster
from tools.cluster.tcp_proxy import Proxy
from tools.drill import conduct_checks, evidence, recovery_times
from tools.drill.conduct_checks import ConductReport, Snapshot, StuckWatch
from tools.drill.drill_setup import (
    cluster_spec,
    journal_path,
    open_account,
    possible_targets,
    server_specs,
    starts_path,
)
from tools.drill.evidence import LeaseComparison
from tools.drill.fault_injection import FaultInjector, InjectedFault, find_killed, limits_in_force
from tools.drill.fault_schedule import OUTSIDE, Fault, Kind, schedule
from tools.drill.history_checks import Disturbance, Evidence, Run, check, unexplained
from tools.drill.score_card import ScoreCard
from tools.drill.webhook_receiver import Receiver
from tools.drill.workload import Clients, PlannedJob, plan_deadline_bursts, plan_jobs

if TYPE_CHECKING:
    from rich.console import Console

_LOOK_S = 0.5
_STALLED_S = 90.0
_AGREE_S = 30.0
_CALM_S = 30.0  # so long after the last fault no job may be stuck
_WEBHOOKS_S = 180.0  # A message that failed a few times is tried again minutes later.
_BURST_SHARE = 4  # A burst of deadlines has one in so many of the jobs.
_BURST_SIZE = (20, 300)  # The least and the most jobs of a burst.
_OFFER_S = 5.0
# How long after its end a fault can still make a job late: an offer is open for 10 s and is checked every 5 s.
_AFTERMATH_NS = 20_000_000_000
# An enqueue can fail during these, if they happen to the Redis of the queues.
_REFUSES_ENQUEUES = {
    *(Kind.REDIS, Kind.FULL, Kind.SILENCE, Kind.CUTS, Kind.DELAYS, Kind.STALE, Kind.FAILOVER, Kind.REFUSAL),
}
_PAUSE_NS = 1_000_000_000  # For so long after a failure a process does not call Redis (routing/queue/queues.py).


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """The options of the command line."""

    jobs: int
    seconds: float
    seed: int
    every_s: float
    kinds: tuple[Kind, ...]
    clients: int = 16
    burst: float = 0.5
    keep: bool = False
    kills: int | None = None
    """The number of faults; None: as many as fit into `seconds`."""
    workers: int = 2
    slots: int = 8
    database: str = "sqlite"
    command: str = ""
    """The command that repeats this drill."""


def drill(options: DrillOptions, console: "Console") -> ScoreCard:
    """Run a drill, and return its card.  No process of it is left in any case.  Raises UpError, Stopped."""
    home = Path(tempfile.mkdtemp(prefix="slotkeeper-drill-"))
    keep = True
    try:
        with _interruptible(), Guardian() as guardian, Proxy(options.seed) as proxy, Receiver() as receiver:
            spec = cluster_spec(options.kinds, options.workers, options.database, options.seed, receiver.port)
            cluster = Cluster(home, guardian, proxy, spec, server_specs(home, options.slots))
            cluster.refuse_deliveries = receiver.refuse
            card = _Drill(options, cluster, receiver, console).run()
        keep = options.keep or not card.passed
        return card
    except Stopped:
        keep = options.keep
        raise
    finally:
        if keep:
            console.print(f"Journals and logs: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)


class _Drill:
    """A drill, from the start of its processes to the card."""

    def __init__(self, options: DrillOptions, cluster: Cluster, receiver: Receiver, console: "Console") -> None:
        self._options, self._cluster, self._receiver, self._console = options, cluster, receiver, console
        self._slots = {server.name: server.slots for server in cluster.servers}
        self._faults = schedule(
            options.seed, options.kinds, possible_targets(cluster), options.seconds, options.every_s, options.kills
        )
        self._seconds = options.seconds if options.kills is None else self._faults[-1].at_s
        self._planned_jobs = self._plan_jobs()
        self._clients = Clients(cluster.url, self._planned_jobs, options.clients, cluster.receiver_url)
        self._injector = FaultInjector(cluster, self._faults, self._print_fault)
        self._agreed_s: float | None = None
        self._left_over: list[str] = []
        self._stuck = StuckWatch()

    def _plan_jobs(self) -> list[PlannedJob]:
        options, hooks = self._options, Kind.RECEIVERS in self._options.kinds
        models = [server.model for server in self._cluster.servers for _ in range(server.slots)]
        plain = plan_jobs(
            options.seed, options.jobs, models, sum(self._slots.values()), self._seconds, options.burst, hooks=hooks
        )
        moments = [(fault.at_s, fault.at_s + fault.lasts_s) for fault in self._faults if fault.kind is Kind.DEADLINES]
        size = min(max(options.jobs // _BURST_SHARE, _BURST_SIZE[0]), _BURST_SIZE[1])
        return sorted(
            plain + plan_deadline_bursts(options.seed, options.jobs, moments, size, models, hooks),
            key=lambda job: job.at_s,
        )

    def run(self) -> ScoreCard:
        with ExitStack() as left:
            left.callback(self._end)
            with self._console.status("Starting Valkey, workers, beat, the API and four inference servers ..."):
                self._cluster.start()
                open_account(self._cluster.url)
            self._comparison = LeaseComparison(self._cluster)
            self._console.print(
                f"seed {self._options.seed}: {len(self._planned_jobs)} jobs, {len(self._faults)} faults in "
                f"{self._seconds:.0f} s (the same seed gives the same jobs and faults)"
            )
            database = Database(self._cluster.database_url)
            left.callback(database.close)
            stalled = self._wait_for_jobs(database)
            self._injector.stop()
            self._injector.join()
            if not stalled:
                self._wait_for_webhooks(database)
            self._left_over = self._find_left_over() + find_killed(self._injector.injected)
            with self._console.status("Reading journals and the database ..."):
                records = _Records(database)
            with self._console.status("Stopping everything ..."):
                slow = self._cluster.stop()
            return self._card(records, stalled, slow)

    # -- during the drill ----------------------------------------------------------------------------------

    def _wait_for_jobs(self, database: Database) -> bool:
        """Wait until every accepted job has ended.  Return whether the drill stalled: jobs are left and none ends."""
        self._clients.start()
        self._injector.start()
        store = JobStore(database)
        with self._progress_bars() as show:
            moved_at, before = time.monotonic(), -1
            while True:
                time.sleep(_LOOK_S)
                over = self._is_over()
                now = time.monotonic()
                try:
                    counts = ledger.read(store.database).by_state
                    self._look_for_stuck(database)
                except DatabaseUnavailable:  # It was killed, and starts again.
                    continue
                ended, accepted = sum(counts[state] for state in FINAL_STATES), len(self._clients.receipts)
                show(accepted, ended)
                if ended != before or self._injector.is_alive():
                    moved_at, before = now, ended
                if over and ended >= sum(counts.values()):
                    return False
                if now - moved_at > _STALLED_S:
                    self._clients.stop()
                    return True

    def _is_over(self) -> bool:
        """Return whether all submits and faults are over.

        After the faults, also start ended processes again, and compare leases with servers.
        """
        if self._injector.is_alive():
            return False
        if self._injector.error is not None:
            raise self._injector.error
        self._cluster.restart_ended()
        if self._agreed_s is None and self._comparison.lasting_difference() == set():
            self._agreed_s = self._seconds_since_faults()
        waits_still = self._agreed_s is None and self._seconds_since_faults() < _AGREE_S
        return self._clients.join(0) and not waits_still

    def _look_for_stuck(self, database: Database) -> None:
        if self._injector.is_alive() or self._seconds_since_faults() < _CALM_S:
            return
        model_of = {server.name: server.model for server in self._cluster.servers}
        try:
            running = self._comparison.running()
        except Exception:  # The next look asks the server again.
            return
        at_servers: dict[str, set[str]] = defaultdict(set)
        slots: Counter[str] = Counter()
        for server in self._cluster.servers:
            slots[server.model] += server.slots
        for name, job in running:
            at_servers[model_of[name]].add(job)
        waiting, started = evidence.active_jobs(database)
        self._stuck.observe(Snapshot(waiting, started, at_servers, slots), time.monotonic())

    def _wait_for_webhooks(self, database: Database) -> None:
        """Wait until no message is pending, for at most _WEBHOOKS_S."""
        until = time.monotonic() + _WEBHOOKS_S
        with self._console.status("Waiting for the last webhooks ..."):
            while time.monotonic() < until:
                if not any(
                    message.state == "pending" and not message.put_off
                    for message in evidence.pending_messages(database, now_ms())
                ):
                    return
                self._cluster.restart_ended()
                time.sleep(_LOOK_S)

    def _seconds_since_faults(self) -> float:
        last = max((injection.undone_ns for injection in self._injector.injected), default=time.monotonic_ns())
        return (time.monotonic_ns() - last) / 1e9

    def _find_left_over(self) -> list[str]:
        """Return the leases and runs that are left although every job has ended."""
        until = time.monotonic() + _AGREE_S
        left: set[tuple[str, str]] | None = None
        while time.monotonic() < until:
            try:
                left = self._comparison.leases() | self._comparison.running()
            except Exception:
                left = None
            if left == set():
                return []
            time.sleep(_LOOK_S)
        return (
            ["Redis or a server did not answer"] if left is None else sorted(f"{server}: {job}" for server, job in left)
        )

    @contextmanager
    def _progress_bars(self) -> Iterator[Callable[[int, int], None]]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            tasks = [progress.add_task(name, total=len(self._planned_jobs)) for name in ("accepted", "ended   ")]

            def show(*done: int) -> None:
                for task, count in zip(tasks, done, strict=True):
                    progress.update(task, completed=count)

            yield show

    def _print_fault(self, fault: Fault) -> None:
        lasts = f" for {fault.lasts_s:.1f} s" if fault.lasts_s else ""
        how = f", {fault.how}," if fault.how and lasts else f", {fault.how}" if fault.how else ""
        self._console.print(f"  {fault.at_s:6.1f} s  {fault.kind} {fault.target}{how}{lasts}")

    def _end(self) -> None:
        """Stop all threads and kill all processes, also after an error."""
        with _signals_ignored():
            self._injector.stop()
            self._clients.stop()
            try:
                if self._injector.ident is not None:
                    self._injector.join()
            finally:
                self._cluster.end()

    # -- afterwards ----------------------------------------------------------------------------------------

    def _card(self, records: "_Records", stalled: bool, slow: Sequence[str]) -> ScoreCard:
        injected, receipts, runs = self._injector.injected, self._clients.receipts, self._runs()
        jobs = evidence.recorded(records.states, records.events_by_job)
        evidence.write_receipts(self._cluster.home / "clients.journal", receipts)
        findings = check(Evidence(receipts, runs, jobs, self._slots))
        idle = recovery_times.slot_recovery(
            injected, runs, recovery_times.assigned_slots(records.events_by_job), receipts, self._cluster.servers
        )
        rerun = [] if self._clocks_were_wrong() else recovery_times.rerun_after(injected, records.events_by_job)
        return ScoreCard(
            seed=self._options.seed,
            command=self._options.command,
            findings=findings,
            conduct=self._conduct(records, runs),
            disordered=unexplained(findings.overtaken, [self._disturbance(injection) for injection in injected]),
            faults=[injection.fault for injection in injected],
            stalled=stalled,
            answers=dict(self._clients.answers),
            refusals=self._clients.refusals,
            gave_up=len(self._clients.gave_up),
            doubled_ids=self._clients.doubled_ids,
            unheard=records.balance.accepted - findings.accepted,
            balanced=records.balance.balanced,
            submits_per_s=self._burst_rate(),
            recovery=recovery_times.summary((str(kind), seconds) for kind, seconds in idle),
            rerun=recovery_times.summary(("rerun", seconds) for seconds in rerun).get("rerun"),
            agreed_s=self._agreed_s,
            left_over=self._left_over,
            crashes=self._cluster.crashes,
            slow=list(slow),
            states={job_id: jobs[job_id].state if job_id in jobs else None for job_id in findings.lost},
            lost_commits=self._cluster.commits.lost,
            disturbed_messages=self._cluster.broker_messages.injected,
        )

    def _conduct(self, records: "_Records", runs: Sequence[Run]) -> ConductReport:
        injected, clients = self._injector.injected, self._clients
        deaths = [
            (injection.at_ns, injection.undone_ns or time.monotonic_ns())
            for injection in injected
            if _may_cost_crash(injection)
        ]
        wall_ns = None if self._clocks_were_wrong() else time.time_ns() - time.monotonic_ns()
        hooked = {job_id: records.states.get(job_id) for job_id, job in clients.planned_by_id.items() if job.hooked}
        with_deadline = {job_id for job_id, job in clients.planned_by_id.items() if job.expires_s is not None}
        return ConductReport(
            {
                "two at once": self._overfull_servers(),
                "stuck": [f"{job_id} {problem}" for job_id, problem in self._stuck.stuck.items()],
                "doubled accepts": conduct_checks.duplicate_accepts(records.numbers),
                "lies": clients.false_denials,
                "late answers": clients.late,
                "undue retries": conduct_checks.undue_retries(records.events_by_job, runs),
                "undue crashes": conduct_checks.undue_crashes(records.events_by_job, runs, deaths, wall_ns),
                "undeserved ends": conduct_checks.unexpected_ends(records.states, self._cluster.revoked, with_deadline),
                "credits": conduct_checks.undue_charges(records.states, records.charges, records.unbalanced),
                "over limits": conduct_checks.over_limits(runs, limits_in_force(injected, self._cluster.servers)),
                **conduct_checks.webhook_faults(hooked, self._receiver.deliveries, records.pending_messages),
            }
        )

    def _runs(self) -> list[Run]:
        return [
            run
            for server in self._cluster.servers
            for run in evidence.server_runs(
                server.name,
                journal_path(self._cluster.home, server.name),
                starts_path(self._cluster.home, server.name),
                [
                    injection.at_ns
                    for injection in self._injector.injected
                    if injection.fault.kind is Kind.SERVER and injection.fault.target == server.name
                ],
                time.monotonic_ns(),
            )
        ]

    def _overfull_servers(self) -> list[str]:
        """Return a line for each run that a server began while it had no free slot, by the server's own count."""
        return [
            line
            for server in self._cluster.servers
            for line in evidence.crowded_starts(server.name, starts_path(self._cluster.home, server.name), server.slots)
        ]

    def _clocks_were_wrong(self) -> bool:
        return any(injection.fault.kind in (Kind.CLOCK, Kind.STEP) for injection in self._injector.injected)

    def _disturbance(self, injection: InjectedFault) -> Disturbance:
        fault, all_slots, clients = injection.fault, sum(self._slots.values()), self._options.clients
        most = {
            Kind.WORKER: all_slots,
            Kind.STOP: all_slots,
            Kind.RESTARTS: all_slots,
            Kind.IMPATIENT: all_slots,
            Kind.SERVER: self._slots.get(fault.target, 0),
            Kind.WEB: clients,
            Kind.MAINTENANCE: 0,
            Kind.BEAT: 0,
            Kind.DEADLINES: 0,
            Kind.RECEIVERS: 0,
            Kind.STEP: 0,
            Kind.REVOKES: all_slots,
        }.get(fault.kind, all_slots + clients)
        if fault.kind in OUTSIDE | {Kind.FULL, Kind.REFUSAL}:
            # While the fault lasts, offers that were not claimed are made again.
            most *= 1 + round(fault.lasts_s / _OFFER_S)
        ended_ns = max(injection.undone_ns, injection.at_ns)
        refuses_enqueues = fault.target == "redis" and fault.kind in _REFUSES_ENQUEUES
        return Disturbance(
            injection.at_ns, ended_ns + _AFTERMATH_NS, most, ended_ns + _PAUSE_NS if refuses_enqueues else None
        )

    def _burst_rate(self) -> float | None:
        answered = sorted(receipt.answered_ns for receipt in self._clients.receipts)
        at_once = sum(job.at_s == 0 for job in self._planned_jobs)
        if not 1 < at_once <= len(answered):
            return None
        return at_once / (answered[at_once - 1] / 1e9 - self._clients.began_s)


class _Records:
    """What the database has at the end of the drill, read once."""

    def __init__(self, database: Database) -> None:
        self.events_by_job: dict[str, list[Event]] = evidence.job_events(database)
        self.states = evidence.states(database)
        self.numbers = evidence.job_numbers(database)
        self.pending_messages = evidence.pending_messages(database, now_ms())
        self.balance = ledger.read(database)
        self.unbalanced = credits.find_unbalanced(database, with_transfers=True)
        self.charges = evidence.charges(database)


def _may_cost_crash(injection: InjectedFault) -> bool:
    """Return whether the fault may cost a crash: a process died, or was stopped for longer than a lease.

    SIGTERM costs nothing, even if the process is killed before it has ended.
    """
    return injection.fault.kind in (Kind.WORKER, Kind.STOP, Kind.SERVER)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the drill as Ctrl-C does.  Raises Stopped."""

    def stop(*_: object) -> None:
        raise Stopped

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore signals: a second Ctrl-C must not leave processes behind.  The block takes a second or two."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
