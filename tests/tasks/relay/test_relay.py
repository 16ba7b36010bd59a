"""The relay publishes every event to each sink in order, although processes are killed and sinks are unavailable."""

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
    """Reads the stream as a consumer does."""

    def __init__(self, valkey: Valkey) -> None:
        self._redis: Any = valkey.client()

    def events(self) -> list[dict[str, Any]]:
        found = self._redis.xread({"slotkeeper:events": "0"})
        return [orjson.loads(fields[b"event"]) for _, fields in found[0][1]] if found else []

    def ids(self) -> list[int]:
        return [int(event["id"]) for event in self.events()]


def a_relay(database: Database, valkey: Valkey, cap: int = CAP) -> Relay:
    stream = EventStream(make_scripts(valkey.client(), Keys("slotkeeper")), cap)

    def find_event(number: int) -> str | None:
        found = EventReader(database, after=number - 1, transitions_only=False).read(1)
        source = f"/slotkeeper/{Catalog(database).get_database_id()}"
        return cloudevents.to_json(found[0], source) if found and found[0].event.id == number else None

    return Relay("redis", database, RedisStreamSink(stream, cap, find_event))


def all_ids(database: Database) -> list[int]:
    return [entry.event.id for entry in EventReader(database, transitions_only=False).read(10_000)]


