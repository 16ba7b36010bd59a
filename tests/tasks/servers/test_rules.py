from typing import Any

import orjson
import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper import json_text
from tasks.servers.compiled import compile_description
from tasks.servers.description import DEFAULT, Description, from_shorthand
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.rules import TOO_DEEP, ResponseContext

DEFAULT_PLAN = compile_description(DEFAULT)


def response(body: Any, status: int = 200, **headers: str) -> Response:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Response(status, {name.replace("_", "-").lower(): value for name, value in headers.items()}, raw)


def submitted(reply, description: Description = DEFAULT, remote_id: str | None = None) -> Outcome:
    """Return the outcome of a reply to a submit."""
    plan = DEFAULT_PLAN if description is DEFAULT else compile_description(description)
    return plan.submit.judge.outcome(reply, ResponseContext("job-1", remote_id, now_s=0.0))


def polled(reply, description: Description = DEFAULT, remote_id: str | None = "srv-1") -> Outcome | None:
    """Return the outcome of a reply to a poll."""
    plan = DEFAULT_PLAN if description is DEFAULT else compile_description(description)
    return plan.status[0].judge.outcome(reply, ResponseContext("job-1", remote_id))


def with_rules(*rules: dict, step: str = "submit", **parts: Any) -> Description:
    return Description.model_validate({step: {"rules": list(rules)}, **parts})


# -- the slot protocol: responses to a submit -----------------------------------------------------------------


@pytest.mark.parametrize("word", ["success", "completed", "done"])
@pytest.mark.parametrize("result", [{"a": 1}, [], "x", 0, False, None])
def test_a_success_status_is_done_with_any_json_as_result(word, result):
    assert submitted(response({"status": word, "result": result})) == Outcome(OutcomeKind.DONE, result=result)


def test_a_success_without_result_has_none():
    assert submitted(response({"status": "success"})) == Outcome(OutcomeKind.DONE, result=None)


@pytest.mark.parametrize("word", ["processing", "queued", "pending", "running"])
def test_an_accepted_job_is_pending_under_the_servers_id(word):
    outcome = submitted(response({"status": word, "job_id": "srv-1"}, 202))
    assert outcome == Outcome(OutcomeKind.PENDING, remote_id="srv-1")


def test_an_id_may_be_a_number():
    assert submitted(response({"status": "processing", "job_id": 17})).remote_id == "17"


@pytest.mark.parametrize(
    "extra", [{}, *({"job_id": bad} for bad in (None, True, 1.5, [], {}, "", "..", "a\nb", "x" * 300))]
)
def test_an_accepted_job_without_a_usable_id_is_a_bad_response(extra):
    outcome = submitted(response({"status": "processing", **extra}))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")


@pytest.mark.parametrize("status", [409, 429, 503])
def test_a_busy_response_costs_nothing_and_its_retry_after_is_obeyed(status):
    outcome = submitted(response({"error": "full"}, status, Retry_After="7"))
    assert (outcome.kind, outcome.retry_after_s) == (OutcomeKind.BUSY, 7.0)
    assert submitted(response(b"", status)).kind is OutcomeKind.BUSY


@pytest.mark.parametrize("status", [502, 504])
def test_a_bad_gateway_response_counts_as_unreachable_and_costs_no_retry(status):
    outcome = submitted(response(b"<html>", status))
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNREACHABLE, "bad_gateway")


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_an_invalid_request_is_final(status):
    outcome = submitted(response({"error": "prompt is missing"}, status))
    assert (outcome.kind, outcome.code) == (OutcomeKind.FAILED, "bad_request")
    assert "prompt is missing" in outcome.message


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_wrong_url_or_key_costs_a_retry(status):
    outcome = submitted(response({"detail": "Not Found"}, status))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "misconfigured")


@pytest.mark.parametrize("status", [402, 408, 418, 499, 500, 501, 507, 599])
def test_any_other_error_costs_a_retry(status):
    outcome = submitted(response({"error": "CUDA out of memory"}, status, Retry_After="3"))
    assert (outcome.kind, outcome.code, outcome.retry_after_s) == (OutcomeKind.RETRY, "server_error", 3.0)


@pytest.mark.parametrize("word", ["failed", "error"])
def test_an_error_inside_a_200_costs_a_retry(word):
    outcome = submitted(response({"status": word, "error": {"message": "boom"}}))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "job_failed")
    assert outcome.message.endswith("boom")


