"""The input and the outcome of a simulation, as plain values.

Times are simulated, as integers, in milliseconds since the epoch; their names end in `_ms`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slotkeeper.jobs.values import PRIORITY_DEFAULT
from slotkeeper.registry.snapshot import CatalogSnapshot


class SimulationError(ValueError):
    """The input cannot be simulated.  The text is one sentence that says why and what to do."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that will be submitted.  `run_ms`: how long it holds its slot, at least 1.  `constraints`: as text.

    `deadline_ms`: a time; 0: none.  No job expires in a simulation; one that starts after its deadline counts as late.
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
    """An outage of a server.  Jobs that run there at `from_ms` return to their place in the queue and run again."""

    server: str
    from_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load and the fleet that runs it.

    `arrivals`: sorted by time.  The use of slots is measured from `begin_ms` to `end_ms`; the simulation continues
    until every job has ended.
    """

    arrivals: Sequence[Arrival]
    catalog: CatalogSnapshot
    begin_ms: int
    end_ms: int
    outages: Sequence[Outage] = ()
    start_latency_ms: int = 0
    """Time from an offer to the start of its job."""
    swap_ms: int = 0
    """Time that a server needs to load a model other than that of its last run."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the outcome.  `start_ms` and `end_ms` None: no slot could run it.

    `turn`: the number of its offer among the offers of its fleet.  `lost_ms`: slot time of runs that an outage ended;
    `start_ms` is then the start of the last run.
    """

    number: int  # in order of acceptance, from 1
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
        """Whether the job started after its deadline, or never."""
        return self.deadline_ms > 0 and (self.start_ms is None or self.start_ms > self.deadline_ms)

    @property
    def wait_ms(self) -> int | None:
        """Time from the arrival to the start of the run that finished; None: there was none."""
        return None if self.start_ms is None else self.start_ms - self.arrival_ms


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a scenario: its jobs, in order of acceptance."""

    scenario: Scenario
    jobs: Sequence[Job]
