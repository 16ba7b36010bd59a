"""Redis reaches its maxmemory: writes that free memory and writes for running jobs still succeed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from redis.exceptions import OutOfMemoryError

from routing.maintenance import rebuild
from slotkeeper.jobs.values import QueuedJob
from tests.support import passes
from tests.support.cluster import Cluster
from tests.support.harness import Harness
from tools.cluster.stack import eventually


@contextmanager
def _full(cluster: Cluster) -> Iterator[None]:
    """Set Redis to its memory limit and remove its functions, so that clients must load them again."""
    with cluster.redis() as redis:
        redis.config_set("maxmemory", 1)
        redis.function_flush()
        try:
            yield
        finally:
            redis.config_set("maxmemory", 0)


@pytest.mark.e2e
def test_takeovers_resumed_servers_and_new_workers_succeed_while_redis_is_full(cluster: Cluster) -> None:
    (worker,) = cluster.ensure_workers(1)
    busy, paused, gate = cluster.model(1), cluster.model(1), cluster.gate()
    held = cluster.submit(busy, gate)
    cluster.sent(busy)
    assert cluster.api.call("PATCH", f"/admin/servers/{paused}", json={"state": "paused"}).ok
    waiting = [cluster.submit(model, 0.02) for model in (busy, paused) for _ in range(5)]

    with _full(cluster):
        worker.kill()
        cluster.start_worker()
        assert cluster.api.call("PATCH", f"/admin/servers/{paused}", json={"state": "online"}).ok
        late = cluster.submit(busy, 0.02)
        gate.open()
        for job_id in (held, *waiting):
            cluster.until(job_id, "completed", within_s=20)
    cluster.until(late, "completed")
    jobs = [cluster.row(job_id) for job_id in waiting]
    assert [(job.attempt, job.crashes) for job in jobs] == [(1, 0)] * len(jobs)
    eventually(lambda: not cluster.taken(busy) and not cluster.taken(paused), "the slots are free")


def test_a_queue_that_does_not_fit_into_redis_opens_with_the_jobs_that_fit(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "JOBS_AT_ONCE", 2)
    harness.register()
    ids = [harness.submit() for _ in range(5)]
    harness.offered()
    harness.lose_redis()
    fill, filled = harness.dispatcher.queues.fill, list[int]()

    def fill_one_chunk(fleet: str, jobs: Sequence[QueuedJob]) -> int:
        if filled:
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        filled.append(len(jobs))
        return fill(fleet, jobs)

    with monkeypatch.context() as full:
        full.setattr(harness.dispatcher.queues, "fill", fill_one_chunk)
        passes.sweep(harness.dispatcher)
        assert harness.run_all() == ids[:2], "their ends free memory for the others"
    passes.sweep(harness.dispatcher)
    assert harness.run_all() == ids[2:]


def test_an_immediately_rebuilt_queue_opens_although_redis_has_no_memory_for_its_jobs(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()
    harness.offered()
    harness.lose_redis()
    with monkeypatch.context() as full:
        full.setattr(harness.dispatcher.queues, "fill", _refuse)
        rebuild.rebuild_queue(harness.dispatcher, "zimg")
    assert harness.dispatcher.fleets.counts(["zimg"])["zimg"].is_open
    passes.sweep(harness.dispatcher)
    assert harness.run_all() == [job_id]


def _refuse(*_: object) -> int:
    raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
