"""The change listener wakes its waiters after each commit to the database, and at no other time."""

import pytest

from slotkeeper.db import Database, change_listener
from slotkeeper.db.change_listener import ChangeDetector, ChangeListener
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.store import JobStore
from tests.support.builders import a_queued_job, eventually


@pytest.fixture
def news(database: Database) -> ChangeDetector:
    """Up to what there is."""
    found = ChangeDetector(database)
    assert found.has_changed()
    return found


def test_each_commit_by_any_connection_is_reported_once(
    news: ChangeDetector, store: JobStore, database_url: str
) -> None:
    a_queued_job(store)
    assert [news.has_changed(), news.has_changed()] == [True, False]
    another = Database(database_url)
    try:
        a_queued_job(JobStore(another))
    finally:
        another.close()
    assert [news.has_changed(), news.has_changed()] == [True, False]


def test_a_read_is_not_reported_as_a_change(news: ChangeDetector, store: JobStore) -> None:
    store.get("nobody")
    assert not news.has_changed()


def test_the_detector_reports_one_change_after_the_database_was_unavailable(
    news: ChangeDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> object:
        raise DatabaseUnavailable("away")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(news, "_poll", away)
        with pytest.raises(DatabaseUnavailable):
            news.has_changed()
    assert [news.has_changed(), news.has_changed()] == [True, False]


def test_a_listener_that_fails_takes_it_for_a_change(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_listener, "POLL_S", 0.001)
    monkeypatch.setattr(ChangeDetector, "has_changed", lambda _: 1 / 0)
    woken: list[bool] = []
    found = ChangeListener(database)
    found.on_change(lambda: woken.append(True))
    found.start()
    eventually(lambda: len(woken) > 2)
    found.stop()


def test_a_callback_that_raises_stops_neither_the_other_callbacks_nor_the_thread(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_listener, "POLL_S", 0.001)
    monkeypatch.setattr(ChangeDetector, "has_changed", lambda _: True)
    called: list[bool] = []
    listener = ChangeListener(database)
    listener.on_change(lambda: 1 / 0)
    listener.on_change(lambda: called.append(True))
    listener.start()
    eventually(lambda: len(called) > 2)
    listener.stop()
