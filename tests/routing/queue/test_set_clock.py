"""When the clock of Redis is set, no job is charged for time that did not pass, and old reports do not count."""

import pytest

from routing.queries.process_list import ProcessList
from routing.queue.worker_capacity import WorkerCapacity
from routing.scripts import make_scripts
from slotkeeper.redis.keys import Keys
from tests.support.fleet_queue import FRAGMENTS
from tests.support.harness import SECOND, Harness

HOUR = 3_600 * SECOND


def mean_slot_ms(harness: Harness) -> float:
    (stats,) = harness.redis.keys("*:stats:model:zimg")
    found = harness.redis.hget(stats, "run_ms")
    assert found is not None
    return float(found)


@pytest.mark.parametrize("is_renewed", [True, False])
def test_the_slot_time_of_a_run_has_no_step_forward_of_the_clock_in_it(harness: Harness, is_renewed: bool) -> None:
    harness.register()
    harness.submit()
    task = harness.start()
    harness.hold(task, 60 * SECOND)
    harness.later(HOUR)
    if is_renewed:
        harness.hold(task, SECOND)
    harness.settle(task)
    lease_ms = harness.dispatcher.settings.lease_ms
    assert 60 * SECOND <= mean_slot_ms(harness) <= 61 * SECOND + lease_ms


def test_slot_time_is_not_negative_after_a_step_back(harness: Harness) -> None:
    harness.register()
    harness.submit()
    task = harness.start()
    harness.hold(task, 60 * SECOND)
    harness.later(-HOUR)
    harness.dispatcher.fleets.clamp_times(["zimg"])
    harness.hold(task, 2 * SECOND)
    harness.settle(task)
    assert mean_slot_ms(harness) == 2 * SECOND


def test_a_report_of_capacity_does_not_count_longer_because_the_clock_was_set_back(harness: Harness) -> None:
    workers = WorkerCapacity(make_scripts(harness.redis, Keys("test"), FRAGMENTS))
    workers.report("dead/1", 64)
    assert workers.read_total() == 64
    harness.later(-HOUR)
    assert workers.read_total() == 0
    assert workers.report("alive/1", 3) == 3


def test_a_process_that_reported_later_than_now_is_not_listed(harness: Harness) -> None:
    processes = ProcessList(make_scripts(harness.redis, Keys("test"), FRAGMENTS))
    processes.report("dead", {"role": "worker", "host": "h"})
    assert [process.name for process in processes.read_all()] == ["dead"]
    harness.later(-HOUR)
    assert processes.read_all() == []
