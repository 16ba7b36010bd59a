"""What the servers of a worker's runs say while they are at it, told to those who watch: at once where somebody does,
and together what comes in the same moment.

One word is on its way for a run at a time.  What Redis does not take is dropped, and what a run keeps is bounded.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from redis.exceptions import RedisError

from routing.progress import EntryIds, ProgressCommands
from slotkeeper import json_text
from slotkeeper.redis.scripts import Command
from tasks.servers.pointers import MISSING
from tasks.servers.stream_reader import Piece

log = structlog.get_logger(__name__)

BATCH_S = 0.02
"""What comes within this is told together."""
_UNWATCHED_S = 0.25
_EACH_S = (
    0.001  # longer for each run that says something, so that a worker asks Redis a thousand times a second at most
)
_AFTER_FAILURE_S = 1.0
MAX_ENTRY_CHARS = 16 * 1024
"""Characters of an entry; a longer piece comes in parts, and a value that takes more is left out."""
MAX_PENDING_CHARS = 64 * 1024
"""Characters that wait for Redis; what comes then is dropped."""
MAX_STORED_BYTES = 64 * 1024
"""Bytes of a job that are kept for those who come later."""


class ProgressPublisher:
    """All runs of an event loop.  `ask`: runs a script."""

    def __init__(self, telling: ProgressCommands, ask: Callable[[Command[int]], Awaitable[int]], loop: Any) -> None:
        self.telling, self.ask, self.loop = telling, ask, loop
        self.active_streams = 0  # runs that have said something

    def stream(self, job_id: str, attempt: int) -> "ProgressStream":
        return ProgressStream(self, job_id, attempt)


class ProgressStream:
    """What one attempt's server says.  For the loop's thread alone."""

    __slots__ = ("_attempt", "_is_over", "_job_id", "_saying", "_words")

    def __init__(self, saying: ProgressPublisher, job_id: str, attempt: int) -> None:
        self._saying, self._job_id, self._attempt = saying, job_id, attempt
        self._words: _Words | None = None  # Every run has a speech, and few say anything.
        self._is_over = False

    def __call__(self, piece: Piece) -> None:
        """The server has said this."""
        if self._is_over:
            return
        if self._words is None:
            self._words = _Words(self._saying, self._job_id, self._attempt)
        self._words.add(piece)

    def close(self) -> None:
        """The run is over: what waits is told now."""
        if not self._is_over:
            self._is_over = True
            if self._words is not None:
                self._words.end()


class _Words:
    """A speech from its first word on."""

    def __init__(self, saying: ProgressPublisher, job_id: str, attempt: int) -> None:
        self._saying, self._job_id, self._attempt = saying, job_id, attempt
        self._clock = EntryIds(attempt)
        self._entries: deque[_ProgressEntry] = deque()
        self._waiting = 0  # characters
        self._sizes: deque[int] = deque()  # bytes of what is kept for those who come later
        self._last_progress: Any = None
        self._is_asking = self._is_over = False
        self._rests_until = 0.0  # by the loop's clock
        self._timer: Any = None
        saying.active_streams += 1

    def add(self, piece: Piece) -> None:
        self._note(piece)
        self._send_soon()

    def end(self) -> None:
        self._is_over = True
        self._saying.active_streams -= 1
        self._rests_until = 0.0
        self._send_soon()

    def _note(self, piece: Piece) -> None:
        if piece.progress is not None and piece.progress != self._last_progress:
            self._last_progress = piece.progress
            self._add(_ProgressEntry(0, progress=piece.progress), _size(piece.progress))
        if piece.text is not None:
            for at in range(0, len(piece.text), MAX_ENTRY_CHARS):
                self._add_text(piece.text[at : at + MAX_ENTRY_CHARS], piece.offset + at)
        elif piece.value is not MISSING:
            self._add(_ProgressEntry(piece.offset, values=[piece.value]), _size(piece.value))

    def _add_text(self, text: str, offset: int) -> None:
        last = self._entries[-1] if self._entries else None
        if last is not None and last.goes_on(offset) and last.size + len(text) <= MAX_ENTRY_CHARS:
            last.texts.append(text)
            last.size += len(text)
            self._waiting += len(text)
        else:
            self._add(_ProgressEntry(offset, texts=[text]), len(text))

    def _add(self, entry: "_ProgressEntry", size: int) -> None:
        if size > MAX_ENTRY_CHARS or self._waiting + size > MAX_PENDING_CHARS:
            return
        entry.size = size
        self._entries.append(entry)
        self._waiting += size + 1

    def _send_soon(self) -> None:
        if self._is_asking or not (self._entries or self._is_over):
            return
        left_s = self._rests_until - self._saying.loop.time()
        if self._timer is not None:
            if left_s > 0:
                return
            self._timer.cancel()
            self._timer = None
        if left_s > 0:
            self._timer = self._saying.loop.call_later(left_s, self._ring)
        else:
            self._is_asking = True
            self._saying.loop.create_task(self._send())

    def _ring(self) -> None:
        self._timer = None
        self._send_soon()

    async def _send(self) -> None:
        pause_s = BATCH_S
        try:
            while self._entries:
                watchers = await self._saying.ask(self._command(self._entries.popleft()))
                pause_s = BATCH_S if watchers > 0 else _UNWATCHED_S
            if self._is_over:
                await self._saying.ask(self._saying.telling.end_command(self._job_id))
        except RedisError:
            pause_s = _AFTER_FAILURE_S
        except Exception:
            log.exception("progress_publisher_failed", job_id=self._job_id)
            self._entries.clear()
        self._waiting = sum(entry.size for entry in self._entries)
        self._rests_until = self._saying.loop.time() + max(pause_s, _EACH_S * self._saying.active_streams)
        self._is_asking = False
        if not self._is_over:
            self._send_soon()

    def _command(self, entry: "_ProgressEntry") -> Command[int]:
        text = json_text.dumps({"job_id": self._job_id, "attempt": self._attempt, **entry.to_dict()})
        self._sizes.append(len(text))
        while sum(self._sizes) > MAX_STORED_BYTES and len(self._sizes) > 1:
            self._sizes.popleft()
        return self._saying.telling.publish_command(self._job_id, self._clock.next(), text.decode(), len(self._sizes))


class _ProgressEntry:
    """What is told together."""

    __slots__ = ("_offset", "_progress", "_values", "size", "texts")

    def __init__(
        self, offset: int, *, texts: list[str] | None = None, values: list[Any] | None = None, progress: Any = None
    ) -> None:
        self._offset, self.texts, self._values, self._progress = offset, texts or [], values, progress
        self.size = 0

    def goes_on(self, offset: int) -> bool:
        """Whether a text that begins there goes on with this one's."""
        return bool(self.texts) and self._offset + self.size == offset

    def to_dict(self) -> dict[str, Any]:
        if self.texts:
            return {"offset": self._offset, "text": "".join(self.texts)}
        if self._values:
            return {"offset": self._offset, "pieces": self._values}
        return {"progress": self._progress}


def _size(value: Any) -> int:
    return len(json_text.dumps(value))
