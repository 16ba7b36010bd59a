"""Sending to real receivers on this machine: what arrives, what is made of the answer, and when it ends."""

import base64
import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from ipaddress import ip_address
from types import SimpleNamespace

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from tasks.security import url_guard
from tasks.security.url_guard import parse_networks
from tasks.webhooks import sender
from tasks.webhooks.sender import MAX_RESPONSE_BYTES, SendResult, WebhookSender

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
LOOPBACK = parse_networks("127.0.0.1/32")
BODY = b'{"job_id": "j1", "status": "completed", "result": {"url": "https://x/\xc3\xa9"}}'
SOON_S = 0.2  # the deadline of a test
SLACK_S = 4.0  # what a busy machine may add to it; without a deadline nothing here ends within 5 s


def now() -> datetime:
    return datetime.now(UTC)


def a_sender(timeout_s: float = 5.0) -> WebhookSender:
    return WebhookSender(LOOPBACK, timeout_s)


def send(
    url: str,
    *,
    timeout_s: float = 5.0,
    body: bytes = BODY,
    at: datetime | None = None,
    secrets: Sequence[str] = (SECRET,),
) -> SendResult:
    return a_sender(timeout_s).send(url, "msg_1", body, at or now(), secrets)


@pytest.fixture
def url(httpserver):
    return f"http://127.0.0.1:{httpserver.port}/hook"


def received(httpserver):
    """The one webhook; somebody who knew this port before may ask for another path."""
    (request,) = [request for request, _ in httpserver.log if request.path == "/hook"]
    return request


def read_all(conn: socket.socket) -> bytes:
    """The whole request; a receiver that closes before has its answer thrown away."""
    request = b""
    while not request.endswith(BODY):
        request += conn.recv(65536)
    return request


