"""One request as it arrives."""

from typing import Any

from app.config import AppSettings
from app.web.gateway import Answer, Headers
from app.web.owners import Owner

LONGEST_TARGET = 16 << 10
LONGEST_HEAD = 32 << 10
MOST_HEADERS = 100


class Request:
    """What has come of it so far."""

    __slots__ = (
        "began",
        "begun",
        "body",
        "close",
        "complete",
        "environ",
        "head_size",
        "headers",
        "limit",
        "owner",
        "refusal",
        "served",
        "target",
        "unread",
    )

    def __init__(self, began: float) -> None:
        self.began = began  # monotonic seconds; of its body, once that is being read
        self.target = b""
        self.headers: Headers = []
        self.head_size = 0
        self.environ: dict[str, Any] | None = None  # None: its head is not whole yet
        self.limit = 0  # bytes of its body
        self.body = bytearray()
        self.complete = False
        self.owner: Owner | None = None
        self.refusal: Answer | None = None
        self.served = False  # It is with the application, or answered.
        self.begun = False  # A thread has it.
        self.close = False  # after it
        self.unread = False  # Some of its body is left out.

    def add_header(self, name: bytes, value: bytes) -> None:
        self.head_size += len(name) + len(value)
        if self.environ is None and not self.is_head_too_large:  # after that they are trailers
            self.headers.append((name, value))

    @property
    def is_head_too_large(self) -> bool:
        return self.head_size > LONGEST_HEAD or len(self.headers) > MOST_HEADERS

    @property
    def announced(self) -> int | None:
        """Length of its body; None: it comes in chunks."""
        environ = self.environ or {}
        return None if "HTTP_TRANSFER_ENCODING" in environ else int(environ.get("CONTENT_LENGTH") or 0)

    @property
    def missing(self) -> int:
        """Bytes of its body that surely are still to come."""
        return (self.announced or 0) - len(self.body)

    @property
    def is_too_large(self) -> bool:
        return len(self.body) > self.limit or (self.announced or 0) > self.limit

    @property
    def method(self) -> str:
        return str((self.environ or {}).get("REQUEST_METHOD", "GET"))

    @property
    def path(self) -> str:
        return str((self.environ or {}).get("PATH_INFO", ""))

    @property
    def version(self) -> str:
        return str((self.environ or {}).get("SERVER_PROTOCOL", "HTTP/1.1")).removeprefix("HTTP/")

    def refuse(self, answer: Answer) -> None:
        """Answer this, when its turn comes, and read no further."""
        if self.refusal is None and not self.served:
            self.refusal = answer
            self.unread = self.close = True

    def is_too_slow(self, now_s: float, settings: AppSettings) -> bool:
        """A body earns a second with each `body_min_rate` bytes."""
        if self.environ is None:
            return now_s - self.began > settings.head_timeout_s
        return now_s - self.began > settings.body_timeout_s + len(self.body) / settings.body_min_rate
