"""Real Kafka, NATS and AMQP servers: each gets all events, in order for each job, also after its own outage."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from app.up.ports import free_port
from slotkeeper.db import Database
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox.sink_cursors import SinkCursors
from tasks.relay.relay import Relay
from tasks.relay.sinks.sink import SinkUnavailable
from tests.support.builders import T0, a_queued_job, an_ended_job

_UP_S = 40.0


@pytest.fixture
def record(sqlite_url: str) -> Iterator[Database]:
    database = Database(sqlite_url)
    yield database
    database.close()


def _until(condition: Callable[[], Any], what: str, within_s: float = _UP_S) -> Any:
    until, last = time.monotonic() + within_s, None
    while time.monotonic() < until:
        try:
            if found := condition():
                return found
        except Exception as error:  # It is not there yet.
            last = error
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come about: {last!r}")


def _drained(relay: Relay) -> None:
    """Until the relay has nothing left; a sink that comes back is tried again."""

    def is_done() -> bool:
        try:
            return relay.relay_batch() == 0 and not SinkCursors(relay._database).list_lags([relay._name], T0)[0].events
        except SinkUnavailable:
            return False

    _until(is_done, "the relay's end")


def _unique_events(bodies: list[bytes]) -> list[tuple[int, str, str]]:
    """Return (number, job, type) of each event once, in the order of first receipt."""
    found = [orjson.loads(body) for body in bodies]
    return list(dict.fromkeys((int(event["id"]), event["subject"], event["type"]) for event in found))


def _assert_whole_and_in_order(received: list[tuple[int, str, str]], database: Database, jobs: list[str]) -> None:
    store, by_job = JobStore(database), defaultdict(list)
    for number, job, _ in received:
        by_job[job].append(number)
    assert {job: by_job[job] for job in jobs} == {job: [event.id for event in store.list_events(job)] for job in jobs}


@contextmanager
def _process(command: list[str], folder: Path, **more: Any) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=more.pop("stdout", log), stderr=log, cwd=folder, **more)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


# -- Kafka, by librdkafka's own mock -----------------------------------------------------------------------------

_MOCK = """
import sys
from confluent_kafka import Producer
producer = Producer({"test.mock.num.brokers": 3, "bootstrap.servers": "ignored"})
print(",".join(f"{it.host}:{it.port}" for it in producer.list_topics(timeout=20).brokers.values()), flush=True)
sys.stdin.read()
"""


@contextmanager
def _kafka(folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    command = [sys.executable, "-c", _MOCK]
    with _process(command, folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().decode().strip()


def _consumed(servers: str, count: int) -> list[bytes]:
    from confluent_kafka import Consumer

    settings = {"bootstrap.servers": servers, "group.id": "test", "auto.offset.reset": "earliest"}
    consumer, found, until = Consumer(settings), list[Any](), time.monotonic() + _UP_S
    consumer.subscribe(["slotkeeper.events"])
    while len({message.value() for message in found}) < count and time.monotonic() < until:  # Some events come twice.
        found += [message for message in consumer.consume(500, 0.5) if not message.error()]
    consumer.close()
    for message in found:
        assert message.key().decode() == orjson.loads(message.value())["partitionkey"]
    return [message.value() for message in found]


def test_kafka_gets_all_events_in_order_per_job_after_a_pause_of_the_broker(
    record: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("confluent_kafka")
    from tasks.relay.sinks import kafka

    with _kafka(tmp_path) as (broker, servers):
        sink = kafka.KafkaSink(servers, "slotkeeper.events", {})
        store, relay = JobStore(record), Relay("kafka", record, sink)
        jobs = [an_ended_job(store).id for _ in range(20)]
        _until(lambda: relay.relay_batch(), "the first events")
        broker.send_signal(signal.SIGSTOP)
        jobs += [an_ended_job(store).id for _ in range(20)]
        with monkeypatch.context() as impatient, pytest.raises(SinkUnavailable):
            impatient.setattr(kafka, "_TIMEOUT_S", 1.0)
            relay.relay_batch()
        broker.send_signal(signal.SIGCONT)
        _drained(relay)
        _assert_whole_and_in_order(_unique_events(_consumed(servers, 120)), record, jobs)
        sink.close()


def test_an_unreachable_kafka_leaves_the_backlog_in_the_database(
    record: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("confluent_kafka")
    from tasks.relay.sinks import kafka

    sink = kafka.KafkaSink(f"127.0.0.1:{free_port()}", "slotkeeper.events", {})
    relay = Relay("kafka", record, sink)
    job = a_queued_job(JobStore(record))
    with monkeypatch.context() as impatient, pytest.raises(SinkUnavailable):
        impatient.setattr(kafka, "_TIMEOUT_S", 0.5)
        relay.relay_batch()
    assert SinkCursors(record).list_lags(["kafka"], T0)[0].events == 1
    with _kafka(tmp_path) as (_, servers):  # An empty broker replaces the first.
        relay._close()
        relay = Relay("kafka", record, kafka.KafkaSink(servers, "slotkeeper.events", {}))
        _drained(relay)
        _assert_whole_and_in_order(_unique_events(_consumed(servers, 1)), record, [job.id])


def test_the_kafka_sink_skips_an_event_that_is_too_large_and_publishes_the_following_events(
    record: Database, tmp_path: Path
) -> None:
    pytest.importorskip("confluent_kafka")
    from tasks.relay.sinks import kafka

    with _kafka(tmp_path) as (_, servers), capture_logs() as logs:
        store = JobStore(record)
        relay = Relay("kafka", record, kafka.KafkaSink(servers, "slotkeeper.events", {"message.max.bytes": "1000"}))
        before = an_ended_job(store)
        large = an_ended_job(store, model="m" * 1000)
        after = an_ended_job(store)
        _drained(relay)
        _assert_whole_and_in_order(_unique_events(_consumed(servers, 6)), record, [before.id, after.id])
        relay._close()
    refused = [line for line in logs if line["event"] == "event_too_large"]
    assert len(refused) == len(store.list_events(large.id))


# -- NATS --------------------------------------------------------------------------------------------------------


@contextmanager
def _nats(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    binary = shutil.which("nats-server")
    if binary is None:
        pytest.skip("nats-server is not installed")
    command = [binary, "-js", "-a", "127.0.0.1", "-p", str(port), "-sd", str(folder)]
    with _process(command, folder) as process:
        yield process


def _from_nats(url: str, count: int) -> list[bytes]:
    import asyncio

    import nats

    async def read() -> list[bytes]:
        client = await nats.connect(url)
        subscription = await client.jetstream().pull_subscribe("slotkeeper.>", "test")
        found: list[bytes] = []
        while (missing := count - len(set(found))) > 0:  # Some events come twice.
            found += [message.data for message in await subscription.fetch(missing, timeout=20)]
        await client.close()
        return found

    return asyncio.run(read())


def test_nats_gets_all_events_in_order_per_job_after_the_broker_was_killed(record: Database, tmp_path: Path) -> None:
    pytest.importorskip("nats")
    from tasks.relay.sinks.nats import NatsSink

    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    store, sink = JobStore(record), NatsSink(url, "slotkeeper")
    relay = Relay("nats", record, sink)
    with _nats(tmp_path, port):
        jobs = [an_ended_job(store).id for _ in range(20)]
        _drained(relay)
    jobs += [an_ended_job(store).id for _ in range(20)]
    with pytest.raises(SinkUnavailable):
        relay.relay_batch()
    with _nats(tmp_path, port):
        _drained(relay)
        _assert_whole_and_in_order(_unique_events(_from_nats(url, 120)), record, jobs)
        sink.close()


# -- AMQP --------------------------------------------------------------------------------------------------------

_RABBITMQ = "/usr/lib/rabbitmq/bin"  # Debian's script in PATH must run as a separate user.
_RABBITMQ_UP_S = 120.0


@contextmanager
def _rabbitmq(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a broker with its data in this folder and a separate epmd: Erlang would start one that outlives it."""
    server, epmd = shutil.which("rabbitmq-server", path=_RABBITMQ), shutil.which("epmd")
    if server is None or epmd is None:
        pytest.skip("rabbitmq-server is not installed")
    names_port = free_port()
    (folder / "plugins").write_text("[].\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RABBITMQ_")} | {
        "RABBITMQ_NODENAME": f"slotkeeper{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "logs"),
        "RABBITMQ_CONFIG_FILE": str(folder / "none"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(names_port),
        "HOME": str(folder),  # its cookie
    }
    with (
        _process([epmd, "-address", "127.0.0.1", "-port", str(names_port)], folder, env=env),
        _process([server], folder, env=env, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # The program is a script's child.


@pytest.mark.timeout(600)
def test_an_amqp_exchange_gets_all_events_in_order_per_job_after_the_broker_was_killed(
    record: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kombu import Connection, Queue
    from kombu import Exchange as Declared

    from tasks.relay.sinks import amqp

    port = free_port()
    url = f"amqp://guest:guest@127.0.0.1:{port}//"
    queue = Queue("test", Declared("slotkeeper.events", type="topic", durable=True), routing_key="job.*", durable=True)
    store, sink = JobStore(record), amqp.AmqpSink(url, "slotkeeper.events")
    relay = Relay("amqp", record, sink)

    def some_jobs() -> list[str]:
        return [an_ended_job(store).id for _ in range(20)]

    def is_bound() -> bool:
        with Connection(url, connect_timeout=2) as connection:
            queue(connection.channel()).declare()
        return True

    def bodies() -> Iterator[bytes]:
        with Connection(url) as connection:
            bound = queue(connection.channel())
            while (message := bound.get(no_ack=True)) is not None:
                body: Any = message.body
                assert message.delivery_info["routing_key"] == orjson.loads(body)["type"]
                yield body if isinstance(body, bytes) else body.encode()

    with _rabbitmq(tmp_path, port) as broker:
        _until(is_bound, "RabbitMQ", _RABBITMQ_UP_S)
        jobs = some_jobs()
        _drained(relay)
        os.killpg(broker.pid, signal.SIGSTOP)
        jobs += some_jobs()
        monkeypatch.setattr(amqp, "_TIMEOUT_S", 1.0)
        with pytest.raises(SinkUnavailable):  # The broker may or may not have received the events.
            relay.relay_batch()
    with pytest.raises(SinkUnavailable):
        relay.relay_batch()
    monkeypatch.undo()
    with _rabbitmq(tmp_path, port):
        _until(is_bound, "RabbitMQ again", _RABBITMQ_UP_S)
        _drained(relay)
        _assert_whole_and_in_order(_unique_events(list(bodies())), record, jobs)
    sink.close()