@pytest.mark.parametrize("status", [200, 500])
def test_an_error_that_the_server_calls_not_retryable_is_final(status):
    assert submitted(response({"status": "failed", "retryable": False}, status)).kind is OutcomeKind.FAILED
    assert submitted(response({"status": "failed", "retryable": 0}, status)).kind is OutcomeKind.RETRY


def test_an_error_that_the_server_calls_retryable_is_not_final():
    assert submitted(response({"error": "later", "retryable": True}, 400)).kind is OutcomeKind.RETRY


def test_only_when_up_is_allowed_only_in_a_failed_rule_of_submit():
    with pytest.raises(ValueError, match="belongs to a rule whose `then` is 'failed'"):
        with_rules({"if": {"status": 406}, "then": "retry", "only_when_up": True})
    with pytest.raises(ValueError, match="a rule of submit alone"):
        Description.model_validate(
            {
                "mode": "async",
                "status": [
                    {
                        "path": "{{endpoint}}/{{id}}",
                        "rules": [{"if": {"status": 406}, "then": "failed", "only_when_up": True}],
                    }
                ],
            }
        )


def test_the_message_of_a_canceled_run_names_the_cancel():
    outcome = submitted(response({"status": "canceled"}))
    assert outcome.message == 'the server canceled the run: {"status":"canceled"}'


def test_a_canceled_status_is_canceled():
    assert submitted(response({"status": "canceled"})).kind is OutcomeKind.CANCELED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>ok</html>",
        b"OK",
        b'{"status":"success","result":NaN}',
        b'{"status":"succ',
        b"null",
        b"[]",
        b'"done"',
        b"{}",
        b'{"status":"finished"}',
        b'{"status":"SUCCESS"}',
        b'{"status":true}',
        b'{"status":null}',
        b'{"result":1}',
    ],
)
def test_an_unreadable_200_costs_a_retry(body):
    outcome = submitted(response(body))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")


@pytest.mark.parametrize("status", [301, 302, 304, 307, 308, 700])
def test_a_redirect_is_a_bad_response(status):
    outcome = submitted(response({"status": "success", "result": 1}, status, Location="http://elsewhere/"))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")


def test_a_response_about_another_job_is_a_bad_response():
    done = {"status": "success", "result": "the picture of another job"}
    outcome = submitted(response(done, X_Job_Id="job-2"))
    assert (outcome.kind, outcome.code, outcome.result) == (OutcomeKind.RETRY, "bad_answer", None)
    assert submitted(response(done, X_Job_Id="job-1")).kind is OutcomeKind.DONE


def test_a_busy_response_is_busy_whatever_job_it_names():
    assert submitted(response(b"", 503, X_Job_Id="job-2")).kind is OutcomeKind.BUSY


def test_the_check_of_the_echo_can_be_disabled():
    without_echo = Description.model_validate({"submit": {"echo": False}})
    assert submitted(response({"status": "success"}, X_Job_Id="its-own"), without_echo).kind is OutcomeKind.DONE


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (FailureReason.CONNECT, OutcomeKind.UNREACHABLE),
        (FailureReason.TIMEOUT, OutcomeKind.UNKNOWN),
        (FailureReason.RESET, OutcomeKind.UNKNOWN),
    ],
)
def test_only_a_request_without_a_connection_counts_as_not_sent(reason, kind):
    assert submitted(NoResponse(reason)).kind is kind


def test_a_request_that_cannot_be_sent_costs_a_retry():
    outcome = submitted(NoResponse(FailureReason.UNSENDABLE))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "misconfigured")


@pytest.mark.parametrize(
    "reason, words",
    [
        (FailureReason.TOO_LARGE, ("64 MiB", "answer with their URL")),
        (FailureReason.TOO_MANY_PIECES, ("too many pieces", "send larger ones")),
    ],
)
@pytest.mark.parametrize("read", [submitted, polled])
def test_an_answer_above_the_limit_is_final_and_names_the_remedy(read, reason, words):
    outcome = read(NoResponse(reason))
    assert (outcome.kind, outcome.code) == (OutcomeKind.FAILED, "answer_too_large")
    assert all(word in outcome.message for word in words)