def test_the_stream_contains_the_events_in_order_as_valid_cloudevents(database, store, valkey):
    job = an_ended_job(store, tenant="acme", priority=2)
    relay = a_relay(database, valkey)
    assert relay.relay_batch() == 3
    events = Reader(valkey).events()
    assert [event["type"] for event in events] == ["job.enqueued", "job.started", "job.completed"]
    assert {event["subject"] for event in events} == {job.id}
    for event in events:
        message = HTTPMessage(headers={"content-type": cloudevents.CONTENT_TYPE}, body=orjson.dumps(event))
        read = from_structured(message, JSONFormat())
        assert (read.get_id(), read.get_type(), read.get_specversion()) == (event["id"], event["type"], "1.0")
    assert events[1]["data"] == {
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
    event = Reader(valkey).events()[-1]
    assert (event["type"], event["alias"]) == ("job.delayed", "job.failed")
    assert (event["data"]["attempt"], event["data"]["retry_in_ms"]) == (1, SECOND)
    assert event["data"]["error"] == {"code": "server_error", "message": "no"}


def test_an_audit_entry_is_published_with_its_actor_and_subject(database, valkey):
    Catalog(database).register("zimg", "gpu1", "http://gpu1/run", 2, T0)
    a_relay(database, valkey).relay_batch()
    (event,) = Reader(valkey).events()
    assert (event["type"], event["subject"]) == ("act.server.register", "server/gpu1")
    assert (event["data"]["actor"], event["data"]["interface"]) == ("slotkeeper", "process")


def test_an_unavailable_stream_receives_all_events_when_it_is_back(database, store, valkey):
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
    assert _relay_until_empty(relay) == 15
    assert Reader(valkey).ids() == all_ids(database)
    assert {event["subject"] for event in Reader(valkey).events()} == {first.id, *jobs}
    assert SinkCursors(database).list_lags(["redis"], T0)[0].seconds == 0


def _relay_until_empty(relay: Relay) -> int:
    """Relay until a call publishes nothing, and return how many events were published."""
    published = 0
    while found := relay.relay_batch():
        published += found
    return published


def test_a_stream_that_lost_its_last_events_gets_them_again(database, store, valkey):
    """A replica that was behind has become the primary."""
    relay = a_relay(database, valkey)
    an_ended_job(store)
    relay.relay_batch()
    client: Any = valkey.client()
    key = "slotkeeper:events"
    kept = client.xrange(key)[:1]
    client.delete(key)
    client.xadd(key, kept[0][1], id=kept[0][0])
    an_ended_job(store)
    _relay_all(relay)
    assert Reader(valkey).ids() == all_ids(database)


def _relay_all(relay: Relay) -> None:
    """Relay until two calls in a row publish nothing, because the first may have ended with a CursorMismatch."""
    empty_calls = 0
    while empty_calls < 2:
        empty_calls = 0 if relay.relay_batch() else empty_calls + 1


def test_an_emptied_stream_receives_the_newest_events(database, store, valkey):
    relay = a_relay(database, valkey, cap=3)
    an_ended_job(store)
    an_ended_job(store)
    relay.relay_batch()
    valkey.flush()
    an_ended_job(store)
    _relay_all(relay)
    assert Reader(valkey).ids() == all_ids(database)[3:]


def test_a_stream_of_another_database_is_renamed(database, store, valkey):
    client: Any = valkey.client()
    client.xadd("slotkeeper:events", {"event": "{}"}, id="999999999-0")
    an_ended_job(store)
    _relay_all(a_relay(database, valkey))
    assert Reader(valkey).ids() == all_ids(database)
    assert client.xlen("slotkeeper:events:before") == 1


def test_events_that_the_stream_has_are_not_added_again(database, store, valkey):
    """The first relay ended after publishing and before it advanced the cursor."""
    an_ended_job(store)
    first = a_relay(database, valkey)
    first._cursors.advance = lambda *_: False  # type: ignore[method-assign]
    first.relay_batch()
    first._cursors = SinkCursors(database)
    first._close()
    assert SinkCursors(database).find_slowest(["redis"]) < all_ids(database)[0]
    an_ended_job(store)
    _relay_all(a_relay(database, valkey))
    assert Reader(valkey).ids() == all_ids(database)
    assert SinkCursors(database).find_slowest(["redis"]) == all_ids(database)[-1]


def test_only_one_relay_publishes_at_a_time_and_the_next_one_takes_over_after_it(database, store, valkey, monkeypatch):
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
    """The first relay was suspended for longer than its hold of the cursor."""
    first, second = a_relay(database, valkey), a_relay(database, valkey)
    a_queued_job(store)
    first.relay_batch()
    first._cursors.release("redis", first._holder)
    a_queued_job(store)
    assert second.relay_batch() == 1
    a_queued_job(store)
    assert first.relay_batch() == 0
    assert not SinkCursors(database).advance("redis", first._holder, first._position, 10**9, T0)
    assert _relay_until_empty(second) == 1
    assert Reader(valkey).ids() == all_ids(database)


class RecordingSink:
    """A sink that records all events, and confirms them unless `fails` is set."""

    retention = None

    def __init__(self) -> None:
        self.received: list[PublishedEvent] = []
        self.fails = False

    def resume_after(self, position: int) -> int:
        return position

    def publish(self, batch: Any) -> None:
        self.received.extend(batch)
        if self.fails:
            raise SinkUnavailable("no answer")

    def close(self) -> None:
        pass


def test_events_that_a_sink_has_not_confirmed_are_published_again(database, store):
    sink = RecordingSink()
    relay = Relay("kafka", database, sink)
    job = an_ended_job(store)
    sink.fails = True
    with pytest.raises(SinkUnavailable):
        relay.relay_batch()
    assert SinkCursors(database).find_slowest(["kafka"]) == 0
    sink.fails = False
    relay.relay_batch()
    numbers = [event.id for event in store.list_events(job.id)]
    assert [event.number for event in sink.received] == numbers * 2
    assert SinkCursors(database).find_slowest(["kafka"]) == numbers[-1]


class SlowSink:
    """A sink that takes `event_s` for each event, by its own clock, and fails after `timeout_s`."""

    retention = None

    def __init__(self, event_s: float, timeout_s: float) -> None:
        self.now_s, self.batch_sizes, self._event_s, self._timeout_s = 0.0, list[int](), event_s, timeout_s

    def resume_after(self, position: int) -> int:
        return position

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        took_s = len(batch) * self._event_s
        self.now_s += min(took_s, self._timeout_s)
        if took_s > self._timeout_s:
            raise SinkUnavailable("no answer")
        self.batch_sizes.append(len(batch))

    def close(self) -> None: ...


@pytest.mark.parametrize("timeout_s", [4.0, 100.0], ids=["a timeout", "no timeout"])
def test_the_batches_of_a_slow_sink_become_smaller(database, store, monkeypatch, timeout_s):
    store.submit([a_job() for _ in range(300)], T0)
    sink = SlowSink(0.1, timeout_s)
    monkeypatch.setattr("tasks.relay.relay.time.monotonic", lambda: sink.now_s)
    relay = Relay("slow", database, sink)
    for _ in range(100):
        with suppress(SinkUnavailable):
            relay.relay_batch()
    assert sum(sink.batch_sizes) == 300
    assert max(sink.batch_sizes[:1]) <= 50 and max(sink.batch_sizes[4:]) <= 20, "2 s; the cursor is held for 10 s"


def test_an_unavailable_sink_does_not_delay_another(database, store):
    available, unavailable = RecordingSink(), RecordingSink()
    unavailable.fails = True
    first, second = Relay("nats", database, available), Relay("amqp", database, unavailable)
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

class ValkeyAtUrl:
    url = sys.argv[2]
    client = Valkey.client

relay = a_relay(Database(sys.argv[1]), ValkeyAtUrl())
print("begun", flush=True)
relay.run()
"""


@pytest.mark.parametrize("point", ["relay_read", "relay_published", "relay_moved"])
def test_a_relay_killed_at_any_point_loses_and_repeats_no_event_in_the_stream(
    database_url, database, store, valkey, point
):
    for _ in range(3):
        an_ended_job(store)
    process = _start_process(database_url, valkey, f"{point}:1")
    assert process.wait(60) == -signal.SIGKILL
    an_ended_job(store)
    database.write(_expire_holds)
    _relay_all(a_relay(database, valkey))
    assert Reader(valkey).ids() == all_ids(database)


def _expire_holds(tx: Any) -> None:
    tx.connection.exec_driver_sql("UPDATE relays SET until_ms = 0")


def _start_process(database_url: str, valkey: Valkey, crash_at: str = "") -> "subprocess.Popen[bytes]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
    env |= {"SLOTKEEPER_CRASH_AT": crash_at, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    return subprocess.Popen([sys.executable, "-c", _PROCESS, database_url, valkey.url], env=env)


def test_events_are_in_the_stream_within_a_second(sqlite_url, valkey):
    database = Database(sqlite_url)
    store, reader = JobStore(database), Reader(valkey)
    process = _start_process(sqlite_url, valkey)
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


def test_a_relay_that_is_behind_does_not_pause(database, store, valkey, monkeypatch):
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


def test_the_end_of_a_dead_job_has_the_type_job_dlq(database, store, valkey):
    an_ended_job(store, State.DEAD)
    a_relay(database, valkey).relay_batch()
    assert [event["type"] for event in Reader(valkey).events()] == ["job.enqueued", "job.started", "job.dlq"]


@pytest.fixture
def idle_relay(database, store, valkey, monkeypatch) -> Iterator[Relay]:
    """Return a running relay that has published all events, and whose next poll without a commit is in an hour."""
    monkeypatch.setattr(relays, "_HOLD_PERIOD_S", 3600.0)
    monkeypatch.setattr(relays, "_MAX_PAUSE_S", relays._MIN_PAUSE_S)
    relay, listener = a_relay(database, valkey), ChangeListener(database)
    relay.wake_on_change(listener)
    listener.start()
    an_ended_job(store)
    thread = threading.Thread(target=relay.run)
    thread.start()
    eventually(lambda: Reader(valkey).ids() == all_ids(database))
    yield relay
    relay.stop()
    listener.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_an_idle_relay_publishes_new_events(database, store, valkey, idle_relay):
    for _ in range(2):
        an_ended_job(store)
        eventually(lambda: Reader(valkey).ids() == all_ids(database))


def test_a_relay_is_idle_only_while_it_holds_the_cursor_and_no_event_waits_for_a_transaction(database, store, valkey):
    first, second = a_relay(database, valkey), a_relay(database, valkey)
    for relay in (first, second):
        relay.wake_on_change(ChangeListener(database))
        relay.relay_batch()
    assert [first._is_idle, second._is_idle] == [True, False]
    first._reader.has_gap = True  # An event waits for an open transaction, so a later poll may find it.
    assert not first._is_idle
