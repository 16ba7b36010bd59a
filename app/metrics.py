"""Figures for Prometheus, read from the record and from Redis when they are asked for.

So they are right however many processes there are, and survive all of them.
"""

from collections.abc import Iterable, Iterator

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from jobs import ledger
from jobs.catalog import Snapshot
from jobs.errors import RecordUnavailable
from routing.dispatcher import Dispatcher
from routing.queues import Depths

log = structlog.get_logger(__name__)


class Figures(Collector):
    """Collects at each scrape.  Never fails: what cannot be read is left out, and `up` of it is 0."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("slotkeeper_up", "Whether this process reaches a part.", labels=["part"])
        for part, read in (("database", self._record), ("redis", self._rooms)):
            try:
                yield from list(read())
                up.add_metric([part], 1)
            except (RecordUnavailable, RedisError) as error:
                log.warning("figures_missing", part=part, error=str(error))
                up.add_metric([part], 0)
        yield up

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry would else read everything when this is registered."""
        return []

    def _record(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("slotkeeper_jobs", "Jobs in the record by state.", labels=["state"])
        for state, count in ledger.standing(self._dispatcher.store.database).items():
            jobs.add_metric([state.value], count)
        yield jobs
        broken = GaugeMetricFamily(
            "slotkeeper_invariant_findings", "Differences that the latest audit found.", labels=["check"]
        )
        for check, count in ledger.findings(self._dispatcher.store.database).items():
            broken.add_metric([check], count)
        yield broken

    def _rooms(self) -> Iterator[Metric]:
        catalog = self._dispatcher.fleet.snapshot()
        rooms = self._dispatcher.queues.depths_of(catalog.fleets())
        yield _waiting(catalog, rooms)
        yield _slots(rooms)


def _waiting(catalog: Snapshot, rooms: dict[str, Depths]) -> Metric:
    waiting = GaugeMetricFamily("slotkeeper_waiting_jobs", "Queued jobs in line, by model.", labels=["model"])
    for model in catalog.models.values():
        if model.fleet in rooms:
            waiting.add_metric([model.name], rooms[model.fleet].waiting.get(model.name, 0))
    return waiting


def _slots(rooms: dict[str, Depths]) -> Metric:
    slots = GaugeMetricFamily("slotkeeper_slots", "Slots by fleet and state.", labels=["fleet", "state"])
    for fleet, depths in rooms.items():
        for state, count in (("free", depths.free), ("resting", depths.resting), ("taken", depths.taken)):
            slots.add_metric([fleet, state], count)
    return slots


def registry(dispatcher: Dispatcher) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(Figures(dispatcher))
    return made
