"""Metrics for Prometheus, read from the database and from Redis at each scrape.

So they are correct for any number of processes, and survive restarts.  No metric has the label `tenant`, because there
may be any number of tenants.  Models and fleets beyond the first MAX_MODEL_LABELS are counted as `other`.
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
from slotkeeper.jobs.batches import Batches
from slotkeeper.outbox.sink_cursors import SinkCursors
from slotkeeper.redis.scripts import Scripts
from slotkeeper.registry.api_keys import ApiKeys
from slotkeeper.registry.credit_accounts import Account, CreditAccounts
from slotkeeper.registry.snapshot import CatalogSnapshot
from tasks.config import EventSettings, TaskSettings
from tasks.extensions.transport import count_unacknowledged

log = structlog.get_logger(__name__)


_BY_PRIORITY = ("model", "priority")
Labels = str | tuple[str, ...]


class MetricsCollector(Collector):
    """Collects the metrics at each scrape.  Never fails: if a part cannot be read, its metrics are left
    out, and its `slotkeeper_up` is 0.
    """

    def __init__(
        self, dispatcher: Dispatcher, scripts: Scripts, processes: ProcessList, counters: ProcessCounters
    ) -> None:
        self._dispatcher, self._scripts = dispatcher, scripts
        self._processes, self._counters = processes, counters

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("slotkeeper_up", "Whether this process reaches a part.", labels=["part"])
        for part, reads in (("database", self._database_metrics()), ("redis", self._redis_metrics())):
            up.add_metric([part], 1)
            try:
                for read in reads:
                    yield from list(read())
            except (DatabaseUnavailable, RedisError) as error:
                log.warning("metrics_missing", part=part, error=str(error))
                up.samples.pop()
                up.add_metric([part], 0)
        yield up

    def _database_metrics(self) -> Sequence[Callable[[], Iterator[Metric]]]:
        return self._state_metrics, self._job_metrics, self._pending_metrics

    def _redis_metrics(self) -> Sequence[Callable[[], Iterator[Metric]]]:
        return (
            self._queue_metrics,
            self._lane_metrics,
            self._task_metrics,
            self._process_counters,
            self._process_metrics,
        )

    # -- from the database -------------------------------------------------------------------------------------

    def _state_metrics(self) -> Iterator[Metric]:
        database = self._dispatcher.store.database
        jobs = ((state.value, count) for state, count in ledger.count_by_state(database).items())
        yield _gauge("slotkeeper_jobs", "Jobs in the database by state.", ["state"], jobs)
        help_text = "Valid keys that end within seven days."
        yield GaugeMetricFamily("slotkeeper_keys_expiring", help_text, ApiKeys(database).count_expiring(now_ms()))
        findings = ledger.read_findings(database)
        difference = findings.pop(ledger.DIFFERENCE, None)
        checks = findings.items()
        yield _gauge(
            "slotkeeper_invariant_findings", "Differences that the latest check of invariants found.", ["check"], checks
        )
        if difference is not None:
            help_text = "Accepted jobs without a state at the latest check; 0 is right."
            yield GaugeMetricFamily("slotkeeper_ledger_difference", help_text, difference)

    def _job_metrics(self) -> Iterator[Metric]:
        database = self._dispatcher.store.database
        totals = job_counters.read_counters(database)
        yield from _job_counters(totals)
        yield _histogram(
            "slotkeeper_wait_seconds",
            "Time from when a job entered its queue, or returned to it, to its start.",
            _BY_PRIORITY,
            job_counters.WAIT_BUCKETS_S,
            {labels: (histogram.buckets, histogram.sum_s) for labels, histogram in totals.waits.items()},
        )
        yield _histogram(
            "slotkeeper_run_seconds",
            "Time from the start of an attempt to its end.",
            ["model"],
            job_counters.WAIT_BUCKETS_S,
            {labels: (histogram.buckets, histogram.sum_s) for labels, histogram in totals.runs.items()},
        )
        lag_s = job_counters.counting_lag_ms(database, now_ms()) / 1000
        yield GaugeMetricFamily("slotkeeper_figures_lag_seconds", "Age of the oldest event not counted yet.", lag_s)

    def _pending_metrics(self) -> Iterator[Metric]:
        database = self._dispatcher.store.database
        webhooks = gauges.count_pending_webhooks(database, now_ms())
        yield GaugeMetricFamily("slotkeeper_webhooks_pending", "Messages that are pending.", webhooks.pending)
        help_text = "By how much the oldest message that is due is late."
        yield GaugeMetricFamily("slotkeeper_webhook_lag_seconds", help_text, webhooks.late_ms / 1000)
        sinks = SinkCursors(database).list_lags(EventSettings().sinks, now_ms())
        help_text = "Age of the oldest event that a sink has not received."
        yield _gauge("slotkeeper_event_lag_seconds", help_text, ["sink"], ((lag.sink, lag.seconds) for lag in sinks))
        unfinished = Counter(batch.shown_state for batch in Batches(database).list_unfinished())
        counts = [(state, unfinished[state]) for state in ("open", "active", "paused")]
        yield _gauge("slotkeeper_batches", "Batches of lines that have not ended.", ["state"], counts)
        yield _gauge(
            "slotkeeper_credits",
            "Micro-credits of tenants with an account.",
            ["tenant", "account"],
            _credit_sums(CreditAccounts(database).list_all()),
        )
        quarantined = gauges.count_quarantined_slots(database)
        label_of = _model_labels(self._dispatcher.catalog.get())
        by_model: Counter[tuple[str, str]] = Counter()
        for (model, reason), count in quarantined.items():
            by_model[(label_of(model), reason)] += count
        help_text = "Slots that are quarantined, because their server may still run a job that has ended."
        yield _gauge("slotkeeper_slots_withheld", help_text, ["model", "reason"], by_model.items())

    # -- from Redis --------------------------------------------------------------------------------------------

    def _queue_metrics(self) -> Iterator[Metric]:
        catalog = self._dispatcher.catalog.get()
        fleets = catalog.fleets()
        counts = self._dispatcher.fleets.counts(fleets)
        yield _waiting_gauge(catalog, counts)
        yield _slot_gauge(catalog, counts)
        offers = _sum_by_fleet(catalog, gauges.read_offer_counts(self._scripts, list(counts)).items())
        yield _counter("slotkeeper_offers", "Offers made.", ["fleet"], offers.items())
        states: Counter[tuple[str, str]] = Counter()
        label_of = _fleet_labels(catalog)
        for fleet, servers in read_servers_of_fleets(self._dispatcher.slots, list(counts)).items():
            for state in ("closed", "open", "half_open", "probing"):
                states[(label_of(fleet), state)] += sum(server.breaker == state for server in servers.values())
        yield _gauge(
            "slotkeeper_server_breakers", "Servers by state of their breaker.", ["fleet", "state"], states.items()
        )
        yield self._model_breakers(catalog)

    def _model_breakers(self, catalog: CatalogSnapshot) -> Metric:
        """Return the breakers of the models that have their own label."""
        models = [catalog.models[name] for name in sorted(catalog.models)[:MAX_MODEL_LABELS]]
        breakers = model_overview.read_breakers(self._dispatcher, models)
        open_ = {(name,): int(state not in ("", "closed")) for name, (state, _, _) in breakers.items()}
        help_text = "Whether the breaker of the model is open, so that none of its jobs starts."
        return _gauge("slotkeeper_model_breaker_open", help_text, ["model"], open_.items())

    def _lane_metrics(self) -> Iterator[Metric]:
        catalog = self._dispatcher.catalog.get()
        label_of = _model_labels(catalog)
        waiting: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str, str], int] = {}
        for depth in gauges.read_lane_depths(self._scripts, catalog.fleets()):
            labels = label_of(depth.model), str(depth.priority)
            waiting[labels] += depth.jobs
            oldest[labels] = min(oldest.get(labels, depth.first_ms), depth.first_ms)
        yield _gauge("slotkeeper_queue_jobs", "Jobs in the queue.", _BY_PRIORITY, waiting.items())
        now = now_ms()
        ages = ((labels, max(now - created, 0) / 1000) for labels, created in oldest.items())
        help_text = "Age of the first job in the queue; under edf, of the one with the earliest deadline."
        yield _gauge("slotkeeper_oldest_job_age_seconds", help_text, _BY_PRIORITY, ages)

    def _task_metrics(self) -> Iterator[Metric]:
        runs = task_runs.read_task_runs(self._scripts)
        ended = ((name, task_run.ended_ms / 1000) for name, task_run in runs.items())
        help_text = "When a maintenance task last ended, s since the epoch."
        yield _gauge("slotkeeper_task_last_run_timestamp_seconds", help_text, ["task"], ended)
        took = ((name, task_run.took_s) for name, task_run in runs.items())
        yield _gauge(
            "slotkeeper_task_last_run_seconds", "Duration of the last run of a maintenance task.", ["task"], took
        )

    def _process_counters(self) -> Iterator[Metric]:
        refused = self._counters.counts(REFUSED)
        help_text = "Jobs refused, by the limit that refused them."
        yield _counter("slotkeeper_jobs_refused", help_text, ["limit"], refused.items())
        yield _histogram(
            "slotkeeper_handoff_seconds",
            "Time from a server's response to the next request for its slot, if a job waited.",
            [],
            process_counters.HANDOFF_BUCKETS_S,
            {(): self._counters.histogram(HANDED_ON)},
        )

    def _process_metrics(self) -> Iterator[Metric]:
        processes = [process for process in self._processes.read_all() if process.is_alive]
        roles = Counter(process.role for process in processes)
        yield _gauge("slotkeeper_processes", "Processes that are alive, by role.", ["role"], roles.items())
        if not TaskSettings().broker_url:  # The broker is this Redis.
            help_text = "Messages that workers took and have not acknowledged for 15 s, as if they had died."
            held = count_unacknowledged(self._scripts.redis)
            yield GaugeMetricFamily("slotkeeper_broker_messages_held", help_text, held)
        workers = [process for process in processes if process.role == "worker"]
        help_text = "Runs that workers have in flight."
        yield _gauge("slotkeeper_worker_runs", help_text, ["host"], _by_host(workers, "runs").items())
        help_text = "Runs that workers may have in flight."
        yield _gauge("slotkeeper_worker_capacity", help_text, ["host"], _by_host(workers, "capacity").items())
        slowest = {
            worker.host: 0.0 for worker in workers[:MAX_MODEL_LABELS] if worker.facts.get("canary_ms") is not None
        }
        for worker in workers:
            if worker.host in slowest:
                slowest[worker.host] = max(slowest[worker.host], float(worker.facts.get("canary_ms") or 0) / 1000)
        help_text = "How long the last canary took through the slowest worker: broker, event loop, Redis, database."
        yield _gauge("slotkeeper_canary_seconds", help_text, ["host"], slowest.items())


def _job_counters(counters: JobCounters) -> Iterator[Metric]:
    yield _counter("slotkeeper_jobs_accepted", "Jobs accepted.", ["model"], counters.accepted.items())
    yield _counter("slotkeeper_jobs_ended", "Jobs that have ended.", ["model", "state"], counters.ended.items())
    help_text = "Attempts that have ended, by reason."
    yield _counter("slotkeeper_attempts_ended", help_text, ["model", "reason"], counters.attempts.items())


def _waiting_gauge(catalog: CatalogSnapshot, counts: Mapping[str, QueueCounts]) -> Metric:
    label_of = _model_labels(catalog)
    waiting: Counter[str] = Counter()
    for model in catalog.models.values():
        if model.fleet in counts:
            waiting[label_of(model.name)] += counts[model.fleet].waiting.get(model.name, 0)
    return _gauge("slotkeeper_waiting_jobs", "Jobs in the queue, by model.", ["model"], waiting.items())


def _slot_gauge(catalog: CatalogSnapshot, counts: Mapping[str, QueueCounts]) -> Metric:
    label_of = _fleet_labels(catalog)
    slots: Counter[tuple[str, str]] = Counter()
    for fleet, queue in counts.items():
        for state, count in (("free", queue.free), ("cooling", queue.cooling), ("taken", queue.taken)):
            slots[(label_of(fleet), state)] += count
    return _gauge("slotkeeper_slots", "Slots by fleet and state.", ["fleet", "state"], slots.items())


def _by_host(workers: Iterable[Process], fact: str) -> Counter[str]:
    """Return host -> sum of a fact of its workers."""
    sums: Counter[str] = Counter()
    for worker in workers:
        host = worker.host if worker.host in sums or len(sums) < MAX_MODEL_LABELS else OTHER_MODELS
        sums[host] += int(worker.facts.get(fact) or 0)
    return sums


def _credit_sums(accounts: Sequence[Account]) -> Iterable[tuple[tuple[str, str], int]]:
    """Return (tenant, account) -> sum of the balances."""
    label_of, sums = _limit_labels([account.tenant for account in accounts]), Counter[tuple[str, str]]()
    for account in accounts:
        for name in ("available", "held", "spent"):
            sums[label_of(account.tenant), name] += getattr(account, name)
    return sums.items()


def _sum_by_fleet(catalog: CatalogSnapshot, values: Iterable[tuple[str, int]]) -> Counter[str]:
    label_of, sums = _fleet_labels(catalog), Counter[str]()
    for fleet, value in values:
        sums[label_of(fleet)] += value
    return sums


def _model_labels(catalog: CatalogSnapshot) -> Callable[[str], str]:
    """Return a function that returns the label of a model."""
    return _limit_labels(sorted(catalog.models))


def _fleet_labels(catalog: CatalogSnapshot) -> Callable[[str], str]:
    return _limit_labels(sorted(catalog.fleets()))


def _limit_labels(names: Sequence[str]) -> Callable[[str], str]:
    """Return a function that returns a name if it is among the first MAX_MODEL_LABELS, otherwise OTHER_MODELS."""
    shown = frozenset(names[:MAX_MODEL_LABELS])
    return lambda name: name if name in shown else OTHER_MODELS


# -- metric families ---------------------------------------------------------------------------------------


def _label_values(labels: Labels) -> list[str]:
    return [labels] if isinstance(labels, str) else list(labels)


def _gauge(name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(_label_values(label_values), value)
    return family


def _counter(name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(_label_values(label_values), value)
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
    for label_values, (parts, sum_s) in values.items():
        family.add_metric(list(label_values), list(zip(edges, accumulate(parts), strict=True)), sum_s)
    return family


def metrics_registry(
    dispatcher: Dispatcher, scripts: Scripts, processes: ProcessList, counters: ProcessCounters
) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)  # Else it would collect everything when this is registered.
    registry.register(MetricsCollector(dispatcher, scripts, processes, counters))
    return registry
