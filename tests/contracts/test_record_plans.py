"""Every statement that the product says again and again finds its rows by an index, and reads no table through.

On both databases; without any statistics, and with those of a large table of ended jobs, from before the backlog came.
On PostgreSQL also in the form that it takes after some executions, when it plans without knowing the values.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import orjson
import pytest
from sqlalchemy import event

from jobs.db import Database
from jobs.states import State, Why
from jobs.store import Store
from tests.support.builders import T0, a_job

ENDED, WAITING = 4000, 400
LATER = T0 + 60_000
_FIELDS = "id, model, state, why, tier, tenant, created_ms, finished_ms, deadline_ms, due_ms, source, payload"


@pytest.fixture(params=["no statistics", "statistics from before the backlog"])
def full(request: pytest.FixtureRequest, database: Database) -> Store:
    """Many ended jobs of one tenant and model, then a backlog."""
    _fill(database, "done", ENDED, f"'completed', 'finished', 5, 'big', {T0}, {T0}, NULL, NULL")
    if request.param != "no statistics":
        with database.engine.connect() as connection:
            connection.exec_driver_sql("ANALYZE")
            connection.commit()
    _fill(database, "wait", WAITING, f"'queued', 'submitted', 5, 'big', {T0}, NULL, {LATER * 2}, NULL")
    return Store(database)


def _fill(database: Database, name: str, rows: int, values: str) -> None:
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})"
    with database.engine.begin() as connection:
        connection.exec_driver_sql(
            f"INSERT INTO jobs ({_FIELDS}) {numbers} SELECT '{name}-' || i, 'busy', {values}, 'rest', '{{}}' FROM n"
        )


@contextmanager
def _said(database: Database) -> Iterator[list[tuple[str, Any]]]:
    said: list[tuple[str, Any]] = []

    def note(connection: object, cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if re.match(r"SELECT|UPDATE|DELETE|INSERT", statement):
            said.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def _plans(database: Database, act: Callable[[], Any]) -> list[str]:
    """How the database finds what each statement of `act` asks for."""
    with _said(database) as said:
        act()
    explain = _sqlite_plan if database.engine.dialect.name == "sqlite" else _postgresql_plan
    plans = []
    with database.read() as connection:
        for statement, parameters in said:
            if isinstance(parameters, list):
                continue  # rows of an executemany: nothing is searched
            plans += explain(connection, statement, parameters)
    assert plans
    return plans


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


def _reads_no_table_through(plans: list[str], *, but_states: bool = False) -> None:
    for plan in plans:
        assert not re.search(r"Seq Scan", plan), plan
        assert not re.search(r"^SCAN (?!.*(USING|CONSTANT|subquery|anon_|\())", plan), plan
        if not but_states:
            assert "ix_jobs_state_seq" not in plan, plan


BY_KEY: dict[str, Callable[[Store], Any]] = {
    "submit": lambda store: store.submit([a_job(idempotency_key="k")], T0),
    "knows": lambda store: store.knows([a_job(idempotency_key="k")], T0),
    "start": lambda store: store.start("wait-1", "gpu1", "gpu1-slot0", "l w", T0),
    "settle": lambda store: store.settle("wait-1", 1, Why.FINISHED, T0, result="{}"),
    "settle of a run without result": lambda store: store.settle("wait-1", 1, Why.SERVER_BUSY, T0),
    "end_waiting": lambda store: store.end_waiting("wait-1", Why.CANCEL_REQUESTED, T0),
    "request_cancel": lambda store: store.request_cancel("wait-1", T0),
    "note_remote": lambda store: store.note_remote("wait-1", 1, "r", T0),
    "revive": lambda store: store.revive("wait-1", T0),
    "get": lambda store: store.get("wait-1"),
    "state_of": lambda store: store.state_of("wait-1"),
    "headers": lambda store: store.headers("wait-1"),
    "events_of": lambda store: store.events_of("wait-1"),
    "last_seq": lambda store: store.last_seq(),
    "delete_dead": lambda store: store.delete_dead("wait-1"),
}


def test_one_job_is_found_by_its_key_and_never_by_its_state(database, full):
    for act in BY_KEY.values():
        _reads_no_table_through(_plans(database, lambda act=act: act(full)))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("full", ["no statistics"], indirect=True)
def test_a_listing_reads_no_more_than_the_jobs_of_one_of_what_it_asks_for(database, full):
    states = (None, State.QUEUED, State.DEAD)
    for state, tenant, model, before in product(states, (None, "big"), (None, "busy"), (None, 100)):
        asked = {"state": state, "tenant": tenant, "model": model, "before_seq": before}
        plans = _plans(database, lambda asked=asked: full.find(**asked, limit=20))
        few = state is State.DEAD or (state is not None and model is None and tenant is None)
        wanted = "state_seq" if few else "tenant_seq" if tenant else "model_seq" if model else ""
        assert any(wanted in plan for plan in plans), (asked, plans)
        if wanted:
            _reads_no_table_through(plans, but_states=few)


def test_a_model_without_queued_jobs_costs_one_look_into_an_index_of_queued_jobs(database, full):
    for models in (["idle"], ["idle", "busy"]):
        plans = _plans(database, lambda models=models: full.queued(models, 0, 50))
        _reads_no_table_through(plans)
        assert any("ix_jobs_queued" in plan for plan in plans), plans


def test_what_time_has_come_for_is_found_by_its_time(database, full):
    """Nothing is due here; what is, stands first in the index."""
    for act, index in (
        (full.promote_due, "ix_jobs_due"),
        (full.expire_overdue, "ix_jobs_deadline"),
        (full.purge, "ix_jobs_finished"),
    ):
        plans = _plans(database, lambda act=act: act(T0 - 1))
        _reads_no_table_through(plans)
        assert any(index in plan for plan in plans), plans
