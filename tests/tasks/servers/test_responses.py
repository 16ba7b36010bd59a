import gzip
import json
import re
from email.utils import formatdate
from typing import Any

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from tasks.servers import Description, HealthKind, RunDetails, ServerAdapter
from tasks.servers.http_client import SPOOL_AFTER_BYTES
from tasks.servers.responses import NOT_JSON, Response, id_text, parse_json, redact, retry_after_s
from tests.support.scripted import always, answer

NOW_S = 1_700_000_000.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("1.5", 1.5),
        ("99999999", 3600.0),
        (formatdate(NOW_S + 30, usegmt=True), 30.0),
        (formatdate(NOW_S - 30, usegmt=True), 0.0),
        (formatdate(NOW_S + 1e6, usegmt=True), 3600.0),
        (None, None),
        ("", None),
        ("-5", None),
        ("5, 10", None),
        ("1e9", None),
        ("٣", None),
        ("9" * 5000, None),
        ("soon", None),
        ("Fri, 99 Xyz 20", None),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date_and_at_most_an_hour(header, seconds):
    assert retry_after_s(header, NOW_S) == seconds


@pytest.mark.parametrize("body", [b"", b"NaN", b'{"a": Infinity}', b"[1e999]", b"<html>", b"{", b"\xff", b"[" * 9000])
def test_a_body_that_is_not_json_is_refused(body):
    assert parse_json(body) is NOT_JSON


def test_json_is_parsed_regardless_of_the_content_type():
    assert Response(200, {"content-type": "text/html"}, b'{"a": 1}').json == {"a": 1}
    assert Response(200, {}, b"null").json is None


@pytest.mark.parametrize(("value", "text"), [("a", "a"), (12, "12"), ("a/b c", "a/b c")])
def test_an_id_is_a_string_or_an_integer(value, text):
    assert id_text(value) == text


@pytest.mark.parametrize("value", [None, True, 1.5, [], {}, "", "..", ".", "a\nb", "\x00", "x" * 257])
def test_a_value_that_cannot_be_an_id_is_none(value):
    assert id_text(value) is None


def test_a_message_is_one_bounded_line_without_controls():
    assert redact("a\x00b\x1b[31m\u202e\r\nc\t d") == "ab[31m c d"
    assert len(redact("x" * 10_000)) == 500


def test_a_message_repeats_no_secret_not_even_half_of_one():
    secret = "k" * 40
    assert redact(f"bad key {secret}!", [secret]) == "bad key ***!"
    assert "kk" not in redact("x" * 480 + secret, [secret])
    assert "kk" not in redact(f"bad {secret[:20]}\x00{secret[20:]}", [secret])


# -- unreadable responses: the message names the fault --------------------------------------------------------

CALL = RunDetails("job-1", 1, {"prompt": "a cat"})
FAULTY_JSON = {
    "NaN": (b'{"status": "completed", "result": NaN}', "NaN at character 35"),
    "a number": (b'{"status": "completed", "result": 1e999}', "1e999 at character 35"),
    "half a pair": (rb'{"status": "completed", "result": "\ud800"}', r"\ud800 at character 36"),
    "a byte order mark": (b'\xef\xbb\xbf{"status": "completed"}', "byte order mark"),
    "not UTF-8": (b'{"status": "completed", "result": "\xe9"}', "byte E9 at position 36"),
    "cut": (b'{"status": "completed", "result": ', "ends at character 34"),
}
NOT_LIKE_JSON = {
    "a page": (b"<html><title>Log in</title></html>", "an HTML or XML page ('Log in')"),
    "nothing": (b"", "it is empty"),
    "text": (b"out of order", "out of order"),
}
UNREADABLE = [pytest.param(*case, id=name) for name, case in (FAULTY_JSON | NOT_LIKE_JSON).items()]


def _names_fault(outcome: Outcome, clause: str) -> bool:
    return outcome.code == "bad_answer" and clause in outcome.message


@pytest.mark.parametrize(("body", "clause"), UNREADABLE)
def test_an_unreadable_response_to_a_submit_costs_a_retry_and_names_the_fault(
    scripted, ours, body: bytes, clause: str
) -> None:
    server = ours(scripted(lambda _: answer(body)).url)
    outcome = server.submit(CALL)
    assert outcome.kind is OutcomeKind.RETRY and _names_fault(outcome, clause), outcome


@pytest.mark.parametrize(("body", "clause"), UNREADABLE)
def test_an_unreadable_response_to_a_poll_is_pending_and_names_the_fault(
    scripted, ours, body: bytes, clause: str
) -> None:
    outcome = ours(scripted(lambda _: answer(body)).url).status(CALL, "j1")
    assert outcome.kind is OutcomeKind.PENDING and _names_fault(outcome, clause), outcome


