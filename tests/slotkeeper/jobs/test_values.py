"""Frozen values, and the fold of events into attempts."""

from dataclasses import FrozenInstanceError, fields

import pytest

from routing.queries.job_timeline import PhaseKind, attempts_of, merge_unreached, phases_of
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.tables import jobs
from slotkeeper.jobs.values import Event, Job, NewJob, QueuedJob, new_job_id
from tests.support.builders import T0, a_job


def _event(type_: str, attempt: int, at_ms: int = T0, **data: object) -> Event:
    return Event(at_ms, "j", type_, at_ms, attempt, dict(data))


def test_job_values_are_immutable():
    with pytest.raises(FrozenInstanceError):
        a_job().priority = 1


def test_a_job_is_its_row():
    assert {field.name for field in fields(Job)} | {"sent_ms"} == set(jobs.c.keys())


def test_a_new_job_is_of_the_middle_priority_and_the_default_tenants():
    job = NewJob(id="j", model="zimg", payload="{}")
    assert (job.priority, job.tenant, job.source, job.not_before_ms) == (5, "default", "rest", None)


def test_a_job_returns_its_fields_for_the_queue():
    numbers = dict.fromkeys(("attempt", "waits", "failures", "crashes"), 0)
    absent = dict.fromkeys(
        field.name for field in fields(Job) if field.name.endswith(("_ms", "_url", "_id", "_code", "_message"))
    )
    job = Job(
        **numbers
        | absent
        | dict.fromkeys(("server", "slot", "lease"))
        | {
            "id": "j",
            "seq": 7,
            "model": "zimg",
            "priority": 2,
            "tenant": "acme",
            "created_ms": T0,
            "constraints": "gpu=A100",
        }
        | {"state": State.QUEUED, "why": Reason.SUBMITTED, "source": "rest"}
    )
    assert job.queued == QueuedJob("j", 7, "zimg", 2, "acme", T0, "gpu=A100")


def test_times_are_milliseconds():
    assert now_ms() > T0 - 10 * 365 * 86_400_000
    assert isinstance(now_ms(), int)


def test_ids_are_uuids_of_version_seven():
    assert [len(part) for part in new_job_id().split("-")] == [8, 4, 4, 4, 12]
    assert new_job_id()[14] == "7"


def test_a_job_that_has_not_started_has_no_attempts():
    assert attempts_of([]) == []
    assert attempts_of([_event("job.delayed", 0), _event("job.enqueued", 0), _event("job.canceled", 0)]) == []


def test_a_running_attempt_has_no_end():
    (attempt,) = attempts_of(
        [_event("job.enqueued", 0), _event("job.started", 1, T0 + 1, server="gpu1", slot="gpu1-slot0")]
    )
    assert (attempt.attempt, attempt.server, attempt.slot, attempt.started_ms) == (1, "gpu1", "gpu1-slot0", T0 + 1)
    assert (attempt.ended_ms, attempt.outcome, attempt.error) == (None, None, None)


def test_an_attempt_ends_with_the_event_that_follows_its_start():
    error = {"code": "bad", "message": "no"}
    trail = [
        _event("job.started", 1, T0 + 1),
        _event("job.delayed", 1, T0 + 2, why="server_error", error=error),
        _event("job.enqueued", 1, T0 + 3, why="due"),
        _event("job.started", 2, T0 + 4),
        _event("job.completed", 2, T0 + 5, why="finished"),
    ]
    first, second = attempts_of(trail)
    assert (first.ended_ms, first.outcome, first.error) == (T0 + 2, "server_error", error)
    assert (second.attempt, second.ended_ms, second.outcome, second.error) == (2, T0 + 5, "finished", None)


def test_a_start_after_a_start_is_another_attempt():
    first, second = attempts_of([_event("job.started", 1), _event("job.started", 2)])
    assert (first.attempt, first.ended_ms, second.attempt) == (1, None, 2)


def test_starts_that_reached_no_server_are_merged_into_one_attempt_and_into_the_waiting_phase():
    """While a server is unreachable, a job starts repeatedly; none of these starts counts as an attempt."""
    met_none = ["server_unreachable", "server_busy", "handed_back"]
    trail = [_event("job.enqueued", 0, T0)]
    for number, why in enumerate(met_none, 1):
        trail += [_event("job.started", number, T0 + 10 * number, slot=f"gpu{number}-slot0")]
        trail += [_event("job.enqueued", number, T0 + 10 * number + 1, why=why)]
    trail += [_event("job.started", 4, T0 + 50), _event("job.completed", 4, T0 + 60, why="finished")]

    unreached, attempt = attempts_of(trail)
    assert (unreached.unreached, unreached.attempt, unreached.slot) == (3, 3, "gpu3-slot0")
    assert (unreached.started_ms, unreached.ended_ms, unreached.outcome) == (T0 + 10, T0 + 31, "handed_back")
    assert (attempt.unreached, attempt.attempt, attempt.outcome) == (0, 4, "finished")

    waited, ran = merge_unreached(phases_of(trail))
    assert (waited.kind, waited.from_ms, waited.to_ms, waited.unreached) == (PhaseKind.WAITED, T0, T0 + 50, 3)
    assert (ran.kind, ran.from_ms, ran.to_ms) == (PhaseKind.RAN, T0 + 50, T0 + 60)
