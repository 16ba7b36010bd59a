"""What receivers of webhooks read, and what a template can and cannot make of it."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.errors import InvalidRequest
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Event
from slotkeeper.outbox.event_reader import OutboxEvent
from slotkeeper.outbox.subscriptions import END_EVENT_TYPES, Subscription
from slotkeeper.outbox.webhook_messages import Message
from tasks.webhooks import bodies
from tasks.webhooks.bodies import (
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATE_NAMES,
    MAX_VALUE_CHARS,
    TEMPLATE_FIELDS,
    event_data,
    message_body,
    validate_template,
)

MESSAGE = Message("we_1", 7, "j1", "job.failed", 1_800_000_000_123, "pending", 1, 0, 0, None, None, None)
ERROR = {"code": "bad", "message": "no"}
ENTRY = OutboxEvent(
    Event(
        7, "j1", "job.failed", MESSAGE.at_ms, 2, {"why": "invalid_request", "error": {"code": "bad", "message": "no"}}
    ),
    "zimg",
    "acme",
    3,
    "gpu1",
)


def filled(template: Any, **told: Any) -> Any:
    return json.loads(message_body(MESSAGE, {"job_id": "j1", "model": "zimg"} | told, validate_template(template)))


def refusal(template: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        validate_template(template)
    assert refused.value.field == "template"
    return str(refused.value)


def test_without_a_template_the_body_has_type_time_and_data() -> None:
    told = json.loads(message_body(MESSAGE, event_data(ENTRY, None), None))
    assert (told["type"], told["timestamp"]) == ("job.failed", "2027-01-15T08:00:00.123Z")
    assert told["data"] == {
        "job_id": "j1",
        "model": "zimg",
        "tenant": "acme",
        "priority": 3,
        "server": "gpu1",
        "attempt": 2,
        "why": "invalid_request",
        "error": {"code": "bad", "message": "no"},
        "status": "failed",
    }


@pytest.mark.parametrize(
    "text", ["{{" + " " * 4000, "{{" + "a " * 1999, "{{ " * 1300, "{{" + "\n" * 2000 + "}", "{{" * 2000]
)
def test_a_template_is_read_in_one_go_however_it_is_made(text: str) -> None:
    began = time.process_time()
    assert "without its" in refusal({"text": text})
    assert time.process_time() - began < 1, "whoever reads it holds up a whole process"


def test_names_in_texts_become_values_and_the_rest_stays() -> None:
    template = {
        "text": "{{model}}: {{ job_id }} {{error.message}}!",
        "blocks": [{"n": 1, "x": "{{nothing"[:0]}],
        "on": True,
    }
    assert filled(template, error={"message": "no"}) == {
        "text": "zimg: j1 no!",
        "blocks": [{"n": 1, "x": ""}],
        "on": True,
    }


def test_a_text_that_is_one_name_alone_becomes_the_value() -> None:
    told = {"result": {"urls": ["a", "b"]}, "attempt": 3}
    assert filled({"all": "{{result}}", "one": "{{result.urls.1}}", "n": "{{attempt}}"}, **told) == {
        "all": told["result"],
        "one": "b",
        "n": 3,
    }


def test_what_is_not_there_is_empty_in_a_text_and_null_alone() -> None:
    template = {"a": "<{{result.url}}>", "b": "{{result.url}}", "c": "{{error.code}}", "d": "{{result.x.9}}"}
    assert filled(template, result=None) == {"a": "<>", "b": None, "c": None, "d": None}
    assert filled(template, result={"x": [1]}, error=None) == {"a": "<>", "b": None, "c": None, "d": None}


@given(st.text())
def test_a_value_is_a_text_whatever_it_holds(value: str) -> None:
    made = filled({"text": "says: {{error.message}}", "admin": False}, error={"message": value.replace("\ud800", "")})
    assert made.keys() == {"text", "admin"} and made["admin"] is False
    assert made["text"].startswith("says: ")


def test_a_value_that_names_a_value_is_not_filled_in() -> None:
    told = {"error": {"message": '{{result}}", "x": "{{tenant}}'}, "result": "secret", "tenant": "acme"}
    assert filled({"text": "{{error.message}}"}, **told) == {"text": told["error"]["message"]}


def test_what_slack_would_take_for_a_mention_or_a_link_is_shown_as_it_is() -> None:
    template = {"text": "{{error.message|slack}} {{model}}"}
    told = {"error": {"message": "<!channel> & <http://evil|click>"}}
    assert filled(template, **told) == {"text": "&lt;!channel&gt; &amp; &lt;http://evil|click&gt; zimg"}
    assert filled({"text": "{{error.message|slack}}"}, **told)["text"].startswith("&lt;")


@pytest.mark.parametrize(
    "name",
    ["payload", "envelope", "lease", "remote_id", "callback_url", "__class__", "error", "error.__class__", "result.x!",
     "job_id.x", "data.job_id", "", "result.", "result..a", "secret/KEY", "model|upper", "result." + "a." * 9 + "a"],
)  # fmt: skip
def test_a_template_names_what_is_told_and_nothing_else(name: str) -> None:
    said = refusal({"text": f"x {{{{{name}}}}}"})
    assert "job_id" in said, "it says what there is"


def test_even_a_template_that_was_stored_otherwise_gets_no_other_value() -> None:
    told = {"payload": "secret", "result": {"a": 1}}
    stored = '{"a":"{{payload}}","b":"x{{payload}}","c":"{{result.__class__}}"}'
    assert json.loads(message_body(MESSAGE, told, stored)) == {"a": None, "b": "x", "c": None}


@pytest.mark.parametrize(
    "template",
    [
        "text",
        ["a"],
        7,
        {"text": "{{model"},
        {"{{model}}": "x"},
        {"text": "x" * MAX_TEMPLATE_BYTES},
        {"text": "{{model}}" * (MAX_TEMPLATE_NAMES + 1)},
        {"text": ["{{result}}", "{{result}}", "{{result.a}}", "{{result}}"]},
        json.loads("[" * 12 + "]" * 12) and {"a": json.loads("[" * 12 + "]" * 12)},
    ],
)
def test_a_template_that_cannot_be_meant_is_refused_with_what_to_do(template: Any) -> None:
    assert refusal(template).startswith("template ")


def test_the_largest_template_makes_a_bounded_body() -> None:
    template = {"a": "{{error.message}}" * MAX_TEMPLATE_NAMES}
    made = message_body(MESSAGE, {"error": {"message": "x" * 1_000_000}}, validate_template(template))
    assert len(made) <= MAX_TEMPLATE_BYTES + MAX_TEMPLATE_NAMES * (MAX_VALUE_CHARS + 3)


def test_every_name_that_is_offered_can_be_named() -> None:
    assert validate_template({"text": " ".join(f"{{{{{name}}}}}" for name in TEMPLATE_FIELDS)})


def test_a_job_that_has_gone_on_does_not_speak_for_the_end_it_had() -> None:
    class Gone:
        state = "queued"

    told = event_data(ENTRY, Gone())  # type: ignore[arg-type]
    assert "result" not in told and told["status"] == "failed"


def test_a_test_says_what_an_end_says() -> None:
    assert {"job_id", "model", "status", "result", "error"} <= bodies.test_data("acme").keys()


@pytest.mark.parametrize("template, expected", [(None, True), ('{"a":1}', False)])
def test_an_address_of_slack_is_sent_what_slack_takes_unless_it_has_a_template(
    template: str | None, expected: bool
) -> None:
    receiver = Subscription("we", "acme", "https://Hooks.Slack.com/services/T/B/X", END_EVENT_TYPES, "", 0, template)
    found = bodies.template_of(receiver)
    assert found is not None and (found != template) is expected
    assert bodies.template_of(replace(receiver, url="https://example.com/hooks.slack.com", template=None)) is None


def test_a_job_whose_callback_is_an_address_of_slack_is_told_there_in_a_text() -> None:
    job = SimpleNamespace(id="j<1>", model="zimg", state=State.DEAD, attempts=2, result=None)
    job.error_code, job.error_message = "oom", "<!channel>"
    message = replace(MESSAGE, receiver="j<1>", job_id="j<1>", type="job.dlq")
    template = bodies.template_of(
        Subscription("j<1>", "acme", "https://hooks.slack.com/services/T/B/X", END_EVENT_TYPES, "", 0)
    )
    told = bodies.job_end_data(message, job)  # type: ignore[arg-type]
    assert json.loads(message_body(message, told, template)) == {
        "text": "zimg: job.dlq, job j&lt;1&gt; &lt;!channel&gt;"
    }
    assert json.loads(message_body(message, told, None)) == {
        "job_id": "j<1>",
        "model": "zimg",
        "status": "dead",
        "attempts": 2,
        "result": None,
        "error": {"code": "oom", "message": "<!channel>"},
    }
