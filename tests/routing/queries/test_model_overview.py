"""The overview of models: usage of the last hour, and the oldest queued jobs."""

from collections.abc import Mapping

import pytest
from sqlalchemy import text

from routing.queries import model_overview
from routing.queries.model_overview import MINUTE_MS, MINUTES, LastHourUsage
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore
from tests.support.builders import SECOND, T0, a_queued_job, a_start
from tests.support.ends import store_end

FIRST = T0 - T0 % MINUTE_MS


def _run(store: JobStore, begins_ms: int, ends_ms: int) -> None:
    job = a_queued_job(store, now_ms=T0)
    run = a_start(store, job.id, now_ms=begins_ms)
    assert store_end(store, job.id, run.attempt, Reason.FINISHED, ends_ms, result="{}")


def _minutes(last_hour: LastHourUsage, now_ms: int) -> Mapping[int, tuple[int, int]]:
    """Return minute, counted from FIRST -> (jobs that ended, slot time in seconds), of the minutes with either."""
    begins = [now_ms - now_ms % MINUTE_MS - n * MINUTE_MS for n in range(MINUTES, -1, -1)]
    return {
        (at - FIRST) // MINUTE_MS: (usage.ended, usage.busy_ms // 1000)
        for at, usage in zip(begins, last_hour.of("zimg", now_ms), strict=True)
        if usage.ended or usage.busy_ms
    }


def test_slot_time_is_split_between_the_minutes_of_a_run(store: JobStore) -> None:
    _run(store, FIRST + 30 * SECOND, FIRST + 120 * SECOND)
    _run(store, FIRST + 70 * SECOND, FIRST + 75 * SECOND)
    last_hour = LastHourUsage(store.database)
    last_hour.read_missing(FIRST + 10 * MINUTE_MS)
    assert _minutes(last_hour, FIRST + 10 * MINUTE_MS) == {0: (0, 30), 1: (1, 65), 2: (1, 0)}


def test_a_minute_is_read_once_and_removed_after_an_hour(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = model_overview._read_minute
    monkeypatch.setattr(model_overview, "_read_minute", lambda database, at: (read.append(at), real(database, at))[1])
    last_hour = LastHourUsage(store.database, lambda: 0.0)
    last_hour.read_missing(FIRST)
    last_hour.read_missing(FIRST + 1)
    assert len(read) == len(set(read)) == 61 and last_hour.is_complete(FIRST)
    last_hour.read_missing(FIRST + MINUTE_MS)
    assert read[61:] == [FIRST]


def test_the_present_minute_is_counted_and_read_again_after_a_second(store: JobStore) -> None:
    now_s = [0.0]
    last_hour = LastHourUsage(store.database, lambda: now_s[0])
    _run(store, FIRST - 10 * SECOND, FIRST + 5 * SECOND)
    last_hour.read_missing(FIRST + 6 * SECOND)
    assert _minutes(last_hour, FIRST + 6 * SECOND) == {-1: (0, 10), 0: (1, 5)}
    _run(store, FIRST + 6 * SECOND, FIRST + 7 * SECOND)
    last_hour.read_missing(FIRST + 7 * SECOND)
    assert _minutes(last_hour, FIRST + 7 * SECOND)[0] == (1, 5), "it was read less than a second ago"
    now_s[0] = 1.0
    last_hour.read_missing(FIRST + 8 * SECOND)
    assert _minutes(last_hour, FIRST + 8 * SECOND) == {-1: (0, 10), 0: (2, 6)}
    last_hour.read_missing(FIRST + MINUTE_MS)
    assert _minutes(last_hour, FIRST + MINUTE_MS) == {-1: (0, 10), 0: (2, 6)}, "now it is over, and counted once"


def test_the_throughput_counts_the_jobs_of_the_present_minute() -> None:
    minutes = [model_overview.MinuteUsage() for _ in range(MINUTES)] + [model_overview.MinuteUsage(ended=11)]
    assert model_overview._throughput(minutes, FIRST + 30 * SECOND) == 2.0


def test_the_usage_of_the_current_minute_counts_only_its_elapsed_seconds() -> None:
    minutes = [model_overview.MinuteUsage() for _ in range(MINUTES)] + [model_overview.MinuteUsage(busy_ms=5 * SECOND)]
    assert model_overview._slot_use(minutes, [], 1, FIRST + 10 * SECOND)[-1] == 0.5


def test_reading_stops_after_its_budget_and_continues_with_the_next_call(store: JobStore) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.1
        return now[0]

    last_hour = LastHourUsage(store.database, clock)
    last_hour.read_missing(FIRST)
    assert not last_hour.is_complete(FIRST)
    for _ in range(60):
        last_hour.read_missing(FIRST)
    assert last_hour.is_complete(FIRST)


def test_a_minute_is_read_by_the_index_of_ends(store: JobStore) -> None:
    if store.database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL reads a table this small without its index")
    with store.database.read() as connection:
        query = model_overview._ENDED.compile(connection.engine)
        plan = connection.execute(text(f"EXPLAIN QUERY PLAN {query}".replace("?", "1")), {}).all()
    assert any("ix_jobs_finished" in str(row) for row in plan), plan


def test_the_oldest_queued_job_of_each_model_is_found(store: JobStore) -> None:
    a_queued_job(store, now_ms=T0)
    a_queued_job(store, now_ms=T0 + 1)
    a_queued_job(store, now_ms=T0 + 2, model="flux")
    oldest = model_overview._read_oldest_queued(store.database, ["zimg", "flux", "idle"])
    assert oldest == {"zimg": T0, "flux": T0 + 2}
