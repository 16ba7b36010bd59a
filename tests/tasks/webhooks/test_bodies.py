"""The bodies of webhook messages, and what a template can and cannot contain."""

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


def render(template: Any, **values: Any) -> Any:
    data = {"job_id": "j1", "model": "zimg"} | values
    return json.loads(message_body(MESSAGE, data, validate_template(template)))


def refusal_message(template: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate_template(template)
    assert caught.value.field == "template"
    return str(caught.value)


def test_without_a_template_the_body_has_type_time_and_data() -> None:
    body = json.loads(message_body(MESSAGE, event_data(ENTRY, None), None))
    assert (body["type"], body["timestamp"]) == ("job.failed", "2027-01-15T08:00:00.123Z")
    assert body["data"] == {
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
def test_the_time_to_parse_a_template_is_bounded(text: str) -> None:
    began_s = time.process_time()
    assert "without its" in refusal_message({"text": text})
    assert time.process_time() - began_s < 1, "the regular expression must not backtrack"


def test_names_in_strings_are_replaced_by_values_and_the_rest_is_unchanged() -> None:
    template = {
        "text": "{{model}}: {{ job_id }} {{error.message}}!",
        "blocks": [{"n": 1, "x": "{{nothing"[:0]}],
        "on": True,
    }
    assert render(template, error={"message": "no"}) == {
        "text": "zimg: j1 no!",
        "blocks": [{"n": 1, "x": ""}],
        "on": True,
    }


def test_a_string_that_is_a_single_name_becomes_the_value_itself() -> None:
    values = {"result": {"urls": ["a", "b"]}, "attempt": 3}
    assert render({"all": "{{result}}", "one": "{{result.urls.1}}", "n": "{{attempt}}"}, **values) == {
        "all": values["result"],
        "one": "b",
        "n": 3,
    }


def test_a_missing_value_is_empty_within_a_string_and_null_on_its_own() -> None:
    template = {"a": "<{{result.url}}>", "b": "{{result.url}}", "c": "{{error.code}}", "d": "{{result.x.9}}"}
    assert render(template, result=None) == {"a": "<>", "b": None, "c": None, "d": None}
    assert render(template, result={"x": [1]}, error=None) == {"a": "<>", "b": None, "c": None, "d": None}


@given(st.text())
def test_a_value_cannot_change_the_structure_of_the_body(value: str) -> None:
    body = render({"text": "error: {{error.message}}", "admin": False}, error={"message": value.replace("\ud800", "")})
    assert body.keys() == {"text", "admin"} and body["admin"] is False
    assert body["text"].startswith("error: ")


def test_names_inside_a_value_are_not_replaced() -> None:
    values = {"error": {"message": '{{result}}", "x": "{{tenant}}'}, "result": "secret", "tenant": "acme"}
    assert render({"text": "{{error.message}}"}, **values) == {"text": values["error"]["message"]}


def test_mentions_and_links_are_escaped_for_slack() -> None:
    template = {"text": "{{error.message|slack}} {{model}}"}
    values = {"error": {"message": "<!channel> & <http://evil|click>"}}
    assert render(template, **values) == {"text": "&lt;!channel&gt; &amp; &lt;http://evil|click&gt; zimg"}
    assert render({"text": "{{error.message|slack}}"}, **values)["text"].startswith("&lt;")


@pytest.mark.parametrize(
    "name",
    ["payload", "envelope", "lease", "remote_id", "callback_url", "__class__", "error", "error.__class__", "result.x!",
     "job_id.x", "data.job_id", "", "result.", "result..a", "secret/KEY", "model|upper", "result." + "a." * 9 + "a"],
)  # fmt: skip
def test_a_template_with_an_unknown_name_is_refused(name: str) -> None:
    assert "job_id" in refusal_message({"text": f"x {{{{{name}}}}}"}), "the message lists the allowed names"


def test_a_stored_template_with_a_forbidden_name_gets_no_value() -> None:
    data = {"payload": "secret", "result": {"a": 1}}
    stored = '{"a":"{{payload}}","b":"x{{payload}}","c":"{{result.__class__}}"}'
    assert json.loads(message_body(MESSAGE, data, stored)) == {"a": None, "b": "x", "c": None}


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
def test_an_invalid_template_is_refused_with_an_explanation(template: Any) -> None:
    assert refusal_message(template).startswith("template ")


def test_the_largest_template_gives_a_body_of_limited_size() -> None:
    template = {"a": "{{error.message}}" * MAX_TEMPLATE_NAMES}
    body = message_body(MESSAGE, {"error": {"message": "x" * 1_000_000}}, validate_template(template))
    assert len(body) <= MAX_TEMPLATE_BYTES + MAX_TEMPLATE_NAMES * (MAX_VALUE_CHARS + 3)


def test_every_name_that_is_offered_can_be_named() -> None:
    assert validate_template({"text": " ".join(f"{{{{{name}}}}}" for name in TEMPLATE_FIELDS)})


def test_the_event_of_an_end_has_no_result_after_the_job_was_revived() -> None:
    class RevivedJob:
        state = "queued"

    data = event_data(ENTRY, RevivedJob())  # type: ignore[arg-type]
    assert "result" not in data and data["status"] == "failed"


def test_a_test_message_has_the_fields_of_a_job_end() -> None:
    assert {"job_id", "model", "status", "result", "error"} <= bodies.test_data("acme").keys()


@pytest.mark.parametrize("template, is_default", [(None, True), ('{"a":1}', False)])
def test_a_url_of_slack_has_a_template_for_slack_by_default(template: str | None, is_default: bool) -> None:
    receiver = Subscription("we", "acme", "https://Hooks.Slack.com/services/T/B/X", END_EVENT_TYPES, "", 0, template)
    found = bodies.template_of(receiver)
    assert found is not None and (found != template) is is_default
    assert bodies.template_of(replace(receiver, url="https://example.com/hooks.slack.com", template=None)) is None


def test_a_callback_url_of_slack_receives_a_text_message() -> None:
    job = SimpleNamespace(id="j<1>", model="zimg", state=State.DEAD, attempts=2, result=None)
    job.error_code, job.error_message = "oom", "<!channel>"
    message = replace(MESSAGE, receiver="j<1>", job_id="j<1>", type="job.dlq")
    template = bodies.template_of(
        Subscription("j<1>", "acme", "https://hooks.slack.com/services/T/B/X", END_EVENT_TYPES, "", 0)
    )
    data = bodies.job_end_data(message, job)  # type: ignore[arg-type]
    assert json.loads(message_body(message, data, template)) == {
        "text": "zimg: job.dlq, job j&lt;1&gt; &lt;!channel&gt;"
    }
    assert json.loads(message_body(message, data, None)) == {
        "job_id": "j<1>",
        "model": "zimg",
        "status": "dead",
        "attempts": 2,
        "result": None,
        "error": {"code": "oom", "message": "<!channel>"},
    }
