from typing import Any

import orjson
import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from tasks.servers.compiled import compile_description
from tasks.servers.description import DEFAULT, Description, from_shorthand
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.rules import TOO_DEEP, ResponseContext

DEFAULT_PLAN = compile_description(DEFAULT)


def reply(body: Any, status: int = 200, **headers: str) -> Response:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Response(status, {name.replace("_", "-"): value for name, value in headers.items()}, raw)


def submitted(answer, description: Description = DEFAULT, asked: str | None = None) -> Outcome:
    plan = DEFAULT_PLAN if description is DEFAULT else compile_description(description)
    return plan.submit.judge.outcome(answer, ResponseContext("job-1", asked, now_s=0.0))


def polled(answer, description: Description = DEFAULT, asked: str | None = "srv-1") -> Outcome | None:
    plan = DEFAULT_PLAN if description is DEFAULT else compile_description(description)
    return plan.status[0].judge.outcome(answer, ResponseContext("job-1", asked))


def with_rules(*rules: dict, step: str = "submit", **parts: Any) -> Description:
    return Description.model_validate({step: {"rules": list(rules)}, **parts})


# -- the slot protocol, answers to a submit --------------------------------------------------------


@pytest.mark.parametrize("word", ["success", "completed", "done"])
@pytest.mark.parametrize("result", [{"a": 1}, [], "x", 0, False, None])
def test_a_success_word_is_done_with_any_json_as_result(word, result):
    assert submitted(reply({"status": word, "result": result})) == Outcome(OutcomeKind.DONE, result=result)


def test_a_success_without_result_has_none():
    assert submitted(reply({"status": "success"})) == Outcome(OutcomeKind.DONE, result=None)


@pytest.mark.parametrize("word", ["processing", "queued", "pending", "running"])
def test_a_job_taken_on_is_pending_under_the_servers_id(word):
    assert submitted(reply({"status": word, "job_id": "srv-1"}, 202)) == Outcome(OutcomeKind.PENDING, remote_id="srv-1")


def test_an_id_may_be_a_number():
    assert submitted(reply({"status": "processing", "job_id": 17})).remote_id == "17"


@pytest.mark.parametrize(
    "extra", [{}, *({"job_id": bad} for bad in (None, True, 1.5, [], {}, "", "..", "a\nb", "x" * 300))]
)
def test_a_job_taken_on_without_a_usable_id_is_a_bad_answer(extra):
    outcome = submitted(reply({"status": "processing", **extra}))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")


@pytest.mark.parametrize("status", [409, 429, 503])
def test_busy_costs_nothing_and_tells_when_to_come_back(status):
    outcome = submitted(reply({"error": "full"}, status, Retry_After="7"))
    assert (outcome.kind, outcome.retry_after_s) == (OutcomeKind.BUSY, 7.0)
    assert submitted(reply(b"", status)).kind is OutcomeKind.BUSY


@pytest.mark.parametrize("status", [502, 504])
def test_a_bad_gateway_is_the_servers_fault_and_costs_no_retry(status):
    outcome = submitted(reply(b"<html>", status))
    assert (outcome.kind, outcome.code) == (OutcomeKind.UNREACHABLE, "bad_gateway")


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_wrong_request_is_final(status):
    outcome = submitted(reply({"error": "prompt is missing"}, status))
    assert (outcome.kind, outcome.code) == (OutcomeKind.FAILED, "bad_request")
    assert "prompt is missing" in outcome.message


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_wrong_address_or_key_costs_a_retry_since_the_job_is_not_to_blame(status):
    outcome = submitted(reply({"detail": "Not Found"}, status))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "misconfigured")


@pytest.mark.parametrize("status", [402, 408, 418, 499, 500, 501, 507, 599])
def test_any_other_error_costs_a_retry(status):
    outcome = submitted(reply({"error": "CUDA out of memory"}, status, Retry_After="3"))
    assert (outcome.kind, outcome.code, outcome.retry_after_s) == (OutcomeKind.RETRY, "server_error", 3.0)


@pytest.mark.parametrize("word", ["failed", "error"])
def test_an_error_inside_a_200_costs_a_retry(word):
    outcome = submitted(reply({"status": word, "error": {"message": "boom"}}))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "job_failed")
    assert outcome.message.endswith("boom")


@pytest.mark.parametrize("status", [200, 500])
def test_what_the_server_calls_not_retryable_is_final(status):
    assert submitted(reply({"status": "failed", "retryable": False}, status)).kind is OutcomeKind.FAILED
    assert submitted(reply({"status": "failed", "retryable": 0}, status)).kind is OutcomeKind.RETRY


def test_what_the_server_calls_retryable_is_not_final():
    assert submitted(reply({"error": "later", "retryable": True}, 400)).kind is OutcomeKind.RETRY


