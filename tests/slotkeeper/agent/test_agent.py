"""A node's runs: stored on disk before they start and before their slot is free, found after a restart, and signed."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import time as day_time
from pathlib import Path
from typing import Any

import orjson
import pytest

from slotkeeper import signatures
from slotkeeper.agent import run_journal
from slotkeeper.agent.agent import Agent
from slotkeeper.agent.config import AgentConfig, Hours, InvalidConfig, ModelEntry, read_config
from slotkeeper.agent.identity import AgentIdentity, enroll, load_identity
from slotkeeper.agent.owner_controls import OwnerControls
from slotkeeper.agent.run_journal import RunJournal
from slotkeeper.serve.http_server import Request, Response
from slotkeeper.signatures import RunStatement
from tests.support.gated import Gate
from tests.support.scripted import Scripted
from tools.cluster.stack import eventually

_PAYLOAD = b'{"prompt": "a cat"}'
_KEY = signatures.make_key()


class Home:
    """An agent without a connection, which can be restarted."""

    def __init__(self, folder: Path, **models: dict[str, str]) -> None:
        entries = {name: ModelEntry(entry.get("function"), entry.get("forward")) for name, entry in models.items()}
        self.config = AgentConfig(
            "ws://127.0.0.1:1",
            entries or {"zimg": ModelEntry("tests.support.gated:model", None)},
            folder / "state",
        )
        self.agents: list[Agent] = []
        self.restart()

    def restart(self) -> None:
        self.agent = Agent(self.config, AgentIdentity("n_1", "attic", _KEY, "i1"))
        self.agents.append(self.agent)

    @property
    def journal(self) -> RunJournal:
        return self.agent._journal

    def call(self, method: str, path: str, body: bytes = b"", **headers: str) -> Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.agent.routes.handle(Request(method, path, names, body))

    def run(self, body: bytes = _PAYLOAD, *, job: str = "j1", attempt: int = 1, model: str = "zimg") -> Response:
        return self.call(
            "POST",
            "/run",
            body,
            x_source="dispatcher",
            x_model=model,
            x_job_id=job,
            x_attempt=str(attempt),
            idempotency_key=job,
        )

    def status(self, name: str = "j1-1", attempt: int = 1) -> dict[str, Any]:
        response = self.call("GET", f"/status/{name}", x_attempt=str(attempt))
        return {"http": response.status, **orjson.loads(response.body)}

    def health(self) -> dict[str, Any]:
        return dict(orjson.loads(self.call("GET", "/health").body))


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Callable[..., Home]]:
    made: list[Home] = []

    def make(**models: dict[str, str]) -> Home:
        made.append(Home(tmp_path, **models))
        return made[-1]

    yield make
    for home in made:
        for agent in home.agents:
            agent._executor.close()
            agent._threads.shutdown(wait=False)


def _end(response: Response) -> dict[str, Any]:
    assert response.status == 200 and response.events is not None, response.body
    return dict(orjson.loads([event for event in response.events if event.startswith(b"data: ")][-1][6:]))


def _statement(body: dict[str, Any]) -> RunStatement:
    keys = {signatures.key_id(signatures.public_key_of(_KEY)): signatures.public_key_of(_KEY)}
    return RunStatement.decode(signatures.verify_envelope(body["envelope"], keys).statement)


# -- runs ------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_its_result_and_what_proves_it(homes: Callable[..., Home]) -> None:
    body = _end(homes().run())
    assert body["status"] == "completed" and body["job_id"] == "j1-1"
    statement = _statement(body)
    assert (statement.job, statement.attempt, statement.model, statement.node) == ("j1", 1, "zimg", "n_1")
    assert statement.payload_sha256 == hashlib.sha256(_PAYLOAD).hexdigest()
    assert 0 < statement.started_ms <= statement.ended_ms


def test_a_later_attempt_gets_the_finished_result_signed_for_itself(homes: Callable[..., Home]) -> None:
    home = homes()
    _end(home.run())
    again = _end(home.run(attempt=2))
    statement = _statement(again)
    assert (again["job_id"], statement.attempt, statement.run_attempt) == ("j1-2", 2, 1)
    home.restart()
    assert _statement(home.status("j1-2", 2)).attempt == 2
    assert _statement(home.status("j1-1", 1)).attempt == 1


def test_a_run_is_stored_before_it_starts_and_its_end_is_stored_before_its_slot_is_free(
    homes: Callable[..., Home], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, gate = homes(), Gate(tmp_path / "gate")
    seen: list[tuple[bool, int]] = []
    note = RunJournal.note

    def noting(self: RunJournal, *given: Any) -> None:
        note(self, *given)
        stored = self.find("j1-1")
        seen.append((stored is not None and stored.ending is not None, home.health()["active_jobs"]))

    monkeypatch.setattr(RunJournal, "note", noting)
    response = home.run(orjson.dumps(gate.payload))
    assert home.journal.has("j1-1") and home.health()["active_jobs"] == 1
    gate.open()
    _end(response)
    assert seen == [(True, 1)]


def test_a_restarted_agent_answers_from_its_journal(homes: Callable[..., Home]) -> None:
    home = homes()
    ended = _end(home.run())
    home.restart()
    found = home.status()
    assert (found["http"], found["status"], found["result"]) == (200, "completed", ended["result"])
    assert _end(home.run())["result"] == ended["result"]  # It joins the finished run.
    assert home.status("other-1")["never_received"] is True


def test_a_run_that_died_with_the_agent_is_not_reported_as_never_received(
    homes: Callable[..., Home], tmp_path: Path
) -> None:
    home, gate = homes(), Gate(tmp_path / "gate")
    home.run(orjson.dumps(gate.payload))
    started = home.health()["started"]
    home.restart()
    found = home.status()
    assert found["http"] == 404 and found["died"] is True and "never_received" not in found
    assert home.health()["started"] != started
    gate.open()


def test_a_forwarded_run_holds_its_slot_until_its_server_has_stopped(homes: Callable[..., Home]) -> None:
    release = threading.Event()

    def hold(_: object) -> bytes:
        release.wait(30)
        return b""

    with Scripted(hold) as server:
        home = homes(zimg={"forward": f"{server.url}/generate"})
        threading.Thread(target=home.run, daemon=True).start()
        eventually(lambda: home.health()["active_jobs"] == 1, "it runs")
        started = home.health()["started"]

        home.restart()

        assert home.health()["job_ids"] == ["j1"] and home.health()["started"] == started
        assert home.status()["status"] == "processing"
        assert home.run(job="j2").status == 503
        release.set()
    home.agent._check_local_servers()
    assert home.health()["active_jobs"] == 0 and home.health()["started"] != started


@pytest.mark.parametrize(
    ("headers", "scope"),
    [({"x_model": "other"}, "node"), ({"x_node_declaration": "newer"}, "node")],
)
def test_a_node_refuses_a_job_of_another_model_or_declaration(
    homes: Callable[..., Home], headers: dict[str, str], scope: str
) -> None:
    given = {"x_model": "zimg", "x_job_id": "j1", "x_attempt": "1", **headers}
    response = homes().call("POST", "/run", _PAYLOAD, **given)
    assert (response.status, orjson.loads(response.body)["scope"]) == (409, scope)


def test_a_payload_that_is_too_large_for_a_node_is_refused_with_scope_job(homes: Callable[..., Home]) -> None:
    home = homes()
    response = home.run(b"x" * (home.config.max_payload_bytes + 1))
    assert (response.status, orjson.loads(response.body)["scope"]) == (409, "job")


def test_a_full_disk_refuses_runs_before_they_begin(homes: Callable[..., Home]) -> None:
    home = homes()
    home.journal._connection.execute("PRAGMA max_page_count = 1")  # Not less than it has: so it cannot grow.
    prompt = orjson.dumps({"prompt": "a cat"})
    refused = None
    for number in range(500):
        response = home.run(prompt, job=f"j{number}" + "x" * 100)
        if response.status == 409:
            refused = response
            break
        _end(response)
    assert refused is not None and b"disk is full" in refused.body
    assert home.health()["active_jobs"] == 0 and not home.journal.has(f"j{number}" + "x" * 100 + "-1")


def test_a_run_whose_end_cannot_be_stored_still_returns_its_result(homes: Callable[..., Home], tmp_path: Path) -> None:
    home, gate = homes(), Gate(tmp_path / "gate")
    response = home.run(orjson.dumps(gate.payload))
    home.journal._connection.execute("PRAGMA query_only = 1")
    gate.open()
    assert _end(response)["status"] == "completed"
    assert home.status()["status"] == "completed" and home.journal.list_unended()


def test_a_run_that_its_local_server_refuses_as_busy_is_refused_with_scope_node(homes: Callable[..., Home]) -> None:
    with Scripted(lambda _seen: b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n") as server:
        response = homes(zimg={"forward": f"{server.url}/generate"}).run()
    assert (response.status, orjson.loads(response.body)["scope"]) == (409, "node")


def test_old_results_are_deleted_and_the_start_of_a_run_is_kept_longer(tmp_path: Path) -> None:
    home = Home(tmp_path)
    _end(home.run())
    now = [time.time() + run_journal.RESULT_AGE_S + 10]
    journal = RunJournal(home.config.state_dir / "runs", lambda: now[0])
    journal.prune()
    assert journal.has("j1-1")
    stored = journal.find("j1-1")
    assert stored is not None and stored.ending is None and not journal.list_unended()
    now[0] += run_journal.BEGIN_AGE_S
    journal.prune()
    assert not journal.has("j1-1")
    home.agent._executor.close()


# -- the owner ---------------------------------------------------------------------------------------------------


def test_pause_and_hours_keep_jobs_out_and_change_nothing_of_runs(homes: Callable[..., Home], tmp_path: Path) -> None:
    home, gate = homes(), Gate(tmp_path / "gate")
    running = home.run(orjson.dumps(gate.payload))
    owner = OwnerControls(home.config.state_dir, None)
    owner.pause("a game", None)
    assert home.run(job="j2").status == 409 and "a game" in home.agent.why_not()
    gate.open()
    assert _end(running)["status"] == "completed"
    owner.resume()
    assert home.agent.why_not() == ""
    owner.pause("", 1.0)
    assert home.agent.why_not() == ""


@pytest.mark.parametrize(
    ("start", "end", "now", "is_in"),
    [("18:00", "08:00", "23:00", True), ("18:00", "08:00", "09:00", False), ("09:00", "17:00", "12:00", True)],
)
def test_hours_may_pass_midnight(start: str, end: str, now: str, is_in: bool) -> None:
    hours = Hours(day_time.fromisoformat(start), day_time.fromisoformat(end))
    assert hours.includes(day_time.fromisoformat(now)) is is_in


# -- configuration and identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "gateway: it is missing"),
        ('gateway = "http://x"', "wss://"),
        ('gateway = "ws://x"', "models: it is missing"),
        ('gateway = "ws://x"\n[models]', "add at least one"),
        ('gateway = "ws://x"\n[models.a]', "either function or forward"),
        ('gateway = "ws://x"\n[models.a]\nfunction = "m:f"\nx = 1', "there is no such field"),
        ('gateway = "ws://x"\nslots = 0\n[models.a]\nfunction = "m:f"', "at least 1"),
        ('gateway = "ws://x"\nslots = true\n[models.a]\nfunction = "m:f"', "of the type int"),
        ('gateway = "ws://x"\nmore = 1', "more: there is no such field"),
        ('gateway = "ws://x"\n[hours]\nfrom = "8"\n[models.a]\nfunction = "m:f"', "hours"),
        ("gateway =", "no TOML"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(InvalidConfig, match=message) as refused:
        read_config(tmp_path / "a.toml")
    assert "\n" not in str(refused.value)


def test_an_enrolment_whose_answer_was_lost_is_sent_again_with_the_same_key(tmp_path: Path) -> None:
    sent: list[dict[str, str]] = []

    def post(body: dict[str, str]) -> dict[str, Any]:
        sent.append(body)
        if len(sent) == 1:
            raise OSError("the connection broke")
        return {"id": "n_1", "name": "attic"}

    with pytest.raises(OSError, match="broke"):
        enroll(tmp_path / "state", "attic", "nt_x", post)
    assert enroll(tmp_path / "state", "attic", "nt_x", post).id == "n_1"
    assert sent[0] == sent[1]
    assert (tmp_path / "state" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert load_identity(tmp_path / "state").name == "attic"
    with pytest.raises(InvalidConfig, match="already"):
        enroll(tmp_path / "state", "attic", "nt_x", post)
    with pytest.raises(InvalidConfig, match="enroll"):
        load_identity(tmp_path)


def test_a_run_that_is_starting_is_not_reported_as_never_received(homes: Callable[..., Home]) -> None:
    home = homes()
    request = Request("POST", "/run", {"x-job-id": "j1", "x-attempt": "1", "x-model": "zimg"}, _PAYLOAD)
    home.agent.routes.note_arrival(request)
    assert home.status()["status"] == "processing"
    _end(home.agent.routes.handle(request))
    assert home.status()["status"] == "completed"
    assert home.status("j2-1")["never_received"] is True


def test_a_canceled_run_breaks_the_connection_to_its_local_server(homes: Callable[..., Home]) -> None:
    seen = threading.Event()

    def hold(_: object) -> bytes:
        seen.set()
        threading.Event().wait(5)
        return b""

    with Scripted(hold) as server:
        home = homes(zimg={"forward": f"{server.url}/generate"})
        threading.Thread(target=home.run, daemon=True).start()
        assert seen.wait(10)
        home.call("POST", "/cancel/j1-1")
        eventually(lambda: home.status()["status"] == "canceled", "it ends")


def test_the_reason_of_a_pause_is_one_short_line(homes: Callable[..., Home]) -> None:
    home = homes()
    OwnerControls(home.config.state_dir, None).pause("a\tgame\n" + "x" * 500, None)
    assert home.agent.why_not().isprintable() and len(home.agent.why_not()) == 100
    (home.config.state_dir / "paused.json").write_text("[]")
    assert home.agent.why_not() == ""
