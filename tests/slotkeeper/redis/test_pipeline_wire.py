"""The connection of an event loop to Redis: replies, errors, pushes and lost connections, over TCP and TLS."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import hiredis
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from redis import Redis, exceptions

from routing.scripts import make_scripts
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.pipeline import Pipeline
from slotkeeper.redis.scripts import Command
from tools.cluster.valkey_process import Valkey

KEYS = Keys("test")
SCRIPTS = make_scripts(Redis(), KEYS)  # Makes commands, and sends none.
ANSWER = b"*1\r\n:7\r\n"
_HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"


def depths(fleet: str = "zimg") -> Command:
    return Command(SCRIPTS.target("queue_counts", fleet, lambda answer: int(answer[0])), ())


class Stub:
    """A Redis that accepts each handshake and sends each script its given reply; None closes the connection."""

    def __init__(self, *replies: bytes | None, greeting: bytes = b"+OK\r\n", a_time: int = 1 << 20) -> None:
        self._replies, self._greeting, self._a_time = list(replies), greeting, a_time
        self.fleets: list[bytes] = []  # the fleet of each script
        self.connections = 0

    async def speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        commands = hiredis.Reader()
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                commands.feed(data)
                while words := commands.gets():
                    reply = self._answer(words)
                    if reply is None:
                        writer.close()
                        return
                    for n in range(0, len(reply), self._a_time):
                        writer.write(reply[n : n + self._a_time])
                        await asyncio.sleep(0)
        writer.close()

    def _answer(self, words: list[bytes]) -> bytes | None:
        if words[0] == b"FCALL":
            self.fleets.append(words[3].partition(b"{")[2].partition(b"}")[0])
            return self._replies.pop(0)
        if words[0] == b"HELLO":
            return _HELLO
        return self._greeting if b"LIB-VER" in words else b"+OK\r\n"


def play(
    speak: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    act: Callable[[Pipeline], Awaitable[Any]],
    url: str = "redis://127.0.0.1:{port}",
    context: ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
) -> Any:
    """Do `act` in a worker's loop with a pipeline to this server."""

    async def life() -> Any:
        failed = list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))
        server = await asyncio.start_server(speak, "127.0.0.1", 0, ssl=context)
        with Redis.from_url(url.format(port=server.sockets[0].getsockname()[1])) as client:
            pipeline = Pipeline(asyncio.get_running_loop(), make_scripts(client, KEYS), timeout_s)
            try:
                async with asyncio.timeout(5):
                    found = await act(pipeline)
            finally:
                await pipeline.close()
                server.close()
        await asyncio.sleep(0)  # The loop reports the end of the connection.
        assert failed == []
        return found

    return uvloop.run(life())


def asked(*fleets: str) -> Callable[[Pipeline], Awaitable[list[Any]]]:
    """Send a request for each fleet at once and return the responses, errors included."""

    async def act(pipeline: Pipeline) -> list[Any]:
        return await asyncio.gather(*(pipeline.execute(depths(fleet)) for fleet in fleets), return_exceptions=True)

    return act


async def over(pipeline: Pipeline) -> None:
    """Wait until its connection is not used any more."""
    while pipeline._serving is not None:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("a_time", [1, 3, 1000])
def test_a_reply_is_parsed_correctly_in_chunks_of_any_size(a_time):
    stub = Stub(ANSWER, b"*1\r\n$2\r\n11\r\n", b"-ERR no\r\n", ANSWER, a_time=a_time)
    one, two, wrong, four = play(stub.speak, asked("a", "b", "c", "d"))
    assert (one, two, four, str(wrong)) == (7, 11, 7, "no")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-ERR wrong\r\n", exceptions.ResponseError),
        (b"-BUSY wait\r\n", exceptions.ResponseError),
        (b"-OOM full\r\n", exceptions.OutOfMemoryError),
        (b"-READONLY a replica\r\n", exceptions.ReadOnlyError),
        (b"-MOVED 1 127.0.0.1:1\r\n", exceptions.MovedError),
        (b"-NOPERM no\r\n", exceptions.NoPermissionError),
    ],
)
def test_an_error_reply_raises_the_exception_of_redis_py_for_its_request_only(reply, kind):
    stub = Stub(ANSWER, reply, ANSWER)
    one, wrong, three = play(stub.speak, asked("a", "b", "c"))
    assert (one, three, type(wrong), stub.connections) == (7, 7, kind, 1)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-LOADING yet\r\n", exceptions.BusyLoadingError),
        (b"-NOAUTH who are you\r\n", exceptions.AuthenticationError),
        (b"what?\r\n", exceptions.InvalidResponse),
    ],
)
def test_a_fatal_reply_fails_all_pending_requests_and_the_next_request_reconnects(reply, kind):
    async def act(pipeline: Pipeline) -> list[Any]:
        return await asked("a", "b", "c")(pipeline) + await asked("d")(pipeline)

    stub = Stub(ANSWER, reply, b"", ANSWER)
    one, *lost, again = play(stub.speak, act)
    assert (one, again, stub.connections) == (7, 7, 2) and [type(error) for error in lost] == [kind] * 2


