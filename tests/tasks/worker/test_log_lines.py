"""The log lines of a run name its job, tenant and outcome, and contain no data of a client or a server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.queries.job_counters import EventCounter
from slotkeeper import logs
from slotkeeper.jobs.states import Reason, State
from slotkeeper.trace_context import find_trace
from tasks.maintenance import log_job_end
from tasks.worker import executor
from tests.support.harness import Harness
from tests.tasks.worker.one_run import run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

PLANTED = "sk-PLANTED-0123456789"
CALLBACK = f"https://client.example/{PLANTED}"


@pytest.fixture(autouse=True)
def restore_log_configuration() -> Iterator[None]:
    yield
    logs.configure()


def _count_events(harness: Harness) -> None:
    counter = EventCounter(harness.store.database, log_job_end)
    while counter.count_new_events():
        pass


def _read_log(capsys: pytest.CaptureFixture[str]) -> str:
    assert logs.flush(10)
    return capsys.readouterr().err


def _lines(text: str, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_line_of_a_run_contains_a_payload_a_key_a_secret_or_a_response_of_a_server(
    harness, worker, server, capsys, monkeypatch, form
):
    logs.configure(form=form)
    harness.register(max_retries=0)
    outcomes = [
        Outcome(OutcomeKind.DONE, result={"url": PLANTED}),
        Outcome(OutcomeKind.FAILED, code=PLANTED, message=PLANTED),
        Outcome(OutcomeKind.RETRY, code=PLANTED, message=PLANTED),
        Outcome(OutcomeKind.LOST, code=PLANTED, message=PLANTED),
    ]
    for outcome in outcomes:
        secrets = {"payload": {"prompt": PLANTED}, "idempotency_key": f"{PLANTED}{outcome.kind}"}
        harness.submit(callback_url=CALLBACK, **secrets)
        server.answers = [outcome, outcome, outcome]
        run(harness)

    def fail(*_: object) -> Any:
        raise ValueError(PLANTED)

    monkeypatch.setattr(worker.server_calls, "_call", fail)
    harness.submit(payload={"prompt": PLANTED})
    run(harness)
    _count_events(harness)
    log = _read_log(capsys)
    assert log.count("job_ended") >= 2 and "run_failed" in log
    assert PLANTED not in log


def test_each_end_of_a_job_is_logged_once_with_job_tenant_and_trace(harness, worker, server, capsys):
    logs.configure(form="json")
    harness.register()
    done = harness.submit(tenant="acme")
    server.answers = [Outcome(OutcomeKind.DONE, result={})]
    run(harness)
    canceled = harness.submit()
    harness.store.cancel_waiting(canceled, harness.now)
    _count_events(harness)
    _count_events(harness)
    first, second = _lines(_read_log(capsys), "job_ended")
    fields = ("job_id", "tenant", "trace_id", "state", "why", "attempt")
    expected = [done, "acme", find_trace(done, None).id, State.COMPLETED, Reason.FINISHED, 1]
    assert [first[field] for field in fields] == expected
    assert (first["server"], first["model"]) == ("gpu", "zimg") and first["run_ms"] >= 0
    assert [second[field] for field in fields[:2]] == [canceled, "default"]
    assert second["why"] == Reason.CANCEL_REQUESTED and "run_ms" not in second


def test_a_line_of_a_worker_about_a_run_names_its_job_tenant_and_trace(harness, worker, server, capsys, monkeypatch):
    logs.configure(form="json")
    harness.register()
    job_id = harness.submit(tenant="acme")

    def log_and_fail(*_: object) -> Any:
        executor.log.info("here")
        raise RuntimeError

    monkeypatch.setattr(worker.server_calls, "_call", log_and_fail)
    run(harness)
    (line,) = _lines(_read_log(capsys), "here")
    assert (line["job_id"], line["tenant"], line["trace_id"]) == (job_id, "acme", find_trace(job_id, None).id)


def test_an_end_that_another_process_has_counted_is_not_logged_again(harness, worker, server, monkeypatch):
    harness.register()
    harness.submit()
    server.answers = [Outcome(OutcomeKind.DONE, result={})]
    run(harness)
    logged: list[Any] = []
    slow, read_position = EventCounter(harness.store.database, logged.append), EventCounter._position
    quick = EventCounter(harness.store.database, logged.append)

    def read_position_and_lose_the_race(counter: EventCounter) -> int:
        position = read_position(counter)
        if counter is slow:
            quick.count_new_events()
        return position

    monkeypatch.setattr(EventCounter, "_position", read_position_and_lose_the_race)
    assert slow.count_new_events() == 0
    assert len(logged) == 1
