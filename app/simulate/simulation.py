"""Plays a scenario, fleet by fleet: fleets share no slot, so that each is a simulation of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from heapq import merge
from itertools import islice

from redis import Redis

from app.simulate.private_valkey import private_valkey
from app.simulate.scenario import Arrival, Job, Outage, Outcome, Scenario, SimulationError
from app.simulate.simulated_queue import RunRecord, SimulatedQueue, SimulationEvent
from slotkeeper.jobs.values import QueuedJob

_EVENTS = 1000  # in one round trip
_ACTS = 4000  # in one round trip: a tenth of a second

Progress = Callable[[int], object]
"""Told how many more jobs have ended."""


def run(scenario: Scenario, *, progress: Progress = lambda _: None, redis: Redis | None = None) -> Outcome:
    """Simulate.  `redis`: an empty server to play on; None: one is started, and gone afterwards.

    Raises Wrong for a scenario that cannot be played.
    """
    _check(scenario)
    ran: dict[int, list[RunRecord]] = {}
    with private_valkey() if redis is None else nullcontext(redis) as server:
        for fleet in scenario.catalog.fleets():
            room = SimulatedQueue(server, fleet, scenario.catalog, scenario.start_latency_ms, scenario.swap_ms)
            for one in _play(room, scenario, progress):
                ran.setdefault(one.job, []).append(one)
    jobs = (_job(number, arrival, ran.get(number, [])) for number, arrival in enumerate(scenario.arrivals, 1))
    return Outcome(scenario, tuple(jobs))


def _play(room: SimulatedQueue, scenario: Scenario, progress: Progress) -> Iterator[RunRecord]:
    coming = _events(room, scenario)
    batch: list[SimulationEvent] = list(islice(coming, _EVENTS + 1))
    done = False
    while not done or batch:
        # The event after the last one that is sent says how far time may go: nothing else comes before it.
        beyond = batch[_EVENTS] if len(batch) > _EVENTS else None
        taken, done, rows = room.play(batch[:_EVENTS], beyond.at_ms if beyond else None, _ACTS)
        yield from rows
        progress(sum(not row.broken for row in rows))
        batch = [*batch[taken:], *islice(coming, taken)]


def _events(room: SimulatedQueue, scenario: Scenario) -> Iterator[SimulationEvent]:
    """What comes from outside, in order of time."""
    models = set(scenario.catalog.models_of(room.fleet))
    first = min([scenario.begin_ms, *(arrival.at_ms for arrival in scenario.arrivals[:1])])
    yield room.opening(first)
    arrivals = (
        room.arrival(_waiting(number, arrival), arrival.at_ms, arrival.run_ms)
        for number, arrival in enumerate(scenario.arrivals, 1)
        if arrival.model in models
    )
    yield from merge(_changes(room, scenario), arrivals, key=lambda event: event.at_ms)


def _changes(room: SimulatedQueue, scenario: Scenario) -> Iterator[SimulationEvent]:
    """Servers that go down and come up again."""
    catalog = scenario.catalog
    here = {server.name for server in catalog.servers_of(room.fleet)}
    turns = [
        (at, state, outage.server)
        for outage in _joined(scenario.outages)
        if outage.server in here
        for at, state in ((outage.from_ms, "paused"), (outage.until_ms, "online"))
    ]
    for at, state, name in sorted(turns):
        server = replace(catalog.servers[name], state=state)
        catalog = replace(catalog, servers={**catalog.servers, name: server})
        yield room.changed(at, name if state == "paused" else "", catalog)


def _joined(outages: Sequence[Outage]) -> list[Outage]:
    """Outages of one server that touch are one."""
    joined: list[Outage] = []
    for outage in sorted(outages, key=lambda it: (it.server, it.from_ms, it.until_ms)):
        last = joined[-1] if joined else None
        if last and last.server == outage.server and outage.from_ms <= last.until_ms:
            joined[-1] = replace(last, until_ms=max(last.until_ms, outage.until_ms))
        else:
            joined.append(outage)
    return joined


def _waiting(number: int, arrival: Arrival) -> QueuedJob:
    return QueuedJob(
        str(number),
        number,
        arrival.model,
        arrival.priority,
        arrival.tenant,
        arrival.at_ms,
        arrival.constraints,
        deadline_ms=arrival.deadline_ms,
    )


def _job(number: int, arrival: Arrival, runs: Sequence[RunRecord]) -> Job:
    last = runs[-1] if runs and not runs[-1].broken else None
    lost = sum(run.end_ms - run.start_ms for run in runs if run.broken)
    return Job(
        number,
        arrival.model,
        arrival.tenant,
        arrival.priority,
        arrival.at_ms,
        last.start_ms if last else None,
        last.end_ms if last else None,
        last.slot if last else "",
        last.turn if last else 0,
        lost,
        arrival.deadline_ms,
    )


def _check(scenario: Scenario) -> None:
    before = None
    for number, arrival in enumerate(scenario.arrivals, 1):
        if arrival.model not in scenario.catalog.models:
            known = ", ".join(sorted(scenario.catalog.models)) or "none"
            raise SimulationError(
                f"Job {number} asks for model {arrival.model!r}; the fleet has {known}: add it, or leave it out."
            )
        if arrival.run_ms < 1:
            raise SimulationError(f"Job {number} runs for {arrival.run_ms} ms: give it at least 1.")
        if not 1 <= arrival.priority <= 9:
            raise SimulationError(
                f"Job {number} has priority {arrival.priority}: priorities go from 1, the most urgent, to 9."
            )
        if before is not None and arrival.at_ms < before:
            raise SimulationError(
                f"Job {number} arrives before the one that stands before it: sort the arrivals by time."
            )
        before = arrival.at_ms
    for outage in scenario.outages:
        if outage.server not in scenario.catalog.servers:
            known = ", ".join(sorted(scenario.catalog.servers)) or "none"
            raise SimulationError(f"There is no server {outage.server!r} that could fail: the fleet has {known}.")
        if outage.until_ms <= outage.from_ms:
            raise SimulationError(f"The outage of {outage.server} ends before it begins: give it a length above 0.")