def test_only_when_up_belongs_to_a_final_rule_of_submit():
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


def test_a_canceled_run_is_no_error_of_the_server():
    outcome = submitted(reply({"status": "canceled"}))
    assert outcome.message == 'the server canceled the run: {"status":"canceled"}'


def test_a_job_given_up_says_so():
    assert submitted(reply({"status": "canceled"})).kind is OutcomeKind.CANCELED


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
def test_garbage_in_a_200_costs_a_retry(body):
    outcome = submitted(reply(body))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")


@pytest.mark.parametrize("status", [301, 302, 304, 307, 308, 700])
def test_a_redirect_is_a_bad_answer(status):
    outcome = submitted(reply({"status": "success", "result": 1}, status, Location="http://elsewhere/"))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "bad_answer")


def test_an_answer_to_another_job_is_a_bad_answer():
    done = {"status": "success", "result": "somebody else's picture"}
    outcome = submitted(reply(done, X_Job_Id="job-2"))
    assert (outcome.kind, outcome.code, outcome.result) == (OutcomeKind.RETRY, "bad_answer", None)
    assert submitted(reply(done, X_Job_Id="job-1")).kind is OutcomeKind.DONE


def test_a_refusal_is_a_refusal_whatever_job_it_names():
    assert submitted(reply(b"", 503, X_Job_Id="job-2")).kind is OutcomeKind.BUSY


def test_the_echo_can_be_switched_off():
    silent = Description.model_validate({"submit": {"echo": False}})
    assert submitted(reply({"status": "success"}, X_Job_Id="its-own"), silent).kind is OutcomeKind.DONE


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (FailureReason.CONNECT, OutcomeKind.UNREACHABLE),
        (FailureReason.TIMEOUT, OutcomeKind.UNKNOWN),
        (FailureReason.RESET, OutcomeKind.UNKNOWN),
    ],
)
def test_only_a_connection_never_made_is_certainly_not_sent(how, kind):
    assert submitted(NoResponse(how)).kind is kind


def test_a_request_that_cannot_be_sent_costs_a_retry_as_the_configuration_may_be_mended():
    outcome = submitted(NoResponse(FailureReason.UNSENDABLE))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "misconfigured")


@pytest.mark.parametrize(
    "reason, words",
    [
        (FailureReason.TOO_LARGE, ("64 MiB", "answer with their URL")),
        (FailureReason.TOO_MANY_PIECES, ("too many pieces", "send larger ones")),
    ],
)
@pytest.mark.parametrize("asked", [submitted, polled])
def test_an_answer_above_the_limit_is_final_and_names_the_remedy(asked, reason, words):
    outcome = asked(NoResponse(reason))
    assert (outcome.kind, outcome.code) == (OutcomeKind.FAILED, "answer_too_large")
    assert all(one in outcome.message for one in words)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": "e", "detail": "d"}, "e: d"),  # BentoML: what was wrong, and with which field
        ({"error": "e", "detail": "e"}, "e"),
        ({"error": "", "detail": [{"loc": ["body"]}]}, '[{"loc":["body"]}]'),
        ({"message": "m"}, "m"),
        ({"error": {"code": 3}}, '{"code":3}'),
        (b"plain words", "plain words"),
        ({"reason": "no such lora"}, '{"reason":"no such lora"}'),
        ([1], "[1]"),
    ],
)
def test_a_message_says_what_the_server_said(body, said):
    assert submitted(reply(body, 500)).message == f"the server answered 500: {said}"


@pytest.mark.parametrize("body", [{}, b"", b"<!doctype html><p>x", {"error": None}])
def test_a_message_without_words_gives_the_status(body):
    assert submitted(reply(body, 500)).message == "the server answered 500"


def test_a_message_is_bounded_and_repeats_no_secret():
    about = ResponseContext("job-1", None, secrets=("tok-123",))
    answer = reply({"error": "bad token tok-123 " + "x" * 100_000}, 500)
    message = DEFAULT_PLAN.submit.judge.outcome(answer, about).message
    assert "tok-123" not in message and "***" in message and len(message) <= 500


# -- the slot protocol, answers to a poll ----------------------------------------------------------


@pytest.mark.parametrize("word", ["success", "completed", "done"])
def test_a_poll_finds_the_result(word):
    assert polled(reply({"status": word, "result": [1]})) == Outcome(OutcomeKind.DONE, result=[1])


@pytest.mark.parametrize("word", ["processing", "queued", "pending", "running"])
def test_a_poll_of_a_running_job_is_pending(word):
    assert polled(reply({"status": word})) == Outcome(OutcomeKind.PENDING, remote_id="srv-1")


