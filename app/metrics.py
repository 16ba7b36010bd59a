"""Figures for Prometheus, read from the record and from Redis when they are asked for.

So they are right however many processes there are, and survive all of them.  None is by tenant, of whom there may be
any number; models and fleets beyond the first MOST_MODELS stand together as `other`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import task_runs
from routing.queries import gauges, job_counters, model_overview, process_counters
from routing.queries.job_counters import MAX_MODEL_LABELS, OTHER_MODELS, JobCounters
from routing.queries.process_counters import HANDED_ON, REFUSED, ProcessCounters
from routing.queries.process_list import Process, ProcessList
from routing.queries.server_status import read_servers_of_fleets
from routing.queue.fleets import QueueCounts
from slotkeeper.clock import now_ms
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs import ledger
from slotkeeper.outbox.sink_cursors import SinkCursors
from slotkeeper.redis.scripts import Scripts
from slotkeeper.registry.snapshot import CatalogSnapshot
from tasks.config import EventSettings, TaskSettings
from tasks.extensions.transport import count_unacknowledged

log = structlog.get_logger(__name__)


_BY_PRIORITY = ("model", "priority")


class MetricsCollector(Collector):
    """Collects at each scrape.  Never fails: what cannot be read is left out, and `up` of it is 0."""

    def __init__(
        self, dispatcher: Dispatcher, scripts: Scripts, processes: ProcessList, counted: ProcessCounters
    ) -> None:
        self._dispatcher, self._scripts = dispatcher, scripts
        self._processes, self._tallies = processes, counted

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("slotkeeper_up", "Whether this process reaches a part.", labels=["part"])
        for part, reads in (("database", self._record()), ("redis", self._redis())):
            up.add_metric([part], 1)
            try:
                for read in reads:
                    yield from list(read())
            except (DatabaseUnavailable, RedisError) as error:
                log.warning("metrics_missing", part=part, error=str(error))
                up.samples.pop()
                up.add_metric([part], 0)
        yield up

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry would else read everything when this is registered."""
        return []

    def _record(self) -> Sequence[Callable[[], Iterator[Metric]]]:
        return self._states, self._history, self._pending

    def _redis(self) -> Sequence[Callable[[], Iterator[Metric]]]:
        return self._rooms, self._lanes, self._tasks, self._counts, self._living

    # -- from the record ---------------------------------------------------------------------------------------

    def _states(self) -> Iterator[Metric]:
        database = self._dispatcher.store.database
        jobs = ((state.value, count) for state, count in ledger.count_by_state(database).items())
        yield _gauge("slotkeeper_jobs", "Jobs in the database by state.", ["state"], jobs)
        found = ledger.read_findings(database)
        difference = found.pop(ledger.DIFFERENCE, None)
        checks = found.items()
        yield _gauge(
            "slotkeeper_invariant_findings", "Differences that the latest check of invariants found.", ["check"], checks
        )
        if difference is not None:
            help_text = "Accepted jobs without a state at the latest check; 0 is right."
            yield GaugeMetricFamily("slotkeeper_ledger_difference", help_text, difference)

    def _history(self) -> Iterator[Metric]:
        database = self._dispatcher.store.database
        found = job_counters.read_counters(database)
        yield from _job_counters(found)
        yield _histogram(
            "slotkeeper_wait_seconds",
            "From when a job came into its queue, or back, to its start.",
            _BY_PRIORITY,
            job_counters.WAIT_BUCKETS_S,
            {labels: (each.buckets, each.sum_s) for labels, each in found.waits.items()},
        )
        yield _histogram(
            "slotkeeper_run_seconds",
            "From an attempt's start to its end.",
            ["model"],
            job_counters.WAIT_BUCKETS_S,
            {labels: (each.buckets, each.sum_s) for labels, each in found.runs.items()},
        )
        lag_s = job_counters.counting_lag_ms(database, now_ms()) / 1000
        yield GaugeMetricFamily("slotkeeper_figures_lag_seconds", "Age of the oldest event not counted yet.", lag_s)

    def _pending(self) -> Iterator[Metric]:
        database = self._dispatcher.store.database
        webhooks = gauges.count_pending_webhooks(database, now_ms())
        yield GaugeMetricFamily("slotkeeper_webhooks_pending", "Messages that are pending.", webhooks.pending)
        help_text = "By how much the oldest message that is due is late."
        yield GaugeMetricFamily("slotkeeper_webhook_lag_seconds", help_text, webhooks.late_ms / 1000)
        sinks = SinkCursors(database).list_lags(EventSettings().sinks, now_ms())
        help_text = "Age of the oldest event that a sink has not received."
        yield _gauge("slotkeeper_event_lag_seconds", help_text, ["sink"], ((it.sink, it.seconds) for it in sinks))
        quarantined = gauges.count_quarantined_slots(database)
        named = _model_labels(self._dispatcher.catalog.get())
        by_model: Counter[tuple[str, str]] = Counter()
        for (model, reason), count in quarantined.items():
            by_model[(named(model), reason)] += count
        help_text = "Slots that are quarantined, because their server may still run a job that has ended."
        yield _gauge("slotkeeper_slots_withheld", help_text, ["model", "reason"], by_model.items())

    # -- from Redis --------------------------------------------------------------------------------------------

    def _rooms(self) -> Iterator[Metric]:
        catalog = self._dispatcher.catalog.get()
        fleets = catalog.fleets()
        rooms = self._dispatcher.fleets.counts(fleets)
        yield _waiting_gauge(catalog, rooms)
        yield _slot_gauge(catalog, rooms)
        offers = _sum_by_fleet(catalog, gauges.read_offer_counts(self._scripts, list(rooms)).items())
        yield _counter("slotkeeper_offers", "Offers made.", ["fleet"], offers.items())
        states: Counter[tuple[str, str]] = Counter()
        named = _fleet_labels(catalog)
        for fleet, servers in read_servers_of_fleets(self._dispatcher.slots, list(rooms)).items():
            for state in ("closed", "open", "half_open", "probing"):
                states[(named(fleet), state)] += sum(it.breaker == state for it in servers.values())
        yield _gauge(
            "slotkeeper_server_breakers", "Servers by state of their breaker.", ["fleet", "state"], states.items()
        )
        yield self._model_breakers(catalog)

    def _model_breakers(self, catalog: CatalogSnapshot) -> Metric:
        """Of the models that have a name of their own here."""
        models = [catalog.models[name] for name in sorted(catalog.models)[:MAX_MODEL_LABELS]]
        found = model_overview.read_breakers(self._dispatcher, models)
        open_ = {(name,): int(state not in ("", "closed")) for name, (state, _, _) in found.items()}
        help_text = "Whether the breaker of the model is open, so that none of its jobs starts."
        return _gauge("slotkeeper_model_breaker_open", help_text, ["model"], open_.items())

    def _lanes(self) -> Iterator[Metric]:
        catalog = self._dispatcher.catalog.get()
        named = _model_labels(catalog)
        waiting: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str, str], int] = {}
        for depth in gauges.read_lane_depths(self._scripts, catalog.fleets()):
            labels = named(depth.model), str(depth.priority)
            waiting[labels] += depth.jobs
            oldest[labels] = min(oldest.get(labels, depth.first_ms), depth.first_ms)
        yield _gauge("slotkeeper_queue_jobs", "Jobs in the queue.", _BY_PRIORITY, waiting.items())
        now = now_ms()
        ages = ((labels, max(now - created, 0) / 1000) for labels, created in oldest.items())
        help_text = "Age of the first job in the queue; under edf, of the one with the earliest deadline."
        yield _gauge("slotkeeper_oldest_job_age_seconds", help_text, _BY_PRIORITY, ages)

    def _tasks(self) -> Iterator[Metric]:
        runs = task_runs.read_task_runs(self._scripts)
        ended = ((name, it.ended_ms / 1000) for name, it in runs.items())
        help_text = "When a maintenance task last ended, s since the epoch."
        yield _gauge("slotkeeper_task_last_run_timestamp_seconds", help_text, ["task"], ended)
        took = ((name, it.took_s) for name, it in runs.items())
        yield _gauge(
            "slotkeeper_task_last_run_seconds", "Duration of the last run of a maintenance task.", ["task"], took
        )

    def _counts(self) -> Iterator[Metric]:
        refused = self._tallies.counts(REFUSED)
        help_text = "Jobs refused, by the limit that refused them."
        yield _counter("slotkeeper_jobs_refused", help_text, ["limit"], refused.items())
        yield _histogram(
            "slotkeeper_handoff_seconds",
            "From a server's answer to the next request for its slot, where a job waited.",
            [],
            process_counters.HANDOFF_BUCKETS_S,
            {(): self._tallies.histogram(HANDED_ON)},
        )

    def _living(self) -> Iterator[Metric]:
        found = [process for process in self._processes.read_all() if process.is_alive]
        roles = Counter(process.role for process in found)
        yield _gauge("slotkeeper_processes", "Processes that are alive, by role.", ["role"], roles.items())
        if not TaskSettings().broker_url:  # The broker is this Redis.
            help_text = "Messages that workers took and have not acknowledged for 15 s, as if they had died."
            held = count_unacknowledged(self._scripts.redis)
            yield GaugeMetricFamily("slotkeeper_broker_messages_held", help_text, held)
        workers = [process for process in found if process.role == "worker"]
        help_text = "Runs that workers have in flight."
        yield _gauge("slotkeeper_worker_runs", help_text, ["host"], _by_host(workers, "runs").items())
        help_text = "Runs that workers may have in flight."
        yield _gauge("slotkeeper_worker_capacity", help_text, ["host"], _by_host(workers, "capacity").items())
        slowest = {it.host: 0.0 for it in workers[:MAX_MODEL_LABELS] if it.facts.get("canary_ms") is not None}
        for it in workers:
            if it.host in slowest:
                slowest[it.host] = max(slowest[it.host], float(it.facts.get("canary_ms") or 0) / 1000)
        help_text = "How long the last canary took through the slowest worker: broker, event loop, Redis, database."
        yield _gauge("slotkeeper_canary_seconds", help_text, ["host"], slowest.items())