def test_a_request_that_was_sent_and_not_answered_is_not_sent_again():
    async def act(pipeline: Pipeline) -> list[Any]:
        return await asked("a", "b", "c")(pipeline) + await asked("d")(pipeline)

    stub = Stub(ANSWER, b"", None, ANSWER)
    one, *lost, again = play(stub.speak, act)
    assert (one, again) == (7, 7) and all(isinstance(error, exceptions.ConnectionError) for error in lost)
    assert stub.fleets == [b"a", b"b", b"c", b"d"]


def test_a_connection_that_received_a_reply_without_a_request_is_not_used_again():
    async def act(pipeline: Pipeline) -> list[Any]:
        found = await asked("a")(pipeline)
        await over(pipeline)
        return found + await asked("b")(pipeline)

    stub = Stub(ANSWER + b"*1\r\n:8\r\n", ANSWER)
    assert play(stub.speak, act) == [7, 7]
    assert stub.connections == 2


def test_data_that_follows_the_handshake_does_not_count_as_a_reply():
    stub = Stub(b"", greeting=b"+OK\r\n*1\r\n:8\r\n")
    (found,) = play(stub.speak, asked("a"))
    assert isinstance(found, exceptions.ConnectionError) and stub.fleets == []


def test_a_push_message_does_not_count_as_a_reply():
    push = b">2\r\n$4\r\nnews\r\n:8\r\n"
    stub = Stub(push + ANSWER + push, ANSWER)
    assert play(stub.speak, asked("a", "b")) == [7, 7]
    assert stub.connections == 1


def test_a_reply_that_cannot_be_handled_fails_all_pending_requests_and_the_next_one_reconnects(monkeypatch):
    async def act(pipeline: Pipeline) -> list[Any]:
        with monkeypatch.context() as broken:
            broken.setattr(
                pipeline._scripts, "load_command", None
            )  # called for a function that this Redis does not have
            found = await asked("a", "b")(pipeline)
        return found + await asked("c")(pipeline)

    stub = Stub(b"-ERR Function not found\r\n", b"", ANSWER)
    *lost, again = play(stub.speak, act)
    assert again == 7 and len(lost) == 2
    assert all(isinstance(error, exceptions.ConnectionError) and "NoneType" in str(error) for error in lost)


def test_the_unsent_commands_of_a_closed_connection_are_sent_on_the_next_connection():
    async def act(pipeline: Pipeline) -> list[Any]:
        found = await asked("a")(pipeline)
        line = pipeline._connection
        assert line is not None
        line.close(exceptions.ConnectionError("over"))
        await over(pipeline)
        following = pipeline.execute(depths("b"))
        pipeline._flush(line)
        return [*found, await following]

    assert play(Stub(ANSWER, ANSWER).speak, act) == [7, 7]


def test_a_redis_that_does_not_answer_the_handshake_causes_a_timeout():
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    (found,) = play(speak, asked("a"), timeout_s=0.2)
    assert isinstance(found, exceptions.TimeoutError)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 127.0.0.1, with its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(alternative, critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "redis.pem"
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(private + made.public_bytes(pem))
    return file


@pytest.fixture
def valkey_behind_tls(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey") as server:
        yield server


def test_scripts_run_over_tls(certificate, valkey_behind_tls):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    lives = set[asyncio.Task[None]]()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, on = await asyncio.open_connection("127.0.0.1", valkey_behind_tls.port)
        lives.add(asyncio.create_task(carry(back, writer)))
        await carry(reader, on)

    async def act(pipeline: Pipeline) -> list[Any]:
        found = await asked(*"abcdefgh")(pipeline)
        valkey_behind_tls.kill()
        await over(pipeline)
        return found

    url = f"rediss://127.0.0.1:{{port}}?ssl_ca_certs={certificate}"
    assert play(speak, act, url, context) == [0] * 8
