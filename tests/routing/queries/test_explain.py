"""The causes for which a run waits, apart from its server's response, as its worker reports them."""

import pytest

from routing.queries.explain import NO_WORKER, explain_idle_server, explain_job
from routing.queries.process_list import ProcessList
from routing.queue.worker_capacity import WorkerCapacity
from tests.support.stage import Stage

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

SENTENCE = "Its request has no answer."


def _report(stage: Stage, job_id: str) -> None:
    facts = {"role": "worker", "host": "a", "awaits": {"gpu-slot0": [job_id, SENTENCE]}}
    ProcessList(stage.dispatcher.slots.scripts).report("worker@a/1", facts)


def test_explain_shows_the_cause_that_the_worker_reports(stage: Stage) -> None:
    stage.register()
    job_id = stage.submit()
    stage.start()
    assert stage.explained(job_id) == "It runs on gpu-slot0, attempt 1."
    _report(stage, job_id)
    assert stage.explained(job_id) == f"It runs on gpu-slot0, attempt 1.  {SENTENCE}"


def test_a_report_about_the_last_run_of_a_slot_does_not_concern_the_next(stage: Stage) -> None:
    stage.register()
    job_id = stage.submit()
    stage.start()
    _report(stage, "another")
    assert SENTENCE not in stage.explained(job_id)


def test_a_check_of_the_server_names_the_run(stage: Stage) -> None:
    workers = WorkerCapacity(stage.dispatcher.slots.scripts)
    stage.register()
    stage.register(server="other")
    job_id = stage.submit()
    stage.start()
    _report(stage, job_id)
    catalog = stage.dispatcher.catalog.get()
    found = {name: explain_idle_server(stage.dispatcher, workers, catalog.servers[name]) for name in ("gpu", "other")}
    sentences = {
        name: [one.sentence for one in blockers if one.code == "run_waits"] for name, blockers in found.items()
    }
    assert sentences == {"gpu": [f"job {job_id} on gpu-slot0: {SENTENCE}"], "other": []}


@pytest.mark.parametrize("waiting", [0, 1])
def test_without_a_living_worker_a_job_waits_for_one_offered_or_not(stage: Stage, waiting: int) -> None:
    stage.register(1)
    jobs = [stage.submit(), stage.submit()]
    workers = WorkerCapacity(stage.dispatcher.slots.scripts)
    found = explain_job(stage.dispatcher, workers, stage.job(jobs[waiting]))
    assert found.sentence.startswith(f"It waits: {NO_WORKER}")
    assert (found.waits_for[0].code, found.estimate) == ("no_worker", None)


def test_a_worker_that_is_full_is_alive(stage: Stage) -> None:
    stage.register(1)
    stage.submit()
    job = stage.job(stage.submit())
    workers = WorkerCapacity(stage.dispatcher.slots.scripts)
    workers.report("w1", 0)
    assert "no_worker" not in {one.code for one in explain_job(stage.dispatcher, workers, job).waits_for}


def test_a_worker_that_has_fallen_silent_is_not_alive(stage: Stage) -> None:
    stage.register(1)
    job = stage.job(stage.submit())
    workers = stage.living_worker()
    stage.later(10_000)
    workers.read_total()
    assert [one.code for one in explain_job(stage.dispatcher, workers, job).waits_for] == ["no_worker"]
