"""COMMITs that are lost, and messages that are doubled, delayed or lost."""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from redis import Redis
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from app.up import ports
from app.up.errors import UpError
from app.up.managed_process import ManagedProcess
from tools.cluster import postgres_server
from tools.cluster.protocol_filters import BrokerMessages, LostCommits, MessageFault
from tools.cluster.tcp_proxy import Cut, Direction, Proxy
from tools.cluster.valkey_process import Valkey

# -- PostgreSQL --------------------------------------------------------------------------------------------


def message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


def startup() -> bytes:
    body = (3 << 16).to_bytes(4) + b"user\0me\0\0"
    return (len(body) + 4).to_bytes(4) + body


COMMIT = message(b"P", b"\0COMMIT\0\0\0") + message(b"S", b"")
COMMITTED = message(b"1", b"") + message(b"C", b"COMMIT\0") + message(b"Z", b"I")


@pytest.fixture
def commits() -> LostCommits:
    return LostCommits(random.Random(1))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_answer_to_a_commit_is_lost_in_pieces_of_any_size(commits: LostCommits, size: int) -> None:
    commits.lose(Direction.ANSWERS, 1.0)
    stream_filter = commits.make_filter(lambda *_: None)
    sent, answered = startup() + COMMIT, message(b"C", b"INSERT 0 1\0") + COMMITTED
    assert b"".join(stream_filter.requests(sent[n : n + size]) for n in range(0, len(sent), size)) == sent
    with pytest.raises(Cut):
        for n in range(0, len(answered), size):
            stream_filter.answers(answered[n : n + size])
    assert commits.lost == 1


def test_a_commit_can_be_lost_before_the_database(commits: LostCommits) -> None:
    commits.lose(Direction.REQUESTS, 1.0)
    for commit in (COMMIT, message(b"Q", b"COMMIT\0"), message(b"Q", b"commit\0")):
        stream_filter = commits.make_filter(lambda *_: None)
        assert stream_filter.requests(startup()) == startup()
        assert stream_filter.requests(message(b"Q", b"SELECT 'COMMIT'\0"))
        with pytest.raises(Cut):
            stream_filter.requests(commit)


def test_other_answers_pass_and_all_pass_after_the_fault(commits: LostCommits) -> None:
    commits.lose(Direction.ANSWERS, 1.0)
    other = message(b"C", b"ROLLBACK\0")
    assert commits.make_filter(lambda *_: None).answers(other) == other
    commits.stop()
    assert commits.make_filter(lambda *_: None).answers(COMMITTED) == COMMITTED


@pytest.mark.postgres
@pytest.mark.parametrize(("direction", "stored"), [(Direction.ANSWERS, 1), (Direction.REQUESTS, 0)])
def test_a_transaction_is_stored_if_only_the_answer_to_its_commit_was_lost(
    a_postgres: int, proxy: Proxy, commits: LostCommits, direction: Direction, stored: int
) -> None:
    proxy_port = proxy.open("database", ("127.0.0.1", a_postgres)).filter_streams(commits.make_filter)
    direct = create_engine(postgres_server.url(a_postgres))
    proxied = create_engine(postgres_server.url(proxy_port.port))
    with direct.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS t (n INTEGER)"))
        connection.execute(text("DELETE FROM t"))
    commits.lose(direction, 1.0)
    with pytest.raises(OperationalError), proxied.begin() as connection:
        connection.execute(text("INSERT INTO t VALUES (1)"))
    commits.stop()
    with proxied.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM t")).scalar() == stored
    direct.dispose()
    proxied.dispose()


class Database:
    """A PostgreSQL that is prepared as for the drill, and can be killed."""

    def __init__(self, home: Path) -> None:
        self.port = ports.free_port()
        programs = postgres_server.prepare(home / "postgres")
        role = postgres_server.role(programs, home / "postgres", self.port, 1)
        self.child = ManagedProcess(role, os.environ, Path.cwd(), home / "log")

    def start(self) -> None:
        self.child.start()
        until = time.monotonic() + 30
        while not postgres_server.answers(self.port):
            assert self.child.poll() is None and time.monotonic() < until, self.child.last_log_line()
            time.sleep(0.02)

    def kill(self) -> None:
        self.child.kill()
        self._wait()

    def stop(self) -> None:
        self.child.terminate()
        self._wait()

    def _wait(self) -> None:
        while self.child.poll() is None:
            time.sleep(0.02)