def test_a_poll_of_a_failed_job_costs_a_retry_or_is_final():
    assert polled(reply({"status": "failed", "error": "x"})).kind is OutcomeKind.RETRY
    assert polled(reply({"status": "failed", "error": "x", "retryable": False})).kind is OutcomeKind.FAILED
    assert polled(reply({"status": "cancelled"})).kind is OutcomeKind.CANCELED


def test_only_a_404_in_json_means_that_the_job_is_lost():
    assert polled(reply({"detail": "unknown job"}, 404)).kind is OutcomeKind.LOST
    assert polled(reply(b"<html>404</html>", 404)).kind is OutcomeKind.PENDING


@pytest.mark.parametrize("status", [400, 401, 409, 429, 500, 502, 503, 504, 302])
def test_a_failing_poll_is_still_pending(status):
    outcome = polled(reply({"error": "x", "status": "failed", "retryable": False}, status))
    assert (outcome.kind, outcome.remote_id) == (OutcomeKind.PENDING, "srv-1")


@pytest.mark.parametrize(
    "how", [FailureReason.CONNECT, FailureReason.TIMEOUT, FailureReason.RESET, FailureReason.UNSENDABLE]
)
def test_a_broken_poll_is_still_pending(how):
    outcome = polled(NoResponse(how))
    assert (outcome.kind, outcome.remote_id) == (OutcomeKind.PENDING, "srv-1")


def test_a_result_too_large_to_be_polled_is_not_polled_for_ever():
    assert polled(NoResponse(FailureReason.TOO_LARGE)).code == "answer_too_large"


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"status":"strange"}', b'{"status":"done","result":NaN}'])
def test_garbage_in_a_poll_is_still_pending(body):
    outcome = polled(reply(body))
    assert (outcome.kind, outcome.code) == (OutcomeKind.PENDING, "bad_answer")


@pytest.mark.parametrize("named", ["srv-2", 7, [], {}])
def test_a_poll_that_answers_for_another_job_is_still_pending(named):
    outcome = polled(reply({"status": "done", "job_id": named, "result": "not ours"}))
    assert (outcome.kind, outcome.code, outcome.result) == (OutcomeKind.PENDING, "bad_answer", None)


@pytest.mark.parametrize("named", ["srv-1", "job-1", None])
def test_a_poll_may_name_the_job_by_either_id(named):
    assert polled(reply({"status": "done", "job_id": named})).kind is OutcomeKind.DONE


def test_a_numeric_id_is_the_same_as_text():
    assert polled(reply({"status": "done", "job_id": 17}), asked="17").kind is OutcomeKind.DONE


# -- a description's own rules ---------------------------------------------------------------------


def test_the_first_rule_that_matches_wins():
    description = with_rules(
        {"if": {"status": 500, "text": "out of memory"}, "then": "busy"},
        {"if": {"status": "5xx"}, "then": "failed", "code": "broken", "message": "never again"},
    )
    assert submitted(reply(b"CUDA out of memory", 500), description).kind is OutcomeKind.BUSY
    outcome = submitted(reply(b"other", 500), description)
    assert (outcome.kind, outcome.code, outcome.message) == (OutcomeKind.FAILED, "broken", "never again")
    assert submitted(reply({"status": "success"}), description).kind is OutcomeKind.DONE


@pytest.mark.parametrize(
    ("status", "kind"),
    [(499, OutcomeKind.RETRY), (500, OutcomeKind.BUSY), (504, OutcomeKind.BUSY), (505, OutcomeKind.RETRY)],
)
def test_a_range_of_statuses_includes_both_ends(status, kind):
    assert submitted(reply(b"", status), with_rules({"if": {"status": "500-504"}, "then": "busy"})).kind is kind