# -- messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": "e", "detail": "d"}, "e: d"),  # BentoML: the error, and the field that it is about
        ({"error": "e", "detail": "e"}, "e"),
        ({"error": "", "detail": [{"loc": ["body"]}]}, '[{"loc":["body"]}]'),
        ({"message": "m"}, "m"),
        ({"error": {"code": 3}}, '{"code":3}'),
        (b"plain words", "plain words"),
        ({"reason": "no such lora"}, '{"reason":"no such lora"}'),
        ([1], "[1]"),
    ],
)
def test_a_message_quotes_the_error_of_the_server(body, text):
    assert submitted(response(body, 500)).message == f"the server answered 500: {text}"


@pytest.mark.parametrize("body", [{}, b"", b"<!doctype html><p>x", {"error": None}])
def test_the_message_of_a_response_without_an_error_text_is_its_status(body):
    assert submitted(response(body, 500)).message == "the server answered 500"


def test_a_message_is_bounded_and_repeats_no_secret():
    context = ResponseContext("job-1", None, secrets=("tok-123",))
    error = response({"error": "bad token tok-123 " + "x" * 100_000}, 500)
    message = DEFAULT_PLAN.submit.judge.outcome(error, context).message
    assert "tok-123" not in message and "***" in message and len(message) <= 500


# -- the slot protocol: responses to a poll -------------------------------------------------------------------


@pytest.mark.parametrize("word", ["success", "completed", "done"])
def test_a_poll_of_a_completed_job_returns_the_result(word):
    assert polled(response({"status": word, "result": [1]})) == Outcome(OutcomeKind.DONE, result=[1])


@pytest.mark.parametrize("word", ["processing", "queued", "pending", "running"])
def test_a_poll_of_a_running_job_is_pending(word):
    assert polled(response({"status": word})) == Outcome(OutcomeKind.PENDING, remote_id="srv-1")


def test_a_poll_of_a_failed_job_costs_a_retry_or_is_final():
    assert polled(response({"status": "failed", "error": "x"})).kind is OutcomeKind.RETRY
    assert polled(response({"status": "failed", "error": "x", "retryable": False})).kind is OutcomeKind.FAILED
    assert polled(response({"status": "cancelled"})).kind is OutcomeKind.CANCELED


def test_only_a_404_in_json_means_that_the_job_is_lost():
    assert polled(response({"detail": "unknown job"}, 404)).kind is OutcomeKind.LOST
    assert polled(response(b"<html>404</html>", 404)).kind is OutcomeKind.PENDING


@pytest.mark.parametrize("status", [400, 401, 409, 429, 500, 502, 503, 504, 302])
def test_an_error_response_to_a_poll_is_still_pending(status):
    outcome = polled(response({"error": "x", "status": "failed", "retryable": False}, status))
    assert (outcome.kind, outcome.remote_id) == (OutcomeKind.PENDING, "srv-1")


@pytest.mark.parametrize(
    "reason", [FailureReason.CONNECT, FailureReason.TIMEOUT, FailureReason.RESET, FailureReason.UNSENDABLE]
)
def test_a_poll_without_a_response_is_still_pending(reason):
    outcome = polled(NoResponse(reason))
    assert (outcome.kind, outcome.remote_id) == (OutcomeKind.PENDING, "srv-1")


def test_a_result_that_is_too_large_ends_the_polls():
    assert polled(NoResponse(FailureReason.TOO_LARGE)).code == "answer_too_large"


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"status":"strange"}', b'{"status":"done","result":NaN}'])
def test_an_unreadable_response_to_a_poll_is_still_pending(body):
    outcome = polled(response(body))
    assert (outcome.kind, outcome.code) == (OutcomeKind.PENDING, "bad_answer")


@pytest.mark.parametrize("named", ["srv-2", 7, [], {}])
def test_a_response_to_a_poll_about_another_job_is_still_pending(named):
    outcome = polled(response({"status": "done", "job_id": named, "result": "not ours"}))
    assert (outcome.kind, outcome.code, outcome.result) == (OutcomeKind.PENDING, "bad_answer", None)


@pytest.mark.parametrize("named", ["srv-1", "job-1", None])
def test_a_poll_may_name_the_job_by_either_id(named):
    assert polled(response({"status": "done", "job_id": named})).kind is OutcomeKind.DONE


def test_a_numeric_id_is_equal_to_its_text():
    assert polled(response({"status": "done", "job_id": 17}), remote_id="17").kind is OutcomeKind.DONE


# -- a description's own rules ---------------------------------------------------------------------------------


