"""Answers that cannot be read: each step says what is wrong and where, and whether to ask again can help."""

import gzip
from typing import Any

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from tasks.servers import Call, Description, HealthKind, ServerAdapter
from tasks.servers.http_client import SPOOL_AFTER_BYTES
from tests.support.scripted import answer

CALL = Call("job-1", 1, {"prompt": "a cat"})
ACCEPTED = answer({"status": "processing", "job_id": "j1"})
FAULTY_JSON = {
    "NaN": (b'{"status": "completed", "result": NaN}', "NaN at character 35"),
    "a number": (b'{"status": "completed", "result": 1e999}', "1e999 at character 35"),
    "half a pair": (rb'{"status": "completed", "result": "\ud800"}', r"\ud800 at character 36"),
    "a byte order mark": (b'\xef\xbb\xbf{"status": "completed"}', "byte order mark"),
    "not UTF-8": (b'{"status": "completed", "result": "\xe9"}', "byte E9 at position 36"),
    "cut": (b'{"status": "completed", "result": ', "ends at character 34"),
}
OTHERS = {
    "a page": (b"<html><title>Log in</title></html>", "an HTML or XML page ('Log in')"),
    "nothing": (b"", "it is empty"),
    "text": (b"out of order", "out of order"),
}
ALL = [pytest.param(*case, id=name) for name, case in (FAULTY_JSON | OTHERS).items()]


def _named(outcome: Outcome, clause: str) -> bool:
    return outcome.code == "bad_answer" and clause in outcome.message


@pytest.mark.parametrize(("body", "clause"), ALL)
def test_an_answer_to_a_submit_costs_a_retry_and_names_the_fault(scripted, ours, body: bytes, clause: str) -> None:
    server = ours(scripted(lambda seen: answer(body)).url)
    outcome = server.submit(CALL)
    assert outcome.kind is OutcomeKind.RETRY and _named(outcome, clause), outcome


@pytest.mark.parametrize(("body", "clause"), ALL)
def test_an_answer_to_a_poll_is_pending_and_names_the_fault(scripted, ours, body: bytes, clause: str) -> None:
    outcome = ours(scripted(lambda seen: answer(body)).url).status(CALL, "j1")
    assert outcome.kind is OutcomeKind.PENDING and _named(outcome, clause), outcome


@pytest.mark.parametrize("name", sorted(FAULTY_JSON | OTHERS))
def test_only_faulty_json_is_the_same_when_it_is_asked_for_again(scripted, ours, name: str) -> None:
    body, _ = (FAULTY_JSON | OTHERS)[name]
    outcome = ours(scripted(lambda seen: answer(body)).url).status(CALL, "j1")
    assert outcome.is_faulty_json is (name in FAULTY_JSON)


@pytest.mark.parametrize(("body", "clause"), ALL)
def test_a_result_of_its_own_step_names_the_fault(scripted, ours, body: bytes, clause: str) -> None:
    description = Description.model_validate({"mode": "async", "result": {"result": ""}})
    done = answer({"status": "completed", "job_id": "j1"})
    there = scripted(lambda seen: done if seen.path.startswith("/status") else answer(body))
    outcome = ours(there.url, description).status(CALL, "j1")
    assert outcome.kind is OutcomeKind.PENDING and _named(outcome, clause), outcome


@pytest.mark.parametrize(("body", "clause"), [pytest.param(*case, id=name) for name, case in FAULTY_JSON.items()])
def test_a_push_names_the_fault(body: bytes, clause: str) -> None:
    outcome = ServerAdapter("http://gpu1:9001/generate").read_push(CALL, None, body)
    assert outcome.is_faulty_json and _named(outcome, clause), outcome


@pytest.mark.parametrize(("body", "clause"), ALL)
def test_a_health_check_names_the_fault(scripted, ours, body: bytes, clause: str) -> None:
    health = ours(scripted(lambda seen: answer(body)).url).health()
    assert health.kind is HealthKind.GARBAGE and clause in health.message


@pytest.mark.parametrize(("body", "clause"), [(b'{"piece": NaN}', "NaN at character 11"), (b"<html>", "page")])
def test_an_event_of_a_stream_names_the_fault(scripted, ours, body: bytes, clause: str) -> None:
    description = Description.model_validate({"mode": "sync", "submit": {"stream": {}}})
    stream = answer(b"data: " + body + b"\n\n", Content_Type="text/event-stream")
    outcome = ours(scripted(lambda seen: stream).url, description).submit(CALL)
    assert outcome.kind is OutcomeKind.RETRY and outcome.server_still_running and _named(outcome, clause), outcome


@pytest.mark.parametrize("length", [300_000, SPOOL_AFTER_BYTES + 1000])
def test_a_large_answer_names_the_fault_behind_its_beginning(scripted, ours, length: int) -> None:
    body = b'{"status": "completed", "result": ["%s", NaN]}' % (b"x" * length)
    outcome = ours(scripted(lambda seen: answer(body)).url).submit(CALL)
    assert _named(outcome, f"NaN at character {length + 40}"), outcome


@pytest.mark.parametrize("step", ["submit", "status", "health"])
def test_a_redirect_names_its_target(scripted, ours, step: str) -> None:
    server = ours(scripted(lambda seen: answer(b"", 307, Location="/generate/?token=hidden")).url)
    asked: dict[str, Any] = {
        "submit": lambda: server.submit(CALL).message,
        "status": lambda: server.status(CALL, "j1").message,
        "health": lambda: server.health().message,
    }
    message = asked[step]()
    assert "307, a redirect to /generate/: register that address" in message and "hidden" not in message


@pytest.mark.parametrize(
    ("body", "coding", "clause"),
    [
        (gzip.compress(b'{"status": "completed"}')[:-9], "gzip", "compressed data are damaged"),
        (gzip.compress(b"[NaN]"), "gzip", "NaN at character 2"),
        (b"\x0b\x02\x80{}\x03", "br", "encoded as 'br'"),
    ],
    ids=["damaged", "whole", "unknown"],
)
def test_a_compressed_answer_names_the_fault(scripted, ours, body: bytes, coding: str, clause: str) -> None:
    there = scripted(lambda seen: answer(body, Content_Encoding=coding))
    assert _named(ours(there.url).submit(CALL), clause)


def test_an_answer_about_another_job_names_that_job(scripted, ours) -> None:
    outcome = ours(scripted(lambda seen: answer({"status": "success"}, X_Job_Id="job-2")).url).submit(CALL)
    assert _named(outcome, "about another job: job-2")


def test_a_message_holds_no_secret_that_the_answer_repeats(scripted, ours) -> None:
    there = scripted(lambda seen: answer(b"no such key: s3cret-key"))
    description = Description.model_validate({"submit": {"headers": {"X-Key": "{{secret/KEY}}"}}})
    server = ours(there.url, description, secret=lambda name: "s3cret-key")
    assert "s3cret" not in server.submit(CALL).message + server.health().message
