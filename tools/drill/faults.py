"""Lets the faults of a schedule happen, each at its time, and notes when it did."""

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
    """A fault that has happened: on the monotonic clock, and on the wall's."""

    fault: Fault
    at_ns: int
    at_ms: int
    effect_ns: int = 0
    """When it had been done, and lasted until …"""
    mending_ns: int = 0
    """… this moment, and was over at …"""
    mended_ns: int = 0
    """… this."""
    killed: bool = False
    """What should have ended by itself had to be killed."""


class FaultInjector(threading.Thread):
    """Has the stack for itself while it runs; in the end everything that it stopped has been started again."""

    def __init__(self, stack: Cluster, faults: Sequence[Fault], tell: Callable[[Fault], None]) -> None:
        super().__init__(name="saboteur", daemon=True)
        self._stack, self._tell = stack, tell
        acts = [(fault.at_s, 0, fault) for fault in faults]
        acts += [(fault.at_s + fault.lasts_s, 1, fault) for fault in faults]
        self._acts = sorted(acts, key=lambda act: act[:2])
        self._told = threading.Event()
        self._struck: dict[Fault, InjectedFault] = {}
        self._mends: dict[Fault, Undo] = {}
        self.error: Exception | None = None

    @property
    def injected(self) -> list[InjectedFault]:
        """In the order of their times."""
        return sorted(self._struck.values(), key=lambda it: it.at_ns)

    def stop(self) -> None:
        self._told.set()

    def run(self) -> None:
        began = time.monotonic()
        try:
            for at_s, mends, fault in self._acts:
                self._wait_until(began + at_s)
                if self._told.is_set():
                    return
                (self._mend if mends else self._strike)(fault)
        except Exception as error:  # for whoever joins this thread
            self.error = error

    def _wait_until(self, at: float) -> None:
        while not self._told.is_set() and (left := at - time.monotonic()) > 0:
            self._told.wait(min(left, _LOOK_EVERY_S))
            self._stack.restart_ended()

    def _strike(self, fault: Fault) -> None:
        self._struck[fault] = InjectedFault(fault, time.monotonic_ns(), time.time_ns() // 1_000_000)
        try:
            self._mends[fault] = ACTS[fault.kind](self._stack, fault)
        except NotApplicable:
            del self._struck[fault]
            return
        self._struck[fault].effect_ns = time.monotonic_ns()
        self._tell(fault)

    def _mend(self, fault: Fault) -> None:
        if fault in self._mends:
            struck = self._struck[fault]
            struck.mending_ns = time.monotonic_ns()
            struck.killed = self._mends.pop(fault)() is True
            struck.mended_ns = time.monotonic_ns()
