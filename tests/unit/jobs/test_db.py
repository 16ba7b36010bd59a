"""How the engines are set up; what they promise stands in tests/contracts/test_record_commit.py."""

import pytest
from sqlalchemy import event

from jobs.db import Database, _unavailable


@pytest.fixture
def sqlite(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'new' / 'folder' / 'record.db'}")
    yield database
    database.close()


@pytest.mark.parametrize(("pragma", "value"), [("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)])
def test_an_answered_write_survives_a_power_cut_on_every_connection(sqlite, pragma, value):
    with sqlite.read() as first, sqlite.read() as second:
        for connection in (first, second):
            assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value


def test_reading_takes_no_lock_and_writing_takes_it_at_once(sqlite):
    statements = []
    event.listen(sqlite.engine, "before_cursor_execute", lambda c, cursor, sql, *_: statements.append(sql))
    with sqlite.read() as connection:
        connection.exec_driver_sql("SELECT 1")
    assert statements == ["SELECT 1"]
    sqlite.write(lambda tx: tx.connection.exec_driver_sql("SELECT 2"))
    assert statements[1:] == ["PRAGMA synchronous=FULL", "BEGIN IMMEDIATE", "SELECT 2"]


def test_only_what_nobody_was_promised_does_not_wait_for_the_disk(sqlite):
    statements = []
    event.listen(sqlite.engine, "before_cursor_execute", lambda c, cursor, sql, *_: statements.append(sql))
    sqlite.write(lambda tx: tx.connection.exec_driver_sql("SELECT 1"), relaxed=True)
    sqlite.write(lambda tx: tx.connection.exec_driver_sql("SELECT 2"))
    assert [sql for sql in statements if "synchronous" in sql] == [
        "PRAGMA synchronous=NORMAL",
        "PRAGMA synchronous=FULL",
    ]


@pytest.mark.parametrize(("query", "expected"), [("", 5), ("?connect_timeout=9", "9")])
def test_a_postgresql_that_does_not_answer_is_waited_for_a_few_seconds_only(query, expected):
    database = Database(f"postgresql://nobody@192.0.2.1/record{query}")
    given = []

    def connect(dialect, record, cargs, cparams):
        given.append(cparams["connect_timeout"])
        raise ZeroDivisionError

    event.listen(database.engine, "do_connect", connect)
    with pytest.raises(ZeroDivisionError):
        database.write(lambda tx: None)
    assert given == [expected]


def test_an_unavailable_record_says_why_in_one_line():
    assert "(no reason given)" in _unavailable(Exception("")).detail
    assert "(connection refused)" in _unavailable(Exception("connection refused\nIs the server running?")).detail
