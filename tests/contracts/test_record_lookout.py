"""Who waits for something new in the record is woken by whatever is written to it, and by nothing else."""

import pytest

from slotkeeper.db import lookout
from slotkeeper.db.db import Database
from slotkeeper.db.lookout import Lookout, News
from slotkeeper.errors import RecordUnavailable
from slotkeeper.jobs.store import Store
from tests.support.builders import a_queued_job, eventually


@pytest.fixture
def news(database: Database) -> News:
    """Up to what there is."""
    found = News(database)
    assert found.has_come()
    return found


def test_whatever_anybody_commits_is_news_once(news: News, store: Store, database_url: str) -> None:
    a_queued_job(store)
    assert [news.has_come(), news.has_come()] == [True, False]
    another = Database(database_url)
    try:
        a_queued_job(Store(another))
    finally:
        another.close()
    assert [news.has_come(), news.has_come()] == [True, False]


def test_what_was_only_read_is_no_news(news: News, store: Store) -> None:
    store.get("nobody")
    assert not news.has_come()


def test_after_the_record_was_away_there_is_news(news: News, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> object:
        raise RecordUnavailable("away")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(news, "_look", away)
        with pytest.raises(RecordUnavailable):
            news.has_come()
    assert [news.has_come(), news.has_come()] == [True, False]


def test_a_lookout_that_fails_takes_it_for_news(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever relies on it looks too often then, instead of hardly ever."""
    monkeypatch.setattr(lookout, "EVERY_S", 0.001)
    monkeypatch.setattr(News, "has_come", lambda _: 1 / 0)
    woken: list[bool] = []
    found = Lookout(database)
    found.wake(lambda: woken.append(True))
    found.begin()
    eventually(lambda: len(woken) > 2)
    found.end()
