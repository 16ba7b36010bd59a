"""One connection, byte by byte: ambiguous requests are refused, and a response cannot contain a second one."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import requests

from app.auth.api_keys import KeyCache
from app.config import AppSettings
from app.server import http_protocol
from app.server.application import HttpRequest, WebApplication
from app.server.http_protocol import LimitedHttpProtocol
from slotkeeper.client import Client
from slotkeeper.client_errors import ApiUnreachable, ClientError
from slotkeeper.db import Database
from slotkeeper.registry.identity import FIRST_SCOPES
from tests.support.certificates import self_signed
from tests.support.keys import FakeKeys
from tests.support.web import Web, serving
from tools.cluster.stack import eventually

CRLF = b"\r\n"
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
GATE = threading.Event()
SEEN: list[str] = []
DATABASE = Database("sqlite:///file:nobody")  # It is never read.
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"


def _echo(environ: dict[str, Any], start: Any) -> list[bytes]:
    SEEN.append(environ["PATH_INFO"])
    if environ["PATH_INFO"] == "/gate":
        GATE.wait(20)
    body = environ["wsgi.input"].read().decode("latin-1")
    names = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_HOST", "CONTENT_LENGTH", "HTTP_X_A")
    if environ["PATH_INFO"] == "/big":
        body = "a" * int(environ["QUERY_STRING"])
    content = json.dumps({**{name: environ.get(name) for name in names}, "body": body}).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
    if environ["PATH_INFO"] == "/inject":
        headers.append(("X-B", "a\r\nSet-Cookie: b=\x85\u2028c"))
    if environ["PATH_INFO"] == "/euro":
        headers.append(("X-B", "\u20ac"))
    start("200 OK", headers)
    return [content]


class _Sessions:
    """No sessions of the page."""

    def read(self) -> None:
        pass


class _Follower:
    """A progress follower without subscriptions."""

    def stop(self) -> None:
        pass


def _application(keys: Any = None, **settings: Any) -> WebApplication:
    app_settings = AppSettings(require_keys=keys is not None, **settings)
    cache = None if keys is None else KeyCache(keys, cast(Any, _Sessions()), 1.0)
    return WebApplication(_echo, app_settings, cache, 100, DATABASE, cast(Any, _Follower()), lambda gone_s: None)


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with serving(_application()) as web:
        yield web


@pytest.fixture
def unused_web() -> Iterator[Web]:
    """A server without previous clients: a port may be reused before the server notices a disconnect."""
    with serving(_application()) as web:
        yield web


@pytest.fixture
def address(web: Web) -> tuple[str, int]:
    return web.address


def _exchange(address: tuple[str, int], *sent: bytes, ends: bool = True) -> bytes:
    """Send these pieces, and return the bytes that are received until the connection is closed.

    `ends`: a last request ends the connection, if none of these does; its response is not returned.
    """
    with socket.create_connection(address, 10) as connection:
        for piece in sent:
            connection.sendall(piece)
        if ends:
            with suppress(OSError):  # A refusal has closed the connection.
                connection.sendall(LAST)
        received = _read_all(connection)
    before, _, last = received.rpartition(b"HTTP/1.1 200 OK")
    return before if b'"PATH_INFO": "/last"' in last else received


def _read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def _statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def _last_body(answers: bytes) -> dict[str, Any]:
    return json.loads(answers.rpartition(CRLF + CRLF)[2])


def _protocols_of(web: Web, connection: socket.socket) -> list[LimitedHttpProtocol]:
    return [protocol for protocol in web.connections if protocol.client == connection.getsockname()]


AMBIGUOUS_REQUESTS = {
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 0\r\n\r\nabcde" + HIDDEN,
    "two equal lengths": POST + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "two lengths in a line": POST + b"Content-Length: 5, 5\r\n\r\nabcde" + HIDDEN,
    "a signed length": POST + b"Content-Length: +5\r\n\r\nabcde" + HIDDEN,
    "a length with an underscore": POST + b"Content-Length: 0_5\r\n\r\nabcde" + HIDDEN,
    "a length in hex": POST + b"Content-Length: 0x5\r\n\r\nabcde" + HIDDEN,
    "no length in the length": POST + b"Content-Length: \r\n\r\n" + HIDDEN,
    "a length without end": POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n" + HIDDEN,
    "a negative length": POST + b"Content-Length: -1\r\n\r\n" + HIDDEN,
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks that are not the last coding": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n" + HIDDEN,
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a coding before the chunks": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks behind nothing": POST + b"Transfer-Encoding: , chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks behind a tab": POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks of a name with a blank": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a folded line": POST + b"X-A: b\r\n Content-Length: 5\r\n\r\n" + HIDDEN,
    "a line that begins with a blank": b"POST /a HTTP/1.1\r\n Host: x\r\n\r\n" + HIDDEN,
    "a bare line feed": POST + b"X-A: b\nContent-Length: 5\r\n\r\nabcde" + HIDDEN,
    "a bare carriage return": POST + b"X-A: b\rContent-Length: 5\r\n\r\nabcde" + HIDDEN,
    "a head that ends with line feeds": b"POST /a HTTP/1.1\nHost: x\n\n" + HIDDEN,
    "a zero byte": POST + b"X-A: \0\r\n\r\n" + HIDDEN,
    "a header without a name": POST + b": b\r\n\r\n" + HIDDEN,
    "a header without a colon": POST + b"Content-Length\r\n\r\n" + HIDDEN,
    "no host": b"GET /a HTTP/1.1\r\n\r\n" + HIDDEN,
    "two hosts": GET + b"Host: y\r\n\r\n" + HIDDEN,
    "two types": POST + b"Content-Type: text/plain\r\nContent-Type: application/json\r\n\r\n" + HIDDEN,
    "chunks in HTTP/1.0": b"POST /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "HTTP/2": b"GET /a HTTP/2.0\r\n\r\n" + HIDDEN,
    "HTTP/2, spoken": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
    "HTTP/0.9": b"GET /a HTTP/0.9\r\n\r\n" + HIDDEN,
    "HTTP/1.2": b"GET /a HTTP/1.2\r\nHost: x\r\n\r\n" + HIDDEN,
    "no version": b"GET /a\r\n\r\n" + HIDDEN,
    "a blank in the address": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "an address that is none": b"GET a HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "an address with a user": b"GET http://u:p@x/a HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "an address without a host": b"GET http:///a HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "another protocol's address": b"GET ftp://x/a HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "no method of HTTP": b"G ET /a HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN,
    "a chunk's size that is none": POST + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n" + HIDDEN,
    "a chunk's size without end": POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\na\r\n" + HIDDEN,
    "a negative chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n" + HIDDEN,
    "a chunk that is longer than it says": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n" + HIDDEN,
    "a chunk that ends with a line feed": POST + b"Transfer-Encoding: chunked\r\n\r\n1\na\n0\n\n" + HIDDEN,
    "a line feed in a chunk's extension": POST + b"Transfer-Encoding: chunked\r\n\r\n1;a\nb\r\na\r\n0\r\n\r\n" + HIDDEN,
    "bytes that are no text": bytes(range(256)),
    "a greeting of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
}


@pytest.mark.parametrize("case", AMBIGUOUS_REQUESTS)
def test_an_ambiguous_request_is_refused_and_no_later_request_is_parsed(address: tuple[str, int], case: str) -> None:
    answers = _exchange(address, AMBIGUOUS_REQUESTS[case])
    assert _statuses(answers) == [400], answers
    assert b"connection: close" in answers and b"/hidden" not in answers


@pytest.mark.parametrize("case", AMBIGUOUS_REQUESTS)
def test_an_ambiguous_request_is_refused_also_if_its_bytes_arrive_one_by_one(
    address: tuple[str, int], case: str
) -> None:
    sent = AMBIGUOUS_REQUESTS[case]
    with socket.create_connection(address, 10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(len(sent)):
            try:
                connection.sendall(sent[number : number + 1])
            except OSError:
                break  # The request is refused, and the rest is not read.
        try:
            answers = _read_all(connection)
        except ConnectionError:
            return
    assert _statuses(answers) == [400], answers


def test_chunks_are_joined_without_extensions_and_trailers(address: tuple[str, int]) -> None:
    chunks = b'1;name="v"\r\na\r\n2\r\nbc\r\n0\r\nX-A: trailer\r\nHost: y\r\n\r\n'
    answers = _exchange(address, POST + b"Transfer-Encoding: chunked\r\nX_A: no\r\n\r\n" + chunks)
    echoed = _last_body(answers)
    assert (echoed["body"], echoed["HTTP_X_A"], echoed["HTTP_HOST"], echoed["CONTENT_LENGTH"]) == (
        "abc",
        None,
        "x",
        None,
    )


def test_the_length_of_trailers_is_limited(address: tuple[str, int]) -> None:
    sent = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"X-A: b\r\n" * 80_000
    assert _statuses(_exchange(address, sent, ends=False))[:1] == [400]


def test_pipelined_requests_are_answered_in_order(address: tuple[str, int]) -> None:
    sent = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(20))
    answers = _exchange(address, sent)
    assert _statuses(answers) == [200] * 20
    assert [f'"/{n}"'.encode() in part for n, part in enumerate(answers.split(b"HTTP/1.1 200")[1:])] == [True] * 20


def test_only_a_few_pipelined_requests_are_parsed_ahead(address: tuple[str, int], web: Web) -> None:
    """A parsed request uses a hundred times its size on the network."""
    GATE.clear()
    with socket.create_connection(address, 10) as connection:
        connection.sendall(
            b"GET /gate HTTP/1.1\r\nHost: x\r\n\r\n" + (GET + CRLF) * 500 + GET + b"Connection: close\r\n\r\n"
        )
        eventually(
            lambda: any(protocol.has_complete_request for protocol in web.connections), "the first is in progress"
        )
        held = [len(protocol.pipeline) for protocol in web.connections]
        GATE.set()
        answers = _read_all(connection)
    assert max(held) < 50
    assert _statuses(answers) == [200] * 502


def test_a_request_whose_client_disconnects_while_it_waits_for_a_thread_is_not_handled(unused_web: Web) -> None:
    GATE.clear()
    pool = unused_web.application.general
    earlier = [socket.create_connection(unused_web.address, 10) for _ in range(32)]
    for connection in earlier:  # Without keys one owner gets all 16 threads.
        connection.sendall(b"GET /gate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    eventually(lambda: not pool.has_room, "all have a thread")
    with socket.create_connection(unused_web.address, 10) as last:
        last.sendall(b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n")
        (protocol,) = eventually(lambda: _protocols_of(unused_web, last), "it is connected")
        eventually(lambda: protocol.has_complete_request, "it waits")
    eventually(lambda: protocol.has_disconnected, "the server has noticed")
    SEEN.clear()
    GATE.set()
    for connection in earlier:
        assert _statuses(_read_all(connection)) == [200]
    assert "/late" not in SEEN


def test_a_connection_is_closed_after_the_first_of_many_refused_requests(address: tuple[str, int], web: Web) -> None:
    """Each refusal is sent while the next request is being read."""
    pool = web.application.general
    pool.most_waiting, pool.threads = 0, 0
    try:
        answers = _exchange(address, (GET + CRLF) * 1000, ends=False)
    finally:
        pool.most_waiting, pool.threads = 1024, 16
    assert _statuses(answers) == [429]
    assert b"connection: close" in answers


def test_a_failure_to_send_a_response_closes_only_its_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> bytes:
        raise RuntimeError("planted")

    with monkeypatch.context() as broken:
        broken.setattr("app.server.application.HttpRequest.start", fail)
        with suppress(ConnectionError):
            assert _exchange(address, GET + CRLF, ends=False) == b""
    assert _statuses(_exchange(address, GET + CRLF)) == [200]


def test_a_request_inside_a_body_is_not_parsed(address: tuple[str, int]) -> None:
    body = HIDDEN
    answers = _exchange(address, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert _statuses(answers) == [200]
    assert _last_body(answers)["body"] == body.decode()


UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\nX-A: b\r\n"
)


@pytest.mark.parametrize(
    "body", [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_an_upgrade_request_is_ignored_and_its_body_is_read(
    address: tuple[str, int], body: bytes, at_once: bool
) -> None:
    sent = POST + UPGRADE + body
    answers = _exchange(address, *([sent + HIDDEN] if at_once else (sent[n : n + 1] for n in range(len(sent)))))
    assert _statuses(answers) == [200] and b"/hidden" not in answers and b"connection: close" in answers
    echoed = _last_body(answers)
    assert (echoed["REQUEST_METHOD"], echoed["PATH_INFO"], echoed["body"], echoed["HTTP_X_A"]) == (
        "POST",
        "/a",
        "hello",
        "b",
    )


@pytest.mark.parametrize(
    "case", ["two lengths", "length and chunks", "two hosts", "chunks that are not the last coding"]
)
def test_an_ambiguous_upgrade_request_is_refused(address: tuple[str, int], case: str) -> None:
    line, rest = AMBIGUOUS_REQUESTS[case].split(CRLF, 1)
    answers = _exchange(address, line + CRLF + UPGRADE + rest)
    assert _statuses(answers) == [400] and b"/hidden" not in answers


def test_data_after_an_upgrade_request_is_not_read(address: tuple[str, int]) -> None:
    answers = _exchange(address, GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + HIDDEN)
    assert _statuses(answers) == [200]
    assert b"/hidden" not in answers


@pytest.mark.parametrize("length", [b"Content-Length: 4", b"content-length:4"])
def test_the_protocol_waits_briefly_for_the_body_before_it_handles_a_request(
    web: Web, monkeypatch: pytest.MonkeyPatch, length: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "_BODY_FOLLOWS_S", 60.0)
    SEEN.clear()
    with socket.create_connection(web.address, 10) as connection:
        connection.sendall(POST + length + b"\r\nConnection: close\r\n\r\n")
        eventually(lambda: any(one._unparsed for one in _protocols_of(web, connection)), "the head is held")
        assert not any(protocol._cycles for protocol in _protocols_of(web, connection))
        connection.sendall(b"body")
        assert _last_body(_read_all(connection))["body"] == "body"


def test_a_body_that_arrives_after_its_head_is_read(web: Web) -> None:
    with socket.create_connection(web.address, 10) as connection:
        connection.sendall(POST + b"Content-Length: 4\r\nConnection: close\r\n\r\n")
        eventually(lambda: any(one._cycles for one in _protocols_of(web, connection)), "the request begins")
        connection.sendall(b"body")
        assert _last_body(_read_all(connection))["body"] == "body"


@pytest.mark.parametrize(
    "whole",
    [
        GET + b"\r\n",
        POST + b"Content-Length: 0\r\n\r\n",
        POST + b"Content-Length: 5\r\n\r\na\r\n\r\n",
    ],
)
def test_a_complete_request_is_handled_without_a_wait(web: Web, monkeypatch: pytest.MonkeyPatch, whole: bytes) -> None:
    monkeypatch.setattr(http_protocol, "_BODY_FOLLOWS_S", 60.0)
    with socket.create_connection(web.address, 10) as connection:
        connection.sendall(whole)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [GET, POST + b"Content-Length: 5\r\n\r\nabcd", b"GE"])
def test_an_incomplete_request_does_nothing(address: tuple[str, int], sent: bytes) -> None:
    SEEN.clear()
    with socket.create_connection(address, 10) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert _read_all(connection) == b""
    assert SEEN == []


def test_an_answer_to_head_has_no_body(address: tuple[str, int]) -> None:
    answers = _exchange(address, b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n" + GET + CRLF)
    first, second = answers.split(CRLF + CRLF, 1)
    assert b"content-length: " in first and second.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("version, is_asked", [(b"1.1", True), (b"1.0", False)])
def test_a_client_that_expects_100_continue_gets_it(address: tuple[str, int], version: bytes, is_asked: bool) -> None:
    with socket.create_connection(address, 10) as connection:
        connection.sendall(
            POST.replace(b"1.1", version) + b"Expect: 100-Continue\r\nConnection: close\r\nContent-Length: 3\r\n\r\n"
        )
        if is_asked:
            assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        answer = _read_all(connection)
    assert _statuses(answer) == [200]
    assert _last_body(answer)["body"] == "abc"


@pytest.mark.parametrize(
    "target, path",
    [(b"/%00%0d%0a%ff", "/\0\r\n\xff"), (b"//x/a", "//x/a"), (b"/a/../b", "/a/../b"), (b"/%2e%2E/%2f", "/..//")],
)
def test_a_path_is_decoded_and_not_normalized(address: tuple[str, int], target: bytes, path: str) -> None:
    assert _last_body(_exchange(address, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n"))["PATH_INFO"] == path


def test_a_line_break_in_a_response_header_starts_no_new_header(address: tuple[str, int]) -> None:
    answers = _exchange(address, b"GET /inject HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"\r\nx-b: a  Set-Cookie: b=  c\r\n" in answers


def test_a_header_beyond_latin_1_is_replaced(address: tuple[str, int]) -> None:
    assert b"\r\nx-b: ?\r\n" in _exchange(address, b"GET /euro HTTP/1.1\r\nHost: x\r\n\r\n")


@pytest.mark.parametrize("require_keys, threads, places", [(True, 8, 16), (False, 32, 32)])
def test_with_keys_required_one_owner_gets_only_a_share_of_threads_and_waiting_places(
    require_keys: bool, threads: int, places: int
) -> None:
    application = _application(_Keys() if require_keys else None, web_threads=32, max_waiting_requests=32)
    assert (application.general.share, application.waiting.share) == (threads, places)


class _Keys(FakeKeys):
    """One key.  Looks after the first one wait for GATE."""

    def __init__(self) -> None:
        super().__init__(a=FIRST_SCOPES)

    def get_version(self) -> int:
        version = super().get_version()
        if self.looks > 1:
            GATE.wait(20)
        return version


def test_unknown_keys_do_not_delay_valid_keys_and_share_a_few_lookups() -> None:
    GATE.clear()
    keys = _Keys()
    with serving(_application(keys)) as keyed:
        eventually(lambda: keys.looks, "the keys are read")
        connections = [socket.create_connection(keyed.address, 10) for _ in range(65)]
        try:
            for number, connection in enumerate(connections):
                connection.sendall(GET + b"Connection: close\r\nAuthorization: Bearer sk_%d\r\n\r\n" % number)
            eventually(lambda: keys.looks > 1, "they are read again")
            assert _statuses(_exchange(keyed.address, GET + b"Authorization: Bearer sk_a\r\n\r\n")) == [200]
            GATE.set()
            for connection in connections:
                assert _statuses(_read_all(connection)) == [200]
            assert keys.looks < 5
        finally:
            GATE.set()
            for connection in connections:
                connection.close()


def test_a_client_trusts_only_a_configured_authority(tmp_path: Path) -> None:
    file = str(self_signed(tmp_path / "own.pem"))
    with serving(_application(tls_certificate=file)) as web:
        url = "https://{}:{}".format(*web.address)
        assert Client(url, ca=file).get("/a")["PATH_INFO"] == "/a"
        with pytest.raises(ClientError, match=r"is not trusted \(self.signed certificate\): .*SLOTKEEPER_CA") as raised:
            Client(url).get("/a")
        assert not isinstance(raised.value, ApiUnreachable), "it answers"
        with pytest.raises(ClientError, match=r"cannot be asked: .*nowhere\.pem"):
            Client(url, ca="nowhere.pem").get("/a")
    with (
        serving(_application()) as http_web,
        pytest.raises(ClientError, match="look whether its address begins with http://"),
    ):
        Client("https://{}:{}".format(*http_web.address)).get("/a")


def test_anonymous_requests_do_not_delay_a_readiness_probe() -> None:
    GATE.clear()
    with serving(_application(_Keys())) as keyed:
        connections = []
        try:
            for n in range(2, 6):  # Each address is a separate owner.
                connections.append(socket.create_connection(keyed.address, 10, (f"127.0.0.{n}", 0)))
                connections[-1].sendall(b"GET /gate HTTP/1.1\r\nHost: x\r\n\r\n")
            eventually(lambda: SEEN[-2:] == ["/gate", "/gate"], "both threads are taken")
            probe = b"GET /health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            assert _statuses(_exchange(keyed.address, probe, ends=False)) == [200]
        finally:
            GATE.set()
            for connection in connections:
                connection.close()


@pytest.mark.parametrize("size, is_read", [(2048, True), (2049, False)])
def test_the_body_of_an_anonymous_request_is_limited_to_a_log_in(size: int, is_read: bool) -> None:
    GATE.set()
    with serving(_application(_Keys())) as keyed:
        head = b"POST /page/login HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
        answers = _exchange(keyed.address, head + b"a" * size)
        assert bool(_last_body(answers)["body"]) is is_read


@pytest.mark.parametrize("size", range(10_000, 400_000, 60_000))
def test_the_next_request_is_read_when_a_response_is_sent(address: tuple[str, int], size: int) -> None:
    """For any size of the unsent part."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(8)
        connection.connect(address)
        connection.sendall(b"GET /big?%d HTTP/1.1\r\nHost: x\r\n\r\n" % size)
        received = b""
        while received.count(b"a") < size:
            received += connection.recv(1 << 16)
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        assert _statuses(b"".join(iter(lambda: connection.recv(1 << 16), b""))) == [200]


