"""What a server has done for a worker that died is found again, and not done twice."""

import pytest

from slotkeeper.jobs.states import Reason
from tests.support.town import Town
from tools.cluster.stack import eventually

pytestmark = pytest.mark.e2e


def _one_run(town: Town, model: str, job_id: str) -> None:
    job = town.until(job_id, "completed")
    assert (job.why, job.crashes, job.failures) == (Reason.FINISHED, 1, 0)
    assert job.result is not None and "a cat" in job.result
    assert town.starts(job_id) == 2
    assert [run["job_id"] for run in town.runs(model)] == [job_id], "one run at the server"


def test_a_job_that_its_server_goes_on_with_is_polled_further_by_the_next_worker(town: Town) -> None:
    (first,) = town.crew(1)
    model, gate = town.polled_model(), town.gate()
    job_id = town.submit(model, gate)
    town.sent(model)
    town.sent_later(job_id)
    first.kill()
    town.hire()
    town.started(job_id, 2)
    gate.open()
    _one_run(town, model, job_id)


def test_results_that_came_while_nobody_watched_are_fetched(town: Town) -> None:
    (first,) = town.crew(1)
    models, gate = [town.polled_model(), town.model()], town.gate()
    ids = [town.submit(model, gate) for model in models]
    for model in models:
        town.sent(model)
    town.sent_later(ids[0])
    with town.nobody_reaps():
        first.kill()
        gate.open()
        for model in models:
            eventually(lambda model=model: town.runs(model), "the server has ended it")
        assert [town.row(job_id).state for job_id in ids] == ["running"] * 2, "and nobody knows"
    town.crew(1)
    for model, job_id in zip(models, ids, strict=True):
        _one_run(town, model, job_id)


def test_workers_that_die_before_they_have_noted_the_servers_answer_cost_no_second_run(town: Town) -> None:
    town.crew(0)
    dying = town.hire_all(2, SLOTKEEPER_CRASH_AT="run_sent")
    models, gate = [town.polled_model(), town.model()], town.gate()
    ids = []
    with town.nobody_reaps():  # or the second would die of the first one's job
        for model, run in zip(models, (gate, 0.1), strict=True):
            ids.append(town.submit(model, run))
            eventually(lambda: [worker.popen.poll() for worker in dying].count(-9) == len(ids), "one dies of it")
    town.crew(1)
    town.started(ids[0], 2)
    gate.open()
    for model, job_id in zip(models, ids, strict=True):
        _one_run(town, model, job_id)


def test_a_server_that_has_forgotten_the_job_runs_it_again(town: Town) -> None:
    """The refusal beside the rescues: a result that is nowhere cannot be found."""
    town.crew(1)
    model, gate = town.polled_model(), town.gate()
    job_id = town.submit(model, gate)
    town.sent(model)
    town.sent_later(job_id)
    town.restart_server(model)
    town.started(job_id, 2)
    gate.open()
    job = town.until(job_id, "completed")
    assert (job.crashes, town.starts(job_id)) == (1, 2)
