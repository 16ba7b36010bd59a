"""Sending to real receivers on this machine: the request, the result of each response, the deadline, and TLS."""

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
SOON_S = 0.2  # the deadline in tests of the deadline
SLACK_S = 4.0  # how much later a send may end on a busy machine; without a deadline, none here would end within 5 s


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
    """Return the only request to /hook; a client of an earlier server on this port may request other paths."""
    (request,) = [request for request, _ in httpserver.log if request.path == "/hook"]
    return request


def read_all(conn: socket.socket) -> bytes:
    """Read and return the whole request; if a receiver closes earlier, the sender never sees its response."""
    request = b""
    while not request.endswith(BODY):
        request += conn.recv(65536)
    return request


@pytest.fixture
def resolve_to_loopback(monkeypatch):
    """Resolve every host name to 127.0.0.1."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _host, *rest: real("127.0.0.1", *rest))


@pytest.fixture
def start_receiver():
    """Return a function that starts a receiver and returns its URL.

    The receiver accepts one connection, and passes it to a function of the test with an event that is set when the test
    ends.
    """
    ended, threads = threading.Event(), []

    def start(respond) -> str:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve():
            with listener, listener.accept()[0] as conn, suppress(OSError):
                respond(conn, ended)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    yield start
    ended.set()
    for thread in threads:
        thread.join(5)


# -- the request ---------------------------------------------------------------------------------------------------


def test_a_message_is_signed_and_arrives_unchanged(httpserver, url):
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
def test_a_time_in_any_zone_is_sent_and_signed_in_utc(httpserver, url, zone):
    httpserver.expect_request("/hook").respond_with_data("ok")
    at = now()
    send(url, at=at.astimezone(zone))
    headers = dict(received(httpserver).headers)
    Webhook(SECRET).verify(BODY, headers)
    assert received(httpserver).headers["webhook-timestamp"] == str(int(at.timestamp()))


def test_a_naive_time_is_refused(url):
    with pytest.raises(ValueError, match="aware"):
        send(url, at=datetime(2026, 1, 1))


def test_an_id_with_a_line_break_is_refused(start_receiver):
    target = start_receiver(lambda conn, ended: ended.wait(5))
    with pytest.raises(ValueError, match="header"):
        a_sender().send(target, "msg_1\r\nx-evil: 1", BODY, now(), [SECRET])


def test_path_and_query_are_sent_unchanged_and_the_fragment_is_not_sent(httpserver, url):
    httpserver.expect_request("/hook").respond_with_data("ok")
    send(url + "?a=%20b&token=t0ken#fragment")
    assert received(httpserver).environ["QUERY_STRING"] == "a=%20b&token=t0ken"


@pytest.mark.parametrize(("rest", "line"), [("", b"POST / HTTP/1.1"), ("?a=1", b"POST /?a=1 HTTP/1.1")])
def test_a_url_without_a_path_requests_the_root(start_receiver, rest, line):
    lines = []

    def respond(conn, _ended):
        lines.append(read_all(conn).splitlines()[0])
        conn.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    assert send(start_receiver(respond).rstrip("/") + rest).ok
    assert lines == [line]


def test_a_short_body_is_sent_without_waiting_for_an_acknowledgement(httpserver, url, monkeypatch):
    no_delay, real = [], socket.socket.connect

    def connect(sock, address):
        no_delay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        real(sock, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    httpserver.expect_request("/hook").respond_with_data("ok")
    assert send(url).ok
    assert no_delay != [0]


def test_the_host_header_contains_the_name_and_not_the_address(httpserver, resolve_to_loopback):
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
        "long enough for a secret, but with spaces and commas, which are not base64",
        "whsec_" + "ä" * 40,
        "A" * 33,
    ],
)
def test_an_invalid_secret_is_refused_and_not_quoted(secret):
    with pytest.raises(ValueError, match="openssl rand") as caught:
        send("http://127.0.0.1:1/", secrets=[secret])
    assert len(secret) < 9 or secret not in str(caught.value)


def test_a_secret_needs_no_prefix_and_no_padding(httpserver, url):
    httpserver.expect_request("/hook").respond_with_data("ok")
    secret = base64.b64encode(b"k" * 32).decode()
    assert send(url, secrets=[secret.rstrip("=")]).ok
    Webhook(secret).verify(BODY, dict(received(httpserver).headers))


def test_a_deadline_must_be_above_zero():
    with pytest.raises(ValueError, match="timeout_s"):
        WebhookSender(timeout_s=0)


# -- the result ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_any_2xx_status_is_a_success(httpserver, url, status):
    httpserver.expect_request("/hook").respond_with_data("", status)
    assert send(url) == SendResult(True, status, "", False)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 429, 500, 502, 503])
def test_any_other_status_may_be_retried(httpserver, url, status):
    httpserver.expect_request("/hook").respond_with_data("inner secrets", status)
    sent = send(url + "?token=t0ken")
    assert (sent.ok, sent.status, sent.permanent) == (False, status, False)
    assert sent.error == f"http://127.0.0.1 answered {status}."


def test_410_is_permanent(httpserver, url):
    httpserver.expect_request("/hook").respond_with_data("", 410)
    sent = send(url)
    assert (sent.ok, sent.status, sent.permanent) == (False, 410, True)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_reported_and_not_followed(httpserver, url, status):
    headers = {"location": f"http://127.0.0.1:{httpserver.port}/inside"}
    httpserver.expect_request("/hook").respond_with_data("", status, headers)
    httpserver.expect_request("/inside").respond_with_data("")
    sent = send(url)
    assert (sent.ok, sent.status, sent.permanent) == (False, status, False)
    assert "redirect" in sent.error and "inside" not in sent.error
    assert "/inside" not in [request.path for request, _ in httpserver.log]


def test_a_refused_connection_may_be_retried():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sent = send(f"http://127.0.0.1:{port}/?token=t0ken")
    assert (sent.ok, sent.status, sent.permanent) == (False, None, False)
    assert sent.error == "http://127.0.0.1: the connection failed: Connection refused."


def test_an_unknown_name_may_be_retried(monkeypatch):
    def unknown(*_args):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    sent = send("https://nowhere.test/?token=t0ken")
    assert sent == SendResult(False, None, "https://nowhere.test: the name is not known.", False)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (b"", "closed without an answer"),
        (b"220 mail.example ESMTP\r\n", "not HTTP"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n", "not HTTP"),
        (b"\x00\xff" * 100, "not HTTP"),
    ],
)
def test_a_response_that_is_not_http_is_a_failure_and_is_not_quoted(start_receiver, response, expected):
    def respond(conn, _ended):
        read_all(conn)
        conn.sendall(response)

    sent = send(start_receiver(respond))
    assert (sent.ok, sent.status, sent.permanent) == (False, None, False)
    assert expected in sent.error and "mail" not in sent.error


# -- the deadline --------------------------------------------------------------------------------------------------


def send_within_deadline(url: str, body: bytes = BODY) -> SendResult:
    began_s = time.monotonic()
    sent = send(url, timeout_s=SOON_S, body=body)
    assert time.monotonic() - began_s < SOON_S + SLACK_S
    return sent


def timed_out(sent: SendResult) -> bool:
    return not sent.ok and not sent.permanent and "no answer within 0.2 s" in sent.error


def drip(conn: socket.socket, ended: threading.Event, start: bytes, chunk: bytes) -> None:
    """Send `start`, then a chunk at intervals far below the timeout of a single read, until the test ends."""
    conn.sendall(start)
    while not ended.wait(SOON_S / 4):
        conn.sendall(chunk)


def test_a_receiver_that_does_not_respond_times_out(start_receiver):
    assert timed_out(send_within_deadline(start_receiver(lambda conn, ended: ended.wait(5))))


@pytest.mark.parametrize(
    ("start", "chunk"), [(b"HTTP/1.1 200 OK", b" "), (b"HTTP/1.1 200 OK\r\nx: y", b"y")], ids=["status", "header"]
)
def test_a_receiver_that_sends_its_response_slowly_times_out(start_receiver, start, chunk):
    assert timed_out(send_within_deadline(start_receiver(lambda conn, ended: drip(conn, ended, start, chunk))))


def test_a_receiver_that_does_not_read_the_request_times_out(start_receiver):
    body = json.dumps({"x": "y" * (32 << 20)}).encode()
    assert timed_out(send_within_deadline(start_receiver(lambda conn, ended: ended.wait(5)), body))


class SlowSocket:
    """A socket that sends and receives one byte a second, by a simulated clock."""

    def __init__(self) -> None:
        self.clock_s, self.timeouts_s = 0.0, []

    def settimeout(self, seconds):
        self.timeouts_s.append(seconds)

    def send(self, _data) -> int:
        self.clock_s += 1
        return 1

    def recv_into(self, _buffer) -> int:
        return self.send(b"")


@pytest.mark.parametrize("operation", ["send", "read"])
def test_steady_progress_does_not_extend_the_deadline(monkeypatch, operation):
    slow = SlowSocket()
    monkeypatch.setattr(sender, "time", SimpleNamespace(monotonic=lambda: slow.clock_s))
    bounded = sender._DeadlineSocket(slow, sender._Deadline(5))
    with pytest.raises(TimeoutError):
        bounded.sendall(b"x" * 100) if operation == "send" else bounded.makefile("rb").read(100)
    assert slow.timeouts_s == [5, 4, 3, 2, 1]


def test_a_receiver_without_a_tls_handshake_times_out(start_receiver):
    target = start_receiver(lambda conn, ended: ended.wait(5)).replace("http:", "https:")
    assert timed_out(send_within_deadline(target))


def test_a_dns_lookup_that_hangs_times_out(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: ended.wait(5) and [])
    try:
        assert timed_out(send_within_deadline("http://slow.test/"))
    finally:
        ended.set()


def test_many_addresses_share_one_deadline(monkeypatch):
    row = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(*row, (f"8.8.8.{i}", 80)) for i in range(200)])
    timeouts_s = []

    def connect(sock, _address):
        timeouts_s.append(sock.gettimeout())
        raise TimeoutError

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert timed_out(send_within_deadline("http://many.test/"))
    assert len(timeouts_s) > 1 and sum(timeouts_s) <= SOON_S


@pytest.fixture
def bytes_read(monkeypatch):
    """Return a list of the sizes of all reads from sockets of this process."""
    sizes, real = [], socket.socket.recv_into

    def recv_into(sock, *args):
        sizes.append(real(sock, *args))
        return sizes[-1]

    monkeypatch.setattr(socket.socket, "recv_into", recv_into)
    return sizes


def pour(start: bytes, more: bytes):
    """Return a function for `start_receiver` that sends `start`, then `more` without end."""

    def respond(conn, ended):
        read_all(conn)
        conn.sendall(start)
        while not ended.is_set():
            conn.sendall(more)

    return respond


def test_a_body_without_end_is_not_read(start_receiver, bytes_read):
    sent = send(start_receiver(pour(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", b"x" * 65536)))
    assert sent == SendResult(True, 200, "", False)
    assert sum(bytes_read) <= 16 << 10


def test_the_body_of_a_redirect_is_not_read_completely(start_receiver, bytes_read):
    head = b"HTTP/1.1 302 Found\r\nlocation: /x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert send(start_receiver(pour(head, b"10000\r\n" + b"x" * 65536 + b"\r\n"))).status == 302
    assert sum(bytes_read) <= 16 << 10


def test_the_sender_does_not_wait_for_a_slow_body(start_receiver):
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"
    assert send_within_deadline(start_receiver(lambda conn, ended: drip(conn, ended, head, b"x"))).ok


def test_endless_interim_responses_are_not_read(start_receiver, bytes_read):
    sent = send(start_receiver(pour(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100)))
    assert (sent.ok, sent.permanent) == (False, False)
    assert sum(bytes_read) <= MAX_RESPONSE_BYTES + (16 << 10)


# -- TLS -----------------------------------------------------------------------------------------------------------


def pem(key_or_certificate) -> bytes:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    encoding = serialization.Encoding.PEM
    if hasattr(key_or_certificate, "private_bytes"):
        plain = serialization.NoEncryption()
        return key_or_certificate.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    return key_or_certificate.public_bytes(encoding)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Return a directory with ca.pem, a private authority, and server.pem, its certificate for hooks.example.test."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    def a_certificate(name, key, issuer, signing_key, extensions):
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
            key.public_key(),
            x509.random_serial_number(),
            now() - timedelta(days=1),
            now() + timedelta(days=1),
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(signing_key, SHA256())

    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    is_ca = x509.BasicConstraints(ca=True, path_length=None)
    alt = x509.SubjectAlternativeName([x509.DNSName("hooks.example.test")])
    folder = tmp_path_factory.mktemp("tls")
    (folder / "ca.pem").write_bytes(pem(a_certificate("ca", root, "ca", root, [is_ca])))
    server = a_certificate("server", leaf, "ca", root, [alt])
    (folder / "server.pem").write_bytes(pem(server) + pem(leaf))
    return folder


@pytest.fixture
def tls_server(authority, resolve_to_loopback):
    """Return a server for hooks.example.test, and a list of the names that clients request by SNI."""
    from pytest_httpserver import HTTPServer

    server_names = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority / "server.pem")
    context.sni_callback = lambda _sock, name, _context: server_names.append(name)
    with HTTPServer("127.0.0.1", 0, ssl_context=context) as server:
        server.expect_request("/hook").respond_with_data("ok")
        yield server, server_names


@pytest.fixture
def trusted(authority, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))


def test_sni_and_the_certificate_check_use_the_name_in_the_url(tls_server, trusted):
    server, server_names = tls_server
    assert send(f"https://hooks.example.test:{server.port}/hook") == SendResult(True, 200, "", False)
    assert server_names == ["hooks.example.test"]
    assert received(server).headers["host"] == f"hooks.example.test:{server.port}"


def test_a_trailing_dot_is_not_part_of_the_name_in_tls(tls_server, trusted):
    server, server_names = tls_server
    assert send(f"https://hooks.example.test.:{server.port}/hook").ok
    assert server_names == ["hooks.example.test"]


def test_a_certificate_for_another_name_is_refused(tls_server, trusted):
    sent = send(f"https://other.example.test:{tls_server[0].port}/hook")
    assert (sent.ok, sent.permanent) == (False, False)
    assert "certificate is refused: Hostname mismatch" in sent.error
    assert not tls_server[0].log


def test_a_certificate_for_a_name_is_refused_for_its_address(tls_server, trusted):
    sent = send(f"https://127.0.0.1:{tls_server[0].port}/hook")
    assert "certificate is refused: IP address mismatch" in sent.error


def test_a_certificate_of_an_untrusted_authority_is_refused(tls_server):
    sent = send(f"https://hooks.example.test:{tls_server[0].port}/hook")
    assert not sent.ok and "certificate is refused" in sent.error
    assert not tls_server[0].log


def test_plain_http_on_an_https_url_is_a_failure(httpserver):
    sent = send(f"https://127.0.0.1:{httpserver.port}/")
    assert (sent.ok, sent.permanent) == (False, False) and "TLS failed" in sent.error


def test_the_default_port_is_not_in_the_host_header(monkeypatch):
    """RFC 9110, 7.2.  Some receivers compare the header as text."""
    hosts = {}
    for scheme, port in (("http", 80), ("https", 443)):
        target = url_guard.Target(scheme, "2606:4700::1", port, "", ip_address("2606:4700::1"))
        client = a_sender()._client(target)
        local, remote = socket.socketpair()
        with local, remote:
            client.sock = local
            client.request("GET", "/")
            hosts[scheme] = remote.recv(4096).decode().split("Host: ")[1].split("\r\n")[0]
    assert hosts == {"http": "[2606:4700::1]", "https": "[2606:4700::1]"}
