"""Inject the faults of a schedule, each at its time, and note when that happened."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.cluster.cluster import Cluster
from tools.drill.fault_injection import ACTS, NotApplicable, Undo
from tools.drill.fault_schedule import Fault

_LOOK_EVERY_S = 0.2


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected: when, on the monotonic clock (ns) and on the wall clock (ms)."""

    fault: Fault
    at_ns: int
    at_ms: int
    effect_ns: int = 0
    """When the act had been done."""
    undo_began_ns: int = 0
    """When undoing it began; 0: it has not."""
    undone_ns: int = 0
    """When it had been undone; 0: it has not."""
    killed: bool = False
    """A process that should have ended by itself had to be killed."""


class FaultInjector(threading.Thread):
    """The thread that injects and undoes faults.

    Only this thread may use the cluster while it runs.  It ends when every fault is undone, or early after `stop`.
    on_injected: called after each fault.
    """

    def __init__(self, stack: Cluster, faults: Sequence[Fault], on_injected: Callable[[Fault], None]) -> None:
        super().__init__(name="fault-injector", daemon=True)
        self._stack, self._on_injected = stack, on_injected
        acts = [(fault.at_s, 0, fault) for fault in faults]
        acts += [(fault.at_s + fault.lasts_s, 1, fault) for fault in faults]
        self._acts = sorted(acts, key=lambda act: act[:2])
        self._stop_requested = threading.Event()
        self._injected: dict[Fault, InjectedFault] = {}
        self._undos: dict[Fault, Undo] = {}
        self.error: Exception | None = None

    @property
    def injected(self) -> list[InjectedFault]:
        """The injected faults, in the order of their times."""
        return sorted(self._injected.values(), key=lambda fault: fault.at_ns)

    def stop(self) -> None:
        self._stop_requested.set()

    def run(self) -> None:
        began = time.monotonic()
        try:
            for at_s, is_undo, fault in self._acts:
                self._wait_until(began + at_s)
                if self._stop_requested.is_set():
                    return
                (self._undo if is_undo else self._inject)(fault)
        except Exception as error:  # The thread that joins this one reads it.
            self.error = error

    def _wait_until(self, at: float) -> None:
        while not self._stop_requested.is_set() and (left := at - time.monotonic()) > 0:
            self._stop_requested.wait(min(left, _LOOK_EVERY_S))
            self._stack.restart_ended()

    def _inject(self, fault: Fault) -> None:
        self._injected[fault] = InjectedFault(fault, time.monotonic_ns(), time.time_ns() // 1_000_000)
        try:
            self._undos[fault] = ACTS[fault.kind](self._stack, fault)
        except NotApplicable:
            del self._injected[fault]
            return
        self._injected[fault].effect_ns = time.monotonic_ns()
        self._on_injected(fault)

    def _undo(self, fault: Fault) -> None:
        if fault in self._undos:
            injected = self._injected[fault]
            injected.undo_began_ns = time.monotonic_ns()
            injected.killed = self._undos.pop(fault)() is True
            injected.undone_ns = time.monotonic_ns()