@pytest.fixture(scope="module")
def a_database() -> Iterator[Database]:
    # The user `nobody` cannot enter pytest's folder.
    with tempfile.TemporaryDirectory(prefix="slotkeeper-drill-") as home:
        Path(home).chmod(0o711)
        try:
            database = Database(Path(home))
        except UpError as error:
            pytest.skip(str(error))
        database.start()
        try:
            yield database
        finally:
            database.stop()


@pytest.fixture
def a_postgres(a_database: Database) -> int:
    """Return the port of a running PostgreSQL."""
    return a_database.port


@pytest.mark.postgres
def test_committed_data_survives_a_kill_of_the_database(a_database: Database) -> None:
    """Otherwise a drill would find losses that its own kills have caused."""
    with closing(
        psycopg.connect(f"host=127.0.0.1 port={a_database.port} user={postgres_server.USER} dbname=postgres")
    ) as connection:
        connection.execute("CREATE TABLE kept (n INTEGER)")
        connection.commit()
        for n in range(20):
            connection.execute("INSERT INTO kept VALUES (%s)", [n])
            connection.commit()
        a_database.kill()
    a_database.start()
    with closing(
        psycopg.connect(f"host=127.0.0.1 port={a_database.port} user={postgres_server.USER} dbname=postgres")
    ) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (20,)


# -- the broker --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("broker")) as valkey:
        yield valkey


@pytest.fixture
def broker_messages() -> BrokerMessages:
    return BrokerMessages(random.Random(1))


@pytest.fixture
def client(broker: Valkey, proxy: Proxy, broker_messages: BrokerMessages) -> Iterator[Redis]:
    broker.flush()
    proxy_port = proxy.open("broker", ("127.0.0.1", broker.port)).filter_streams(broker_messages.make_filter)
    with Redis(port=proxy_port.port, socket_timeout=5) as client:
        yield client


def wait_until(condition: object, within_s: float = 5) -> None:
    until = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)


def test_messages_pass_unchanged_without_a_fault(client: Redis) -> None:
    assert client.lpush("gpu.zimg", b"m" * 100_000) == 1
    assert client.lrange("gpu.zimg", 0, -1) == [b"m" * 100_000]


def test_a_lost_message_gets_the_response_of_a_delivered_one(client: Redis, broker_messages: BrokerMessages) -> None:
    broker_messages.inject(MessageFault.LOST, 1.0, 0.0)
    with client.pipeline() as pipe:
        assert pipe.set("a", 1).lpush("gpu.zimg", "m").get("a").execute() == [True, 0, b"1"]
    assert client.llen("gpu.zimg") == 0
    assert broker_messages.injected == 1


def test_a_doubled_message_arrives_twice(client: Redis, broker_messages: BrokerMessages) -> None:
    broker_messages.inject(MessageFault.DOUBLED, 1.0, 0.1)
    client.lpush("gpu.zimg", "m")
    wait_until(lambda: client.lrange("gpu.zimg", 0, -1) == [b"m", b"m"])


def test_a_delayed_message_arrives_even_after_the_fault(client: Redis, broker_messages: BrokerMessages) -> None:
    broker_messages.inject(MessageFault.DELAYED, 1.0, 0.4)
    assert client.lpush("gpu.zimg", "m") == 0
    broker_messages.stop()
    wait_until(lambda: client.lrange("gpu.zimg", 0, -1) == [b"m"])


def test_commands_that_send_no_message_pass(client: Redis, broker_messages: BrokerMessages) -> None:
    broker_messages.inject(MessageFault.LOST, 1.0, 0.0)
    assert client.lpush("something-else", "m") == 1
    assert client.rpush("gpu.zimg", "m") == 1
    assert broker_messages.injected == 0


def test_about_the_requested_share_is_lost(client: Redis, broker_messages: BrokerMessages) -> None:
    broker_messages.inject(MessageFault.LOST, 0.5, 0.0)
    for _ in range(200):
        client.lpush("webhooks", "m")
    assert 70 < client.llen("webhooks") < 130
