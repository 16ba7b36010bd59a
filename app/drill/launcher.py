"""`slotkeeper drill`: the order in which it all happens."""

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.drill import journals, recovery
from app.drill.card import Card
from app.drill.checker import Disturbance, Evidence, check, unexplained
from app.drill.clients import Clients
from app.drill.faults import Saboteur, Struck
from app.drill.jobs import orders
from app.drill.schedule import Fault, Kind, schedule, targets
from app.drill.stack import Stack
from app.drill.truth import Truth
from app.up.errors import Stopped
from app.up.guardian import Guardian
from jobs import ledger
from jobs.db import Database
from jobs.states import FINAL
from jobs.store import Store

if TYPE_CHECKING:
    from rich.console import Console

_LOOK_S = 0.5
_STALLED_S = 90.0
_AGREE_S = 30.0
# How long after its mending a fault can still make a job late: an offer stands 10 s and is looked for every 5 s.
_AFTERMATH_NS = 20_000_000_000


@dataclass(frozen=True, slots=True)
class Wishes:
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


def drill(wishes: Wishes, console: "Console") -> Card:
    """Run it, and answer what came of it.  Raises UpError, Stopped; no process of it is left in any case."""
    home = Path(tempfile.mkdtemp(prefix="slotkeeper-drill-"))
    keep = True
    try:
        with _interruptible(), Guardian() as guardian:
            card = _Drill(wishes, Stack(home, guardian, wishes.workers, wishes.slots), console).run()
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

    def __init__(self, wishes: Wishes, stack: Stack, console: "Console") -> None:
        self._wishes, self._stack, self._console = wishes, stack, console
        slots = sum(server.slots for server in stack.servers)
        models = sorted({server.model for server in stack.servers})
        among = targets(stack.workers, [server.name for server in stack.servers])
        self._faults = schedule(wishes.seed, wishes.kinds, among, wishes.seconds, wishes.every_s, wishes.kills)
        self._seconds = wishes.seconds if wishes.kills is None else self._faults[-1].at_s
        self._orders = orders(wishes.seed, wishes.jobs, models, slots, self._seconds, wishes.burst)
        self._clients = Clients(stack.url, self._orders, wishes.clients)
        self._saboteur = Saboteur(stack, self._faults, self._say_fault)
        self._truth = Truth(stack.redis_url, stack.servers)
        self._agreed_s: float | None = None
        self._left: list[str] = []

    def run(self) -> Card:
        with ExitStack() as left:
            left.callback(self._end)
            with self._console.status("Starting Valkey, workers, beat, the API and three inference servers ..."):
                self._stack.start()
            self._console.print(
                f"seed {self._wishes.seed}: {len(self._orders)} jobs, {len(self._faults)} faults in "
                f"{self._seconds:.0f} s (the same seed brings the same)"
            )
            database = Database(self._stack.record_url)
            left.callback(database.close)
            stalled = self._follow(Store(database))
            self._saboteur.stop()
            self._saboteur.join()
            self._left = self._at_rest()
            with self._console.status("Stopping everything ..."):
                slow = self._stack.stop()
            return self._card(database, stalled, slow)

    # -- while it goes on ----------------------------------------------------------------------------------

    def _follow(self, store: Store) -> bool:
        """Watch until every accepted job has ended; True: they have stopped ending."""
        self._clients.start()
        self._saboteur.start()
        with self._bars() as show:
            moved_at, before = time.monotonic(), -1
            while True:
                counts = store.counts()
                ended, accepted = sum(counts[state] for state in FINAL), len(self._clients.receipts)
                show(accepted, ended)
                now = time.monotonic()
                moved_at, before = (now, ended) if ended != before else (moved_at, before)
                if self._is_over() and ended >= sum(counts.values()):
                    return False
                if now - moved_at > _STALLED_S:
                    self._clients.stop()
                    return True
                time.sleep(_LOOK_S)

    def _is_over(self) -> bool:
        """No more submits, no more faults.  Meanwhile, look after the processes and compare the two truths."""
        if self._saboteur.is_alive():
            return False
        if self._saboteur.error is not None:
            raise self._saboteur.error
        self._stack.look()
        if self._agreed_s is None and self._truth.differs() == set():
            self._agreed_s = self._since_faults()
        waits_still = self._agreed_s is None and self._since_faults() < _AGREE_S
        return self._clients.join(0) and not waits_still

    def _since_faults(self) -> float:
        last = max((one.mended_ns for one in self._saboteur.struck), default=time.monotonic_ns())
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
        self._console.print(f"  {fault.at_s:6.1f} s  {fault.kind} {fault.target}{lasts}")

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

    def _card(self, database: Database, stalled: bool, slow: Sequence[str]) -> Card:
        struck, now_ns = self._saboteur.struck, time.monotonic_ns()
        runs = [
            run
            for server in self._stack.servers
            for run in journals.server_runs(
                server.name,
                self._stack.journal(server.name),
                self._stack.starts(server.name),
                [one.at_ns for one in struck if one.fault.target == server.name],
                now_ns,
            )
        ]
        trails = journals.trails(database)
        emptied_ms = [one.at_ms for one in struck if one.fault.kind is Kind.FLUSH]
        record = journals.recorded(journals.states(database), trails, emptied_ms)
        receipts, places = self._clients.receipts, recovery.placed(trails)
        journals.write_receipts(self._stack.home / "clients.journal", receipts)
        slots = {server.name: server.slots for server in self._stack.servers}
        findings = check(Evidence(receipts, runs, record, slots))
        balance = ledger.read(database)
        return Card(
            seed=self._wishes.seed,
            findings=findings,
            disordered=unexplained(findings.overtaken, [self._disturbance(one) for one in struck]),
            faults=[one.fault for one in struck],
            stalled=stalled,
            answers=dict(self._clients.answers),
            refusals=self._clients.refusals,
            gave_up=len(self._clients.gave_up),
            doubled=self._clients.doubled,
            unheard=balance.accepted - findings.accepted,
            balanced=balance.balanced,
            submits_per_s=self._burst_rate(),
            recovery=recovery.summary(
                (str(kind), seconds)
                for kind, seconds in recovery.slot_recovery(struck, runs, places, receipts, self._stack.servers)
            ),
            rerun=recovery.summary(("rerun", seconds) for seconds in recovery.rerun_after(struck, trails)).get("rerun"),
            agreed_s=self._agreed_s,
            left=self._left,
            crashes=self._stack.crashes,
            slow=list(slow),
            states={job_id: record[job_id].state if job_id in record else None for job_id in findings.lost},
        )

    def _disturbance(self, one: Struck) -> Disturbance:
        slots = {server.name: server.slots for server in self._stack.servers}
        all_slots, clients = sum(slots.values()), self._wishes.clients
        most = {
            Kind.WORKER: all_slots,
            Kind.STOP: all_slots,
            Kind.TERM: all_slots,
            Kind.SERVER: slots.get(one.fault.target, 0),
            Kind.WEB: clients,
            Kind.REDIS: all_slots + clients,
            Kind.FLUSH: all_slots + clients,
        }.get(one.fault.kind, 0)
        return Disturbance(one.at_ns, max(one.mended_ns, one.at_ns) + _AFTERMATH_NS, most)

    def _burst_rate(self) -> float | None:
        answered = sorted(receipt.answered_ns for receipt in self._clients.receipts)
        at_once = sum(order.at_s == 0 for order in self._orders)
        if not 1 < at_once <= len(answered):
            return None
        return at_once / (answered[at_once - 1] / 1e9 - self._clients.began_s)


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
