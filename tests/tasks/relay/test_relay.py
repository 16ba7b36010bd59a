"""The relay: every event reaches each sink, in order, whoever dies meanwhile and whatever is away."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_structured
from cloudevents.core.formats.json import JSONFormat

from routing.scripts import make_scripts
from slotkeeper.db import Database
from slotkeeper.db.change_listener import ChangeListener
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import JobError
from slotkeeper.outbox.event_reader import EventReader
from slotkeeper.outbox.sink_cursors import SinkCursors
from slotkeeper.redis.keys import Keys
from slotkeeper.registry.catalog import Catalog
from tasks.relay import cloudevents
from tasks.relay import relay as relays
from tasks.relay.relay import Relay
from tasks.relay.sinks.redis_stream import EventStream, RedisStreamSink
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable
from tests.support.builders import SECOND, T0, a_job, a_queued_job, a_running_job, an_ended_job, eventually
from tests.support.ends import store_end
from tools.cluster.valkey_process import Valkey

CAP = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey"), appendonly=True) as valkey:
        yield valkey


@pytest.fixture
def valkey(server: Valkey) -> Valkey:
    server.flush()
    return server


class Reader:
    """Reads the stream as anybody would."""

    def __init__(self, valkey: Valkey) -> None:
        self._redis: Any = valkey.client()

    def events(self) -> list[dict[str, Any]]:
        found = self._redis.xread({"slotkeeper:events": "0"})
        return [orjson.loads(fields[b"event"]) for _, fields in found[0][1]] if found else []

    def ids(self) -> list[int]:
        return [int(it["id"]) for it in self.events()]


def a_relay(database: Database, valkey: Valkey, cap: int = CAP) -> Relay:
    stream = EventStream(make_scripts(valkey.client(), Keys("slotkeeper")), cap)

    def known(number: int) -> str | None:
        found = EventReader(database, after=number - 1, transitions_only=False).read(1)
        source = f"/slotkeeper/{Catalog(database).get_database_id()}"
        return cloudevents.to_json(found[0], source) if found and found[0].event.id == number else None

    return Relay("redis", database, RedisStreamSink(stream, cap, known))


def all_ids(database: Database) -> list[int]:
    return [it.event.id for it in EventReader(database, transitions_only=False).read(10_000)]


def test_every_event_reaches_the_stream_in_order_as_a_cloudevent_that_the_sdk_reads(database, store, valkey):
    job = an_ended_job(store, tenant="acme", priority=2)
    relay = a_relay(database, valkey)
    assert relay.relay_batch() == 3
    found = Reader(valkey).events()
    assert [it["type"] for it in found] == ["job.enqueued", "job.started", "job.completed"]
    assert {it["subject"] for it in found} == {job.id}
    for it in found:
        message = HTTPMessage(headers={"content-type": cloudevents.CONTENT_TYPE}, body=orjson.dumps(it))
        read = from_structured(message, JSONFormat())
        assert (read.get_id(), read.get_type(), read.get_specversion()) == (it["id"], it["type"], "1.0")
    assert found[1]["data"] == {
        "job_id": job.id,
        "model": "zimg",
        "tenant": "acme",
        "priority": 2,
        "server": "gpu1",
        "attempt": 1,
        "why": "started",
        "at": "2027-01-15T08:00:00.000Z",
    }
    assert relay.relay_batch() == 0


def test_a_run_that_is_tried_again_is_a_failure_by_its_alias_with_attempt_and_retry_in_ms(database, store, valkey):
    run = a_running_job(store)
    store_end(store, run.job.id, 1, Reason.SERVER_ERROR, T0, error=JobError("server_error", "no"), due_ms=T0 + SECOND)
    a_relay(database, valkey).relay_batch()
    told = Reader(valkey).events()[-1]
    assert (told["type"], told["alias"]) == ("job.delayed", "job.failed")
    assert (told["data"]["attempt"], told["data"]["retry_in_ms"]) == (1, SECOND)
    assert told["data"]["error"] == {"code": "server_error", "message": "no"}


def test_an_act_is_published_with_who_and_what(database, valkey):
    Catalog(database).register("zimg", "gpu1", "http://gpu1/run", 2, T0)
    a_relay(database, valkey).relay_batch()
    (told,) = Reader(valkey).events()
    assert (told["type"], told["subject"]) == ("act.server.register", "server/gpu1")
    assert (told["data"]["actor"], told["data"]["interface"]) == ("slotkeeper", "process")


def test_a_stream_that_is_away_holds_nothing_up_and_gets_everything_afterwards(database, store, valkey):
    relay = a_relay(database, valkey)
    first = a_queued_job(store)
    relay.relay_batch()
    valkey.kill()
    jobs = [an_ended_job(store).id for _ in range(5)]
    with pytest.raises(SinkUnavailable):
        relay.relay_batch()
    (lag,) = SinkCursors(database).list_lags(["redis"], T0 + 5 * SECOND)
    assert (lag.events, lag.seconds) == (15, 5.0)
    valkey.start()
    assert _drained(relay) == 15
    assert Reader(valkey).ids() == all_ids(database)
    assert {it["subject"] for it in Reader(valkey).events()} == {first.id, *jobs}
    assert SinkCursors(database).list_lags(["redis"], T0)[0].seconds == 0


def _drained(relay: Relay) -> int:
    published = 0
    while found := relay.relay_batch():
        published += found
    return published


def test_a_stream_that_lost_its_last_moments_gets_them_again(database, store, valkey):
    """As a replica that was behind and has taken over."""
    relay = a_relay(database, valkey)
    an_ended_job(store)
    relay.relay_batch()
    client: Any = valkey.client()
    key = "slotkeeper:events"
    kept = client.xrange(key)[:1]
    client.delete(key)
    client.xadd(key, kept[0][1], id=kept[0][0])
    an_ended_job(store)
    _settled(relay)
    assert Reader(valkey).ids() == all_ids(database)


def _settled(relay: Relay) -> None:
    """It may find first that it has to look anew."""
    quiet = 0
    while quiet < 2:
        quiet = 0 if relay.relay_batch() else quiet + 1


def test_a_stream_that_was_emptied_is_filled_with_the_newest(database, store, valkey):
    relay = a_relay(database, valkey, cap=3)
    an_ended_job(store)
    an_ended_job(store)
    relay.relay_batch()
    valkey.flush()
    an_ended_job(store)
    _settled(relay)
    assert Reader(valkey).ids() == all_ids(database)[3:]


def test_a_stream_of_another_record_is_set_aside(database, store, valkey):
    client: Any = valkey.client()
    client.xadd("slotkeeper:events", {"event": "{}"}, id="999999999-0")
    an_ended_job(store)
    _settled(a_relay(database, valkey))
    assert Reader(valkey).ids() == all_ids(database)
    assert client.xlen("slotkeeper:events:before") == 1


def test_what_is_in_the_stream_already_is_not_added_again(database, store, valkey):
    """The relay died before its cursor was moved."""
    an_ended_job(store)
    first = a_relay(database, valkey)
    first._cursors.advance = lambda *_: False  # type: ignore[method-assign]
    first.relay_batch()
    first._cursors = SinkCursors(database)
    first._close()
    assert SinkCursors(database).find_slowest(["redis"]) < all_ids(database)[0]
    an_ended_job(store)
    _settled(a_relay(database, valkey))
    assert Reader(valkey).ids() == all_ids(database)
    assert SinkCursors(database).find_slowest(["redis"]) == all_ids(database)[-1]


def test_one_relay_at_a_time_and_the_next_when_its_time_is_over(database, store, valkey, monkeypatch):
    first, second = a_relay(database, valkey), a_relay(database, valkey)
    job = a_queued_job(store)
    assert first.relay_batch() == 1
    a_queued_job(store)
    assert second.relay_batch() == 0
    assert Reader(valkey).ids() == [store.list_events(job.id)[0].id]
    first._close()
    second._renew_at = 0.0
    assert second.relay_batch() == 1


def test_a_relay_that_was_taken_over_from_moves_nothing_and_adds_nothing(database, store, valkey, monkeypatch):
    """It stood still for longer than it may."""
    first, second = a_relay(database, valkey), a_relay(database, valkey)
    a_queued_job(store)
    first.relay_batch()
    first._cursors.release("redis", first._holder)
    a_queued_job(store)
    assert second.relay_batch() == 1
    a_queued_job(store)
    assert first.relay_batch() == 0
    assert not SinkCursors(database).advance("redis", first._holder, first._position, 10**9, T0)
    assert _drained(second) == 1
    assert Reader(valkey).ids() == all_ids(database)


class Slow:
    """A sink whose answers a test decides on."""

    retention = None

    def __init__(self) -> None:
        self.taken: list[PublishedEvent] = []
        self.fails = False

    def resume_after(self, position: int) -> int:
        return position

    def publish(self, batch: Any) -> None:
        self.taken.extend(batch)
        if self.fails:
            raise SinkUnavailable("no answer")

    def close(self) -> None:
        pass


def test_what_a_sink_has_not_confirmed_is_published_again(database, store):
    sink = Slow()
    relay = Relay("kafka", database, sink)
    job = an_ended_job(store)
    sink.fails = True
    with pytest.raises(SinkUnavailable):
        relay.relay_batch()
    assert SinkCursors(database).find_slowest(["kafka"]) == 0
    sink.fails = False
    relay.relay_batch()
    numbers = [it.id for it in store.list_events(job.id)]
    assert [it.number for it in sink.taken] == numbers * 2
    assert SinkCursors(database).find_slowest(["kafka"]) == numbers[-1]


class SlowSink:
    """Takes its time for each event; with `patience_s` it gives up on a batch that takes longer."""

    retention = None

    def __init__(self, each_s: float, patience_s: float) -> None:
        self.now, self.batches, self._each_s, self._patience_s = 0.0, list[int](), each_s, patience_s

    def resume_after(self, position: int) -> int:
        return position

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        took_s = len(batch) * self._each_s
        self.now += min(took_s, self._patience_s)
        if took_s > self._patience_s:
            raise SinkUnavailable("no answer")
        self.batches.append(len(batch))

    def close(self) -> None: ...


@pytest.mark.parametrize("patience_s", [4.0, 100.0], ids=["that gives up", "that does not"])
def test_a_slow_sink_is_given_as_much_as_it_takes_in_its_time(database, store, monkeypatch, patience_s):
    store.submit([a_job() for _ in range(300)], T0)
    sink = SlowSink(0.1, patience_s)
    monkeypatch.setattr("tasks.relay.relay.time.monotonic", lambda: sink.now)
    relay = Relay("slow", database, sink)
    for _ in range(100):
        with suppress(SinkUnavailable):
            relay.relay_batch()
    assert sum(sink.batches) == 300
    assert max(sink.batches[:1]) <= 50 and max(sink.batches[4:]) <= 20, "2 s, where the cursor is held for 10"


def test_sinks_come_on_apart_from_one_another(database, store):
    well, away = Slow(), Slow()
    away.fails = True
    first, second = Relay("nats", database, well), Relay("amqp", database, away)
    an_ended_job(store)
    with pytest.raises(SinkUnavailable):
        second.relay_batch()
    assert first.relay_batch() == 3
    assert SinkCursors(database).find_slowest(["nats", "amqp"]) == 0


_PROCESS = """
import sys
from slotkeeper.db import Database
from tests.tasks.relay.test_relay import a_relay
from tools.cluster.valkey_process import Valkey