def test_the_first_rule_that_matches_applies():
    description = with_rules(
        {"if": {"status": 500, "text": "out of memory"}, "then": "busy"},
        {"if": {"status": "5xx"}, "then": "failed", "code": "broken", "message": "never again"},
    )
    assert submitted(response(b"CUDA out of memory", 500), description).kind is OutcomeKind.BUSY
    outcome = submitted(response(b"other", 500), description)
    assert (outcome.kind, outcome.code, outcome.message) == (OutcomeKind.FAILED, "broken", "never again")
    assert submitted(response({"status": "success"}), description).kind is OutcomeKind.DONE


@pytest.mark.parametrize(
    ("status", "kind"),
    [(499, OutcomeKind.RETRY), (500, OutcomeKind.BUSY), (504, OutcomeKind.BUSY), (505, OutcomeKind.RETRY)],
)
def test_a_range_of_statuses_includes_both_ends(status, kind):
    assert submitted(response(b"", status), with_rules({"if": {"status": "500-504"}, "then": "busy"})).kind is kind


@pytest.mark.parametrize(
    ("value", "actual", "matches"),
    [
        ("a", "a", True),
        (["a", "b"], "b", True),
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
        ("a", ["a"], False),
        ("a", {"a": 1}, False),
    ],
)
def test_a_value_is_compared_as_json_compares(value, actual, matches):
    description = with_rules({"if": {"pointer": "/x", "value": value}, "then": "busy"})
    assert (submitted(response({"x": actual}), description).kind is OutcomeKind.BUSY) is matches


def test_a_pointer_without_a_value_matches_any_value():
    description = with_rules({"if": {"pointer": "/busy"}, "then": "busy"})
    assert submitted(response({"busy": None}), description).kind is OutcomeKind.BUSY
    assert submitted(response({"idle": 1}), description).kind is OutcomeKind.RETRY
    assert submitted(response(b"busy"), description).kind is OutcomeKind.RETRY


def test_the_result_can_be_the_whole_response():
    description = Description.model_validate(
        {"submit": {"rules": [{"if": {"status": 200}, "then": "done"}], "result": ""}}
    )
    assert submitted(response({"predictions": [1]}), description).result == {"predictions": [1]}
    assert submitted(response(b"NaN"), description).code == "bad_answer"


def test_a_text_response_is_a_result_only_with_result_as_text():
    rules = [{"if": {"status": 200}, "then": "done"}]
    as_text = Description.model_validate({"submit": {"rules": rules, "result_as": "text"}})
    assert submitted(response("grüße".encode()), as_text).result == "grüße"
    assert submitted(response(b"hello"), with_rules(*rules)).kind is OutcomeKind.RETRY


def test_a_connection_error_can_mean_something_else():
    description = with_rules({"if": {"connection": ["timeout"]}, "then": "retry", "code": "freed"})
    assert submitted(NoResponse(FailureReason.TIMEOUT), description).code == "freed"
    assert submitted(NoResponse(FailureReason.RESET), description).kind is OutcomeKind.UNKNOWN


def test_a_rule_matches_either_responses_or_connection_errors():
    description = with_rules(
        {"if": {"connection": "reset"}, "then": "retry"}, {"if": {"status": [200, 500]}, "then": "busy"}
    )
    assert submitted(response(b"", 500), description).kind is OutcomeKind.BUSY
    assert submitted(NoResponse(FailureReason.TIMEOUT), description).kind is OutcomeKind.UNKNOWN


def test_next_requests_the_next_step():
    description = Description.model_validate(
        {"status": [{"rules": [{"if": {"status": 200}, "then": "next"}]}, {"path": "/q"}]}
    )
    assert polled(response({}), description) is None


def test_a_pointer_can_contain_the_id():
    rules = [{"if": {"pointer": "/{{id}}/ok", "value": True}, "then": "done"}]
    description = Description.model_validate({"status": {"rules": rules, "result": "/{{id}}/out"}})
    assert polled(response({"srv-1": {"ok": True, "out": 5}}), description).result == 5
    assert polled(response({"srv-2": {"ok": True}}), description).kind is OutcomeKind.PENDING


@pytest.mark.parametrize(
    ("body", "mentioned"), [('[["srv-1"]]', True), ('["srv-10"]', False), ('["x-srv-1"]', False), ("[]", False)]
)
def test_an_id_is_mentioned_only_as_a_whole_word(body, mentioned):
    description = with_rules({"if": {"mentions_id": True}, "then": "lost"}, step="status")
    assert (polled(response(body.encode()), description).kind is OutcomeKind.LOST) is mentioned


