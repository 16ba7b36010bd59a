"""Redis reaches its maxmemory: what frees memory and what running jobs need goes on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from redis.exceptions import OutOfMemoryError

from routing.maintenance import rebuild
from slotkeeper.jobs.values import QueuedJob
from tests.support import passes
from tests.support.stage import Stage
from tests.support.town import Town
from tools.cluster.stack import eventually


@contextmanager
def _full(town: Town) -> Iterator[None]:
    """Set Redis to its memory limit and remove its functions, so that clients must load them again."""
    with town.redis() as redis:
        redis.config_set("maxmemory", 1)
        redis.function_flush()
        try:
            yield
        finally:
            redis.config_set("maxmemory", 0)


@pytest.mark.e2e
def test_a_full_redis_stops_neither_takeovers_nor_resumed_servers_nor_new_workers(town: Town) -> None:
    (worker,) = town.crew(1)
    busy, paused, gate = town.model(1), town.model(1), town.gate()
    held = town.submit(busy, gate)
    town.sent(busy)
    assert town.api.call("PATCH", f"/admin/servers/{paused}", json={"state": "paused"}).ok
    waiting = [town.submit(model, 0.02) for model in (busy, paused) for _ in range(5)]

    with _full(town):
        worker.kill()
        town.hire()
        assert town.api.call("PATCH", f"/admin/servers/{paused}", json={"state": "online"}).ok
        late = town.submit(busy, 0.02)
        gate.open()
        for job_id in (held, *waiting):
            town.until(job_id, "completed", within_s=20)
    town.until(late, "completed")
    jobs = [town.row(job_id) for job_id in waiting]
    assert [(job.attempt, job.crashes) for job in jobs] == [(1, 0)] * len(jobs)
    eventually(lambda: not town.taken(busy) and not town.taken(paused), "the slots are free")


def test_a_room_that_redis_cannot_hold_whole_opens_with_the_jobs_that_it_holds(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "JOBS_AT_ONCE", 2)
    stage.register()
    ids = [stage.submit() for _ in range(5)]
    stage.offered()
    stage.lose_redis()
    fill, filled = stage.dispatcher.queues.fill, list[int]()

    def fill_one_chunk(fleet: str, jobs: Sequence[QueuedJob]) -> int:
        if filled:
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        filled.append(len(jobs))
        return fill(fleet, jobs)

    with monkeypatch.context() as full:
        full.setattr(stage.dispatcher.queues, "fill", fill_one_chunk)
        passes.sweep(stage.dispatcher)
        assert stage.run_all() == ids[:2], "they make room for the others"
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == ids[2:]


def test_a_room_that_is_rebuilt_at_once_opens_though_redis_cannot_hold_it_whole(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    stage.offered()
    stage.lose_redis()
    with monkeypatch.context() as full:
        full.setattr(stage.dispatcher.queues, "fill", _refuse)
        rebuild.rebuild_queue(stage.dispatcher, "zimg")
    assert stage.dispatcher.fleets.counts(["zimg"])["zimg"].is_open
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == [job_id]


def _refuse(*_: object) -> int:
    raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
