"""A file as one batch, from the command line and from Python, against a real server."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from app.cli.__main__ import main
from routing.dispatch import batch_control
from slotkeeper.client import ApiError, ApiUnreachable, Client
from slotkeeper.jobs.batch_ids import line_job_id
from slotkeeper.jobs.batches import Batches
from tests.support.api import Api
from tests.support.served import Served, serve

BAD, MISSING = "{no json", '{"model": "none", "payload": {}}'


@pytest.fixture
def served(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    api.model()
    with serve(api) as served:
        monkeypatch.setenv("SLOTKEEPER_URL", "http://{}:{}".format(*served.address))
        monkeypatch.setattr("slotkeeper.client._CHUNK_LINES", 200)
        yield served


def run(*words: str, stdin: str = "") -> Result:
    done = CliRunner().invoke(main, words, input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def lines_of(count: int) -> list[str]:
    return [json.dumps({"model": "zimg", "payload": {"n": n}}) for n in range(count)]


def write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def payloads(served: Served, batch: str, lines: int) -> list[int]:
    found = [served.api.job(line_job_id(batch, line)).payload for line in range(lines)]
    return [json.loads(payload or "{}")["n"] for payload in found]


def client(served: Served) -> Client:
    return Client("http://{}:{}".format(*served.address))


# -- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("batches", "submit"), ("submit-file",)], ids=" ".join)
def test_a_file_is_one_batch_in_its_order(served: Served, tmp_path: Path, command: tuple[str, ...]) -> None:
    path = write(tmp_path / "jobs.jsonl", [*lines_of(3), "", *lines_of(2)])
    done = run(*command, path, "--priority", "3", "--label", "run=7", "--name", "night", "--json")
    assert done.exit_code == 0
    batch = json.loads(done.stdout)
    assert (batch["jobs"], batch["status"], batch["name"], batch["known"]) == (5, "active", "night", 0)
    assert payloads(served, batch["batch"], 5) == [0, 1, 2, 0, 1]
    job = served.api.job(line_job_id(batch["batch"], 4))
    assert job.priority == 3 and "run=7" in job.labels


def test_lines_that_cannot_be_accepted_are_named_by_their_number_in_the_file(served: Served, tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.jsonl", [*lines_of(2), "", BAD, *lines_of(1), MISSING])
    done = run("batches", "submit", path)
    assert done.exit_code == 1
    assert "5 lines received.  Jobs: 3.  Refused: 2 lines." in done.stdout
    fourth, sixth = (line for line in done.stderr.splitlines() if line.startswith("Line "))
    assert fourth.startswith("Line 4: The line is not valid JSON")
    assert sixth.startswith("Line 6: ") and "none" in sixth


def test_the_same_command_submits_nothing_twice(served: Served, tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.jsonl", lines_of(450))
    first, again = (run("batches", "submit", path, "--json") for _ in range(2))
    before, after = json.loads(first.stdout), json.loads(again.stdout)
    assert (before["batch"], after["known"], after["jobs"]) == (after["batch"], 450, 450)
    third = run("batches", "submit", path)
    assert "0 lines received, and 450 had been received before" in third.stdout and "--again" in third.stderr
    resubmitted = json.loads(run("batches", "submit", path, "--again", "--json").stdout)
    assert (resubmitted["batch"] != before["batch"], resubmitted["known"]) == (True, 0)
    other = json.loads(run("batches", "submit", path, "--priority", "1", "--json").stdout)
    assert other["batch"] not in (before["batch"], resubmitted["batch"])


def test_the_command_printed_at_ctrl_c_submits_the_rest_of_the_file(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "my jobs.jsonl", lines_of(450))
    post = Client.post

    def post_until_ctrl_c(client: Client, address: str, *request: Any) -> Any:
        if "from=200" in address:
            raise KeyboardInterrupt
        return post(client, address, *request)

    with monkeypatch.context() as patched:
        patched.setattr(Client, "post", post_until_ctrl_c)
        stopped = run("batches", "submit", path, "--again", "--label", "run=to day")
    assert stopped.exit_code == 130
    first, *_, last = stopped.stderr.splitlines()
    assert last.startswith("200 lines were received; submit the rest with: slotkeeper batches submit ")
    command = shlex.split(last.partition("rest with: ")[2])
    assert command == shlex.split(first.partition("go on with: ")[2]), (
        "the command was printed before the first line was sent"
    )
    batch = json.loads(run(*command[1:], "--json").stdout)
    assert (batch["known"], batch["jobs"]) == (200, 450)
    assert payloads(served, batch["batch"], 450) == list(range(450))


def test_the_submit_of_a_file_retries_while_the_api_restarts_and_reports_each_retry(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, away = Client.post, [True, True]
    monkeypatch.setattr("slotkeeper.client.time.sleep", lambda _: None)

    def post_when_back(client: Client, address: str, *request: Any) -> Any:
        done = post(client, address, *request)
        if "/lines" in address and away and away.pop():  # It was stored, and its answer was lost.
            raise ApiUnreachable("Nothing answers at the API.")
        return done

    monkeypatch.setattr(Client, "post", post_when_back)
    done = run("batches", "submit", write(tmp_path / "jobs.jsonl", lines_of(3)), "--json")
    assert (done.exit_code, json.loads(done.stdout)["jobs"]) == (0, 3)
    assert done.stderr.count("Nothing answers at the API.  Trying again; a line is accepted only once.") == 2


def test_a_file_submit_reports_an_unknown_outcome_while_the_api_is_unreachable(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stay_away(client: Client, *request: Any) -> Any:
        raise ApiUnreachable("Nothing answers at the API.")

    monkeypatch.setattr(Client, "post", stay_away)
    monkeypatch.setattr(Client, "retry", lambda client, send, patience_s, on_pause: send())
    done = run("batches", "submit", write(tmp_path / "jobs.jsonl", lines_of(1)))
    assert done.exit_code == 3 and "submit the rest with" in done.stderr


def test_a_file_may_be_read_from_a_pipe(served: Served) -> None:
    """The command runs in a process: a pipe cannot be read twice to derive a key from its content."""
    command = [sys.executable, "-m", "app.cli", "batches", "submit", "-", "--json"]
    done = subprocess.run(command, input="\n".join(lines_of(2)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    batch = json.loads(done.stdout)
    assert batch["jobs"] == 2
    assert f"go on with: slotkeeper batches submit - --json --key {batch['key']}\n" in done.stderr


def test_a_batch_is_shown_paused_resumed_and_canceled(served: Served, tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.jsonl", [*lines_of(2), BAD])
    batch = json.loads(run("batches", "submit", path, "--name", "night", "--json").stdout)["batch"]
    assert run("batches", "pause", batch).exit_code == 0
    assert json.loads(run("batches", "show", batch, "--json").stdout)["by_state"] == {"delayed": 2}
    assert run("batches", "resume", batch).exit_code == 0
    assert "night" in run("batches", "list").stdout
    assert [error["line"] for error in json.loads(run("batches", "errors", batch, "--json").stdout)] == [2]
    assert "2 canceled" in run("batches", "cancel", batch).stdout
    assert run("batches", "wait", batch).exit_code == 1
    found = [json.loads(line) for line in run("batches", "results", batch).stdout.splitlines()]
    assert [line["status"] for line in found] == ["canceled", "canceled", "refused"]
    assert run("batches", "results", batch, "--from", "2").stdout.count("\n") == 1


# -- from Python -------------------------------------------------------------------------------------------------


def test_a_client_submits_lines_from_anything_that_yields_them(served: Served) -> None:
    api, seen = client(served), list[int | None]()
    lines = ({"payload": {"n": n}, "custom_id": f"c{n}"} for n in range(450))
    batch = api.submit_batch(lines, model="zimg", on_chunk=lambda batch: seen.append(batch["next_line"]))
    assert (batch["jobs"], batch["status"], seen) == (450, "active", [0, 200, 400, 450])
    assert api.cancel_batch(batch["batch"])["canceled"] == 450
    batch_control.drive_all(served.api.dispatcher, Batches(served.api.database), 86_400, 10)
    ended = api.wait_for_batch(batch["batch"])
    assert (ended["status"], ended["ended"]) == ("ended", 450)
    results = list(api.iter_results(batch["batch"], first=440))
    assert [line["custom_id"] for line in results] == [f"c{n}" for n in range(440, 450)]
    assert next(api.iter_results(batch["batch"], ended=True))["line"] == 0


def test_a_batch_that_is_not_there_is_an_error(served: Served) -> None:
    missing = "01890000-0000-7000-8000-000000000000"
    for act in (
        client(served).get_batch,
        client(served).cancel_batch,
        lambda batch: list(client(served).iter_results(batch)),
    ):
        with pytest.raises(ApiError) as refused:
            act(missing)
        assert refused.value.status == 404
