"""Progress of runs, from workers to subscriptions, over a real Redis."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from redis.exceptions import RedisError

from routing.progress import (
    FIRST_ENTRY,
    EntryId,
    EntryIds,
    ProgressCommands,
    ProgressEntry,
    ProgressFollower,
    Subscription,
)
from routing.scripts import make_scripts
from slotkeeper.redis.connections import connect
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.scripts import Scripts
from tasks.servers.stream_reader import Piece
from tasks.worker import progress_publisher as saying
from tasks.worker.progress_publisher import ProgressPublisher
from tools.cluster.valkey_process import Valkey


@pytest.fixture
def scripts(valkey: Valkey) -> Iterator[Scripts]:
    valkey.flush()
    yield make_scripts(connect(valkey.url, 3.0), Keys("slotkeeper"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH_S", "_UNWATCHED_PAUSE_S", "_PAUSE_PER_STREAM_S", "_FAILURE_PAUSE_S"):
        monkeypatch.setattr(saying, name, 0.0)
    monkeypatch.setattr("routing.progress._RECONNECT_S", 0.01)


def publish(scripts: Scripts, text: str, entry_id: EntryId, kept: int = 100) -> int:
    return scripts.run(ProgressCommands(scripts).publish_command("j", entry_id, text, kept))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def receive(
    scripts: Scripts,
    act: Callable[[ProgressFollower, list[bytes], Callable[[], bool]], Any],
    entry_id: EntryId = FIRST_ENTRY,
) -> list[bytes]:
    """Return the texts that a subscription receives while `act` runs."""
    received: list[bytes] = []

    async def whole() -> None:
        follower = ProgressFollower(scripts)
        subscription = Subscription("j", entry_id, lambda entry: received.append(entry.text))
        follower.subscribe(subscription)
        await until(lambda: subscription.buffered is None)
        try:
            await act(follower, received, lambda: subscription.buffered is None)
        finally:
            follower.stop()

    asyncio.run(whole())
    return received


def test_a_subscription_receives_the_stored_entries_then_the_new_ones(scripts):
    publish(scripts, "a", EntryId(1, 5))

    async def act(_follower, received, _reads) -> None:
        await until(lambda: received == [b"a"])
        assert await asyncio.to_thread(publish, scripts, "b", EntryId(1, 6)) == 1
        await until(lambda: len(received) == 2)

    assert receive(scripts, act) == [b"a", b"b"]


def test_a_subscription_receives_only_entries_after_its_last_id(scripts):
    for ms in (5, 6, 7):
        publish(scripts, f"{ms}", EntryId(1, ms))

    async def act(_follower, received, _reads) -> None:
        await until(lambda: len(received) == 2)

    assert receive(scripts, act, EntryId(1, 5)) == [b"6", b"7"]


def test_entries_of_an_earlier_attempt_are_refused_after_those_of_a_later_one(scripts):
    publish(scripts, "old", EntryId(1, 900))
    assert publish(scripts, "new", EntryId(2, 5)) == 0
    assert publish(scripts, "a zombie's", EntryId(1, 901)) == -1

    async def act(_follower, received, _reads) -> None:
        await until(lambda: len(received) == 2)

    assert receive(scripts, act) == [b"old", b"new"]


def test_a_stream_keeps_only_the_last_entries(scripts):
    for ms in range(5):
        publish(scripts, f"{ms}", EntryId(1, ms + 1), kept=2)
    assert scripts.redis.xlen("slotkeeper:said:j") == 2
    assert 0 < scripts.redis.pttl("slotkeeper:said:j") <= 600_000


def test_a_stream_expires_soon_after_the_end_of_its_job(scripts):
    publish(scripts, "a", EntryId(1, 1))
    scripts.run(ProgressCommands(scripts).end_command("j"))
    assert 0 < scripts.redis.pttl("slotkeeper:said:j") <= 30_000


def test_a_subscription_continues_after_an_outage_of_redis(tmp_path):
    with Valkey(tmp_path / "valkey", appendonly=True) as valkey:
        scripts = make_scripts(connect(valkey.url, 3.0), Keys("slotkeeper"))

        async def act(_follower, received, reads) -> None:
            await asyncio.to_thread(valkey.kill)
            await until(lambda: not reads())
            await asyncio.to_thread(valkey.start)
            await until(reads)
            await asyncio.to_thread(publish, scripts, "back", EntryId(1, 9))
            await until(lambda: received == [b"back"])

        assert receive(scripts, act) == [b"back"]


def test_a_subscription_that_begins_during_the_connect_receives_entries_too(scripts):
    received: list[bytes] = []

    async def whole() -> None:
        follower = ProgressFollower(scripts)
        first, second = (
            Subscription(job_id, FIRST_ENTRY, lambda entry: received.append(entry.text)) for job_id in ("i", "j")
        )
        follower.subscribe(first)
        await asyncio.sleep(0)
        assert follower._channel is None
        follower.subscribe(second)
        try:
            await until(lambda: first.buffered is None and second.buffered is None)
            assert await asyncio.to_thread(publish, scripts, "a", EntryId(1, 1)) == 1
            await until(lambda: received == [b"a"])
        finally:
            follower.stop()

    asyncio.run(whole())


def test_the_remaining_entries_are_delivered_before_the_end_is_reported(scripts):
    publish(scripts, "a", EntryId(1, 1))
    received: list[bytes] = []

    async def whole() -> None:
        follower = ProgressFollower(scripts)
        subscription = Subscription("j", FIRST_ENTRY, lambda entry: received.append(entry.text))
        follower.finish(subscription, lambda: received.append(b"the end"))
        await until(lambda: len(received) == 2)

    asyncio.run(whole())
    assert received == [b"a", b"the end"]


def test_the_end_is_reported_while_redis_is_away():
    received: list[str] = []

    async def whole() -> None:
        follower = ProgressFollower(make_scripts(connect("redis://127.0.0.1:1/0", 0.5), Keys("slotkeeper")))
        follower.finish(Subscription("j", FIRST_ENTRY, lambda _: None), lambda: received.append("the end"))
        await until(lambda: bool(received))

    asyncio.run(whole())


def test_new_entries_wait_until_the_backlog_was_delivered():
    received: list[bytes] = []
    subscription = Subscription("j", FIRST_ENTRY, lambda entry: received.append(entry.text), buffered=[])
    subscription.deliver(ProgressEntry(EntryId(1, 3), b"c"))
    subscription.deliver_backlog([ProgressEntry(EntryId(1, 1), b"a"), ProgressEntry(EntryId(1, 3), b"c")])
    subscription.deliver(ProgressEntry(EntryId(1, 4), b"d"))
    assert received == [b"a", b"c", b"d"]


def test_entry_ids_grow_also_when_the_clock_is_set_back(monkeypatch):
    ids = EntryIds(3)
    first = ids.next()
    monkeypatch.setattr("routing.progress.time.time_ns", lambda: 0)
    assert ids.next() == EntryId(3, first.ms + 1)


# -- the worker's side -----------------------------------------------------------------------------------------


class Asked:
    """In place of Redis: keeps what it is told, once the test lets it answer."""

    def __init__(self, scripts: Scripts) -> None:
        self.told: list[dict[str, Any]] = []
        self.kept: list[int] = []
        self.ended = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.saying = ProgressPublisher(ProgressCommands(scripts), self.ask, asyncio.get_running_loop())

    async def ask(self, command: Any) -> int:
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        _, text, kept, _ = command.args
        if text:
            self.told.append(orjson.loads(text))
            self.kept.append(kept)
        self.ended = self.ended or not text
        return 1


def speaking(scripts: Scripts, act: Callable[[Asked, Any], Any]) -> Asked:
    async def whole() -> Asked:
        asked = Asked(scripts)
        await act(asked, asked.saying.stream("j", 2))
        return asked

    return asyncio.run(whole())


def test_what_comes_while_redis_is_asked_is_told_together(scripts):
    async def act(asked, speech) -> None:
        asked.may_answer.clear()
        for n, text in enumerate("abcd"):
            speech(Piece(text=text, offset=n))
            await asyncio.sleep(0)
        asked.may_answer.set()
        await until(lambda: len(asked.told) == 2)

    told = speaking(scripts, act).told
    assert told[0] == {"job_id": "j", "attempt": 2, "offset": 0, "text": "a"}
    assert told[1] == {"job_id": "j", "attempt": 2, "offset": 1, "text": "bcd"}


def test_a_text_that_begins_anew_is_told_apart(scripts):
    async def act(asked, speech) -> None:
        asked.may_answer.clear()
        for text, offset in (("x", 0), ("a", 0), ("b", 1)):
            speech(Piece(text=text, offset=offset))
        asked.may_answer.set()
        await until(lambda: len(asked.told) == 2)

    assert [(it["offset"], it["text"]) for it in speaking(scripts, act).told] == [(0, "x"), (0, "ab")]


def test_values_and_progress_are_told_each_and_the_same_progress_once(scripts):
    async def act(asked, speech) -> None:
        for piece in (Piece(progress=0.5), Piece(progress=0.5), Piece(value=[1], offset=0)):
            speech(piece)
        speech.close()
        await until(lambda: asked.ended)

    told = [{name: it[name] for name in it if name not in ("job_id", "attempt")} for it in speaking(scripts, act).told]
    assert told == [{"progress": 0.5}, {"offset": 0, "pieces": [[1]]}]


def test_a_redis_that_does_not_answer_takes_no_memory(scripts, monkeypatch):
    monkeypatch.setattr(saying, "MAX_PENDING_CHARS", 100)
    monkeypatch.setattr(saying, "MAX_ENTRY_CHARS", 20)

    async def act(asked, speech) -> None:
        asked.may_answer.clear()
        for n in range(1000):
            speech(Piece(text="x" * 10, offset=10 * n))
        assert len(speech._entries) < 20
        asked.may_answer.set()
        speech.close()
        await until(lambda: asked.ended)

    assert speaking(scripts, act).told[-1]["offset"] < 1000  # The gap shows in what is missing before the next.


def test_an_error_of_redis_costs_nothing_but_the_piece(scripts):
    async def act(asked, speech) -> None:
        asked.error = RedisError("away")
        speech(Piece(text="a", offset=0))
        await until(lambda: not speech._is_sending and not speech._entries)
        asked.error = None
        speech(Piece(text="b", offset=1))
        await until(lambda: len(asked.told) == 1)

    assert speaking(scripts, act).told[0]["offset"] == 1


def test_a_long_piece_comes_in_parts_and_a_large_value_not_at_all(scripts, monkeypatch):
    monkeypatch.setattr(saying, "MAX_ENTRY_CHARS", 4)

    async def act(asked, speech) -> None:
        speech(Piece(text="abcdefg", offset=0))
        speech(Piece(value="abcdefg", offset=7))
        speech.close()
        await until(lambda: asked.ended)

    assert [it["text"] for it in speaking(scripts, act).told] == ["abcd", "efg"]


def test_what_is_kept_of_a_run_is_bounded_by_its_bytes(scripts, monkeypatch):
    monkeypatch.setattr(saying, "MAX_STORED_BYTES", 200)
    monkeypatch.setattr(saying, "MAX_ENTRY_CHARS", 10)

    async def act(asked, speech) -> None:
        speech(Piece(text="x" * 200, offset=0))
        speech.close()
        await until(lambda: asked.ended)

    kept = speaking(scripts, act).kept
    assert kept[0] == 1 and 1 < max(kept) < 5


def test_a_run_that_says_nothing_asks_redis_nothing(scripts):
    async def act(asked, speech) -> None:
        speech.close()
        await asyncio.sleep(0)
        assert not asked.ended and asked.told == []

    speaking(scripts, act)
