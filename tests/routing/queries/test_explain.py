"""The causes for which a run waits, apart from its server's response, as its worker reports them."""

import pytest

from routing.queries.explain import explain_idle_server
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