def test_a_server_with_a_certificate_uses_tls(tmp_path: Path) -> None:
    file = str(self_signed(tmp_path / "web.pem"))
    with serving(_application(tls_certificate=file)) as web:
        url = f"https://127.0.0.1:{web.address[1]}/a"
        assert requests.post(url, b"abc", verify=file, timeout=10).json()["body"] == "abc"
        with pytest.raises(requests.ConnectionError):
            requests.get(url.replace("https", "http"), timeout=10)


def _check_much_later(web: Web) -> None:
    for protocol in web.connections:
        protocol.check_timeouts(time.monotonic() + 3600)


@pytest.mark.parametrize(
    "sent, statuses", [(b"", []), (b"GET /a HTT", [408]), (GET + CRLF, [200]), (GET + CRLF + b"GET /b", [200, 408])]
)
def test_an_idle_connection_is_closed(unused_web: Web, sent: bytes, statuses: list[int]) -> None:
    with socket.create_connection(unused_web.address, 10) as connection:
        connection.sendall(sent)
        got = b""
        while _statuses(got) != [status for status in statuses if status == 200]:
            got += connection.recv(1 << 16)
        (protocol,) = eventually(lambda: _protocols_of(unused_web, connection), "it is connected")
        eventually(
            lambda: bool(protocol.scope) == bool(sent) and not protocol.has_complete_request, "all is read and answered"
        )
        unused_web.call(_check_much_later, unused_web)
        with suppress(ConnectionError):
            got += b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert _statuses(got) == statuses


