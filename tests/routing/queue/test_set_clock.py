"""When the clock of Redis is set, no job is charged for time that did not pass, and old reports do not count."""

import pytest

from routing.queries.process_list import ProcessList
from routing.queue.worker_capacity import WorkerCapacity
from routing.scripts import make_scripts
from slotkeeper.redis.keys import Keys
from tests.support.room import FRAGMENTS
from tests.support.stage import SECOND, Stage

HOUR = 3_600 * SECOND


def mean_slot_ms(stage: Stage) -> float:
    (stats,) = stage.redis.keys("*:stats:model:zimg")
    found = stage.redis.hget(stats, "run_ms")
    assert found is not None
    return float(found)


@pytest.mark.parametrize("is_renewed", [True, False])
def test_the_slot_time_of_a_run_has_no_step_forward_of_the_clock_in_it(stage: Stage, is_renewed: bool) -> None:
    stage.register()
    stage.submit()
    task = stage.start()
    stage.hold(task, 60 * SECOND)
    stage.later(HOUR)
    if is_renewed:
        stage.hold(task, SECOND)
    stage.settle(task)
    lease_ms = stage.dispatcher.settings.lease_ms
    assert 60 * SECOND <= mean_slot_ms(stage) <= 61 * SECOND + lease_ms


def test_slot_time_is_not_negative_after_a_step_back(stage: Stage) -> None:
    stage.register()
    stage.submit()
    task = stage.start()
    stage.hold(task, 60 * SECOND)
    stage.later(-HOUR)
    stage.dispatcher.fleets.clamp_times(["zimg"])
    stage.hold(task, 2 * SECOND)
    stage.settle(task)
    assert mean_slot_ms(stage) == 2 * SECOND


def test_a_report_of_capacity_does_not_count_longer_because_the_clock_was_set_back(stage: Stage) -> None:
    workers = WorkerCapacity(make_scripts(stage.redis, Keys("test"), FRAGMENTS))
    workers.report("dead/1", 64)
    assert workers.read_total() == 64
    stage.later(-HOUR)
    assert workers.read_total() == 0
    assert workers.report("alive/1", 3) == 3


def test_a_process_that_reported_later_than_now_is_not_listed(stage: Stage) -> None:
    processes = ProcessList(make_scripts(stage.redis, Keys("test"), FRAGMENTS))
    processes.report("dead", {"role": "worker", "host": "h"})
    assert [process.name for process in processes.read_all()] == ["dead"]
    stage.later(-HOUR)
    assert processes.read_all() == []