class At:
    url = sys.argv[2]
    client = Valkey.client

relay = a_relay(Database(sys.argv[1]), At())
print("begun", flush=True)
relay.run()
"""


@pytest.mark.parametrize("point", ["relay_read", "relay_published", "relay_moved"])
def test_a_relay_killed_at_any_point_loses_nothing_and_doubles_nothing_in_the_stream(
    database_url, database, store, valkey, point
):
    for _ in range(3):
        an_ended_job(store)
    died = _process(database_url, valkey, f"{point}:1")
    assert died.wait(60) == -signal.SIGKILL
    an_ended_job(store)
    database.write(_time_is_over)
    _settled(a_relay(database, valkey))
    assert Reader(valkey).ids() == all_ids(database)


def _time_is_over(tx: Any) -> None:
    tx.connection.exec_driver_sql("UPDATE relays SET until_ms = 0")


def _process(database_url: str, valkey: Valkey, crash_at: str = "") -> "subprocess.Popen[bytes]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
    env |= {"SLOTKEEPER_CRASH_AT": crash_at, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    return subprocess.Popen([sys.executable, "-c", _PROCESS, database_url, valkey.url], env=env)


def test_events_are_in_the_stream_within_a_second(sqlite_url, valkey):
    database = Database(sqlite_url)
    store, reader = JobStore(database), Reader(valkey)
    process = _process(sqlite_url, valkey)
    try:
        a_queued_job(store)
        eventually(lambda: len(reader.ids()) == 1, timeout_s=30)
        for n in range(2, 6):
            a_queued_job(store)
            eventually(lambda n=n: len(reader.ids()) == n, timeout_s=5)
    finally:
        process.terminate()
        process.wait(20)
    database.close()


def test_a_relay_that_is_behind_goes_on_without_a_pause(database, store, valkey, monkeypatch):
    for name, value in (("_FIRST_BATCH", 1), ("_MAX_BATCH", 1), ("_MIN_PAUSE_S", 3600.0), ("_MAX_PAUSE_S", 3600.0)):
        monkeypatch.setattr(relays, name, value)
    an_ended_job(store)
    relay = a_relay(database, valkey)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        eventually(lambda: Reader(valkey).ids() == all_ids(database))
    finally:
        relay.stop()
        thread.join(10)


def test_dead_jobs_are_told_in_the_words_of_a_queue(database, store, valkey):
    an_ended_job(store, State.DEAD)
    a_relay(database, valkey).relay_batch()
    assert [it["type"] for it in Reader(valkey).events()] == ["job.enqueued", "job.started", "job.dlq"]


@pytest.fixture
def resting(database, store, valkey, monkeypatch) -> Iterator[Relay]:
    """One that runs, has published all there was, and would look again in an hour."""
    monkeypatch.setattr(relays, "_HOLD_PERIOD_S", 3600.0)
    monkeypatch.setattr(relays, "_MAX_PAUSE_S", relays._MIN_PAUSE_S)
    found, lookout = a_relay(database, valkey), ChangeListener(database)
    found.wake_on_change(lookout)
    lookout.start()
    an_ended_job(store)
    thread = threading.Thread(target=found.run)
    thread.start()
    eventually(lambda: Reader(valkey).ids() == all_ids(database))
    yield found
    found.stop()
    lookout.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_relay_that_rests_publishes_what_is_written(database, store, valkey, resting):
    for _ in range(2):
        an_ended_job(store)
        eventually(lambda: Reader(valkey).ids() == all_ids(database))


def test_a_relay_rests_only_while_the_cursor_is_its_own_and_all_that_can_be_told_is(database, store, valkey):
    first, second = a_relay(database, valkey), a_relay(database, valkey)
    for it in (first, second):
        it.wake_on_change(ChangeListener(database))
        it.relay_batch()
    assert [first._is_idle, second._is_idle] == [True, False]
    first._reader.has_gap = True  # There is more, which time alone may let be told.
    assert not first._is_idle
