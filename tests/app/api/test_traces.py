"""The API stores a job's trace and sends it to the job's server."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from routing.queries.trace_spans import ATTEMPT
from slotkeeper.jobs.values import Job
from slotkeeper.process import singleton
from slotkeeper.registry.identity import LOCAL_IDENTITY
from slotkeeper.trace_context import make_span_id
from tasks import inference, offer_messages, options, tracing
from tasks.celery_app import celery
from tests.support.api import Api
from tests.support.builders import a_queued_job

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"
BODY: dict[str, Any] = {"model": "zimg", "payload": {}}


def _kept(api: Api, job_id: str) -> str | None:
    job = api.dispatcher.store.get(job_id)
    assert job is not None
    return job.traceparent


@pytest.fixture(autouse=True)
def a_model(api: Api) -> None:
    assert api.client.put("/admin/model-configs/zimg", json={}).status_code == 200


@pytest.mark.parametrize(("given", "kept"), [(GIVEN, GIVEN), ("00-x", None), (f"{GIVEN}, {GIVEN}", None), ("", None)])
def test_rest_takes_a_trace_and_ignores_what_is_none(api: Api, given: str, kept: str | None) -> None:
    answer = api.client.post("/queue/submit", json=BODY, headers={"traceparent": given})
    assert answer.status_code == 202
    assert _kept(api, answer.json["job_id"]) == kept


def test_all_jobs_of_a_batch_have_the_trace_of_its_request(api: Api) -> None:
    answer = api.client.post("/queue/submit-batch", json=[BODY, BODY], headers={"traceparent": GIVEN})
    assert [_kept(api, job["job_id"]) for job in answer.json["jobs"]] == [GIVEN, GIVEN]


@pytest.mark.parametrize("how", ["argument", "option"])
def test_infer_takes_a_trace(how: str) -> None:
    named = {"traceparent": GIVEN}
    asked = options.read_submission(
        "j", ("zimg",), named if how == "argument" else {}, {} if how == "argument" else named, LOCAL_IDENTITY
    )
    assert asked.traceparent == GIVEN


@pytest.mark.parametrize("given", ["00-x", f"{GIVEN}-more", "", GIVEN.upper()])
def test_infer_refuses_nothing_for_a_traceparent_that_is_none(api: Api, given: str) -> None:
    asked = options.read_submission("traced-1", ("zimg",), {"traceparent": given}, {}, LOCAL_IDENTITY)
    (receipt,) = api.dispatcher.submit([asked], LOCAL_IDENTITY)
    assert _kept(api, receipt.accepted.id) is None


def test_an_explicit_trace_overrides_the_headers_and_the_headers_override_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACEPARENT", "of the environment")
    headers = {"traceparent": "of a header", "tracestate": "x=1", "baggage": "y=1"}
    assert inference._trace_options({}, {}, {}) == {"traceparent": "of the environment"}
    assert inference._trace_options({}, {}, headers) == {"traceparent": "of a header"}
    assert inference._trace_options({"traceparent": GIVEN}, {}, headers) == {}
    assert inference._trace_options({}, {"traceparent": GIVEN}, {}) == {}


def test_known_headers_are_removed_and_unknown_headers_remain_to_be_refused() -> None:
    headers = {"traceparent": GIVEN, "tracestate": "x=1", "baggage": "y=1", "slotkeeper_token": "skt_", "mine": "1"}
    assert inference._other_headers(headers) == {"mine": "1"}


@pytest.mark.parametrize(
    ("headers", "found"), [({"traceparent": GIVEN}, GIVEN), ({"traceparent": 1}, None), (None, None)]
)
def test_a_job_submitted_by_a_task_joins_the_trace_of_the_task_and_not_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, Any] | None, found: str | None
) -> None:
    monkeypatch.setenv("TRACEPARENT", "of the worker")
    task = SimpleNamespace(request=SimpleNamespace(headers=headers))
    monkeypatch.setattr(type(celery), "current_worker_task", task)
    assert inference._trace_options({}, {}, {}) == {"traceparent": found}


def test_the_task_context_of_a_job_has_the_span_of_the_job_as_parent(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job: Job = a_queued_job(api.dispatcher.store, traceparent=GIVEN)
    assert offer_messages.task_context(job).headers == {"traceparent": f"00-{TRACE}-{make_span_id(job.id, 'job')}-01"}
    assert offer_messages.task_context(a_queued_job(api.dispatcher.store)).headers == {}


@pytest.mark.parametrize(
    ("given", "exported", "sent"), [(None, False, False), (None, True, True), (GIVEN, False, True)]
)
def test_a_server_gets_a_traceparent_if_the_client_sent_one_or_spans_are_exported(
    monkeypatch: pytest.MonkeyPatch, given: str | None, exported: bool, sent: bool
) -> None:
    monkeypatch.setattr(tracing, "exports_spans", lambda: exported)
    found = tracing.outgoing_traceparent("j", given, ATTEMPT, 2)
    assert (found is not None) == sent
    assert found is None or found.split("-")[2] == make_span_id("j", ATTEMPT, 2)


@pytest.mark.parametrize(
    ("name", "value"), [("SLOTKEEPER_EVENTS_TO", "reddis"), ("SLOTKEEPER_EVENTS_KAFKA_OPTIONS", "{")]
)
def test_settings_of_events_that_are_wrong_end_no_run(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracing, "exports_spans", singleton(tracing.exports_spans._make))
    assert tracing.outgoing_traceparent("j", None, ATTEMPT, 1) is None
    assert tracing.outgoing_traceparent("j", GIVEN, ATTEMPT, 1) is not None


def test_without_the_setting_no_exporter_is_loaded() -> None:
    code = "import sys, tasks.relay.relay, tasks.worker.worker, app.factory\n"
    code += "print('opentelemetry.exporter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
