"""Simulates a scenario, fleet by fleet.  Fleets share no slots, so that each is a separate simulation."""

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

_MAX_EVENTS = 1000  # per round trip
_MAX_SCRIPTS = 4000  # per round trip, which then takes about 0.1 s

Progress = Callable[[int], object]
"""Called with the number of jobs that have ended since the last call."""


def run(scenario: Scenario, *, progress: Progress = lambda _: None, redis: Redis | None = None) -> Outcome:
    """Simulate a scenario.  `redis`: an empty server to use; None: a private one is started, and stopped at the end.

    Raises SimulationError if the scenario is invalid.
    """
    _check(scenario)
    runs_by_job: dict[int, list[RunRecord]] = {}
    with private_valkey() if redis is None else nullcontext(redis) as server:
        for fleet in scenario.catalog.fleets():
            queue = SimulatedQueue(server, fleet, scenario.catalog, scenario.start_latency_ms, scenario.swap_ms)
            for run_record in _play(queue, scenario, progress):
                runs_by_job.setdefault(run_record.job, []).append(run_record)
    jobs = (_job(number, arrival, runs_by_job.get(number, [])) for number, arrival in enumerate(scenario.arrivals, 1))
    return Outcome(scenario, tuple(jobs))


def _play(queue: SimulatedQueue, scenario: Scenario, progress: Progress) -> Iterator[RunRecord]:
    """Simulate one fleet, and yield its runs."""
    events = _events(queue, scenario)
    batch: list[SimulationEvent] = list(islice(events, _MAX_EVENTS + 1))
    done = False
    while not done or batch:
        # The time must not pass the first event that is not sent.
        next_event = batch[_MAX_EVENTS] if len(batch) > _MAX_EVENTS else None
        processed, done, run_records = queue.play(
            batch[:_MAX_EVENTS], next_event.at_ms if next_event else None, _MAX_SCRIPTS
        )
        yield from run_records
        progress(sum(not run_record.broken for run_record in run_records))
        batch = [*batch[processed:], *islice(events, processed)]


def _events(queue: SimulatedQueue, scenario: Scenario) -> Iterator[SimulationEvent]:
    """Yield the external events of one fleet, by time."""
    models = set(scenario.catalog.models_of(queue.fleet))
    first = min([scenario.begin_ms, *(arrival.at_ms for arrival in scenario.arrivals[:1])])
    yield queue.opening(first)
    arrivals = (
        queue.arrival(_queued_job(number, arrival), arrival.at_ms, arrival.run_ms)
        for number, arrival in enumerate(scenario.arrivals, 1)
        if arrival.model in models
    )
    yield from merge(_changes(queue, scenario), arrivals, key=lambda event: event.at_ms)


def _changes(queue: SimulatedQueue, scenario: Scenario) -> Iterator[SimulationEvent]:
    """Yield the events in which servers of the fleet go down and come up again."""
    catalog = scenario.catalog
    servers = {server.name for server in catalog.servers_of(queue.fleet)}
    changes = [
        (at, state, outage.server)
        for outage in _merge_outages(scenario.outages)
        if outage.server in servers
        for at, state in ((outage.from_ms, "paused"), (outage.until_ms, "online"))
    ]
    for at, state, name in sorted(changes):
        server = replace(catalog.servers[name], state=state)
        catalog = replace(catalog, servers={**catalog.servers, name: server})
        yield queue.changed(at, name if state == "paused" else "", catalog)


def _merge_outages(outages: Sequence[Outage]) -> list[Outage]:
    """Merge outages of one server that overlap or touch."""
    merged: list[Outage] = []
    for outage in sorted(outages, key=lambda outage: (outage.server, outage.from_ms, outage.until_ms)):
        last = merged[-1] if merged else None
        if last and last.server == outage.server and outage.from_ms <= last.until_ms:
            merged[-1] = replace(last, until_ms=max(last.until_ms, outage.until_ms))
        else:
            merged.append(outage)
    return merged


def _queued_job(number: int, arrival: Arrival) -> QueuedJob:
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
    """Return the outcome of one job.  `runs`: all its runs, in order."""
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
    """Raise SimulationError if the scenario is invalid."""
    previous_ms = None
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
        if previous_ms is not None and arrival.at_ms < previous_ms:
            raise SimulationError(
                f"Job {number} arrives before the job that precedes it in the list: sort the arrivals by time."
            )
        previous_ms = arrival.at_ms
    for outage in scenario.outages:
        if outage.server not in scenario.catalog.servers:
            known = ", ".join(sorted(scenario.catalog.servers)) or "none"
            raise SimulationError(f"There is no server {outage.server!r} for an outage: the fleet has {known}.")
        if outage.until_ms <= outage.from_ms:
            raise SimulationError(f"The outage of {outage.server} ends before it begins: give it a length above 0.")
