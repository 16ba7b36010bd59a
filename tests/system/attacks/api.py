"""Attacks on the REST API: by its connections, its bodies, and the work that they ask for."""

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from socket import SHUT_RDWR, SHUT_WR, SO_LINGER, SOL_SOCKET, socket

from tests.system.attacks.frame import Attack, Check
from tests.system.attacks.harness import JOB, PLACES, Harness

# -- what must hold ------------------------------------------------------------------------------------------------


def _live(harness: Harness) -> None:
    assert harness.ask("", "GET", "/health/live").status_code == 200


def _operator(harness: Harness) -> None:
    assert harness.ask("operator", "GET", "/admin/models").status_code == 200


def _submit(harness: Harness) -> None:
    answer = harness.ask("alice", "POST", "/queue/submit", {"model": "zimg", "payload": {}})
    assert answer.status_code == 202, answer.text


def _nothing_taken(harness: Harness) -> None:
    assert harness.jobs_of("mallory") == []


# An orchestrator's probe waits for one second, and ends the process after three late answers in a row (Kubernetes'
# defaults).  One late answer also comes where other programs keep the machine busy.
LIVE = Check("the process says that it lives", _live, tries=2)
OPERATOR = Check("the operator is answered", _operator)
SUBMIT = Check("another tenant can submit", _submit, within_s=2.0)
NOTHING = Check("nothing of it is accepted", _nothing_taken, within_s=2.0)
SERVED = (LIVE, OPERATOR, SUBMIT)


# -- connections ---------------------------------------------------------------------------------------------------


@contextmanager
def _holding(harness: Harness, count: int, sent: bytes) -> Iterator[list[socket]]:
    """Hold `count` open connections after sending `sent` on each."""
    with ExitStack() as stack:
        held = []
        for _ in range(count):
            one = stack.enter_context(harness.connect())
            with suppress(OSError):
                one.sendall(sent)
            held.append(one)
        yield held


