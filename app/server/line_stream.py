"""Takes a batch's lines from the body of one request, which may be longer than memory should hold.

`POST /batches` with NDJSON is answered by three views of Flask, as if the client had called each: it creates the batch,
adds its lines, one chunk after another, and closes it.  A chunk that gets 429 or 503 is sent again after its
Retry-After; nothing is read from the client meanwhile, so TCP slows it down.  Any other refusal ends the request with
that refusal; lines before it stay accepted, and the same request, with its Idempotency-Key, goes on there.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import orjson

from app.request_json import NDJSON
from app.server.fair_pool import ClientGone
from app.server.wsgi import Response

PATH = "/batches"
CHUNK_LINES, CHUNK_BYTES = 500, 1 << 20
_JSON = "application/json"
_LONGEST_PAUSE_S = 30.0
_AGAIN = (429, 503)
_SHORTEST_PAUSE_S = 0.05

Call = Callable[[str, str, str, bytes], Awaitable[Response]]
"""Calls a view: path, query, content type and body."""


def is_lines_path(path: str) -> bool:
    """Return whether a path is that of a batch's lines, `/batches/{batch}/lines`."""
    return path.startswith(f"{PATH}/") and path.endswith("/lines")


def is_line_stream(environ: dict[str, Any]) -> bool:
    """Return whether the body of a request is the lines of a batch."""
    media_type = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    return environ["REQUEST_METHOD"] == "POST" and environ["PATH_INFO"] == PATH and media_type == NDJSON


class LineCutter:
    """Cuts a body into chunks of whole lines, without empty ones.

    A line that is too long is cut: the view sees that it is longer than it may be, and keeps it as an error.
    """

    def __init__(self, longest: int) -> None:
        """longest: bytes that one line may have."""
        self._longest = longest
        self._rest = bytearray()  # the beginning of a line
        self._lines: list[bytes] = []
        self._size = 0

    @property
    def held_bytes(self) -> int:
        return self._size + len(self._rest)

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Yield the chunks that are complete with this data."""
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._add(part)
            yield from self._end_line()
        self._add(rest)

    def end(self) -> Iterator[list[bytes]]:
        """Yield the last chunk, if there is one."""
        yield from self._end_line()
        if self._lines:
            yield self._take()

    def _end_line(self) -> Iterator[list[bytes]]:
        if self._rest.strip():
            self._lines.append(bytes(self._rest))
            self._size += len(self._rest)
        self._rest.clear()
        if len(self._lines) >= CHUNK_LINES or self._size >= CHUNK_BYTES:
            yield self._take()

    def _take(self) -> list[bytes]:
        lines, self._lines, self._size = self._lines, [], 0
        return lines

    def _add(self, part: bytes) -> None:
        self._rest += part
        del self._rest[self._longest + 1 :]


async def take_lines(
    call: Call, query: str, chunks: AsyncIterator[list[bytes]], is_wanted: Callable[[], bool]
) -> Response:
    """Create a batch, add the lines of all chunks, close it, and return the response to the client.

    query: the head of the batch.  is_wanted: whether the client waits for the response.  Raises ClientGone.
    """
    created = await call(PATH, query, NDJSON, b"")
    if created.status not in (200, 201):
        return created
    batch = orjson.loads(created.body)
    path, known, received = f"{PATH}/{batch['batch']}", batch["next_line"], 0
    async for lines in chunks:
        if received + len(lines) > known:
            refusal = await _add(call, path, received, lines, is_wanted)
            if refusal is not None:
                return refusal
        received += len(lines)
    closed = await call(f"{path}/close", "", _JSON, orjson.dumps({"lines": received}))
    if closed.status == 200:
        closed.status, closed.headers = created.status, [*closed.headers, *_location(created)]
    return closed


def _location(created: Response) -> list[tuple[bytes, bytes]]:
    return [header for header in created.headers if header[0].lower() == b"location"]


async def _add(call: Call, path: str, first: int, lines: list[bytes], is_wanted: Callable[[], bool]) -> Response | None:
    """Add a chunk, again after each 429, and return the refusal; None: all its lines were received."""
    paused_s, left = 0.0, lines
    while left:
        response = await call(f"{path}/lines", f"from={first}", NDJSON, b"\n".join(left))
        if response.status in _AGAIN and paused_s < _LONGEST_PAUSE_S:
            pause_s = min(max(_retry_after_s(response), _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            paused_s += pause_s
            await asyncio.sleep(pause_s)
            if not is_wanted():
                raise ClientGone
        elif response.status != 200:
            return response
        else:
            following = orjson.loads(response.body)["next_line"]
            left, first, paused_s = left[max(following - first, 0) :], max(following, first), 0.0
    return None


def _retry_after_s(response: Response) -> float:
    return next((float(value) for name, value in response.headers if name.lower() == b"retry-after"), 1.0)
