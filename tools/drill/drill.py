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
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Event
from tools.cluster.cluster import Cluster
from tools.cluster.tcp_proxy import Proxy
from tools.drill import conduct_checks, evidence, recovery_times
from tools.drill.conduct_checks import ConductReport, Snapshot, StuckWatch
from tools.drill.fault_schedule import OUTSIDE, Fault, Kind, schedule
from tools.drill.faults import FaultInjector, InjectedFault
from tools.drill.history_checks import Disturbance, Evidence, Run, check, unexplained
from tools.drill.jobs import PlannedJob, plan_deadline_bursts, plan_jobs
from tools.drill.limits import limits_in_force
from tools.drill.score_card import ScoreCard
from tools.drill.setting import DrillSetup
from tools.drill.truth import LeaseComparison
from tools.drill.webhook_receiver import Receiver
from tools.drill.workload import Clients

if TYPE_CHECKING:
    from rich.console import Console

_LOOK_S = 0.5
_STALLED_S = 90.0
_AGREE_S = 30.0
_CALM_S = 30.0  # so long after the last fault nothing may stand still any more
_HOOKS_S = 180.0  # a message that failed a few times is tried again minutes later
_MASSES_SHARE = 4  # of the jobs, in each mass of deadlines: one in so many
_MASS_SIZE = (20, 300)
_OFFER_S = 5.0
# How long after its mending a fault can still make a job late: an offer stands 10 s and is looked for every 5 s.
_AFTERMATH_NS = 20_000_000_000
# An enqueue can fail under these, if they happen to the Redis of the queue.
_REFUSES_ENQUEUES = {
    *(Kind.REDIS, Kind.FULL, Kind.SILENCE, Kind.CUTS, Kind.DELAYS, Kind.STALE, Kind.FAILOVER, Kind.REFUSAL),
}
_PAUSE_NS = 1_000_000_000  # So long after a failure a process calls no Redis (routing/queue/queues.py).


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """What the command line asks for."""

    jobs: int
    seconds: float
    seed: int
    every_s: float
    kinds: tuple[Kind, ...]
    clients: int = 16
    burst: float = 0.5
    keep: bool = False
    kills: int | None = None
    """So many faults instead of those that `seconds` has room for."""
    workers: int = 2
    slots: int = 8
    database: str = "sqlite"
    command: str = ""
    """Repeats this drill."""


