"""What every preset must be, and what its servers have said, replayed: each conversation is a file beside this one.

source     where the answers come from                id    what the server calls the job in polls and cancels
exchange   act: submit, status, cancel or health      wire  [request line, status, body, headers], in order
           is: what must come of it                   sent  what the first request must hold
"""

import json
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from routing.dispatch.outcome import OutcomeKind
from tasks.servers import DEFAULT, Call, Description, compile_description, presets
from tests.support.scripted import Seen, answer

CONVERSATIONS = Path(__file__).parent / "conversations"


def conversation(name: str) -> dict[str, Any]:
    return tomllib.loads((CONVERSATIONS / f"{name}.toml").read_text("utf-8"))


def exchanges() -> list[Any]:
    return [
        pytest.param(name, one, id=f"{name}-{number}-{one['act']}-{next(iter(one['is'].values()))}")
        for name in presets.names()
        for number, one in enumerate(conversation(name)["exchange"], 1)
    ]


every_preset = pytest.mark.parametrize("name", presets.names())


@every_preset
def test_a_preset_is_a_description_that_can_be_compiled(name):
    compile_description(Description.model_validate(presets.get(name)))


@every_preset
def test_a_preset_says_what_it_is_of(name):
    about = presets.info(name)
    assert about.title and about.servers and about.checked and about.payload and about.slots >= 1
    assert urlsplit(about.endpoint).netloc


def test_what_is_read_of_a_preset_can_be_changed_without_changing_the_preset():
    presets.get("cog")["submit"]["method"] = "POST"
    assert presets.get("cog")["submit"]["method"] == "PUT"


def test_the_slot_protocol_is_what_descriptions_default_to():
    assert Description.model_validate(presets.get("slot-protocol")) == DEFAULT


@pytest.mark.parametrize("read", [presets.get, presets.info])
def test_a_name_that_is_none_is_a_key_error(read):
    with pytest.raises(KeyError):
        read("no-such-server")
    with pytest.raises(KeyError):
        read("../presets/cog")


@pytest.mark.parametrize(("name", "one"), exchanges())
def test_what_its_servers_say_means_what_it_should(name, one, scripted, ours):
    told, about = conversation(name), presets.info(name)
    there = scripted(_player(one["wire"]))
    endpoint = there.url + urlsplit(about.endpoint).path.replace("MODEL", "cat")
    server = ours(endpoint, Description.model_validate(presets.get(name)), secret=told.get("secrets", {}).get)
    call = Call("job-1", 1, about.payload, callback_url="http://me/cb", deadline_s=10.0)
    found = _act(server, one["act"], call, told.get("id"))
    assert [f"{seen.method} {seen.path}" for seen in there.seen] == [line for line, *_ in one["wire"]]
    if "sent" in one:
        sent = there.seen[0].json
        assert {key: sent[key] for key in one["sent"]} == one["sent"]
    assert {key: found[key] for key in one["is"]} == one["is"]


@pytest.mark.parametrize(
    ("health", "kind"),
    [("STARTING", OutcomeKind.BUSY), ("SETUP_FAILED", OutcomeKind.BUSY), ("READY", OutcomeKind.FAILED)],
)
def test_a_server_that_is_not_ready_fails_no_job(health, kind, scripted, ours):
    """cog answers 406 to a stream both while it starts and for a model that does not stream."""
    there = scripted(_player([("PUT", 406, "{}"), ("GET", 200, f'{{"status":"{health}"}}')]))
    server = ours(there.url, Description.model_validate(presets.get("cog-stream")))
    assert server.submit(Call("job-1", 1, {}, deadline_s=10.0)).kind is kind


def _player(wire: list[Any]):
    lines = iter(wire)

    def play(_: Seen) -> bytes:
        _line, status, body, *headers = next(lines)
        return answer(body.encode(), status, **(headers[0] if headers else {}))

    return play


def _act(server: Any, act: str, call: Call, remote_id: str | None) -> dict[str, Any]:
    if act == "cancel":
        return {"said": server.cancel(call, remote_id)}
    found = {"submit": lambda: server.submit(call), "status": lambda: server.status(call, remote_id)}.get(
        act, server.health
    )()
    facts = {field: getattr(found, field) for field in getattr(found, "_fields", found.__slots__)}
    if facts.get("job_ids") is not None:
        facts["job_ids"] = sorted(facts["job_ids"])
    return facts


@every_preset
def test_a_conversation_has_all_that_the_preset_speaks_of(name):
    described = Description.model_validate(presets.get(name))
    had: dict[str, set[Any]] = {"submit": set(), "status": set(), "cancel": set(), "health": set()}
    for one in conversation(name)["exchange"]:
        had[one["act"]].add(one["is"].get("kind"))
    assert had["submit"] >= {OutcomeKind.BUSY} and had["submit"] & {OutcomeKind.DONE, OutcomeKind.PENDING}
    assert (had["submit"] | had["status"]) & {OutcomeKind.RETRY, OutcomeKind.FAILED}, "nothing goes wrong in it"
    if described.mode == "async":
        assert had["status"] >= {OutcomeKind.DONE, OutcomeKind.PENDING, OutcomeKind.RETRY, OutcomeKind.LOST}
    assert bool(had["cancel"]) == (described.cancel is not None)
    assert bool(had["health"]) == (described.health is not None)
    if described.health is not None and described.health.active is not None:
        assert any("active_jobs" in one["is"] for one in conversation(name)["exchange"])


def test_every_conversation_is_a_presets():
    assert {file.stem for file in CONVERSATIONS.iterdir()} == set(presets.names())


@every_preset
def test_the_answers_of_a_conversation_are_as_long_as_they_were(name):
    """What looks like JSON is JSON: a typing mistake would be tested as nonsense."""
    for one in conversation(name)["exchange"]:
        for _line, _status, body, *_ in one["wire"]:
            if body.startswith("{"):
                json.loads(body)
