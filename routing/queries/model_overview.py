"""How models stand at this moment, side by side: what an overview shows."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from routing.dispatch.dispatcher import Dispatcher
from routing.queries import looks
from routing.queries.last_hour import LastHourUsage, MinuteUsage
from routing.queries.looks import MINUTE_MS
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.values import Job
from slotkeeper.registry.snapshot import Model
from slotkeeper.registry.values import Server

_RECENT = 5  # minutes over which throughput is told
_NOT_KNOWN = ("", 0, "")


@dataclass(frozen=True, slots=True)
class SlotState:
    """One of a server's slots.  `job`: what runs there; `withheld`: whose run has ended while the server goes on."""

    name: str
    job: Job | None
    withheld: QuarantinedSlot | None


@dataclass(frozen=True, slots=True)
class ModelOverview:
    """`oldest_ms`: when the first of its waiting jobs was accepted; None: none waits.

    `breaker`: closed, open, half_open, probing, "": not known; open until `breaker_until_ms`, ms since the epoch, by
    `breaker_why`, as for servers (routing/queries/server_status.py: ServerStatus).
    `use`: share of its slots that was in use, for each minute of the last hour; `per_minute`: jobs that ended;
    `failed`: jobs that failed or died within the last hour; `delayed`: jobs that wait to be tried again.
    """

    running: int
    oldest_ms: int | None
    breaker: str
    breaker_until_ms: int
    breaker_why: str
    use: Sequence[float]
    ended: Sequence[int]
    per_minute: float
    failed: int
    delayed: int


def slots_of(servers: Sequence[Server], running: Sequence[Job], dispatcher: Dispatcher) -> dict[str, list[SlotState]]:
    """Each server's slots, in order.  Raises DatabaseUnavailable."""
    taken = {job.slot: job for job in running}
    withheld = {row.slot: row for rows in quarantine.list_by_server(dispatcher.store.database).values() for row in rows}
    return {
        it.name: [
            SlotState(name, taken.get(name), withheld.get(name))
            for name in (f"{it.name}-slot{number}" for number in range(it.slots))
        ]
        for it in servers
    }


def read_overview(
    dispatcher: Dispatcher, last_hour: LastHourUsage, models: Sequence[Model], running: Sequence[Job], now_ms: int
) -> dict[str, ModelOverview]:
    """Of these models.  Redis away: their breakers are not known.  Raises DatabaseUnavailable."""
    names = [model.name for model in models]
    oldest, delayed = looks.oldest_queued(dispatcher.store.database, names), looks.delayed(dispatcher.store.database)
    last_hour.read_missing(now_ms)
    runs: dict[str, list[Job]] = defaultdict(list)
    for job in running:
        runs[job.model].append(job)
    breakers = read_breakers(dispatcher, models)
    return {
        name: replace(
            _now(dispatcher, last_hour, name, runs[name], oldest.get(name), breakers.get(name, _NOT_KNOWN), now_ms),
            delayed=delayed.get(name, 0),
        )
        for name in names
    }


def _now(
    dispatcher: Dispatcher,
    last_hour: LastHourUsage,
    name: str,
    running: Sequence[Job],
    oldest_ms: int | None,
    breaker: tuple[str, int, str],
    now_ms: int,
) -> ModelOverview:
    minutes = last_hour.of(name, now_ms)
    return ModelOverview(
        len(running),
        oldest_ms,
        *breaker,
        _use(minutes, running, dispatcher.catalog.get().count_slots(name), now_ms),
        [minute.ended for minute in minutes],
        sum(minute.ended for minute in minutes[-_RECENT:]) / _RECENT,
        sum(minute.failed for minute in minutes),
        0,
    )


def _use(minutes: Sequence[MinuteUsage], running: Sequence[Job], slots: int, now_ms: int) -> list[float]:
    if not slots:
        return [0.0] * len(minutes)
    busy = [minute.busy_ms for minute in minutes]
    first = now_ms - now_ms % MINUTE_MS - len(minutes) * MINUTE_MS
    for job in running:
        for n in range(max(0, ((job.started_ms or now_ms) - first) // MINUTE_MS), len(busy)):
            begins = first + n * MINUTE_MS
            busy[n] += min(MINUTE_MS, begins + MINUTE_MS - (job.started_ms or now_ms))
    return [min(1.0, it / (slots * MINUTE_MS)) for it in busy]


def read_breakers(dispatcher: Dispatcher, models: Sequence[Model]) -> dict[str, tuple[str, int, str]]:
    """By model: state, until when, by what it was opened.  Nothing, while Redis is away."""
    asked = [dispatcher.queues.model_status_command(model.fleet, model.name) for model in models]
    with suppress(RedisError):
        found = dispatcher.queues.call_if_available(lambda: dispatcher.queues.run_all(asked))
        return {
            model.name: (it.breaker, it.open_until_ms, it.open_why) for model, it in zip(models, found, strict=True)
        }
    return {}
