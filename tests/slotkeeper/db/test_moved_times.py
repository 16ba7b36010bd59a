"""After a lasting step of the shared clock, durations keep their length and nothing is deleted early."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import BigInteger

import slotkeeper.outbox.tables
import slotkeeper.registry.tables  # noqa: F401  All tables are in one MetaData.
from migrations import migrate
from routing.maintenance.server_report import ServerReport, report_time_ms
from slotkeeper.clock import clock
from slotkeeper.db import Database, clock_offset, shared_clock
from slotkeeper.db.moved_times import MOVED_TIMES
from slotkeeper.db.schema import metadata
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Job, Quarantine
from slotkeeper.outbox import retention
from slotkeeper.registry.catalog import Catalog
from tests.support.builders import a_job, a_start
from tests.support.ends import store_end

START_MS = 1_800_000_000_000
SECOND, HOUR, YEAR = 1000, 3_600_000, 365 * 24 * 3_600_000
WINDOW_S = 100

_STAY = """
    batches.cancel_ms batches.changed_ms batches.closed_ms batches.created_ms batches.deadline_ms batches.ended_ms
    credit_accounts.closed_ms credit_accounts.low_since_ms credit_accounts.opened_ms transfers.at_ms transfers.slot_ms
    validations.changed_ms validation_answers.at_ms envelopes.at_ms enrolment_tokens.created_ms nodes.created_ms
    nodes.seen_ms nodes.revoked_ms node_keys.from_ms node_keys.retired_ms node_keys.revoked_ms
    api_keys.created_ms api_keys.last_used_ms api_keys.revoked_ms usage_days.slot_ms
    closed_models.changed_ms descriptions.created_ms events.at_ms idempotency_keys.expires_ms
    jobs.cancel_requested_ms jobs.created_ms jobs.finished_ms models.created_ms messages.at_ms messages.ended_ms
    queue_epochs.since_ms receivers.changed_ms receivers.created_ms revoked_sessions.until_ms secrets.set_ms
    servers.created_ms servers.leaving_ms tenants.created_ms tries.at_ms
