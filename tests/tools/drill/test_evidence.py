from pathlib import Path

import orjson
import pytest

from slotkeeper.db import Database
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import messages
from slotkeeper.jobs.values import Event
from tests.support.builders import an_ended_job
from tools.drill.conduct_checks import PendingMessage
from tools.drill.evidence import crowded_starts, job_events, pending_messages, recorded, server_runs
from tools.drill.history_checks import Run


def write(path: Path, *lines: dict[str, object], torn: bytes = b"") -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + torn)
    return path


def ended_run(job_id: str, started_ns: int, ended_ns: int, slot: int = 0) -> dict[str, object]:
    times = {"started_ns": started_ns, "ended_ns": ended_ns}
    return {"job_id": job_id, "attempt": 1, "slot": slot, "outcome": "completed", **times}


def start(job_id: str, at_ns: int, slot: int = 0) -> dict[str, object]:
    return {"job_id": job_id, "attempt": 1, "slot": slot, "at_ns": at_ns}


def test_findings_of_an_audit_are_no_events_of_a_job(store: JobStore) -> None:
    job = an_ended_job(store).id
    ledger.store_findings(store.database, {"lease_without_run": 1}, [(job, "lease_without_run")], 99_000)
    assert [event.type for event in store.list_events(job)][-1] == "invariant.broken"
    assert [event.type for event in job_events(store.database)[job]][-1] == "job.completed"


def test_a_run_that_ended_is_listed_once(tmp_path: Path) -> None:
    journal = write(tmp_path / "journal", ended_run("j1", 100, 200))
    starts = write(tmp_path / "starts", start("j1", 101))
    assert server_runs("a", journal, starts, [], 900) == [Run("j1", 1, "a", 0, 100, 200)]


def test_a_start_without_an_end_lasted_until_its_server_was_killed(tmp_path: Path) -> None:
    journal = write(tmp_path / "journal", ended_run("j1", 400, 500))
    starts = write(tmp_path / "starts", start("j1", 101), start("j1", 401))
    assert server_runs("a", journal, starts, [50, 300, 700], 900) == [
        Run("j1", 1, "a", 0, 400, 500),
        Run("j1", 1, "a", 0, 101, 300, "cut"),
    ]


def test_a_start_without_an_end_or_a_kill_is_still_active(tmp_path: Path) -> None:
    starts = write(tmp_path / "starts", start("j1", 101))
    assert server_runs("a", tmp_path / "none", starts, [50], 900) == [Run("j1", 1, "a", 0, 101, 900, "cut")]


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    journal = write(tmp_path / "journal", ended_run("j1", 100, 200), torn=b'{"job_id": "j2", "att')
    assert [run.job_id for run in server_runs("a", journal, tmp_path / "none", [], 900)] == ["j1"]


def test_a_turn_has_the_epoch_of_its_queue_before_the_number_of_the_offer() -> None:
    def job_with_offer(event: int, **offer: int) -> list[Event]:
        return [Event(1, "j", "job.enqueued", 1, 0), Event(event, "j", "job.started", 1, 1, offer)]

    jobs = recorded(
        {"j1": State.COMPLETED, "j2": State.COMPLETED, "j3": State.QUEUED},
        {"j1": job_with_offer(70, epoch=1, offer=40), "j2": job_with_offer(50, epoch=2, offer=3), "j3": []},
    )
    assert {job_id: job.turn for job_id, job in jobs.items()} == {"j1": (1, 40), "j2": (2, 3), "j3": None}
    assert jobs["j1"].events == ("job.enqueued", "job.started")


@pytest.mark.parametrize(
    ("tries", "next_in_s", "overdue", "put_off"),
    [
        (0, 0, False, False),
        (1, 5, False, False),
        (6, 500, False, False),
        (1, 3600, False, True),
        (1, -50, False, False),
        (1, -70, True, False),
    ],
)
def test_a_webhook_is_overdue_after_a_minute_and_put_off_if_its_next_attempt_is_too_late(
    database: Database, tries: int, next_in_s: int, overdue: bool, put_off: bool
) -> None:
    row = {"receiver": "j", "event": 11, "job_id": "j", "type": "job.completed", "at_ms": 0, "owed_ms": 0}
    row |= {"tries": tries, "next_ms": 1_000_000 + next_in_s * 1000}
    database.write(lambda tx: tx.connection.execute(messages.insert(), row))
    assert pending_messages(database, 1_000_000) == [
        PendingMessage("msg_j_1_completed", "j", "pending", overdue, put_off)
    ]


def test_runs_beyond_the_slots_are_listed_by_their_server_s_count(tmp_path: Path) -> None:
    lines = [start("j1", 101) | {"at_once": 1}, start("j2", 102) | {"at_once": 2}]
    starts = write(tmp_path / "starts", *lines)
    assert crowded_starts("a", starts, 1) == ["j2 attempt 1 on a: 2 runs, 1 slots"]
    assert crowded_starts("a", starts, 2) == []