def _job_counters(found: JobCounters) -> Iterator[Metric]:
    yield _counter("slotkeeper_jobs_accepted", "Jobs accepted.", ["model"], found.accepted.items())
    yield _counter("slotkeeper_jobs_ended", "Jobs that have ended.", ["model", "state"], found.ended.items())
    help_text = "Attempts that have ended, by reason."
    yield _counter("slotkeeper_attempts_ended", help_text, ["model", "reason"], found.attempts.items())


def _waiting_gauge(catalog: CatalogSnapshot, rooms: Mapping[str, QueueCounts]) -> Metric:
    named = _model_labels(catalog)
    waiting: Counter[str] = Counter()
    for model in catalog.models.values():
        if model.fleet in rooms:
            waiting[named(model.name)] += rooms[model.fleet].waiting.get(model.name, 0)
    return _gauge("slotkeeper_waiting_jobs", "Jobs in the queue, by model.", ["model"], waiting.items())


def _slot_gauge(catalog: CatalogSnapshot, rooms: Mapping[str, QueueCounts]) -> Metric:
    named = _fleet_labels(catalog)
    slots: Counter[tuple[str, str]] = Counter()
    for fleet, depths in rooms.items():
        for state, count in (("free", depths.free), ("cooling", depths.cooling), ("taken", depths.taken)):
            slots[(named(fleet), state)] += count
    return _gauge("slotkeeper_slots", "Slots by fleet and state.", ["fleet", "state"], slots.items())


