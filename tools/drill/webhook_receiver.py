"""A receiver of webhooks that keeps what it gets.  Delays and outages are injected by the proxy."""

import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

import orjson


@dataclass(frozen=True, slots=True)
class Delivery:
    """A webhook that was received.  `id`: its header webhook-id; `at_ns`: when, on the monotonic clock."""

    id: str
    job_id: str
    status: str
    at_ns: int


class Receiver:
    """Listens on a free port of the loopback address while its context is active."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self._refused_share = 0.0
        self._server = _Server(("127.0.0.1", 0), _handler(self.deliveries, self._refuses))
        self.port = int(self._server.server_address[1])

    def refuse(self, share: float) -> None:
        """Answer 500 to this share of the messages from now on: to the same messages at each of their attempts."""
        self._refused_share = share

    def _refuses(self, message_id: str) -> bool:
        return zlib.crc32(message_id.encode()) / 2**32 < self._refused_share

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="receiver", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: object) -> None:
        """Ignore the error: the drill cuts connections."""


def _handler(deliveries: list[Delivery], refuses: Callable[[str], bool]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_POST(self) -> None:
            body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message_id = self.headers["webhook-id"]
            if refuses(message_id):
                self.send_response(500)
            else:
                deliveries.append(Delivery(message_id, body["job_id"], body["status"], time.monotonic_ns()))
                self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing: `deliveries` has everything."""

    return Handler