def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(_application(body_timeout_s=0.2)) as web, socket.create_connection(web.address, 10) as connection:
        connection.sendall(POST + b"Content-Length: 5\r\n\r\na")
        answer = connection.recv(1 << 16)
        assert _statuses(answer) == [408] and b"connection: close" in answer


def test_a_client_that_does_not_read_is_closed(web: Web) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(web.address)
        connection.sendall(b"GET /big?20000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: any(protocol.flow.write_paused for protocol in web.connections), "it does not read")
        web.call(_check_much_later, web)
        web.call(_check_much_later, web)
        web.call(lambda: [protocol.check_timeouts(time.monotonic() + 7200) for protocol in web.connections])
        eventually(lambda: not any(protocol.flow.write_paused for protocol in web.connections), "it is closed")


def test_a_disconnect_with_pipelined_requests_is_noticed(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn notifies only the last request of a disconnect."""
    disconnected = threading.Event()

    async def wait(_: WebApplication, request: HttpRequest) -> None:
        await request.disconnected()
        disconnected.set()

    monkeypatch.setattr(WebApplication, "_answer", wait)
    with socket.create_connection(web.address, 10) as connection:
        connection.sendall((GET + CRLF) * 2)
        eventually(lambda: any(protocol.pipeline for protocol in web.connections), "the second waits for its turn")
    web.call(lambda: [protocol.abort() for protocol in web.connections])
    assert disconnected.wait(10)
