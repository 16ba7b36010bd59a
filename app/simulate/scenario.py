"""What is simulated, and what came of it: plain values.

Times are integers, milliseconds since the epoch, simulated; their names end in `_ms`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slotkeeper.jobs.values import PRIORITY_DEFAULT
from slotkeeper.registry.snapshot import CatalogSnapshot


class SimulationError(ValueError):
    """This cannot be simulated; the text is one sentence that says why and what to do."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that will be submitted.  `run_ms`: how long it holds its slot, at least 1; `constraints`: in text form.

    `deadline_ms`: as `at_ms`; 0: none.  No job expires in a simulation: one that starts later is counted as late.
    """

    at_ms: int
    model: str
    run_ms: int
    tenant: str = "default"
    priority: int = PRIORITY_DEFAULT
    constraints: str = ""
    deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Outage:
    """A server is gone from `from_ms` to `until_ms`: what it runs then goes back to its place and runs again."""

    server: str
    from_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, and the fleet that it meets.

    `arrivals` stand in order of time.  Use of slots is measured from `begin_ms` to `end_ms`; the simulation goes
    on until every job has ended.
    """

    arrivals: Sequence[Arrival]
    catalog: CatalogSnapshot
    begin_ms: int
    end_ms: int
    outages: Sequence[Outage] = ()
    start_latency_ms: int = 0
    """From an offer to the start of its job."""
    swap_ms: int = 0
    """What it costs a server to load another model than the one it has run before."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the outcome.  `start_ms` and `end_ms` None: no slot could ever run it.

    `turn`: the how-manieth offer of its fleet it got.  `lost_ms`: slot time of runs that an outage broke off;
    `start_ms` is then the start of the last run.
    """

    number: int  # of its acceptance
    model: str
    tenant: str
    priority: int
    arrival_ms: int
    start_ms: int | None
    end_ms: int | None
    slot: str
    turn: int
    lost_ms: int = 0
    deadline_ms: int = 0

    @property
    def is_late(self) -> bool:
        """Whether it started after its deadline, or never."""
        return self.deadline_ms > 0 and (self.start_ms is None or self.start_ms > self.deadline_ms)

    @property
    def wait_ms(self) -> int | None:
        """From the arrival to the start of the run that finished."""
        return None if self.start_ms is None else self.start_ms - self.arrival_ms


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a scenario: its jobs, in order of acceptance."""

    scenario: Scenario
    jobs: Sequence[Job]