@pytest.fixture
def names(monkeypatch):
    """A host name that stands for this machine, whatever it is."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _host, *rest: real("127.0.0.1", *rest))


@pytest.fixture
def receiver():
    """Starts a receiver that does with its one connection what the test says, until the test ends."""
    over, threads = threading.Event(), []

    def start(behave) -> str:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve():
            with listener, listener.accept()[0] as conn, suppress(OSError):
                behave(conn, over)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    yield start
    over.set()
    for thread in threads:
        thread.join(5)


# What arrives


def test_a_message_arrives_whole_and_signed(httpserver, url):
    httpserver.expect_request("/hook", method="POST").respond_with_data("", 204)
    assert send(url) == SendResult(ok=True, status=204, error="", permanent=False)
    request = received(httpserver)
    assert request.data == BODY
    assert Webhook(SECRET).verify(request.data, dict(request.headers)) == json.loads(BODY)
    assert request.headers["webhook-id"] == "msg_1"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"].startswith("Slotkeeper/")
    assert request.headers["connection"] == "close"


@pytest.mark.parametrize("change", ["body", "webhook-id", "webhook-timestamp", "secret"])
def test_a_message_that_was_tampered_with_does_not_verify(httpserver, url, change):
    httpserver.expect_request("/hook").respond_with_data("ok")
    send(url)
    headers, body, secret = dict(received(httpserver).headers), BODY, SECRET
    headers = {name.lower(): value for name, value in headers.items()}
    match change:
        case "body":
            body = BODY.replace(b"j1", b"j2")
        case "webhook-id":
            headers[change] = "msg_2"
        case "webhook-timestamp":
            headers[change] = str(int(headers[change]) - 1)
        case "secret":
            secret = base64.b64encode(b"x" * 24).decode()
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        Webhook(secret).verify(body, headers)


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=5, minutes=30)), timezone(-timedelta(hours=8))])
def test_the_time_is_right_and_signed_right_in_every_zone(httpserver, url, zone):
    httpserver.expect_request("/hook").respond_with_data("ok")
    at = now()
    send(url, at=at.astimezone(zone))
    headers = dict(received(httpserver).headers)
    Webhook(SECRET).verify(BODY, headers)
    assert received(httpserver).headers["webhook-timestamp"] == str(int(at.timestamp()))


def test_a_naive_time_is_refused(url):
    with pytest.raises(ValueError, match="aware"):
        send(url, at=datetime(2026, 1, 1))


def test_an_id_cannot_smuggle_in_a_header(receiver):
    target = receiver(lambda conn, over: over.wait(5))
    with pytest.raises(ValueError, match="header"):
        a_sender().send(target, "msg_1\r\nx-evil: 1", BODY, now(), [SECRET])


def test_path_and_query_arrive_as_written_and_the_fragment_stays_here(httpserver, url):
    httpserver.expect_request("/hook").respond_with_data("ok")
    send(url + "?a=%20b&token=t0ken#fragment")
    assert received(httpserver).environ["QUERY_STRING"] == "a=%20b&token=t0ken"


@pytest.mark.parametrize(("rest", "line"), [("", b"POST / HTTP/1.1"), ("?a=1", b"POST /?a=1 HTTP/1.1")])
def test_a_url_without_a_path_means_the_root(receiver, rest, line):
    lines = []

    def behave(conn, _over):
        lines.append(read_all(conn).splitlines()[0])
        conn.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    assert send(receiver(behave).rstrip("/") + rest).ok
    assert lines == [line]


def test_a_short_body_is_not_held_back_for_an_acknowledgement(httpserver, url, monkeypatch):
    at_once, real = [], socket.socket.connect

    def connect(sock, where):
        at_once.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        real(sock, where)

    monkeypatch.setattr(socket.socket, "connect", connect)
    httpserver.expect_request("/hook").respond_with_data("ok")
    assert send(url).ok
    assert at_once != [0]


def test_the_host_header_holds_the_name_and_not_the_address(httpserver, names):
    httpserver.expect_request("/hook").respond_with_data("ok")
    assert send(f"http://hooks.example.test.:{httpserver.port}/hook").ok
    assert received(httpserver).headers["host"] == f"hooks.example.test:{httpserver.port}"


def test_no_proxy_of_the_environment_is_used(httpserver, url, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    httpserver.expect_request("/hook").respond_with_data("ok")
    assert send(url).ok


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_c2hvcnQ=",
        "no base64 at all, but long enough to be one, were it not for the blanks and commas",
        "whsec_" + "ä" * 40,
        "A" * 33,
    ],
)
def test_a_secret_that_would_sign_with_something_else_is_refused_without_being_told(secret):
    with pytest.raises(ValueError, match="openssl rand") as refused:
        send("http://127.0.0.1:1/", secrets=[secret])
    assert len(secret) < 9 or secret not in str(refused.value)


def test_a_secret_may_come_without_prefix_and_padding(httpserver, url):
    httpserver.expect_request("/hook").respond_with_data("ok")
    secret = base64.b64encode(b"k" * 32).decode()
    assert send(url, secrets=[secret.rstrip("=")]).ok
    Webhook(secret).verify(BODY, dict(received(httpserver).headers))


def test_a_deadline_must_be_above_zero():
    with pytest.raises(ValueError, match="timeout_s"):
        WebhookSender(timeout_s=0)


# What is made of the answer


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_is_success(httpserver, url, status):
    httpserver.expect_request("/hook").respond_with_data("", status)
    assert send(url) == SendResult(True, status, "", False)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 429, 500, 502, 503])
def test_any_other_answer_may_be_tried_again(httpserver, url, status):
    httpserver.expect_request("/hook").respond_with_data("inner secrets", status)
    sent = send(url + "?token=t0ken")
    assert (sent.ok, sent.status, sent.permanent) == (False, status, False)
    assert sent.error == f"http://127.0.0.1 answered {status}."


def test_gone_is_for_good(httpserver, url):
    httpserver.expect_request("/hook").respond_with_data("", 410)
    sent = send(url)
    assert (sent.ok, sent.status, sent.permanent) == (False, 410, True)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_told_and_not_followed(httpserver, url, status):
    inside = {"location": f"http://127.0.0.1:{httpserver.port}/inside"}
    httpserver.expect_request("/hook").respond_with_data("", status, inside)
    httpserver.expect_request("/inside").respond_with_data("")
    sent = send(url)
    assert (sent.ok, sent.status, sent.permanent) == (False, status, False)
    assert "redirect" in sent.error and "inside" not in sent.error
    assert "/inside" not in [request.path for request, _ in httpserver.log]


def test_a_closed_port_may_be_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sent = send(f"http://127.0.0.1:{port}/?token=t0ken")
    assert (sent.ok, sent.status, sent.permanent) == (False, None, False)
    assert sent.error == "http://127.0.0.1: the connection failed: Connection refused."


def test_an_unknown_name_may_be_tried_again(monkeypatch):
    def unknown(*_args):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    sent = send("https://nowhere.test/?token=t0ken")
    assert sent == SendResult(False, None, "https://nowhere.test: the name is not known.", False)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "closed without an answer"),
        (b"220 mail.example ESMTP\r\n", "not HTTP"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n", "not HTTP"),
        (b"\x00\xff" * 100, "not HTTP"),
    ],
)
def test_an_answer_that_is_not_http_is_a_failure_and_is_not_quoted(receiver, answer, told):
    def behave(conn, _over):
        read_all(conn)
        conn.sendall(answer)

    sent = send(receiver(behave))
    assert (sent.ok, sent.status, sent.permanent) == (False, None, False)
    assert told in sent.error and "mail" not in sent.error


# When it ends


def ends_in_time(url: str, body: bytes = BODY) -> SendResult:
    start = time.monotonic()
    sent = send(url, timeout_s=SOON_S, body=body)
    assert time.monotonic() - start < SOON_S + SLACK_S
    return sent


def is_late(sent: SendResult) -> bool:
    return not sent.ok and not sent.permanent and "no answer within 0.2 s" in sent.error


def drip(conn: socket.socket, over: threading.Event, first: bytes, drop: bytes) -> None:
    """One drop long before any single read would give up, and never an end."""
    conn.sendall(first)
    while not over.wait(SOON_S / 4):
        conn.sendall(drop)


def test_a_receiver_that_never_answers_is_given_up(receiver):
    assert is_late(ends_in_time(receiver(lambda conn, over: over.wait(5))))


@pytest.mark.parametrize(
    ("first", "drop"), [(b"HTTP/1.1 200 OK", b" "), (b"HTTP/1.1 200 OK\r\nx: y", b"y")], ids=["status", "header"]
)
def test_a_receiver_that_trickles_its_answer_is_given_up(receiver, first, drop):
    assert is_late(ends_in_time(receiver(lambda conn, over: drip(conn, over, first, drop))))


def test_a_receiver_that_does_not_read_is_given_up(receiver):
    body = json.dumps({"x": "y" * (32 << 20)}).encode()
    assert is_late(ends_in_time(receiver(lambda conn, over: over.wait(5)), body))


class SlowSocket:
    """Takes and gives one byte a second, by its own clock."""

    def __init__(self) -> None:
        self.clock_s, self.waits = 0.0, []

    def settimeout(self, seconds):
        self.waits.append(seconds)

    def send(self, _data) -> int:
        self.clock_s += 1
        return 1

    def recv_into(self, _buffer) -> int:
        return self.send(b"")


@pytest.mark.parametrize("way", ["send", "read"])
def test_steady_progress_does_not_move_the_deadline(monkeypatch, way):
    slow = SlowSocket()
    monkeypatch.setattr(sender, "time", SimpleNamespace(monotonic=lambda: slow.clock_s))
    wire = sender._DeadlineSocket(slow, sender._Deadline(5))
    with pytest.raises(TimeoutError):
        wire.sendall(b"x" * 100) if way == "send" else wire.makefile("rb").read(100)
    assert slow.waits == [5, 4, 3, 2, 1]


def test_a_handshake_that_never_comes_is_given_up(receiver):
    target = receiver(lambda conn, over: over.wait(5)).replace("http:", "https:")
    assert is_late(ends_in_time(target))


def test_a_look_up_that_hangs_is_given_up(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: over.wait(5) and [])
    try:
        assert is_late(ends_in_time("http://slow.test/"))
    finally:
        over.set()


def test_many_addresses_share_one_deadline(monkeypatch):
    row = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(*row, (f"8.8.8.{i}", 80)) for i in range(200)])
    waited = []

    def connect(sock, _where):
        waited.append(sock.gettimeout())
        raise TimeoutError

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert is_late(ends_in_time("http://many.test/"))
    assert len(waited) > 1 and sum(waited) <= SOON_S


@pytest.fixture
def taken(monkeypatch):
    """Bytes that were read from any socket of this process by the sender."""
    sizes, real = [], socket.socket.recv_into

    def recv_into(sock, *args):
        sizes.append(real(sock, *args))
        return sizes[-1]

    monkeypatch.setattr(socket.socket, "recv_into", recv_into)
    return sizes


def pour(first: bytes, more: bytes):
    def behave(conn, over):
        read_all(conn)
        conn.sendall(first)
        while not over.is_set():
            conn.sendall(more)

    return behave


def test_a_body_without_end_is_not_read(receiver, taken):
    sent = send(receiver(pour(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", b"x" * 65536)))
    assert sent == SendResult(True, 200, "", False)
    assert sum(taken) <= 16 << 10


def test_the_body_of_a_redirect_is_not_read_either(receiver, taken):
    head = b"HTTP/1.1 302 Found\r\nlocation: /x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert send(receiver(pour(head, b"10000\r\n" + b"x" * 65536 + b"\r\n"))).status == 302
    assert sum(taken) <= 16 << 10


def test_a_trickling_body_is_not_waited_for(receiver):
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"
    assert ends_in_time(receiver(lambda conn, over: drip(conn, over, head, b"x"))).ok


def test_answers_before_the_answer_are_not_read_for_ever(receiver, taken):
    sent = send(receiver(pour(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100)))
    assert (sent.ok, sent.permanent) == (False, False)
    assert sum(taken) <= MAX_RESPONSE_BYTES + (16 << 10)


# TLS


def pem(thing) -> bytes:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    if hasattr(thing, "private_bytes"):
        plain = serialization.NoEncryption()
        return thing.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return thing.public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A folder with ca.pem, a private authority, and server.pem, its certificate for hooks.example.test."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    def a_certificate(name, key, issuer, signing_key, extensions):
        made = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
            key.public_key(),
            x509.random_serial_number(),
            now() - timedelta(days=1),
            now() + timedelta(days=1),
        )
        for extension in extensions:
            made = made.add_extension(extension, critical=False)
        return made.sign(signing_key, SHA256())

    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    is_ca = x509.BasicConstraints(ca=True, path_length=None)
    alt = x509.SubjectAlternativeName([x509.DNSName("hooks.example.test")])
    folder = tmp_path_factory.mktemp("tls")
    (folder / "ca.pem").write_bytes(pem(a_certificate("ca", root, "ca", root, [is_ca])))
    server = a_certificate("server", leaf, "ca", root, [alt])
    (folder / "server.pem").write_bytes(pem(server) + pem(leaf))
    return folder


@pytest.fixture
def tls_server(authority, names):
    """(server, names that clients asked for by SNI)"""
    from pytest_httpserver import HTTPServer

    asked = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority / "server.pem")
    context.sni_callback = lambda _sock, name, _context: asked.append(name)
    with HTTPServer("127.0.0.1", 0, ssl_context=context) as server:
        server.expect_request("/hook").respond_with_data("ok")
        yield server, asked


@pytest.fixture
def trusted(authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))


def test_tls_asks_for_and_checks_the_name_in_the_url(tls_server, trusted):
    server, asked = tls_server
    assert send(f"https://hooks.example.test:{server.port}/hook") == SendResult(True, 200, "", False)
    assert asked == ["hooks.example.test"]
    assert received(server).headers["host"] == f"hooks.example.test:{server.port}"


def test_a_dot_behind_the_name_is_no_part_of_it_for_tls(tls_server, trusted):
    server, asked = tls_server
    assert send(f"https://hooks.example.test.:{server.port}/hook").ok
    assert asked == ["hooks.example.test"]


def test_a_certificate_for_another_name_is_refused(tls_server, trusted):
    sent = send(f"https://other.example.test:{tls_server[0].port}/hook")
    assert (sent.ok, sent.permanent) == (False, False)
    assert "certificate is refused: Hostname mismatch" in sent.error
    assert not tls_server[0].log


def test_a_certificate_for_the_name_is_no_certificate_for_the_address(tls_server, trusted):
    sent = send(f"https://127.0.0.1:{tls_server[0].port}/hook")
    assert "certificate is refused: IP address mismatch" in sent.error


def test_an_authority_that_nobody_trusts_is_refused(tls_server):
    sent = send(f"https://hooks.example.test:{tls_server[0].port}/hook")
    assert not sent.ok and "certificate is refused" in sent.error
    assert not tls_server[0].log


def test_http_where_tls_was_asked_for_is_a_failure(httpserver):
    sent = send(f"https://127.0.0.1:{httpserver.port}/")
    assert (sent.ok, sent.permanent) == (False, False) and "TLS failed" in sent.error


def test_the_usual_port_is_left_out_of_the_host_header(monkeypatch):
    """RFC 9110, 7.2; some receivers compare it as a text."""
    hosts = {}
    for scheme, port in (("http", 80), ("https", 443)):
        target = url_guard.Target(scheme, "2606:4700::1", port, "", ip_address("2606:4700::1"))
        client = a_sender()._client(target)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            client.sock = ours
            client.request("GET", "/")
            hosts[scheme] = theirs.recv(4096).decode().split("Host: ")[1].split("\r\n")[0]
    assert hosts == {"http": "[2606:4700::1]", "https": "[2606:4700::1]"}
