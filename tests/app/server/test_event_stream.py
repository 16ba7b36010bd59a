"""Event streams and waiting requests over real sockets: each event is sent once, and no thread is held."""

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import insert

from app.auth.api_keys import KeyCache, Owner, OwnerKind
from app.server import event_stream as streaming
from routing.maintenance.watched import cancel_unwatched
from routing.progress import EntryId, ProgressFollower
from routing.scripts import make_scripts
from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.jobs.events import add_event
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events
from slotkeeper.outbox import retention
from slotkeeper.outbox.retention import EventRetention
from slotkeeper.redis.connections import connect
from slotkeeper.redis.keys import Keys
from slotkeeper.registry.api_keys import ApiKeys
from slotkeeper.registry.tenants import Tenants
from tasks import services
from tests.support.api import Api
from tests.support.builders import T0, a_queued_job, a_running_job, an_ended_job, eventually
from tests.support.clock import set_clock
from tests.support.ends import store_end
from tests.support.served import KeySessions, Served, serve

KEYS = {"REQUIRE_KEYS": "true"}


@pytest.fixture
def served(api: Api) -> Iterator[Served]:
    with serve(api) as served:
        yield served


@dataclass
class StreamedEvent:
    """One event of a stream."""

    id: int | None = None
    progress_id: str = ""
    type: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class Reader:
    """A client of a stream."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers = dict(self._header_lines())
        self.last: int | None = None
        self._text = b""
        self.ended = False

    def _header_lines(self) -> Iterator[tuple[str, str]]:
        while (line := self._file.readline().strip().decode()) != "":
            name, _, value = line.partition(": ")
            yield name.lower(), value

    def _more(self) -> bool:
        size = int(self._file.readline() or b"0", 16)
        self._text += self._file.read(size)
        self._file.readline()
        self.ended = size == 0
        return not self.ended

    def events(self) -> Iterator[StreamedEvent]:
        """Yield the events until the stream ends."""
        while True:
            while b"\n\n" in self._text:
                block, _, self._text = self._text.partition(b"\n\n")
                event = self._event(block.decode())
                if event is not None:
                    yield event
            if not self._more():
                return

    def _event(self, block: str) -> StreamedEvent | None:
        event = StreamedEvent()
        for line in block.splitlines():
            name, _, value = line.partition(": ")
            if name == "id":
                number, _, progress_id = value.partition("-")
                event.id = self.last = int(number)
                event.progress_id = progress_id
            elif name == "event":
                event.type = value
            elif name == "data":
                event.data = json.loads(value)
        return event if event.type else None

    def next(self) -> StreamedEvent:
        return next(self.events())

    def until_open(self) -> "Reader":
        """Read until the stream has sent its first id."""
        while self.last is None:
            assert self._more()
            while b"\n\n" in self._text:
                block, _, self._text = self._text.partition(b"\n\n")
                self._event(block.decode())
        return self

    def close(self) -> None:
        self._file.close()
        self.connection.close()


def _types(reader: Reader) -> list[str]:
    return [event.type for event in reader.events()]


def _followers(served: Served) -> int:
    return served.application.streams.taken.total()


# -- one job -------------------------------------------------------------------------------------------------


def test_a_jobs_stream_has_all_its_events_and_ends_with_the_job(served: Served) -> None:
    run = a_running_job(served.store, tenant="local", priority=2)
    reader = Reader(served.ask(f"/queue/jobs/{run.job.id}/stream"))
    assert (reader.status, reader.headers["content-type"]) == (200, "text/event-stream")
    assert (reader.headers["cache-control"], reader.headers["x-accel-buffering"]) == ("no-store", "no")
    assert [reader.next().type, reader.next().type] == ["job.enqueued", "job.started"]
    store_end(served.store, run.job.id, 1, Reason.FINISHED, T0, result="{}")
    event = reader.next()
    expected = {
        "job_id": run.job.id,
        "model": "zimg",
        "tenant": "local",
        "priority": 2,
        "server": "gpu1",
        "attempt": 1,
    }
    assert event.type == "job.completed"
    assert event.data == expected | {"why": "finished", "at": "2027-01-15T08:00:00.000Z"}
    assert list(reader.events()) == []
    assert reader.ended


def test_the_stream_of_a_revived_job_continues(served: Served) -> None:
    job = an_ended_job(served.store, State.DEAD)
    served.store.revive(job.id, T0)
    reader = Reader(served.ask(f"/queue/jobs/{job.id}/stream"))
    assert [reader.next().type for _ in range(4)][2:] == ["job.dlq", "job.enqueued"]
    served.store.cancel_waiting(job.id, T0)
    assert _types(reader) == ["job.canceled"]


def test_a_client_that_has_the_last_event_of_a_job_gets_204(served: Served) -> None:
    job = an_ended_job(served.store)
    reader = Reader(served.ask(f"/queue/jobs/{job.id}/stream"))
    assert _types(reader)[-1] == "job.completed"
    assert Reader(served.ask(f"/queue/jobs/{job.id}/stream?after={reader.last}")).status == 204


def test_a_stream_over_http_1_0_is_refused(served: Served) -> None:
    job = an_ended_job(served.store)
    with served.ask(f"/queue/jobs/{job.id}/stream", version="1.0") as connection:
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 505 ") and b"HTTP/1.1" in answer.partition(b"\r\n\r\n")[2]
    assert _followers(served) == 0


# -- progress --------------------------------------------------------------------------------------------------


def _publish_text(job_id: str, text: str, ms: int, attempt: int = 1) -> int:
    """Publish progress as a worker does, and return the number of subscribers."""
    entry = json.dumps({"job_id": job_id, "attempt": attempt, "offset": 0, "text": text})
    return services.scripts().run(services.progress_scripts().publish_command(job_id, EntryId(attempt, ms), entry, 100))


def _texts(reader: Reader) -> list[str]:
    """Return the texts of progress events, and the types of other events."""
    return [event.data.get("text", event.type) for event in reader.events()]


def test_progress_is_sent_between_start_and_end_of_a_job(served: Served) -> None:
    run = a_running_job(served.store)
    job = run.job.id
    _publish_text(job, "before", 1)
    reader = Reader(served.ask(f"/queue/jobs/{job}/stream"))
    assert [reader.next().type for _ in range(2)] == ["job.enqueued", "job.started"]
    event = reader.next()
    assert (event.type, event.data["text"], event.progress_id) == ("progress", "before", "1-1")
    assert _publish_text(job, "now", 2) == 1
    assert reader.next().data["text"] == "now"
    store_end(served.store, job, 1, Reason.FINISHED, T0, result="{}")
    assert _types(reader) == ["job.completed"]


def test_all_progress_is_sent_before_the_end_of_the_job(served: Served) -> None:
    """Even if the end is read from the database first, or the job had ended before."""
    job = a_running_job(served.store).job.id
    _publish_text(job, "all", 1)
    store_end(served.store, job, 1, Reason.FINISHED, T0, result="{}")
    assert _texts(Reader(served.ask(f"/queue/jobs/{job}/stream"))) == [
        "job.enqueued",
        "job.started",
        "all",
        "job.completed",
    ]


def test_a_client_that_reconnects_receives_the_rest_of_the_progress(served: Served) -> None:
    job = a_running_job(served.store).job.id
    for ms, text in enumerate("abc"):
        _publish_text(job, text, ms + 1)
    reader = Reader(served.ask(f"/queue/jobs/{job}/stream"))
    seen = [reader.next() for _ in range(4)][-1]
    assert seen.data["text"] == "b"
    reader.close()
    again = Reader(served.ask(f"/queue/jobs/{job}/stream", {"Last-Event-ID": f"{seen.id}-{seen.progress_id}"}))
    assert again.next().data["text"] == "c"
    store_end(served.store, job, 1, Reason.FINISHED, T0, result="{}")
    assert _types(again) == ["job.completed"]


def test_the_end_of_a_job_is_sent_while_redis_is_unavailable(served: Served) -> None:
    progress_follower = ProgressFollower(make_scripts(connect("redis://127.0.0.1:1/0", 0.5), Keys("slotkeeper")))
    served.application.progress_follower = progress_follower
    job = a_running_job(served.store).job.id
    reader = Reader(served.ask(f"/queue/jobs/{job}/stream"))
    assert [reader.next().type for _ in range(2)] == ["job.enqueued", "job.started"]
    store_end(served.store, job, 1, Reason.FINISHED, T0, result="{}")
    assert _types(reader) == ["job.completed"]


@pytest.mark.parametrize("after", ["1-1", "1-1-", "1-1-x", "1-1-1-1", "-1-1"])
def test_an_invalid_id_of_a_jobs_stream_is_refused(served: Served, after: str) -> None:
    job = a_running_job(served.store).job.id
    assert Reader(served.ask(f"/queue/jobs/{job}/stream?after={after}")).status == 422
    assert Reader(served.ask("/stream?after=1-1-1")).status == 422


# -- all jobs ------------------------------------------------------------------------------------------------


def test_a_new_stream_sends_only_new_events_that_match_its_filter(served: Served) -> None:
    a_queued_job(served.store)
    reader = Reader(served.ask("/stream?model=flux&model=sdxl&type=job.enqueued")).until_open()
    a_running_job(served.store, model="flux")
    a_queued_job(served.store, model="zimg")
    last = a_queued_job(served.store, model="sdxl")
    received = [reader.next(), reader.next()]
    assert [(event.type, event.data["model"]) for event in received] == [
        ("job.enqueued", "flux"),
        ("job.enqueued", "sdxl"),
    ]
    assert received[1].data["job_id"] == last.id


def test_a_batch_can_be_followed(served: Served) -> None:
    batch_id, other_batch_id = str(UUID(int=1)), str(UUID(int=2))
    reader = Reader(served.ask(f"/stream?batch={batch_id}")).until_open()
    a_queued_job(served.store, batch=other_batch_id)
    a_queued_job(served.store)
    expected = a_queued_job(served.store, batch=batch_id)
    assert reader.next().data["job_id"] == expected.id


@pytest.mark.parametrize("settings", [KEYS])
def test_a_tenant_receives_the_events_of_its_own_jobs_and_an_administrator_of_all(
    served: Served, settings: dict[str, str]
) -> None:
    acme, rival, boss = (served.api.tenant(name, admin=name == "boss") for name in ("acme", "rival", "boss"))
    acme_reader, admin_reader = (Reader(served.ask("/stream", key)).until_open() for key in (acme, boss))
    rival_job, acme_job = (a_queued_job(served.store, tenant=name).id for name in ("rival", "acme"))
    assert acme_reader.next().data["job_id"] == acme_job
    assert [admin_reader.next().data["job_id"], admin_reader.next().data["job_id"]] == [rival_job, acme_job]
    assert Reader(served.ask(f"/queue/jobs/{rival_job}/stream", acme)).status == 404
    assert Reader(served.ask(f"/queue/jobs/{rival_job}/stream", rival)).status == 200
    assert Reader(served.ask("/stream?after=0", acme)).next().data["job_id"] == acme_job
    assert Reader(served.ask("/stream")).status == 401


@pytest.mark.parametrize(
    "target", ["/stream?after=x", "/stream?after=-1", "/stream?type=job.lost", "/stream?model=%20", "/stream?batch=x"]
)
def test_an_invalid_stream_request_is_refused(served: Served, target: str) -> None:
    assert Reader(served.ask(target)).status == 422


# -- reconnecting ----------------------------------------------------------------------------------------------


def test_a_client_that_reconnects_continues_after_its_last_event(served: Served) -> None:
    reader = Reader(served.ask("/stream")).until_open()
    first = a_queued_job(served.store).id
    assert reader.next().data["job_id"] == first
    reader.close()
    second = a_queued_job(served.store).id
    for headers in ({"Last-Event-ID": str(reader.last)}, None):
        again = Reader(served.ask("/stream" if headers else f"/stream?after={reader.last}", headers))
        assert again.next().data["job_id"] == second
        again.close()


def test_a_stream_reports_a_gap_first_if_requested_events_are_deleted(served: Served) -> None:
    dead = an_ended_job(served.store, State.DEAD)
    retention.delete_dead_job(served.store.database, dead.id)
    assert EventRetention(served.store.database).delete_next(T0 + 1, 0, last=3) == 3
    job = a_queued_job(served.store).id
    reader = Reader(served.ask("/stream?after=1"))
    assert (event := reader.next()).type == "stream.gap" and event.data["after"] == 1
    assert reader.next().data["job_id"] == job


def test_a_stream_reports_a_gap_for_an_id_above_the_newest_event(served: Served) -> None:
    a_queued_job(served.store)
    reader = Reader(served.ask("/stream?after=1000"))
    assert reader.next().type == "stream.gap"
    job = a_queued_job(served.store).id
    assert reader.next().data["job_id"] == job


@pytest.mark.timeout(120)
def test_a_client_that_reconnects_a_hundred_times_gets_every_event(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_PAGE_SIZE", 7)
    _check_after_many_disconnects(served, served.store.database)


@pytest.mark.timeout(180)
@pytest.mark.postgres
def test_a_client_that_reconnects_gets_every_event_on_postgresql(
    api: Api, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_PAGE_SIZE", 7)
    database = Database(postgres_url)
    api.dispatcher.store.database = database
    with serve(api) as served:
        _check_after_many_disconnects(served, database)
    database.close()


@pytest.mark.postgres
def test_events_committed_out_of_order_are_sent_in_order(api: Api, postgres_url: str) -> None:
    """PostgreSQL can commit event numbers out of order.  A later number must not be sent before an earlier one."""
    database = Database(postgres_url)
    api.dispatcher.store.database = database
    first = a_queued_job(JobStore(database)).id
    with serve(api) as served, database.engine.connect() as late_transaction:
        first_reader = Reader(served.ask("/stream")).until_open()  # The feed reads from now on.
        late_transaction.begin()
        row = {"job_id": first, "type": "job.started", "at_ms": T0, "attempt": 1, "data": "{}"}
        late_transaction.execute(insert(events), row)
        a_queued_job(JobStore(database))
        reader = Reader(served.ask("/stream?after=0"))
        assert reader.next().data["job_id"] == first
        late_transaction.commit()
        assert [reader.next().type for _ in range(2)] == ["job.started", "job.enqueued"]
        first_reader.close()
    database.close()


def _check_after_many_disconnects(served: Served, database: Database) -> None:
    rng = random.Random(7)
    stopping = threading.Event()
    reader = Reader(served.ask("/stream")).until_open()
    first, last = reader.last, reader.last
    assert first is not None

    def write() -> None:
        store = JobStore(database)
        while not stopping.wait(0.002):
            run = a_running_job(store)
            store_end(store, run.job.id, 1, Reason.FINISHED, T0, result="{}")
            with suppress(ZeroDivisionError):
                database.write(_add_event_and_fail)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    received: list[int] = []
    for cut in range(100):
        for _ in range(rng.randrange(6)):
            received.append(reader.next().id or 0)
        last = max(received, default=first)
        if cut % 3 == 0:
            last = max(last - rng.randrange(5), first)  # The client lost some of the events that were sent.
        reader.close()
        reader = Reader(served.ask("/stream", {"Last-Event-ID": str(last)}))
    stopping.set()
    for writer in writers:
        writer.join()
    with database.read() as connection:
        rows = connection.exec_driver_sql(f"SELECT id FROM events WHERE id > {first} ORDER BY id").scalars().all()
    while not received or max(received) < rows[-1]:
        received.append(reader.next().id or 0)
    reader.close()
    assert sorted(set(received)) == list(rows)


def _add_event_and_fail(tx: Any) -> None:
    add_event(tx, "none", "job.enqueued", now_ms(), {})
    tx.flush_inserts()
    raise ZeroDivisionError


def test_events_stored_during_a_slow_read_are_sent_once_and_in_order(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_PAGE_SIZE", 2)
    read_page, gate, requested = streaming.event_reader.read_page, threading.Event(), threading.Event()

    def slow_read_page(*arguments: Any) -> Any:
        requested.set()
        gate.wait(20)
        return read_page(*arguments)

    reader = Reader(served.ask("/stream")).until_open()  # The feed reads from now on.
    jobs = [a_queued_job(served.store).id for _ in range(5)]
    assert [reader.next().data["job_id"] for _ in jobs] == jobs
    monkeypatch.setattr(streaming.event_reader, "read_page", slow_read_page)
    again = Reader(served.ask("/stream?after=0"))
    assert requested.wait(20)
    jobs += [a_queued_job(served.store).id for _ in range(3)]
    assert [reader.next().data["job_id"] for _ in range(3)] == jobs[5:]
    gate.set()
    assert [again.next().data["job_id"] for _ in jobs] == jobs
    jobs.append(a_queued_job(served.store).id)
    assert again.next().data["job_id"] == jobs[-1]


# -- bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [KEYS | {"MAX_TENANT_STREAMS": "2", "MAX_STREAMS": "3"}])
def test_the_number_of_streams_is_limited_per_tenant_and_in_total_and_a_closed_one_is_freed(
    served: Served, settings: dict[str, str]
) -> None:
    acme, rival = served.api.tenant("acme"), served.api.tenant("rival")
    first, second = (Reader(served.ask("/stream", acme)).until_open() for _ in range(2))
    refused = Reader(served.ask("/stream", acme))
    assert refused.status == 429 and refused.headers["retry-after"]
    third = Reader(served.ask("/stream", rival)).until_open()
    assert Reader(served.ask("/stream", rival)).status == 429
    first.close()
    eventually(lambda: _followers(served) == 2)
    assert Reader(served.ask("/stream", acme)).status == 200
    second.close()
    third.close()


@pytest.mark.parametrize("settings", [{"SEND_TIMEOUT_S": "300"}])
def test_a_slow_reader_is_disconnected_and_other_readers_get_all_events(
    served: Served, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_MAX_UNSENT_BYTES", 2000)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(served.address)
        slow.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: _followers(served) == 1)
        transport = served.web.connections[0].transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024)
        reader = Reader(served.ask("/stream")).until_open()
        jobs = [a_queued_job(served.store, model="m" * 100).id for _ in range(200)]
        assert [reader.next().data["job_id"] for _ in jobs] == jobs
        more = iter(int, 1)
        eventually(lambda: (a_queued_job(served.store), next(more), _followers(served) == 1)[-1])


def test_a_stream_without_events_sends_heartbeats_with_the_current_id(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "HEARTBEAT_S", 0.1)
    reader = Reader(served.ask("/stream?model=flux")).until_open()
    before = reader.last
    assert before is not None
    a_queued_job(served.store)
    while reader.last == before:
        assert reader._more()
        while b"\n\n" in reader._text:
            block, _, reader._text = reader._text.partition(b"\n\n")
            assert reader._event(block.decode()) is None
    assert reader.last == before + 1


def test_without_streams_the_feed_does_not_read_the_database(served: Served) -> None:
    reader = Reader(served.ask("/stream")).until_open()
    assert served.application.feed.is_reading
    reader.close()
    eventually(lambda: not served.application.feed.is_reading)
    again = Reader(served.ask("/stream")).until_open()
    job = a_queued_job(served.store).id
    assert again.next().data["job_id"] == job


def test_a_stopping_process_ends_its_streams(served: Served) -> None:
    reader = Reader(served.ask("/stream")).until_open()
    served.web.stop()
    assert list(reader.events()) == []
    assert reader.ended


# -- waiting ---------------------------------------------------------------------------------------------------


def _response_body(connection: socket.socket) -> dict[str, Any]:
    """Read the response and return its body."""
    with connection, connection.makefile("rb") as file:
        size = 0
        while (line := file.readline().strip().lower()) != b"":
            if line.startswith(b"content-length: "):
                size = int(line.partition(b": ")[2])
        body: dict[str, Any] = json.loads(file.read(size))
        return body


def _waiting(served: Served) -> int:
    return served.application.waiting.taken.total()


@pytest.mark.parametrize("settings", [{"WEB_THREADS": "2"}])
def test_waiting_ends_with_the_job_and_holds_no_thread(served: Served, settings: dict[str, str]) -> None:
    served.api.model()
    jobs = [served.api.submitted() for _ in range(20)]
    connections = [served.ask(f"/queue/jobs/{job}?wait=30") for job in jobs]
    eventually(lambda: _waiting(served) == 20)
    # The event loop releases a thread one turn after its response.
    eventually(lambda: not served.application.general._held)
    assert _waiting(served) == 20
    for job in jobs:
        served.api.dispatcher.cancel(job)
    assert [_response_body(connection)["status"] for connection in connections] == ["canceled"] * 20
    eventually(lambda: _waiting(served) == 0)


@pytest.mark.parametrize("path", ["/queue/jobs/{}?wait=60", "/queue/jobs/{}/stream"])
def test_a_job_whose_clients_have_left_is_canceled(served: Served, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    now = [now_ms()]
    set_clock(monkeypatch, lambda: now[0])
    dispatcher, watched = served.api.dispatcher, services.scripts().keys.watched()
    served.api.model()
    job = served.api.submitted(cancel_when_gone=5)
    other = served.api.submitted(cancel_when_gone=60)
    served.api.submitted()

    def due_ms() -> float:
        return dispatcher.watched._redis.zscore(watched, job) or 0

    assert due_ms() == now[0] + 5_000
    clients = [served.ask(path.format(job)) for _ in range(2)]
    eventually(lambda: served.application._watching.total() == 2)
    for left in (clients[0], None):  # Two clients wait, then one.
        now[0] += 4_900
        eventually(lambda: due_ms() == now[0] + 5_000)
        assert cancel_unwatched(dispatcher) == 0
        if left is not None:
            left.close()
            eventually(lambda: served.application._watching.total() == 1)
    clients[1].close()
    eventually(lambda: not served.application._watching)
    now[0] += 5_000
    assert cancel_unwatched(dispatcher) == 1
    ended = served.api.job(job)
    assert (ended.state, ended.error_code) == (State.CANCELED, "client_gone")
    assert cancel_unwatched(dispatcher) == 0 and served.api.job(other).state is State.QUEUED


def test_ended_watched_jobs_are_dropped_and_no_job_is_canceled_while_redis_is_down(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.api.model()
    job, waiting = served.api.submitted(cancel_when_gone=5), served.api.submitted(cancel_when_gone=5)
    served.api.dispatcher.cancel(job)
    later = now_ms() + 6_000
    set_clock(monkeypatch, lambda: later)
    with monkeypatch.context() as away:
        away.setattr(served.api.dispatcher.watched, "list_due", raise_connection_error)
        assert cancel_unwatched(served.api.dispatcher) == 0
    assert cancel_unwatched(served.api.dispatcher) == 2
    assert served.api.job(waiting).state is State.CANCELED
    assert served.api.job(job).error_code == "canceled"


def raise_connection_error(*_: object) -> list[str]:
    raise RedisConnectionError("away")


def test_waiting_for_an_ended_job_ends_at_once(served: Served) -> None:
    job = an_ended_job(served.store)
    Reader(served.ask("/stream")).until_open()  # The feed already reads the database, from after the job's end.
    waiting = asyncio.run_coroutine_threadsafe(served.application.feed.wait_for_end(job.id), served.web.loop)
    waiting.result(10)


def test_a_waiting_request_returns_the_current_status_after_its_wait_time(served: Served) -> None:
    served.api.model()
    assert _response_body(served.ask(f"/queue/jobs/{served.api.submitted()}?wait=0.1"))["status"] == "queued"
    assert _waiting(served) == 0


@pytest.mark.parametrize("settings", [{"MAX_WAITING_REQUESTS": "1"}])
def test_a_request_above_the_limit_does_not_wait_and_a_closed_one_frees_its_place(
    served: Served, settings: dict[str, str]
) -> None:
    served.api.model()
    job = served.api.submitted()
    first = served.ask(f"/queue/jobs/{job}?wait=30")
    eventually(lambda: _waiting(served) == 1)
    assert _response_body(served.ask(f"/queue/jobs/{job}?wait=30"))["status"] == "queued"
    first.close()
    eventually(lambda: _waiting(served) == 0)


def test_a_stopping_process_responds_to_waiting_requests(served: Served) -> None:
    served.api.model()
    connection = served.ask(f"/queue/jobs/{served.api.submitted()}?wait=30")
    eventually(lambda: _waiting(served) == 1)
    served.web.stop()
    assert _response_body(connection)["status"] == "queued"


@pytest.mark.parametrize("settings", [KEYS | {"CATALOG_REFRESH_S": "0"}])
def test_a_stream_ends_when_its_key_is_removed_and_no_other_does(
    served: Served, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.server.application.KEYS_EVERY_S", 0.05)
    removed = Reader(served.ask("/stream", served.api.tenant("acme", admin=True))).until_open()
    kept = Reader(served.ask("/stream", served.api.tenant("beta", admin=True))).until_open()
    Tenants(served.api.database).remove("acme")
    assert list(removed.events()) == []
    assert removed.ended
    an_ended_job(served.store)
    assert [kept.next().type for _ in range(3)] == ["job.enqueued", "job.started", "job.completed"]


@pytest.mark.parametrize("settings", [KEYS | {"CATALOG_REFRESH_S": "0"}])
def test_the_key_cache_checks_an_open_connection_against_the_keys_read_last(api: Api, settings: dict[str, str]) -> None:
    key = api.tenant("acme", admin=True)["Authorization"]
    key_cache, operator = (
        KeyCache(ApiKeys(api.database), cast(Any, KeySessions()), 0.0),
        Owner("acme", OwnerKind.OPERATOR),
    )
    asyncio.run(key_cache.refresh_in_thread())
    assert key_cache.is_still_valid(operator, {"HTTP_AUTHORIZATION": key})
    assert key_cache.is_still_valid(operator, {"HTTP_COOKIE": key.removeprefix("Bearer ")}), "a session of the page"
    assert not key_cache.is_still_valid(operator, {"HTTP_COOKIE": "over"})
    other_key = api.tenant("beta")["Authorization"]
    key_cache = KeyCache(ApiKeys(api.database), cast(Any, KeySessions()), 0.0)
    asyncio.run(key_cache.refresh_in_thread())
    assert key_cache.is_still_valid(Owner("beta", OwnerKind.TENANT), {"HTTP_AUTHORIZATION": other_key})
    assert not key_cache.is_still_valid(operator, {"HTTP_AUTHORIZATION": other_key}), (
        "acme is not an administrator any more"
    )