def drill(wishes: DrillOptions, console: "Console") -> ScoreCard:
    """Run it, and answer what came of it.  Raises UpError, Stopped; no process of it is left in any case."""
    home = Path(tempfile.mkdtemp(prefix="slotkeeper-drill-"))
    keep = True
    try:
        setting = DrillSetup(wishes.workers, wishes.slots, wishes.database, wishes.kinds, wishes.seed)
        with _interruptible(), Guardian() as guardian, Proxy(wishes.seed) as proxy, Receiver() as receiver:
            port = receiver.port if setting.has_receivers else None
            cluster = Cluster(home, guardian, proxy, setting, port)
            cluster.refuse_deliveries = receiver.refuse
            card = _Drill(wishes, cluster, receiver, console).run()
        keep = wishes.keep or not card.passed
        return card
    except Stopped:
        keep = wishes.keep
        raise
    finally:
        if keep:
            console.print(f"Journals and logs: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)


class _Drill:
    """One drill, from the start of the processes to the card."""

    def __init__(self, wishes: DrillOptions, stack: Cluster, receiver: Receiver, console: "Console") -> None:
        self._wishes, self._stack, self._receiver, self._console = wishes, stack, receiver, console
        self._slots = {server.name: server.slots for server in stack.servers}
        self._faults = schedule(
            wishes.seed, wishes.kinds, stack.targets(), wishes.seconds, wishes.every_s, wishes.kills
        )
        self._seconds = wishes.seconds if wishes.kills is None else self._faults[-1].at_s
        self._orders = self._ordered()
        self._clients = Clients(stack.url, self._orders, wishes.clients, stack.receiver_url)
        self._saboteur = FaultInjector(stack, self._faults, self._say_fault)
        self._agreed_s: float | None = None
        self._left: list[str] = []
        self._stuck = StuckWatch()

    def _ordered(self) -> list[PlannedJob]:
        wishes, hooks = self._wishes, self._stack.setting.has_receivers
        models = [server.model for server in self._stack.servers for _ in range(server.slots)]
        plain = plan_jobs(
            wishes.seed, wishes.jobs, models, sum(self._slots.values()), self._seconds, wishes.burst, hooks=hooks
        )
        moments = [(it.at_s, it.at_s + it.lasts_s) for it in self._faults if it.kind is Kind.DEADLINES]
        size = min(max(wishes.jobs // _MASSES_SHARE, _MASS_SIZE[0]), _MASS_SIZE[1])
        return sorted(
            plain + plan_deadline_bursts(wishes.seed, wishes.jobs, moments, size, models, hooks), key=lambda it: it.at_s
        )

    def run(self) -> ScoreCard:
        with ExitStack() as left:
            left.callback(self._end)
            with self._console.status("Starting Valkey, workers, beat, the API and four inference servers ..."):
                self._stack.start()
            self._truth = LeaseComparison(self._stack.redis_url, self._stack.servers)
            self._console.print(
                f"seed {self._wishes.seed}: {len(self._orders)} jobs, {len(self._faults)} faults in "
                f"{self._seconds:.0f} s (the same seed brings the same)"
            )
            database = Database(self._stack.database_url)
            left.callback(database.close)
            stalled = self._follow(database)
            self._saboteur.stop()
            self._saboteur.join()
            if not stalled:
                self._wait_for_webhooks(database)
            self._left = self._at_rest()
            with self._console.status("Reading what was written down ..."):
                evidence = _Read(database)
            with self._console.status("Stopping everything ..."):
                slow = self._stack.stop()
            return self._card(evidence, stalled, slow)

    # -- while it goes on ----------------------------------------------------------------------------------

    def _follow(self, database: Database) -> bool:
        """Watch until every accepted job has ended; True: they have stopped ending."""
        self._clients.start()
        self._saboteur.start()
        store = JobStore(database)
        with self._bars() as show:
            moved_at, before = time.monotonic(), -1
            while True:
                time.sleep(_LOOK_S)
                over = self._is_over()
                now = time.monotonic()
                try:
                    counts = ledger.read(store.database).by_state
                    self._look_for_stuck(database)
                except DatabaseUnavailable:  # It has been killed, and comes back.
                    continue
                ended, accepted = sum(counts[state] for state in FINAL_STATES), len(self._clients.receipts)
                show(accepted, ended)
                if ended != before or self._saboteur.is_alive():
                    moved_at, before = now, ended
                if over and ended >= sum(counts.values()):
                    return False
                if now - moved_at > _STALLED_S:
                    self._clients.stop()
                    return True

    def _is_over(self) -> bool:
        """No more submits, no more faults.  Meanwhile, look after the processes and compare the two truths."""
        if self._saboteur.is_alive():
            return False
        if self._saboteur.error is not None:
            raise self._saboteur.error
        self._stack.restart_ended()
        if self._agreed_s is None and self._truth.differs() == set():
            self._agreed_s = self._since_faults()
        waits_still = self._agreed_s is None and self._since_faults() < _AGREE_S
        return self._clients.join(0) and not waits_still

    def _look_for_stuck(self, database: Database) -> None:
        if self._saboteur.is_alive() or self._since_faults() < _CALM_S:
            return
        model_of = {server.name: server.model for server in self._stack.servers}
        try:
            running = self._truth.running()
        except Exception:  # A server that does not answer now is asked again.
            return
        at_servers: dict[str, set[str]] = defaultdict(set)
        slots: Counter[str] = Counter()
        for server in self._stack.servers:
            slots[server.model] += server.slots
        for name, job in running:
            at_servers[model_of[name]].add(job)
        waiting, said = evidence.active_jobs(database)
        self._stuck.see(Snapshot(waiting, said, at_servers, slots), time.monotonic())

    def _wait_for_webhooks(self, database: Database) -> None:
        """Until none is pending any more, but not for ever."""
        until = time.monotonic() + _HOOKS_S
        with self._console.status("Waiting for the last webhooks ..."):
            while time.monotonic() < until:
                if not any(
                    one.state == "pending" and not one.put_off for one in evidence.pending_messages(database, now_ms())
                ):
                    return
                self._stack.restart_ended()
                time.sleep(_LOOK_S)

    def _since_faults(self) -> float:
        last = max((one.mended_ns for one in self._saboteur.injected), default=time.monotonic_ns())
        return (time.monotonic_ns() - last) / 1e9

    def _at_rest(self) -> list[str]:
        """Leases and runs that are left over although every job has ended."""
        until = time.monotonic() + _AGREE_S
        left: set[tuple[str, str]] | None = None
        while time.monotonic() < until:
            try:
                left = self._truth.leases() | self._truth.running()
            except Exception:
                left = None
            if left == set():
                return []
            time.sleep(_LOOK_S)
        return ["nobody answered"] if left is None else sorted(f"{server}: {job}" for server, job in left)

    @contextmanager
    def _bars(self) -> Iterator[Callable[[int, int], None]]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            tasks = [progress.add_task(name, total=len(self._orders)) for name in ("accepted", "ended   ")]

            def show(*done: int) -> None:
                for task, count in zip(tasks, done, strict=True):
                    progress.update(task, completed=count)

            yield show

    def _say_fault(self, fault: Fault) -> None:
        lasts = f" for {fault.lasts_s:.1f} s" if fault.lasts_s else ""
        how = f", {fault.how}," if fault.how and lasts else f", {fault.how}" if fault.how else ""
        self._console.print(f"  {fault.at_s:6.1f} s  {fault.kind} {fault.target}{how}{lasts}")

    def _end(self) -> None:
        """Whatever happens: no thread of ours goes on, no process is left."""
        with _undisturbed():
            self._saboteur.stop()
            self._clients.stop()
            try:
                if self._saboteur.ident is not None:
                    self._saboteur.join()
            finally:
                self._stack.end()

    # -- afterwards ----------------------------------------------------------------------------------------

    def _card(self, seen: "_Read", stalled: bool, slow: Sequence[str]) -> ScoreCard:
        struck, receipts, runs = self._saboteur.injected, self._clients.receipts, self._runs()
        record = evidence.recorded(seen.states, seen.trails)
        evidence.write_receipts(self._stack.home / "clients.journal", receipts)
        findings = check(Evidence(receipts, runs, record, self._slots))
        idle = recovery_times.slot_recovery(
            struck, runs, recovery_times.placed(seen.trails), receipts, self._stack.servers
        )
        rerun = [] if self._clocks_were_wrong() else recovery_times.rerun_after(struck, seen.trails)
        return ScoreCard(
            seed=self._wishes.seed,
            command=self._wishes.command,
            findings=findings,
            conduct=self._conduct(seen, runs),
            disordered=unexplained(findings.overtaken, [self._disturbance(one) for one in struck]),
            faults=[one.fault for one in struck],
            stalled=stalled,
            answers=dict(self._clients.answers),
            refusals=self._clients.refusals,
            gave_up=len(self._clients.gave_up),
            doubled=self._clients.doubled,
            unheard=seen.balance.accepted - findings.accepted,
            balanced=seen.balance.balanced,
            submits_per_s=self._burst_rate(),
            recovery=recovery_times.summary((str(kind), seconds) for kind, seconds in idle),
            rerun=recovery_times.summary(("rerun", seconds) for seconds in rerun).get("rerun"),
            agreed_s=self._agreed_s,
            left=self._left,
            crashes=self._stack.crashes,
            slow=list(slow),
            states={job_id: record[job_id].state if job_id in record else None for job_id in findings.lost},
            lost_commits=self._stack.commits.lost,
            twisted=self._stack.broker_messages.injected,
        )

    def _conduct(self, seen: "_Read", runs: Sequence[Run]) -> ConductReport:
        struck, clients = self._saboteur.injected, self._clients
        deaths = [(one.at_ns, one.mended_ns or time.monotonic_ns()) for one in struck if _takes_runs_along(one)]
        wall_ns = None if self._clocks_were_wrong() else time.time_ns() - time.monotonic_ns()
        hooked = {job_id: seen.states.get(job_id) for job_id, order in clients.orders_of.items() if order.hooked}
        mortal = {job_id for job_id, order in clients.orders_of.items() if order.expires_s is not None}
        return ConductReport(
            {
                "two at once": self._crowded(),
                "stuck": [f"{job_id} {what}" for job_id, what in self._stuck.stuck.items()],
                "doubled accepts": conduct_checks.doubled(seen.numbers),
                "lies": clients.lies,
                "late answers": clients.late,
                "undue retries": conduct_checks.undue_retries(seen.trails, runs),
                "undue crashes": conduct_checks.undue_crashes(seen.trails, runs, deaths, wall_ns),
                "undeserved ends": conduct_checks.unexpected_ends(seen.states, self._stack.revoked, mortal),
                "over limits": conduct_checks.over_limits(runs, limits_in_force(struck, self._stack.servers)),
                **conduct_checks.webhook_faults(hooked, self._receiver.deliveries, seen.owed),
            }
        )

    def _runs(self) -> list[Run]:
        return [
            run
            for server in self._stack.servers
            for run in evidence.server_runs(
                server.name,
                self._stack.journal(server.name),
                self._stack.starts(server.name),
                [
                    one.at_ns
                    for one in self._saboteur.injected
                    if one.fault.kind is Kind.SERVER and one.fault.target == server.name
                ],
                time.monotonic_ns(),
            )
        ]

    def _crowded(self) -> list[str]:
        """Runs that servers began beyond their slots, as those servers counted."""
        return [
            line
            for server in self._stack.servers
            for line in evidence.crowded_starts(server.name, self._stack.starts(server.name), server.slots)
        ]

    def _clocks_were_wrong(self) -> bool:
        return any(one.fault.kind in (Kind.CLOCK, Kind.STEP) for one in self._saboteur.injected)

    def _disturbance(self, one: InjectedFault) -> Disturbance:
        fault, all_slots, clients = one.fault, sum(self._slots.values()), self._wishes.clients
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
            # It goes on, and offers that come to nothing are made again.
            most *= 1 + round(fault.lasts_s / _OFFER_S)
        ended_ns = max(one.mended_ns, one.at_ns)
        keeps_jobs_out = fault.target == "redis" and fault.kind in _REFUSES_ENQUEUES
        return Disturbance(one.at_ns, ended_ns + _AFTERMATH_NS, most, ended_ns + _PAUSE_NS if keeps_jobs_out else None)

    def _burst_rate(self) -> float | None:
        answered = sorted(receipt.answered_ns for receipt in self._clients.receipts)
        at_once = sum(order.at_s == 0 for order in self._orders)
        if not 1 < at_once <= len(answered):
            return None
        return at_once / (answered[at_once - 1] / 1e9 - self._clients.began_s)


class _Read:
    """The record in the end, once and for all."""

    def __init__(self, database: Database) -> None:
        self.trails: dict[str, list[Event]] = evidence.job_events(database)
        self.states = evidence.states(database)
        self.numbers = evidence.job_numbers(database)
        self.owed = evidence.pending_messages(database, now_ms())
        self.balance = ledger.read(database)


def _takes_runs_along(one: InjectedFault) -> bool:
    """Whether it may cost a crash: a process died, or stood still for longer than a lease.

    An orderly restart costs nothing, also if the process is killed before it has ended.
    """
    return one.fault.kind in (Kind.WORKER, Kind.STOP, Kind.SERVER)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does, in order.  Raises Stopped."""

    def stop(*_: object) -> None:
        raise Stopped

    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not leave processes behind; this takes a second or two."""
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
