"""Prepared statements: SQLAlchemy's, run by the driver, with SQLAlchemy's errors."""

import pytest
from sqlalchemy import Boolean, Column, Integer, MetaData, Table, Text, bindparam, event, insert, select, update
from sqlalchemy.exc import IntegrityError, OperationalError

from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement, execute_raw, execute_text

things = Table(
    "things",
    MetaData(),
    Column("name", Text, primary_key=True),
    Column("size", Integer),
    Column("good", Boolean),
)
ADD = CompiledStatement(insert(things), ["name", "size"])
GROW = CompiledStatement(
    update(things)
    .where(things.c.name == bindparam("p_name"), things.c.size < 10)
    .values(size=things.c.size + bindparam("p_by"))
    .returning(things.c.name, things.c.size)
)
SIZE = CompiledStatement(select(things.c.size).where(things.c.name == bindparam("p_name")))


@pytest.fixture
def connection(database):
    with database.engine.connect() as connection, connection.begin():
        connection.exec_driver_sql("CREATE TEMPORARY TABLE things (name TEXT PRIMARY KEY, size INTEGER, good INTEGER)")
        yield connection


def test_parameters_are_bound_by_name_and_rows_have_the_names_of_their_columns(connection):
    assert ADD.execute(connection, {"size": 3, "name": "a", "more": "than it takes"}) == 1
    assert [(row.name, row.size) for row in GROW.fetch_all(connection, {"p_name": "a", "p_by": 4})] == [("a", 7)]
    assert GROW.fetch_first(connection, {"p_name": "b", "p_by": 4}) is None
    assert SIZE.fetch_value(connection, {"p_name": "a"}) == 7
    assert SIZE.fetch_value(connection, {"p_name": "b"}) is None


def test_rows_are_inserted_together_whatever_is_missing_in_them(connection):
    rows = BulkInsert(things)
    rows.execute(connection, [{"name": "a", "size": None}, {"name": "b", "size": 2}])
    rows.execute(connection, [{"size": None, "name": f"c{n}"} for n in range(300)])
    rows.execute(connection, [{"name": "d"}])
    assert SIZE.fetch_value(connection, {"p_name": "b"}) == 2
    assert connection.exec_driver_sql("SELECT count(*), count(size) FROM things").one() == (303, 1)


def test_a_bulk_insert_skips_existing_rows_and_returns_the_new_rows_in_order(connection):
    rows = BulkInsert(things, unique=("name",), returning=(things.c.size,))
    assert rows.execute(connection, [{"name": "a", "size": 0}]) == [(0,)]
    given = [{"name": name, "size": n} for n, name in enumerate(["a", "b", "b", *map(str, range(3, 1000))])]
    assert rows.execute(connection, given) == [(n,) for n in [1, *range(3, 1000)]]


def test_driver_errors_become_sqlalchemy_errors_that_contain_no_value(connection):
    ADD.execute(connection, {"name": "a", "size": 1})
    with pytest.raises(IntegrityError) as refused:
        ADD.execute(connection, {"name": "a", "size": 4711})
    assert refused.value.orig is not None
    assert "4711" not in str(refused.value)
    assert not refused.value.connection_invalidated


def test_listeners_of_the_engine_receive_these_statements_too(database, connection):
    received = []

    def listen(connection, cursor, text, values, *_):
        received.append((text, values))

    event.listen(database.engine, "before_cursor_execute", listen)
    ADD.execute(connection, {"name": "a", "size": 1})
    execute_text(connection, "SELECT 1")
    assert [text.split()[0] for text, _ in received] == ["INSERT", "SELECT"]
    assert "a" in (received[0][1].values() if isinstance(received[0][1], dict) else received[0][1])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_statement_with_a_column_that_needs_conversion_cannot_be_prepared(connection):
    for statement, columns in ((select(things.c.good), None), (insert(things), ["name", "good"])):
        with pytest.raises(TypeError, match="cannot be compiled once"):
            CompiledStatement(statement, columns).execute(connection, {"name": "a", "good": True})


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_connection_that_was_lost_is_known_to_be_lost(database):
    with database.engine.connect() as connection:
        connection.connection.dbapi_connection.pgconn.finish()
        with pytest.raises(OperationalError) as lost:
            execute_text(connection, "SELECT 1")
        assert lost.value.connection_invalidated
        assert connection.invalidated


def test_a_connection_that_was_interrupted_is_used_no_more(database):
    def interrupt(cursor):
        raise KeyboardInterrupt

    with database.engine.connect() as connection:
        with pytest.raises(KeyboardInterrupt):
            execute_raw(connection, "SELECT 1", (), interrupt)
        assert connection.invalidated
