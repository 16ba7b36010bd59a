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
from tasks.worker import progress_publisher
from tasks.worker.progress_publisher import ProgressPublisher
from tools.cluster.valkey_process import Valkey


@pytest.fixture
def scripts(valkey: Valkey) -> Iterator[Scripts]:
    valkey.flush()
    yield make_scripts(connect(valkey.url, 3.0), Keys("slotkeeper"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH_S", "_UNWATCHED_PAUSE_S", "_PAUSE_PER_STREAM_S", "_FAILURE_PAUSE_S"):
        monkeypatch.setattr(progress_publisher, name, 0.0)
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


def test_a_subscription_that_starts_while_the_follower_connects_receives_entries(scripts):
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


def test_the_end_is_reported_while_redis_is_down():
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


class FakeRedis:
    """A fake Redis that records each published entry, and answers when the test allows it."""

    def __init__(self, scripts: Scripts) -> None:
        self.entries: list[dict[str, Any]] = []
        self.kept: list[int] = []
        self.ended = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.publisher = ProgressPublisher(ProgressCommands(scripts), self.ask, asyncio.get_running_loop())

    async def ask(self, command: Any) -> int:
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        _, text, kept, _ = command.args
        if text:
            self.entries.append(orjson.loads(text))
            self.kept.append(kept)
        self.ended = self.ended or not text
        return 1


def run_publisher(scripts: Scripts, act: Callable[[FakeRedis, Any], Any]) -> FakeRedis:
    async def whole() -> FakeRedis:
        fake = FakeRedis(scripts)
        await act(fake, fake.publisher.stream("j", 2))
        return fake

    return asyncio.run(whole())


def test_pieces_that_arrive_during_a_request_are_sent_together(scripts):
    async def act(fake, stream) -> None:
        fake.may_answer.clear()
        for n, text in enumerate("abcd"):
            stream(Piece(text=text, offset=n))
            await asyncio.sleep(0)
        fake.may_answer.set()
        await until(lambda: len(fake.entries) == 2)

    entries = run_publisher(scripts, act).entries
    assert entries[0] == {"job_id": "j", "attempt": 2, "offset": 0, "text": "a"}
    assert entries[1] == {"job_id": "j", "attempt": 2, "offset": 1, "text": "bcd"}


def test_a_text_that_starts_again_is_a_separate_entry(scripts):
    async def act(fake, stream) -> None:
        fake.may_answer.clear()
        for text, offset in (("x", 0), ("a", 0), ("b", 1)):
            stream(Piece(text=text, offset=offset))
        fake.may_answer.set()
        await until(lambda: len(fake.entries) == 2)

    assert [(entry["offset"], entry["text"]) for entry in run_publisher(scripts, act).entries] == [(0, "x"), (0, "ab")]


def test_each_value_and_each_new_progress_is_a_separate_entry(scripts):
    async def act(fake, stream) -> None:
        for piece in (Piece(progress=0.5), Piece(progress=0.5), Piece(value=[1], offset=0)):
            stream(piece)
        stream.close()
        await until(lambda: fake.ended)

    entries = [
        {name: entry[name] for name in entry if name not in ("job_id", "attempt")}
        for entry in run_publisher(scripts, act).entries
    ]
    assert entries == [{"progress": 0.5}, {"offset": 0, "pieces": [[1]]}]


def test_pending_entries_are_bounded_while_redis_does_not_answer(scripts, monkeypatch):
    monkeypatch.setattr(progress_publisher, "MAX_PENDING_CHARS", 100)
    monkeypatch.setattr(progress_publisher, "MAX_ENTRY_CHARS", 20)

    async def act(fake, stream) -> None:
        fake.may_answer.clear()
        for n in range(1000):
            stream(Piece(text="x" * 10, offset=10 * n))
        assert len(stream._entries) < 20
        fake.may_answer.set()
        stream.close()
        await until(lambda: fake.ended)

    assert run_publisher(scripts, act).entries[-1]["offset"] < 1000  # The next offset shows the gap.


def test_a_redis_error_loses_only_the_piece_that_was_being_sent(scripts):
    async def act(fake, stream) -> None:
        fake.error = RedisError("away")
        stream(Piece(text="a", offset=0))
        await until(lambda: not stream._is_sending and not stream._entries)
        fake.error = None
        stream(Piece(text="b", offset=1))
        await until(lambda: len(fake.entries) == 1)

    assert run_publisher(scripts, act).entries[0]["offset"] == 1


def test_a_long_text_is_split_and_a_large_value_is_dropped(scripts, monkeypatch):
    monkeypatch.setattr(progress_publisher, "MAX_ENTRY_CHARS", 4)

    async def act(fake, stream) -> None:
        stream(Piece(text="abcdefg", offset=0))
        stream(Piece(value="abcdefg", offset=7))
        stream.close()
        await until(lambda: fake.ended)

    assert [entry["text"] for entry in run_publisher(scripts, act).entries] == ["abcd", "efg"]


def test_the_stored_entries_of_a_run_are_bounded_by_their_bytes(scripts, monkeypatch):
    monkeypatch.setattr(progress_publisher, "MAX_STORED_BYTES", 200)
    monkeypatch.setattr(progress_publisher, "MAX_ENTRY_CHARS", 10)

    async def act(fake, stream) -> None:
        stream(Piece(text="x" * 200, offset=0))
        stream.close()
        await until(lambda: fake.ended)

    kept = run_publisher(scripts, act).kept
    assert kept[0] == 1 and 1 < max(kept) < 5


def test_a_run_without_progress_sends_no_request_to_redis(scripts):
    async def act(fake, stream) -> None:
        stream.close()
        await asyncio.sleep(0)
        assert not fake.ended and fake.entries == []

    run_publisher(scripts, act)