@pytest.mark.parametrize("name", sorted(FAULTY_JSON | NOT_LIKE_JSON))
def test_only_a_body_that_begins_like_json_is_faulty_json(scripted, ours, name: str) -> None:
    body, _ = (FAULTY_JSON | NOT_LIKE_JSON)[name]
    outcome = ours(scripted(lambda _: answer(body)).url).status(CALL, "j1")
    assert outcome.is_faulty_json is (name in FAULTY_JSON)


@pytest.mark.parametrize(("body", "clause"), UNREADABLE)
def test_an_unreadable_response_to_the_result_step_names_the_fault(scripted, ours, body: bytes, clause: str) -> None:
    description = Description.model_validate({"mode": "async", "result": {"result": ""}})
    done = answer({"status": "completed", "job_id": "j1"})
    http_server = scripted(lambda request: done if request.path.startswith("/status") else answer(body))
    outcome = ours(http_server.url, description).status(CALL, "j1")
    assert outcome.kind is OutcomeKind.PENDING and _names_fault(outcome, clause), outcome


@pytest.mark.parametrize(("body", "clause"), [pytest.param(*case, id=name) for name, case in FAULTY_JSON.items()])
def test_an_unreadable_push_names_the_fault(body: bytes, clause: str) -> None:
    outcome = ServerAdapter("http://gpu1:9001/generate").read_push(CALL, None, Response(200, {}, body))
    assert outcome.is_faulty_json and _names_fault(outcome, clause), outcome


@pytest.mark.parametrize(("body", "clause"), UNREADABLE)
def test_an_unreadable_response_to_a_health_check_names_the_fault(scripted, ours, body: bytes, clause: str) -> None:
    health = ours(scripted(lambda _: answer(body)).url).health()
    assert health.kind is HealthKind.GARBAGE and clause in health.message


@pytest.mark.parametrize(("body", "clause"), [(b'{"piece": NaN}', "NaN at character 11"), (b"<html>", "page")])
def test_an_unreadable_event_of_a_stream_names_the_fault(scripted, ours, body: bytes, clause: str) -> None:
    description = Description.model_validate({"mode": "sync", "submit": {"stream": {}}})
    stream = answer(b"data: " + body + b"\n\n", Content_Type="text/event-stream")
    outcome = ours(scripted(lambda _: stream).url, description).submit(CALL)
    assert outcome.kind is OutcomeKind.RETRY and outcome.server_still_running and _names_fault(outcome, clause), outcome


@pytest.mark.parametrize("length", [300_000, SPOOL_AFTER_BYTES + 1000])
def test_a_fault_after_the_beginning_of_a_large_response_is_named(scripted, ours, length: int) -> None:
    body = b'{"status": "completed", "result": ["%s", NaN]}' % (b"x" * length)
    outcome = ours(scripted(lambda _: answer(body)).url).submit(CALL)
    assert _names_fault(outcome, f"NaN at character {length + 40}"), outcome


@pytest.mark.parametrize("step", ["submit", "status", "health"])
def test_the_message_of_a_redirect_names_its_target(scripted, ours, step: str) -> None:
    server = ours(scripted(lambda _: answer(b"", 307, Location="/generate/?token=hidden")).url)
    messages: dict[str, Any] = {
        "submit": lambda: server.submit(CALL).message,
        "status": lambda: server.status(CALL, "j1").message,
        "health": lambda: server.health().message,
    }
    message = messages[step]()
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
def test_a_fault_in_a_compressed_response_is_named(scripted, ours, body: bytes, coding: str, clause: str) -> None:
    http_server = scripted(lambda _: answer(body, Content_Encoding=coding))
    assert _names_fault(ours(http_server.url).submit(CALL), clause)


def test_the_message_of_a_response_about_another_job_names_that_job(scripted, ours) -> None:
    outcome = ours(scripted(lambda _: answer({"status": "success"}, X_Job_Id="job-2")).url).submit(CALL)
    assert _names_fault(outcome, "about another job: job-2")


def test_a_message_contains_no_secret_that_the_response_repeats(scripted, ours) -> None:
    http_server = scripted(lambda _: answer(b"no such key: s3cret-key"))
    description = Description.model_validate({"submit": {"headers": {"X-Key": "{{secret/KEY}}"}}})
    server = ours(http_server.url, description, secret=lambda name: "s3cret-key")
    assert "s3cret" not in server.submit(CALL).message + server.health().message


def test_the_error_for_an_unmatched_response_suggests_the_rule_that_makes_it_a_result(scripted, ours):
    server = scripted(always(answer({"y": 42})))
    submit: dict[str, Any] = {"result": "/y"}
    described = {"mode": "sync", "submit": submit, "cancel": None, "health": None}
    run = RunDetails("job-1", 1, {}, deadline_s=5.0)
    outcome = ours(server.url, Description.model_validate(described)).submit(run)
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")
    (rule,) = re.findall(r"add (\{.*\}) to `submit.rules`", outcome.message)
    submit["rules"] = [json.loads(rule)]
    outcome = ours(server.url, Description.model_validate(described)).submit(run)
    assert (outcome.kind, outcome.result) == (OutcomeKind.DONE, 42)
