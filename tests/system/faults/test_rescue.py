"""A run of a worker that died is found again at its server, and its work is not done twice."""

import pytest

from slotkeeper.jobs.states import Reason
from tests.support.cluster import Cluster
from tools.cluster.stack import eventually

pytestmark = pytest.mark.e2e


def _one_run(cluster: Cluster, model: str, job_id: str) -> None:
    job = cluster.until(job_id, "completed")
    assert (job.why, job.crashes, job.failures) == (Reason.FINISHED, 1, 0)
    assert job.result is not None and "a cat" in job.result
    assert cluster.starts(job_id) == 2
    assert [run["job_id"] for run in cluster.runs(model)] == [job_id], "one run at the server"


def test_the_next_worker_continues_to_poll_a_job_that_its_server_still_runs(cluster: Cluster) -> None:
    (first,) = cluster.ensure_workers(1)
    model, gate = cluster.polled_model(), cluster.gate()
    job_id = cluster.submit(model, gate)
    cluster.sent(model)
    cluster.sent_later(job_id)
    first.kill()
    cluster.start_worker()
    cluster.started(job_id, 2)
    gate.open()
    _one_run(cluster, model, job_id)


def test_results_that_finished_without_a_living_worker_are_fetched_later(cluster: Cluster) -> None:
    (first,) = cluster.ensure_workers(1)
    models, gate = [cluster.polled_model(), cluster.model()], cluster.gate()
    ids = [cluster.submit(model, gate) for model in models]
    for model in models:
        cluster.sent(model)
    cluster.sent_later(ids[0])
    with cluster.maintenance_stopped():
        first.kill()
        gate.open()
        for model in models:
            eventually(lambda model=model: cluster.runs(model), "the server has ended it")
        assert [cluster.row(job_id).state for job_id in ids] == ["running"] * 2, "no process has received the results"
    cluster.ensure_workers(1)
    for model, job_id in zip(models, ids, strict=True):
        _one_run(cluster, model, job_id)


def test_a_worker_that_dies_before_it_stores_the_response_of_the_server_causes_no_second_run(cluster: Cluster) -> None:
    cluster.ensure_workers(0)
    dying = cluster.start_workers(2, SLOTKEEPER_CRASH_AT="run_sent")
    models, gate = [cluster.polled_model(), cluster.model()], cluster.gate()
    ids = []
    with cluster.maintenance_stopped():  # Otherwise the second worker would crash with the job of the first.
        for model, run in zip(models, (gate, 0.1), strict=True):
            ids.append(cluster.submit(model, run))
            eventually(
                lambda: [worker.popen.poll() for worker in dying].count(-9) == len(ids), "one worker has crashed"
            )
    cluster.ensure_workers(1)
    cluster.started(ids[0], 2)
    gate.open()
    for model, job_id in zip(models, ids, strict=True):
        _one_run(cluster, model, job_id)


def test_a_job_that_its_server_has_forgotten_runs_again(cluster: Cluster) -> None:
    """The limit of a rescue: a result that the server has lost cannot be found."""
    cluster.ensure_workers(1)
    model, gate = cluster.polled_model(), cluster.gate()
    job_id = cluster.submit(model, gate)
    cluster.sent(model)
    cluster.sent_later(job_id)
    cluster.restart_server(model)
    cluster.started(job_id, 2)
    gate.open()
    job = cluster.until(job_id, "completed")
    assert (job.crashes, cluster.starts(job_id)) == (1, 2)