"""


class Machine:
    """A machine whose time of day is set, with one process of a database in which nothing else happens."""

    def __init__(self, database: Database) -> None:
        self.steady_s, self.set_by_ms = 1_000.0, 0
        self.database, self.store = database, JobStore(database, WINDOW_S)
        self.catalog = Catalog(database)

    def later(self, ms: int) -> None:
        self.steady_s += ms / 1000
        self.catalog.get_version()

    def set_clock(self, by_ms: int) -> None:
        """Set the time of day for good, and come to where it has just been followed."""
        self.set_by_ms += by_ms
        self.later(0)
        self.later(61 * SECOND)
        self.later(0)

    def submit(self, **fields: object) -> str:
        (accepted,) = self.store.submit([a_job(**fields)], clock.now_ms())
        return accepted.id

    def job(self, job_id: str) -> Job:
        found = self.store.get(job_id)
        assert found is not None
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    url = f"sqlite:///{tmp_path}/record.db"
    migrate.upgrade(url)
    with closing(Database(url)) as database:
        found = Machine(database)
        monkeypatch.setattr(shared_clock.time, "monotonic", lambda: found.steady_s)
        monkeypatch.setattr(
            shared_clock.time, "time_ns", lambda: (START_MS + round(found.steady_s * 1000) + found.set_by_ms) * 10**6
        )
        monkeypatch.setattr(clock_offset, "read_boot_id", lambda: "a-boot")
        found.catalog = Catalog(database)
        found.later(0)
        found.later(0)
        yield found


def test_every_time_column_is_listed_as_moving_or_as_fixed() -> None:
    times = {
        f"{table.name}.{column.name}"
        for table in metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, BigInteger) and column.name.endswith(("_ms", "_us"))
    }
    assert times - set(MOVED_TIMES) - _states() == set(_STAY.split()), "decide whether it moves, and list it"
    assert set(MOVED_TIMES) <= times


def _states() -> set[str]:
    """The times at which an operator set the state of something: they stay."""
    return {f"{name}.changed_ms" for name in ("models", "servers", "tenant_states", "defaults")}


@pytest.mark.parametrize("by_ms", [2 * HOUR, -2 * HOUR, 10 * YEAR])
def test_a_time_given_in_seconds_moves_with_the_clock_and_an_absolute_time_stays(machine: Machine, by_ms: int) -> None:
    now = clock.now_ms()
    after_600_s, at_noon = {"deadline_ms": now + 600 * SECOND}, {"deadline_ms": now + HOUR, "given_times": "deadline"}
    in_seconds, as_time = machine.submit(**after_600_s), machine.submit(**at_noon)
    delayed = machine.submit(not_before_ms=now + 100 * SECOND)
    for_noon = machine.submit(not_before_ms=now + HOUR, given_times="not_before")
    machine.set_clock(by_ms)
    assert machine.job(in_seconds).deadline_ms == now + 600 * SECOND + by_ms
    assert machine.job(as_time).deadline_ms == now + HOUR
    assert machine.job(delayed).due_ms == now + 100 * SECOND + by_ms
    assert machine.job(for_noon).due_ms == now + HOUR


def test_an_ended_job_keeps_its_times(machine: Machine) -> None:
    job_id = machine.submit(deadline_ms=clock.now_ms() + HOUR)
    machine.store.cancel_waiting(job_id, clock.now_ms())
    before = machine.job(job_id)
    machine.set_clock(2 * HOUR)
    assert machine.job(job_id) == before and before.state is State.CANCELED


def test_a_retry_moves_also_if_the_job_was_submitted_for_a_time(machine: Machine) -> None:
    now = clock.now_ms()
    job_id = machine.submit(not_before_ms=now + 1, given_times="not_before")
    machine.later(SECOND)
    machine.store.promote_due(clock.now_ms(), 10)
    a_start(machine.store, job_id, now_ms=clock.now_ms())
    due = clock.now_ms() + 300 * SECOND
    assert store_end(machine.store, job_id, 1, Reason.SERVER_ERROR, clock.now_ms(), due_ms=due)
    machine.set_clock(2 * HOUR)
    assert machine.job(job_id).due_ms == due + 2 * HOUR


def test_a_step_of_years_deletes_no_ended_job_before_its_time(machine: Machine) -> None:
    job_id = machine.submit()
    machine.store.cancel_waiting(job_id, clock.now_ms())
    machine.set_clock(10 * YEAR)
    assert delete_older_than(machine, 3 * 61 * SECOND) == 0
    machine.later(3 * 61 * SECOND)
    assert delete_older_than(machine, 3 * 61 * SECOND) == 1


def test_after_a_step_back_no_new_job_is_deleted_early(machine: Machine) -> None:
    old = machine.submit()
    machine.store.cancel_waiting(old, clock.now_ms())
    machine.set_clock(-10 * YEAR)
    new = machine.submit()
    machine.store.cancel_waiting(new, clock.now_ms())
    assert delete_older_than(machine, HOUR) == 0
    machine.later(HOUR + SECOND)
    assert delete_older_than(machine, HOUR) == 1
    assert machine.store.get(new) is None and machine.store.get(old) is not None


@pytest.mark.parametrize("by_ms", [2 * HOUR, -2 * HOUR])
def test_a_process_that_has_not_received_the_clock_step_stores_nothing_by_its_old_clock(
    machine: Machine, by_ms: int
) -> None:
    """Times that it has taken would be wrong by the step: its jobs would wait for hours, or end at once."""
    job_id = machine.submit(deadline_ms=clock.now_ms() + 600 * SECOND)
    old_ms, old_steps = clock.offset_ms, clock.steps
    assert old_ms is not None
    machine.set_clock(by_ms)
    clock.steps = old_steps
    clock.use_offset(old_ms)
    begun, expire = clock.now_ms(), machine.store.expire_overdue
    with pytest.raises(DatabaseUnavailable, match="The clock was set"):
        if not expire(clock.now_ms(), 10, Quarantine("deadline_passed", clock.now_ms())):
            machine.submit(deadline_ms=clock.now_ms() + SECOND)
    assert machine.job(job_id).state is State.QUEUED
    assert clock.now_ms() == begun + by_ms, "the process uses the new clock from here on"
    assert [step.by_ms for step in clock.steps] == [by_ms]
    assert expire(clock.now_ms(), 10, Quarantine("deadline_passed", clock.now_ms())) == []


def test_a_write_that_waited_while_the_clock_was_set_is_refused(machine: Machine) -> None:
    write = machine.store.submit_write([a_job()], clock.now_ms())
    machine.set_clock(2 * HOUR)
    with pytest.raises(DatabaseUnavailable, match="The clock was set"):
        machine.database.commit(write)
    assert machine.submit()


def test_a_pass_under_which_the_clock_is_set_stores_nothing_more(machine: Machine) -> None:
    """It has compared some stored times with the old time and some with the new."""
    with clock.pin_offset():
        machine.submit()
        machine.set_clock(2 * HOUR)
        with pytest.raises(DatabaseUnavailable, match="The clock was set"):
            machine.submit()
    assert machine.submit()


def test_a_report_keeps_its_age_when_the_clock_is_set(machine: Machine) -> None:
    report = ServerReport(up=True, asked_ms=clock.now_ms())
    machine.set_clock(-2 * HOUR)
    assert clock.now_ms() - report_time_ms(report, clock.now_ms()) == 61 * SECOND


def test_a_run_does_not_take_its_old_deadline_for_overdue(machine: Machine) -> None:
    machine.submit(deadline_ms=clock.now_ms() + 600 * SECOND)
    (job,) = machine.store.list_queued()
    run = a_start(machine.store, job.id, now_ms=clock.now_ms())
    machine.set_clock(2 * HOUR)
    assert not run.is_overdue(clock.now_ms())
    assert clock.moved_since(run.clock_offset_ms) == 2 * HOUR


def test_an_interval_that_a_process_measures_has_no_step_in_it(machine: Machine) -> None:
    before = clock.steady_ms()
    machine.set_clock(-10 * YEAR)
    assert clock.steady_ms() - before == 61 * SECOND


@pytest.mark.parametrize("by_ms", [2 * HOUR, 10 * YEAR])
def test_an_idempotency_key_is_kept_for_its_whole_window_after_a_clock_step(machine: Machine, by_ms: int) -> None:
    keyed = {"idempotency_key": "k", "fingerprint": "f"}
    first = machine.submit(**keyed)
    machine.set_clock(by_ms)
    machine.store.delete_expired_keys(clock.now_ms())
    assert machine.submit(**keyed) == first
    machine.later(WINDOW_S * SECOND)
    assert machine.submit(**keyed) != first


def delete_older_than(machine: Machine, ms: int) -> int:
    return retention.delete_ended_jobs(machine.database, clock.ago_ms(ms, clock.now_ms()))