def test_an_async_model_needs_no_status_word_besides_its_id():
    model = from_shorthand("async", id_field="request_id")
    assert submitted(response({"request_id": "r1"}), model) == Outcome(OutcomeKind.PENDING, remote_id="r1")
    assert submitted(response({"status": "processing", "request_id": "r1"}), model).remote_id == "r1"
    assert submitted(response({"status": "success", "result": 1}), model).result == 1
    assert submitted(response({"status": "strange", "request_id": "r1"}), model).code == "bad_answer"
    assert submitted(response({"job_id": "r1"}), DEFAULT).code == "bad_answer"


def test_a_sync_model_that_returns_processing_is_pending():
    assert submitted(response({"status": "processing", "job_id": "r1"}), from_shorthand("sync")).remote_id == "r1"


def test_a_server_that_pushes_needs_no_id():
    description = Description(mode="callback")
    assert submitted(response({"status": "processing"}), description) == Outcome(OutcomeKind.PENDING)


def test_a_given_id_applies_unless_the_server_returns_another():
    assert submitted(response({"status": "processing"}), remote_id="job-1-1").remote_id == "job-1-1"
    assert submitted(response({"status": "processing", "job_id": "own"}), remote_id="job-1-1").remote_id == "own"


# -- responses that are nested too deeply ---------------------------------------------------------------------


def nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * levels + closing * levels).encode()


def nested_objects(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize("read", [submitted, polled])
@pytest.mark.parametrize("make", [nested, nested_objects])
def test_a_result_has_two_hundred_levels_and_no_more(read, make):
    body = b'{"status": "success", "result": %s}'
    assert read(response(body % make(200))).kind is OutcomeKind.DONE
    for levels in (201, 254, 255, 1000):
        assert read(response(body % make(levels))) == TOO_DEEP


@pytest.mark.parametrize("read", [submitted, polled])
@pytest.mark.parametrize("levels", [253, 300, 1000])
def test_an_error_that_is_too_deep_to_be_quoted_is_still_an_error(read, levels):
    outcome = read(response(b'{"status": "failed", "error": %s}' % nested(levels)))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "job_failed")


@pytest.mark.parametrize("read", [submitted, polled])
@pytest.mark.parametrize("make", [nested, nested_objects])
def test_a_response_that_is_too_deep_to_be_parsed_is_reported_as_too_deep(read, make):
    assert read(response(b'{"status": "success", "result": %s}' % make(5000))) == TOO_DEEP
    assert read(response(b'{"status": "success", "result": %s' % make(100))).code == "bad_answer"


@pytest.mark.parametrize(
    "text", ["-0.0", "1E2", '"\\u00e9"', "12345678901234567890123", '{"a":1,"a":2}', "[1,  2]", "1.10"]
)
def test_a_raw_result_is_stored_byte_by_byte_as_the_server_sent_it(text: str) -> None:
    description = Description.model_validate({"submit": {"result_as": "raw"}})
    outcome = submitted(response(b'{"status": "success", "result": %b}' % text.encode()), description)
    assert json_text.dumps(outcome.result) == text.encode()


def test_the_envelope_of_a_result_is_read_at_the_described_pointer() -> None:
    given_envelope = {"payload": "x"}
    body = {"status": "success", "result": 1, "envelope": given_envelope}
    assert submitted(response(body), Description()).envelope is None
    description = Description.model_validate({"submit": {"envelope": "/envelope"}})
    assert submitted(response(body), description).envelope == given_envelope


def test_a_description_without_an_envelope_is_stored_as_the_release_before_reads_it() -> None:
    assert "envelope" not in Description().model_dump_json()
    described = Description.model_validate({"status": {"envelope": "/envelope"}})
    assert Description.model_validate_json(described.model_dump_json()) == described


def test_a_poll_can_show_that_the_server_never_had_the_run() -> None:
    rule = {"if": {"pointer": "/never_received", "value": True}, "then": "unreachable"}
    description = Description.model_validate({"status": {"rules": [rule]}})
    assert polled(response({"never_received": True}, 404), description).kind is OutcomeKind.UNREACHABLE
    assert polled(response({}, 404), description).kind is OutcomeKind.LOST