@contextmanager
def _dripping(harness: Harness, count: int, begun: bytes, drip: bytes) -> Iterator[None]:
    """The same, and on each goes on, a few bytes at a time."""
    over = threading.Event()

    def drop(held: list[socket]) -> None:
        while not over.wait(0.5):
            for one in held:
                with suppress(OSError):
                    one.sendall(drip)

    with _holding(harness, count, begun) as held:
        thread = threading.Thread(target=drop, args=(held,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _idle(harness: Harness) -> object:
    return _holding(harness, PLACES + 100, b"")


def _half_heads(harness: Harness) -> object:
    return _dripping(harness, PLACES + 100, b"GET /health/live HTTP/1.1\r\nX-A: ", b"a")


def _slow_bodies(count: int, path: str = "/queue/submit") -> Callable[[Harness], object]:
    return lambda harness: _dripping(
        harness, count, harness.head("mallory", path, "Content-Length: 100000") + JOB[:20], b" "
    )


def _slow_chunks(harness: Harness) -> object:
    return _dripping(
        harness, 200, harness.head("mallory", "/queue/submit", "Transfer-Encoding: chunked"), b"1\r\n \r\n"
    )


def _of_strangers(harness: Harness) -> object:
    return _dripping(harness, 200, harness.head("", "/tasks/callback/x", "Content-Length: 16000000"), b" " * 1000)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    return b"\x00" + bytes([len(name)]) + name.encode() + b"\x7f" + bytes([len(value) - 127]) + value.encode()


def _field(name: str, value: str) -> bytes:
    """One header as HPACK has it, without an index."""
    if len(value) >= 127:
        return _literal(name, value)
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


@contextmanager
def _unfinished_streams(harness: Harness) -> Iterator[None]:
    """Seventy POSTs of one HTTP/2 connection with heads and no bodies; then it is closed."""
    given = {":method": "POST", ":scheme": "http", ":path": "/queue/submit", ":authority": "127.0.0.1"}
    given |= {"authorization": f"Bearer {harness.keys['mallory']}", "content-type": "application/json"}
    heads = b"".join(_field(name, value) for name, value in given.items())
    with harness.connect() as one, suppress(OSError):
        one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        one.sendall(b"".join(_frame(1, 4, 2 * n + 1, heads) for n in range(70)))
        one.recv(1)
    yield


@contextmanager
def _begun_answers(harness: Harness) -> Iterator[None]:
    """Many large answers are asked for, and not read."""
    request = harness.head("", "/docs/swagger/swagger-ui-bundle.js", method="GET") * 4
    with _holding(harness, 300, request):
        yield


# -- bodies that cost ------------------------------------------------------------------------------------------------


@contextmanager
def _sending(harness: Harness, clients: int, *requests: bytes, again: bool = False) -> Iterator[None]:
    """So many clients that send one request after the other; `again`: over the same connection."""
    over, held = threading.Event(), set[socket]()

    def send(number: int) -> None:
        while not over.is_set():
            with suppress(OSError), harness.connect() as one:
                held.add(one)
                one.sendall(requests[number % len(requests)])
                while one.recv(1 << 20) and again and not over.is_set():
                    one.sendall(requests[number % len(requests)])
                held.discard(one)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        while any(thread.is_alive() for thread in threads):
            for one in list(held):
                with suppress(OSError):
                    one.shutdown(SHUT_RDWR)
            threads[0].join(0.05)
        for thread in threads:
            thread.join()


def _posts(harness: Harness, path: str, *bodies: bytes) -> list[bytes]:
    return [harness.head("mallory", path, f"Content-Length: {len(body)}") + body for body in bodies]


_KEYS = 100_000
COSTLY = {
    "a key that stands twice": b"{" + b",".join(b'"k%d":0' % n for n in range(_KEYS)) + b',"k%d":0}' % (_KEYS - 1),
    "unknown fields": b"{" + b",".join(b'"k%d":0' % n for n in range(_KEYS)) + b"}",
    "deep": b'{"model":"zimg","payload":' + b'{"a":' * 300_000,
    "digits": b'{"model":1' + b"0" * 1_900_000 + b"}",
    "numbers": b'{"model":"zimg","ttl":-1,"payload":{"a":[' + b"0," * 500_000 + b"0]}}",
    "escapes": b'{"model":"zimg","ttl":-1,"payload":{"a":"' + b"\\u0041" * 300_000 + b'"}}',
}


def _costly(clients: int) -> Callable[[Harness], object]:
    return lambda harness: _sending(harness, clients, *_posts(harness, "/queue/submit", *COSTLY.values()))


def _costly_batches(harness: Harness) -> object:
    unknown = b"[" + b",".join([COSTLY["unknown fields"]] * 10) + b"]"
    numbers = b"[" + b"0," * 7_000_000 + b"0]"
    jobs = b"[" + b",".join([COSTLY["numbers"]] * 15) + b"]"
    return _sending(harness, 12, *_posts(harness, "/queue/submit-batch", unknown, numbers, jobs))


def _many_lists(harness: Harness) -> object:
    return _sending(harness, 100, harness.head("mallory", "/queue/jobs?limit=200", method="GET"), again=True)


def _wrong_keys(harness: Harness) -> object:
    wrong = [harness.head("", "/queue/jobs", f"Authorization: Bearer sk_{n}", method="GET") for n in range(100)]
    return _sending(harness, 100, *wrong, again=True)


def _asking_for_health(harness: Harness) -> object:
    return _sending(harness, 60, harness.head("", "/health/ready", method="GET"), again=True)


# -- half a body -------------------------------------------------------------------------------------------------------

_LINES = (JOB + b"\n") * 10
_ARRAY = b"[" + b",".join([JOB] * 10) + b"]"


def _close(one: socket) -> None:
    one.close()


def _half_close(one: socket) -> None:
    one.shutdown(SHUT_WR)
    assert one.recv(1 << 16) == b"", "the server takes it as a disconnect"


def _reset(one: socket) -> None:
    one.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    one.close()


def _nonsense(one: socket) -> None:
    with suppress(OSError):
        one.sendall(b"zz\r\nnot a chunk\r\n")
    answer = one.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:80]


BREAKING_OFF = (_close, _half_close, _reset)


@contextmanager
def _half_bodies(harness: Harness) -> Iterator[None]:
    """What arrives would be valid by itself."""
    chunk = b"%x\r\n%s\r\n"
    for kind, path, body in (
        ("application/x-ndjson", "/queue/submit-batch", _LINES),
        ("application/json", "/queue/submit-batch", _ARRAY),
        ("application/json", "/queue/submit", JOB),
    ):
        counted = harness.head("mallory", path, f"Content-Length: {len(body) + 300}", kind=kind) + body
        chunked = harness.head("mallory", path, "Transfer-Encoding: chunked", kind=kind) + chunk % (len(body), body)
        for sent in (counted, chunked, chunked + b"0\r\n"):
            for break_off in BREAKING_OFF:
                with harness.connect() as one:
                    one.sendall(sent)
                    break_off(one)
        with harness.connect() as one:
            one.sendall(chunked)
            _nonsense(one)
    yield


ATTACKS = [
    Attack("unfinished HTTP/2 streams", _unfinished_streams, SERVED),
    Attack("connections that send nothing", _idle, SERVED),
    Attack("heads without an end", _half_heads, SERVED),
    Attack("bodies that hardly move", _slow_bodies(200), SERVED),
    Attack("chunks that hardly move", _slow_chunks, SERVED),
    Attack("bodies of strangers", _of_strangers, SERVED),
    Attack("bodies that break off", _half_bodies, (*SERVED, NOTHING), lasts_s=0.5),
    Attack("bodies that cost", _costly(20), (*SERVED, NOTHING), lasts_s=3.0),
    Attack("answers that are not read", _begun_answers, SERVED),
    Attack("one tenant asks without pause", _many_lists, SERVED),
    Attack("keys are tried out", _wrong_keys, SERVED),
    Attack("anybody asks for the health", _asking_for_health, SERVED),
    Attack("connections that send nothing, for a minute", _idle, SERVED, 60, quick=False),
    Attack("bodies that hardly move, for a minute", _slow_bodies(900), SERVED, 60, quick=False),
    Attack("slow batches, for a minute", _slow_bodies(900, "/queue/submit-batch"), SERVED, 60, quick=False),
    Attack("bodies that cost, for a minute", _costly(66), (*SERVED, NOTHING), 60, quick=False),
    Attack("batches that cost, for a minute", _costly_batches, (*SERVED, NOTHING), 60, quick=False),
]
