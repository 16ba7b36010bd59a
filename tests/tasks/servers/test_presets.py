"""Presets: their rules, and a replay of recorded exchanges with their servers.  Each conversation is a TOML file:

source     origin of the responses                    id    the server's id of the job in polls and cancels
exchange   act: submit, status, cancel or health      wire  [request line, status, body, headers], in order
           is: fields of the expected result          sent  fields that the first request must contain
"""

import json
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from routing.dispatch.outcome import OutcomeKind
from tasks.servers import DEFAULT, Description, RunDetails, compile_description, presets
from tests.support.scripted import Seen, answer

CONVERSATIONS = Path(__file__).parent / "conversations"


def read_conversation(name: str) -> dict[str, Any]:
    return tomllib.loads((CONVERSATIONS / f"{name}.toml").read_text("utf-8"))


def list_exchanges() -> list[Any]:
    return [
        pytest.param(name, exchange, id=f"{name}-{number}-{exchange['act']}-{next(iter(exchange['is'].values()))}")
        for name in presets.names()
        for number, exchange in enumerate(read_conversation(name)["exchange"], 1)
    ]


every_preset = pytest.mark.parametrize("name", presets.names())


@every_preset
def test_a_preset_is_a_description_that_can_be_compiled(name):
    compile_description(Description.model_validate(presets.get(name)))


@every_preset
def test_a_preset_has_a_title_its_servers_and_an_example(name):
    about = presets.info(name)
    assert about.title and about.servers and about.checked and about.payload and about.slots >= 1
    assert urlsplit(about.endpoint).netloc


def test_a_change_to_a_returned_description_does_not_change_the_preset():
    presets.get("cog")["submit"]["method"] = "POST"
    assert presets.get("cog")["submit"]["method"] == "PUT"


def test_the_preset_of_the_slot_protocol_is_the_default_description():
    assert Description.model_validate(presets.get("slot-protocol")) == DEFAULT


@pytest.mark.parametrize("read", [presets.get, presets.info])
def test_an_unknown_preset_raises_a_key_error(read):
    with pytest.raises(KeyError):
        read("no-such-server")
    with pytest.raises(KeyError):
        read("../presets/cog")


@pytest.mark.parametrize(("name", "exchange"), list_exchanges())
def test_a_recorded_exchange_has_the_expected_result(name, exchange, scripted, ours):
    conversation, about = read_conversation(name), presets.info(name)
    http_server = scripted(_replay(exchange["wire"]))
    endpoint = http_server.url + urlsplit(about.endpoint).path.replace("MODEL", "cat")
    server = ours(endpoint, Description.model_validate(presets.get(name)), secret=conversation.get("secrets", {}).get)
    call = RunDetails("job-1", 1, about.payload, callback_url="http://me/cb", deadline_s=10.0)
    result = _perform(server, exchange["act"], call, conversation.get("id"))
    requests = [f"{request.method} {request.path}" for request in http_server.seen]
    assert requests == [line for line, *_ in exchange["wire"]]
    if "sent" in exchange:
        sent = http_server.seen[0].json
        assert {key: sent[key] for key in exchange["sent"]} == exchange["sent"]
    assert {key: result[key] for key in exchange["is"]} == exchange["is"]


@pytest.mark.parametrize(
    ("health", "kind"),
    [("STARTING", OutcomeKind.BUSY), ("SETUP_FAILED", OutcomeKind.BUSY), ("READY", OutcomeKind.FAILED)],
)
def test_a_server_that_is_not_ready_fails_no_job(health, kind, scripted, ours):
    """Cog returns 406 to a stream both while it starts and for a model that does not stream."""
    http_server = scripted(_replay([("PUT", 406, "{}"), ("GET", 200, f'{{"status":"{health}"}}')]))
    server = ours(http_server.url, Description.model_validate(presets.get("cog-stream")))
    assert server.submit(RunDetails("job-1", 1, {}, deadline_s=10.0)).kind is kind


def _replay(wire: list[Any]):
    """Return a function that returns the recorded responses, one for each request."""
    responses = iter(wire)

    def respond(_: Seen) -> bytes:
        _line, status, body, *headers = next(responses)
        return answer(body.encode(), status, **(headers[0] if headers else {}))

    return respond


def _perform(server: Any, act: str, call: RunDetails, remote_id: str | None) -> dict[str, Any]:
    if act == "cancel":
        return {"said": server.cancel(call, remote_id)}
    requests = {"submit": lambda: server.submit(call), "status": lambda: server.status(call, remote_id)}
    result = requests.get(act, server.health)()
    fields = {field: getattr(result, field) for field in getattr(result, "_fields", result.__slots__)}
    if fields.get("job_ids") is not None:
        fields["job_ids"] = sorted(fields["job_ids"])
    return fields


@every_preset
def test_a_conversation_contains_every_step_of_its_preset(name):
    description = Description.model_validate(presets.get(name))
    kinds: dict[str, set[Any]] = {"submit": set(), "status": set(), "cancel": set(), "health": set()}
    for exchange in read_conversation(name)["exchange"]:
        kinds[exchange["act"]].add(exchange["is"].get("kind"))
    assert kinds["submit"] >= {OutcomeKind.BUSY} and kinds["submit"] & {OutcomeKind.DONE, OutcomeKind.PENDING}
    assert (kinds["submit"] | kinds["status"]) & {OutcomeKind.RETRY, OutcomeKind.FAILED}, "no exchange fails"
    if description.mode == "async":
        assert kinds["status"] >= {OutcomeKind.DONE, OutcomeKind.PENDING, OutcomeKind.RETRY, OutcomeKind.LOST}
    assert bool(kinds["cancel"]) == (description.cancel is not None)
    assert bool(kinds["health"]) == (description.health is not None)
    if description.health is not None and description.health.active is not None:
        assert any("active_jobs" in exchange["is"] for exchange in read_conversation(name)["exchange"])


def test_every_conversation_belongs_to_a_preset():
    assert {file.stem for file in CONVERSATIONS.iterdir()} == set(presets.names())


@every_preset
def test_a_recorded_body_that_begins_like_json_is_valid_json(name):
    """A typing mistake in it would be tested as an unreadable response."""
    for exchange in read_conversation(name)["exchange"]:
        for _line, _status, body, *_ in exchange["wire"]:
            if body.startswith("{"):
                json.loads(body)