@pytest.mark.parametrize(
    ("value", "answered", "matches"),
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
def test_a_value_is_compared_as_json_compares(value, answered, matches):
    description = with_rules({"if": {"pointer": "/x", "value": value}, "then": "busy"})
    assert (submitted(reply({"x": answered}), description).kind is OutcomeKind.BUSY) is matches


def test_a_pointer_alone_asks_whether_something_is_there():
    description = with_rules({"if": {"pointer": "/busy"}, "then": "busy"})
    assert submitted(reply({"busy": None}), description).kind is OutcomeKind.BUSY
    assert submitted(reply({"idle": 1}), description).kind is OutcomeKind.RETRY
    assert submitted(reply(b"busy"), description).kind is OutcomeKind.RETRY


def test_a_rule_can_take_the_whole_answer_as_result():
    description = Description.model_validate(
        {"submit": {"rules": [{"if": {"status": 200}, "then": "done"}], "result": ""}}
    )
    assert submitted(reply({"predictions": [1]}), description).result == {"predictions": [1]}
    assert submitted(reply(b"NaN"), description).code == "bad_answer"


def test_a_text_answer_is_a_result_only_if_described_so():
    rules = [{"if": {"status": 200}, "then": "done"}]
    as_text = Description.model_validate({"submit": {"rules": rules, "result_as": "text"}})
    assert submitted(reply("grüße".encode()), as_text).result == "grüße"
    assert submitted(reply(b"hello"), with_rules(*rules)).kind is OutcomeKind.RETRY


def test_a_connection_error_can_mean_something_else():
    description = with_rules({"if": {"connection": ["timeout"]}, "then": "retry", "code": "freed"})
    assert submitted(NoResponse(FailureReason.TIMEOUT), description).code == "freed"
    assert submitted(NoResponse(FailureReason.RESET), description).kind is OutcomeKind.UNKNOWN


def test_a_rule_about_an_answer_is_not_about_a_connection_error_nor_the_reverse():
    description = with_rules(
        {"if": {"connection": "reset"}, "then": "retry"}, {"if": {"status": [200, 500]}, "then": "busy"}
    )
    assert submitted(reply(b"", 500), description).kind is OutcomeKind.BUSY
    assert submitted(NoResponse(FailureReason.TIMEOUT), description).kind is OutcomeKind.UNKNOWN


def test_next_asks_for_the_next_step():
    description = Description.model_validate(
        {"status": [{"rules": [{"if": {"status": 200}, "then": "next"}]}, {"path": "/q"}]}
    )
    assert polled(reply({}), description) is None


def test_pointers_may_hold_the_id():
    rules = [{"if": {"pointer": "/{{id}}/ok", "value": True}, "then": "done"}]
    description = Description.model_validate({"status": {"rules": rules, "result": "/{{id}}/out"}})
    assert polled(reply({"srv-1": {"ok": True, "out": 5}}), description).result == 5
    assert polled(reply({"srv-2": {"ok": True}}), description).kind is OutcomeKind.PENDING


@pytest.mark.parametrize(
    ("body", "mentioned"), [('[["srv-1"]]', True), ('["srv-10"]', False), ('["x-srv-1"]', False), ("[]", False)]
)
def test_an_id_is_mentioned_only_as_a_whole(body, mentioned):
    description = with_rules({"if": {"mentions_id": True}, "then": "lost"}, step="status")
    assert (polled(reply(body.encode()), description).kind is OutcomeKind.LOST) is mentioned


def test_an_async_model_needs_no_word_beside_its_id():
    model = from_shorthand("async", id_field="request_id")
    assert submitted(reply({"request_id": "r1"}), model) == Outcome(OutcomeKind.PENDING, remote_id="r1")
    assert submitted(reply({"status": "processing", "request_id": "r1"}), model).remote_id == "r1"
    assert submitted(reply({"status": "success", "result": 1}), model).result == 1
    assert submitted(reply({"status": "strange", "request_id": "r1"}), model).code == "bad_answer"
    assert submitted(reply({"job_id": "r1"}), DEFAULT).code == "bad_answer"


def test_a_sync_model_that_says_processing_is_polled_all_the_same():
    assert submitted(reply({"status": "processing", "job_id": "r1"}), from_shorthand("sync")).remote_id == "r1"


def test_a_pushing_server_needs_no_id():
    description = Description(mode="callback")
    assert submitted(reply({"status": "processing"}), description) == Outcome(OutcomeKind.PENDING)


def test_an_id_that_we_gave_stands_in_for_one_that_the_server_does_not_repeat():
    assert submitted(reply({"status": "processing"}), asked="job-1-1").remote_id == "job-1-1"
    assert submitted(reply({"status": "processing", "job_id": "own"}), asked="job-1-1").remote_id == "own"


# -- answers that could be read but not kept -------------------------------------------------------------


def nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * levels + closing * levels).encode()


def nested_objects(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize("read", [submitted, polled])
@pytest.mark.parametrize("make", [nested, nested_objects])
def test_a_result_has_two_hundred_levels_and_no_more(read, make):
    body = b'{"status": "success", "result": %s}'
    assert read(reply(body % make(200))).kind is OutcomeKind.DONE
    for levels in (201, 254, 255, 1000):
        assert read(reply(body % make(levels))) == TOO_DEEP


@pytest.mark.parametrize("read", [submitted, polled])
@pytest.mark.parametrize("levels", [253, 300, 1000])
def test_an_error_that_is_too_deep_to_be_told_is_still_an_error(read, levels):
    outcome = read(reply(b'{"status": "failed", "error": %s}' % nested(levels)))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "job_failed")


@pytest.mark.parametrize("read", [submitted, polled])
@pytest.mark.parametrize("make", [nested, nested_objects])
def test_what_is_too_deep_to_be_read_is_too_deep(read, make):
    assert read(reply(b'{"status": "success", "result": %s}' % make(5000))) == TOO_DEEP
    assert read(reply(b'{"status": "success", "result": %s' % make(100))).code == "bad_answer"