def _by_host(workers: Iterable[Process], fact: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for it in workers:
        host = it.host if it.host in found or len(found) < MAX_MODEL_LABELS else OTHER_MODELS
        found[host] += int(it.facts.get(fact) or 0)
    return found


def _sum_by_fleet(catalog: CatalogSnapshot, values: Iterable[tuple[str, int]]) -> Counter[str]:
    named, found = _fleet_labels(catalog), Counter[str]()
    for fleet, value in values:
        found[named(fleet)] += value
    return found


def _model_labels(catalog: CatalogSnapshot) -> Callable[[str], str]:
    """The label of a model."""
    return _limit_labels(sorted(catalog.models))


def _fleet_labels(catalog: CatalogSnapshot) -> Callable[[str], str]:
    return _limit_labels(sorted(catalog.fleets()))


def _limit_labels(names: Sequence[str]) -> Callable[[str], str]:
    shown = frozenset(names[:MAX_MODEL_LABELS])
    return lambda name: name if name in shown else OTHER_MODELS


# -- the form that Prometheus wants ----------------------------------------------------------------------------

Labels = str | tuple[str, ...]


def _label_values(labels: Labels) -> list[str]:
    return [labels] if isinstance(labels, str) else list(labels)


def _gauge(name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for its, value in values:
        family.add_metric(_label_values(its), value)
    return family


def _counter(name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for its, value in values:
        family.add_metric(_label_values(its), value)
    return family


def _histogram(
    name: str,
    help_text: str,
    labels: Sequence[str],
    bounds_s: Sequence[float],
    values: Mapping[tuple[str, ...], tuple[Sequence[int], float]],
) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=labels)
    edges = [*(f"{bound:g}" for bound in bounds_s), "+Inf"]
    for its, (parts, sum_s) in values.items():
        family.add_metric(list(its), list(zip(edges, accumulate(parts), strict=True)), sum_s)
    return family


def metrics_registry(
    dispatcher: Dispatcher, scripts: Scripts, processes: ProcessList, counted: ProcessCounters
) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(MetricsCollector(dispatcher, scripts, processes, counted))
    return made
