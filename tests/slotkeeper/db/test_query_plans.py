"""Every statement that the product executes repeatedly finds its rows by an index, and scans no table.

On both databases; without any statistics, and with those of a large table of ended jobs from before the backlog.
On PostgreSQL also as a generic plan, which it makes after some executions without knowing the values.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import orjson
import pytest
from sqlalchemy import event

from routing.queries import job_list
from slotkeeper.db import Database, commit_outcome
from slotkeeper.jobs import ledger, quarantine
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events
from slotkeeper.jobs.values import Quarantine
from slotkeeper.outbox import event_reader, retention
from slotkeeper.outbox.redelivery import Redelivery
from slotkeeper.outbox.result_notifications import ResultNotifications
from slotkeeper.outbox.subscriptions import Subscription
from slotkeeper.outbox.webhook_messages import DeliveryResult, DueCallback, Message, MessageKey, MessageQueue
from slotkeeper.registry.api_keys import ApiKeys
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.webhook_rotations import SecretRotations
from tests.support.builders import T0, a_job
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_remote_id, store_start

ENDED, WAITING = 4000, 400
LATER = T0 + 60_000
_FIELDS = {
    "jobs": "id, model, state, why, priority, tenant, created_ms, finished_ms, deadline_ms, due_ms, source, payload",
    "events": "job_id, type, at_ms, attempt, data",
    "messages": "receiver, event, job_id, type, at_ms, state, next_ms, owed_ms, ended_ms",
    "result_notifications": "id, job_id, next_ms, created_ms",
    "idempotency_keys": "tenant, key, job_id, fingerprint, expires_ms",
}
_STATISTICS = ["no statistics", "statistics from before the backlog", "statistics of the backlog"]


@pytest.fixture(params=_STATISTICS)
def full(request: pytest.FixtureRequest, database: Database) -> JobStore:
    """Many ended jobs of one tenant and model, then a backlog; with each what hangs on it."""
    _fill_all(database, "done", ENDED, f"'completed', 'finished', 5, 'big', {T0}, {T0}, NULL, NULL", "given_up", 0)
    if request.param == _STATISTICS[1]:
        _count(database)
    _fill_all(
        database, "wait", WAITING, f"'queued', 'submitted', 5, 'big', {T0}, NULL, {LATER * 2}, NULL", "pending", T0
    )
    if request.param == _STATISTICS[2]:
        _count(database)
    return JobStore(database)


def _fill_all(database: Database, name: str, rows: int, job: str, message: str, expires_ms: int) -> None:
    of_job = f"'{name}-' || i"
    _fill(database, "jobs", rows, f"{of_job}, 'busy', {job}, 'rest', '{{}}'")
    _fill(database, "events", rows, f"{of_job}, 'job.enqueued', {T0}, 0, '{{}}'")
    columns = f"10, {of_job}, 'job.completed', {T0}, '{message}', {T0}, {T0}, {T0}"
    _fill(database, "messages", rows, f"{of_job}, {columns}")
    _fill(database, "result_notifications", rows, f"'t-{name}-' || i, {of_job}, {T0} + i, {T0}")
    _fill(database, "idempotency_keys", rows, f"'big', {of_job}, {of_job}, '', {LATER} + {expires_ms}")


def _fill(database: Database, table: str, rows: int, values: str) -> None:
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})"
    with database.engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO {table} ({_FIELDS[table]}) {numbers} SELECT {values} FROM n")


def _count(database: Database) -> None:
    with database.engine.connect() as connection:
        connection.exec_driver_sql("ANALYZE")
        connection.commit()


@contextmanager
def _executed(database: Database) -> Iterator[list[tuple[str, Any]]]:
    executed: list[tuple[str, Any]] = []

    def note(connection: object, cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if re.match(r"SELECT|UPDATE|DELETE|INSERT", statement):
            executed.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield executed
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def _plans(database: Database, act: Callable[[], Any]) -> list[str]:
    """Return the query plan of each statement that `act` executes."""
    with _executed(database) as executed:
        act()
    plans = []
    for statement, parameters in executed:
        if not isinstance(parameters, list):  # rows of an executemany: nothing is searched
            plans += _explain(database, statement, parameters)
    assert plans
    return plans


def _explain(database: Database, statement: str, parameters: Any) -> list[str]:
    explain = _sqlite_plan if database.engine.dialect.name == "sqlite" else _postgresql_plan
    with database.read() as connection:
        return explain(connection, statement, parameters)


def _sqlite_plan(connection: Any, statement: str, parameters: Any) -> list[str]:
    return [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]


def _postgresql_plan(connection: Any, statement: str, parameters: Any) -> list[str]:
    found: list[str] = []
    for mode in ("force_custom_plan", "force_generic_plan"):
        connection.exec_driver_sql(f"SET plan_cache_mode = {mode}")
        # What a table of this size is read through for gladly, one of millions is not.
        connection.exec_driver_sql("SET enable_seqscan = off")
        cursor = connection.connection.cursor()
        cursor.execute(f"EXPLAIN (FORMAT JSON, VERBOSE) {statement}", parameters, prepare=mode == "force_generic_plan")
        answer = cursor.fetchone()[0]
        plan = answer if isinstance(answer, list) else orjson.loads(answer)
        found += list(_nodes(plan[0]["Plan"]))
    connection.exec_driver_sql("RESET ALL")
    return found


def _nodes(node: dict[str, Any]) -> Iterator[str]:
    parts = (node.get(name) for name in ("Node Type", "Relation Name", "Index Name", "Index Cond"))
    yield " ".join(str(part) for part in parts if part)
    for child in node.get("Plans", ()):
        yield from _nodes(child)


# A table or an index from its first row to its last: PostgreSQL's have no condition.
_WALKS = re.compile(r"Seq Scan|(?:Index|Index Only|Bitmap Index) Scan \S+(?: \S+)?$|Bitmap Index Scan \S+$")
_WALKS_ON_SQLITE = re.compile(r"^SCAN (?!(?:\d+ )?CONSTANT ROW|given|subquery|anon_|\()")
# What finds one row, or the few rows of one job.
_KEYS = re.compile(
    r"pk_\w+|uq_\w+|sqlite_autoindex_\w+|PRIMARY KEY|ix_\w+_job(?:_id)?|ix_tries_receiver|ix_api_keys_tenant|rowid"
    "|ix_batches_id"
)


def _indexes(plan: str) -> list[str]:
    return re.findall(r"\b(?:ix|pk|uq)_\w+|sqlite_autoindex_\w+|PRIMARY KEY", plan)


def _reads_nothing_through(plans: list[str], *, but: str = "no index at all") -> None:
    """`but`: an index that may be scanned, as all its rows match or the scan ends at a limit."""
    for plan in plans:
        assert but in plan or not (_WALKS.search(plan) or _WALKS_ON_SQLITE.search(plan)), plan


def _finds_by(plans: list[str], *wanted: str) -> None:
    """By these indexes and keys, and no other."""
    for plan in plans:
        for index in _indexes(plan):
            assert index in wanted or _KEYS.fullmatch(index), plan
    for index in wanted:
        assert any(index in plan for plan in plans), plans


_EVENT = {"job_id": "wait-1", "type": "job.started", "at_ms": T0, "attempt": 1, "data": "{}"}
_HOOK = Message("wait-1", 10, "wait-1", "job.completed", T0, "pending", 0, T0, T0, None, None, None)
_RECEIVER = Subscription("wait-1", "big", "http://c", frozenset(), "", T0)
_LINGERS = Quarantine("lost", T0)

BY_KEY: dict[str, Callable[[Database, JobStore], Any]] = {
    "submit": lambda _, store: store.submit([a_job(idempotency_key="k")], T0),
    "knows": lambda _, store: store.knows_keys([a_job(idempotency_key="k")], T0),
    "start": lambda _, store: store_start(store, "wait-1", "gpu1", "gpu1-slot0", "l w", T0),
    "settle": lambda _, store: store_end(store, "wait-1", 1, Reason.FINISHED, T0, result="{}"),
    "starts at once": lambda database, store: _all_at_once(
        database, *[store.start_write(f"wait-{n}", "gpu1", f"gpu1-slot{n}", "l w", T0, 0, fleet="") for n in (3, 4, 5)]
    ),
    "settles at once": lambda database, store: _all_at_once(
        database, *[store.settle_write(f"wait-{n}", 1, Reason.FINISHED, T0, result="{}") for n in (3, 4, 5)]
    ),
    "settle of a run without result": lambda _, store: store_end(store, "wait-1", 1, Reason.SERVER_BUSY, T0),
    "settle that quarantines": lambda _, store: store_end(
        store, "wait-2", 1, Reason.SERVER_LOST, T0, quarantine=_LINGERS
    ),
    "end_waiting": lambda _, store: store.cancel_waiting("wait-1", T0),
    "request_cancel": lambda _, store: store.request_cancel("wait-1", T0),
    "note_remote": lambda _, store: store_remote_id(store, "wait-1", 1, "r", T0),
    "revive": lambda _, store: store.revive("wait-1", T0),
    "get": lambda _, store: store.get("wait-1"),
    "briefs": lambda _, store: store.get_statuses(["wait-1", "wait-2"]),
    "state_of": lambda _, store: store.get_state("wait-1"),
    "headers": lambda _, store: store.get_message_headers("wait-1"),
    "events_of": lambda _, store: store.list_events("wait-1"),
    "delete_dead": lambda _, store: retention.delete_dead_job(store.database, "wait-1"),
    "whether it wrote an event": lambda database, _: _wrote(database),
    "claim of a webhook": lambda database, _: MessageQueue(database).claim(
        [MessageKey("wait-1", 10, of_job=True)], T0, T0
    ),
    "end of a delivery": lambda database, _: MessageQueue(database).note_delivered(
        _HOOK, _RECEIVER, DeliveryResult(True, 200, 1), T0
    ),
    "owed": lambda database, _: ResultNotifications(database).is_pending("t-wait-1"),
    "told": lambda database, _: ResultNotifications(database).delete(["t-wait-1", "t-wait-2"]),
    "withheld": lambda database, _: quarantine.find(database, "wait-1", 1),
    "let go of": lambda database, _: quarantine.release(database, "wait-1", 1),
    "version of the catalog": lambda database, _: Catalog(database).get_version(),
    "keys of a tenant": lambda database, _: ApiKeys(database).list_of("t"),
    "secret of a tenant": lambda database, _: SecretRotations(database).get("big"),
}


def _all_at_once(database: Database, *writes: Any) -> None:
    assert None not in database.commit_all(writes)


def _wrote(database: Database) -> bool:
    with database.read() as connection:
        return commit_outcome.has_row(connection, commit_outcome.WitnessRow(events, _EVENT))


def test_one_job_is_found_by_its_key_and_never_by_its_state(database, full):
    for act in BY_KEY.values():
        plans = _plans(database, lambda act=act: act(database, full))
        _reads_nothing_through(plans)
        _finds_by(plans)


def test_a_listing_reads_only_the_jobs_that_match_one_of_its_filters(database, full):
    states = (None, State.QUEUED, State.DEAD)
    for state, tenant, model, before in product(states, (None, "big"), (None, "busy"), (None, 100)):
        asked = {"state": state, "tenant": tenant, "model": model, "before_seq": before}
        plans = _plans(database, lambda asked=asked: job_list.find_jobs(database, **asked, limit=20))
        few = state is State.DEAD or (state is not None and model is None and tenant is None)
        wanted = "state_seq" if few else "tenant_seq" if tenant else "model_seq" if model else ""
        if wanted:
            _reads_nothing_through(plans)
            _finds_by(plans, f"ix_jobs_{wanted}")


@pytest.mark.parametrize("tenant", [None, "big"])
@pytest.mark.parametrize("before", [None, ENDED // 2])
def test_a_listing_by_a_label_reads_the_jobs_of_the_label_or_of_a_filter_that_has_fewer(database, full, tenant, before):
    _label_all(database, "team=search", 1)
    _label_all(database, "run=7", 1000)

    def finds_page_by(index: str, *labels: str, **filters: Any) -> None:
        filters |= {"tenant": tenant, "before_seq": before}
        with _executed(database) as executed:
            job_list.find_jobs(database, labels=labels, **filters, limit=20)
        plans = {statement: _explain(database, statement, parameters) for statement, parameters in executed}
        _reads_nothing_through([line for plan in plans.values() for line in plan])
        page = [line for statement, plan in plans.items() if "count(" not in statement for line in plan]
        _finds_by([line for line in page if "job_labels.seq = " not in line], index)

    of_label = "ix_job_labels_tenant_label_seq" if tenant else _LABEL_KEYS[database.engine.dialect.name]
    finds_page_by(of_label, "run=7")
    finds_page_by(of_label, "team=search", "run=7")
    finds_page_by(of_label, "run=7", model="busy")
    finds_page_by("ix_jobs_state_seq", "team=search", state=State.DEAD)
    finds_page_by("ix_jobs_model_seq", "team=search", model="idle")


_LABEL_KEYS = {"sqlite": "PRIMARY KEY", "postgresql": "pk_job_labels"}


def _label_all(database: Database, label: str, every: int) -> None:
    rows = f"SELECT '{label}', seq, tenant FROM jobs WHERE seq / {every} * {every} = seq"
    with database.engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO job_labels (label, seq, tenant) {rows}")


def test_running_jobs_are_found_by_their_state(database, full):
    plans = _plans(database, full.list_running)
    _reads_nothing_through(plans)
    _finds_by(plans, "ix_jobs_state_seq")


def test_listing_a_model_without_queued_jobs_reads_only_an_index_of_queued_jobs(database, full):
    alone = _plans(database, lambda: full.list_queued(["idle"], 0, 50))
    _reads_nothing_through(alone)
    _finds_by(alone, "ix_jobs_queued")
    beside = _plans(database, lambda: full.list_queued(["idle", "busy"], 0, 50))
    _reads_nothing_through(beside)
    by_place = {plan for plan in beside if "ix_jobs_state_seq" in plan}
    busy = "nearly all queued jobs belong to the busy model, so both indexes are equally good for each of its pages"
    assert len(by_place) <= 2, busy
    _finds_by([plan for plan in beside if plan not in by_place], "ix_jobs_queued")


def test_the_list_of_all_queued_jobs_reads_by_index_from_the_last_position(database, full):
    plans = _plans(database, lambda: full.list_queued(None, 100, 50))
    _reads_nothing_through(plans)
    _finds_by(plans, "ix_jobs_state_seq")


def test_the_event_reader_reads_by_index_from_the_last_position(database, full):
    def read() -> None:
        with database.read() as connection:
            last = event_reader.get_last_id(connection)
        event_reader.list_queued_between(database, last - 1, 10**9)

    plans = _plans(database, read)
    _reads_nothing_through(plans, but="Index Only Scan events pk_events")  # backwards, for the last event
    _finds_by(plans)


def test_counts_read_an_index_and_not_what_jobs_carry(database, full):
    plans = [plan for plan in _plans(database, lambda: ledger.read(database)) if re.search(r"\bjobs\b", plan)]
    assert plans
    for plan in plans:
        assert re.match(r"(Index Only Scan jobs|SCAN jobs USING COVERING INDEX) ix_jobs_state_seq", plan), plan


def test_a_repeated_count_reads_no_completed_jobs(database, full):
    plans = [plan for plan in _plans(database, lambda: ledger.count_by_state(database)) if "jobs" in plan]
    _reads_nothing_through(plans)
    _finds_by(plans, "ix_jobs_state_seq")


def test_a_count_of_queued_jobs_reads_no_others(database, full):
    plans = _plans(database, lambda: ledger.queued_by_model(full.database))
    _reads_nothing_through(plans, but="ix_jobs_queued")
    for plan in plans:
        assert all(re.match("ix_jobs_(queued|state_seq)", index) for index in _indexes(plan)), plan


def test_due_rows_are_found_by_the_index_of_their_time(database, full):
    """Nothing is due here; due rows would be first in the index."""
    for act, index in (
        (full.promote_due, "ix_jobs_due"),
        (full.expire_overdue, "ix_jobs_deadline"),
        (lambda now: retention.delete_ended_jobs(database, now), "ix_jobs_finished"),
        (full.delete_expired_keys, "ix_idempotency_keys_expires_ms"),
        (lambda now: MessageQueue(database).list_due_callbacks(now, 10), "ix_messages_due"),
        (
            lambda now: MessageQueue(database).list_due_callbacks(now, 10, DueCallback(T0, "m", 10, "", "")),
            "ix_messages_due",
        ),
        (lambda now: MessageQueue(database).list_newest_due_callbacks(now, 10), "ix_messages_due"),
        (lambda now: ResultNotifications(database).claim_due(now, 50), "ix_result_notifications_next_ms"),
    ):
        plans = _plans(database, lambda act=act: act(T0 - 1))
        _reads_nothing_through(plans)
        _finds_by(plans, index)


def test_given_up_callbacks_are_found_by_an_index_of_only_given_up_messages(database, full):
    found = Redelivery(database)
    for act in (
        found.list_given_up_callbacks,
        lambda: found.list_given_up_callbacks("big"),
        lambda: found.retry_callbacks("big", T0, LATER),
    ):
        _finds_by(_plans(database, act), "ix_messages_given_up")  # holds only these


def test_due_and_expired_rows_are_found_by_an_index_on_their_time(database, full):
    _fill(
        database,
        "jobs",
        10,
        f"'due-' || i, 'busy', 'delayed', 'scheduled', 5, 'big', {T0}, NULL, NULL, {T0}, 'rest', '{{}}'",
    )
    for act, index in (
        (lambda: full.promote_due(LATER), "ix_jobs_due"),
        (lambda: full.expire_overdue(LATER * 3, 10, _LINGERS), "ix_jobs_deadline"),
        (lambda: retention.delete_ended_jobs(database, LATER, 10), "ix_jobs_finished"),
        (lambda: ResultNotifications(database).claim_due(LATER, 10), "ix_result_notifications_next_ms"),
        (lambda: MessageQueue(database).list_due_callbacks(LATER, 10), "ix_messages_due"),
        (lambda: MessageQueue(database).list_newest_due_callbacks(LATER, 10), "ix_messages_due"),
    ):
        plans = _plans(database, act)
        _reads_nothing_through(plans)
        _finds_by(plans, index)
