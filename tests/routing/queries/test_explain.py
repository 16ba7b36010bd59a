"""The causes for which a run waits, apart from its server's response, as its worker reports them."""

import pytest

from routing.queries.explain import NO_WORKER, explain_idle_server, explain_job
from routing.queries.process_list import ProcessList
from routing.queue.worker_capacity import WorkerCapacity
from tests.support.harness import Harness

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

SENTENCE = "Its request has no answer."


def _report(harness: Harness, job_id: str) -> None:
    facts = {"role": "worker", "host": "a", "awaits": {"gpu-slot0": [job_id, SENTENCE]}}
    ProcessList(harness.dispatcher.slots.scripts).report("worker@a/1", facts)


def test_explain_shows_the_cause_that_the_worker_reports(harness: Harness) -> None:
    harness.register()
    job_id = harness.submit()
    harness.start()
    assert harness.explained(job_id) == "It runs on gpu-slot0, attempt 1."
    _report(harness, job_id)
    assert harness.explained(job_id) == f"It runs on gpu-slot0, attempt 1.  {SENTENCE}"


def test_a_report_about_the_last_run_of_a_slot_does_not_concern_the_next(harness: Harness) -> None:
    harness.register()
    job_id = harness.submit()
    harness.start()
    _report(harness, "another")
    assert SENTENCE not in harness.explained(job_id)


def test_a_check_of_the_server_names_the_run(harness: Harness) -> None:
    workers = WorkerCapacity(harness.dispatcher.slots.scripts)
    harness.register()
    harness.register(server="other")
    job_id = harness.submit()
    harness.start()
    _report(harness, job_id)
    catalog = harness.dispatcher.catalog.get()
    found = {name: explain_idle_server(harness.dispatcher, workers, catalog.servers[name]) for name in ("gpu", "other")}
    sentences = {
        name: [one.sentence for one in blockers if one.code == "run_waits"] for name, blockers in found.items()
    }
    assert sentences == {"gpu": [f"job {job_id} on gpu-slot0: {SENTENCE}"], "other": []}


@pytest.mark.parametrize("waiting", [0, 1])
def test_without_a_live_worker_an_offered_or_queued_job_waits_for_a_worker(harness: Harness, waiting: int) -> None:
    harness.register(1)
    jobs = [harness.submit(), harness.submit()]
    workers = WorkerCapacity(harness.dispatcher.slots.scripts)
    found = explain_job(harness.dispatcher, workers, harness.job(jobs[waiting]))
    assert found.sentence.startswith(f"It waits: {NO_WORKER}")
    assert (found.waits_for[0].code, found.estimate) == ("no_worker", None)


def test_a_worker_that_is_full_is_alive(harness: Harness) -> None:
    harness.register(1)
    harness.submit()
    job = harness.job(harness.submit())
    workers = WorkerCapacity(harness.dispatcher.slots.scripts)
    workers.report("w1", 0)
    assert "no_worker" not in {one.code for one in explain_job(harness.dispatcher, workers, job).waits_for}


def test_a_worker_that_has_fallen_silent_is_not_alive(harness: Harness) -> None:
    harness.register(1)
    job = harness.job(harness.submit())
    workers = harness.living_worker()
    harness.later(10_000)
    workers.read_total()
    assert [one.code for one in explain_job(harness.dispatcher, workers, job).waits_for] == ["no_worker"]
