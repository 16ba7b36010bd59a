"""What a whole run leaves in the log: which job of whose, and how it ended; nothing that anybody has sent."""

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
from tests.support.stage import Stage
from tests.tasks.worker.one_run import run

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

PLANTED = "sk-PLANTED-0123456789"
CALLBACK = f"https://client.example/{PLANTED}"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    logs.configure()


def _count(stage: Stage) -> None:
    historian = EventCounter(stage.store.database, log_job_end)
    while historian.count_new_events():
        pass


def _read(capsys: pytest.CaptureFixture[str]) -> str:
    assert logs.flush(10)
    return capsys.readouterr().err


def _ends(text: str) -> list[dict[str, Any]]:
    return [it for it in map(json.loads, text.splitlines()) if it["event"] == "job_ended"]


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_line_of_a_whole_run_shows_a_payload_a_key_a_secret_or_what_a_server_said(
    stage, worker, server, capsys, monkeypatch, form
):
    logs.configure(form=form)
    stage.register(max_retries=0)
    ends = [
        Outcome(OutcomeKind.DONE, result={"url": PLANTED}),
        Outcome(OutcomeKind.FAILED, code=PLANTED, message=PLANTED),
        Outcome(OutcomeKind.RETRY, code=PLANTED, message=PLANTED),
        Outcome(OutcomeKind.LOST, code=PLANTED, message=PLANTED),
    ]
    for outcome in ends:
        secret = {"payload": {"prompt": PLANTED}, "idempotency_key": f"{PLANTED}{outcome.kind}"}
        stage.submit(callback_url=CALLBACK, **secret)
        server.answers = [outcome, outcome, outcome]
        run(stage)

    def fails(*_: object) -> Any:
        raise ValueError(PLANTED)

    monkeypatch.setattr(worker.server_calls, "_call", fails)
    stage.submit(payload={"prompt": PLANTED})
    run(stage)
    _count(stage)
    said = _read(capsys)
    assert said.count("job_ended") >= 2 and "run_failed" in said
    assert PLANTED not in said


def test_each_job_that_ends_is_one_line_with_job_tenant_and_trace_whoever_ends_it(stage, worker, server, capsys):
    logs.configure(form="json")
    stage.register()
    done = stage.submit(tenant="acme")
    server.answers = [Outcome(OutcomeKind.DONE, result={})]
    run(stage)
    canceled = stage.submit()
    stage.store.cancel_waiting(canceled, stage.now)
    _count(stage)
    _count(stage)
    first, second = _ends(_read(capsys))
    told = ("job_id", "tenant", "trace_id", "state", "why", "attempt")
    assert [first[it] for it in told] == [done, "acme", find_trace(done, None).id, State.COMPLETED, Reason.FINISHED, 1]
    assert (first["server"], first["model"]) == ("gpu", "zimg") and first["run_ms"] >= 0
    assert [second[it] for it in told[:2]] == [canceled, "default"]
    assert second["why"] == Reason.CANCEL_REQUESTED and "run_ms" not in second


def test_what_a_worker_says_of_a_run_names_its_job_tenant_and_trace(stage, worker, server, capsys, monkeypatch):
    logs.configure(form="json")
    stage.register()
    job_id = stage.submit(tenant="acme")

    def says(*_: object) -> Any:
        executor.log.info("here")
        raise RuntimeError

    monkeypatch.setattr(worker.server_calls, "_call", says)
    run(stage)
    (line,) = [it for it in map(json.loads, _read(capsys).splitlines()) if it["event"] == "here"]
    assert (line["job_id"], line["tenant"], line["trace_id"]) == (job_id, "acme", find_trace(job_id, None).id)


def test_an_end_that_somebody_else_has_counted_is_not_told_twice(stage, worker, server, monkeypatch):
    stage.register()
    stage.submit()
    server.answers = [Outcome(OutcomeKind.DONE, result={})]
    run(stage)
    told: list[Any] = []
    slow, position = EventCounter(stage.store.database, told.append), EventCounter._position
    quick = EventCounter(stage.store.database, told.append)

    def late(historian: EventCounter) -> int:
        before = position(historian)
        if historian is slow:
            quick.count_new_events()
        return before

    monkeypatch.setattr(EventCounter, "_position", late)
    assert slow.count_new_events() == 0
    assert len(told) == 1
