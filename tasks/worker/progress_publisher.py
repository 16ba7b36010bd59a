"""Publishes what servers report during their runs to the clients that watch: soon if there are any, and in batches.

One entry of a run is on its way at a time.  Entries that Redis does not take are dropped, and the memory of each run is
bounded.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
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
"""What arrives within this time, in seconds, is published together."""
_UNWATCHED_PAUSE_S = 0.25
# The pause is longer for each run that reports, so that a worker sends Redis a thousand commands a second at most.
_PAUSE_PER_STREAM_S = 0.001
_FAILURE_PAUSE_S = 1.0
MAX_ENTRY_CHARS = 16 * 1024
"""Characters of an entry; a longer piece comes in parts, and a value that takes more is left out."""
MAX_PENDING_CHARS = 64 * 1024
"""Characters that wait for Redis; what comes then is dropped."""
MAX_STORED_BYTES = 64 * 1024
"""Bytes of a job that are kept for clients that connect later."""


class ProgressPublisher:
    """The streams of all runs of an event loop.  redis: runs a script."""

    def __init__(self, commands: ProgressCommands, redis: Callable[[Command[int]], Awaitable[int]], loop: Any) -> None:
        self.commands, self.redis, self.loop = commands, redis, loop
        self.active_streams = 0  # runs that have reported something

    def stream(self, job_id: str, attempt: int) -> "ProgressStream":
        return ProgressStream(self, job_id, attempt)


class ProgressStream:
    """What the server of one attempt reports.  For the loop's thread alone."""

    def __init__(self, publisher: ProgressPublisher, job_id: str, attempt: int) -> None:
        self._publisher, self._job_id, self._attempt = publisher, job_id, attempt
        self._entry_ids: EntryIds | None = None  # None: nothing was reported, as for most runs
        self._entries: list[_ProgressEntry] = []
        self._pending_chars = 0
        self._stored_sizes: list[int] = []  # bytes of the entries that are kept for clients that connect later
        self._last_progress: Any = None
        self._is_sending = self._is_closed = False
        self._paused_until = 0.0  # by the loop's clock
        self._timer: Any = None

    def __call__(self, piece: Piece) -> None:
        """Publish what the server has reported."""
        if self._is_closed:
            return
        if self._entry_ids is None:
            self._entry_ids = EntryIds(self._attempt)
            self._publisher.active_streams += 1
        self._add_piece(piece)
        self._send_soon()

    def close(self) -> None:
        """Publish what waits, and end the stream: the run is over."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._entry_ids is not None:
            self._publisher.active_streams -= 1
            self._paused_until = 0.0
            self._send_soon()

    def _add_piece(self, piece: Piece) -> None:
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
        if last is not None and last.continues_at(offset) and last.size + len(text) <= MAX_ENTRY_CHARS:
            last.texts.append(text)
            last.size += len(text)
            self._pending_chars += len(text)
        else:
            self._add(_ProgressEntry(offset, texts=[text]), len(text))

    def _add(self, entry: "_ProgressEntry", size: int) -> None:
        if size > MAX_ENTRY_CHARS or self._pending_chars + size > MAX_PENDING_CHARS:
            return
        entry.size = size
        self._entries.append(entry)
        self._pending_chars += size + 1

    def _send_soon(self) -> None:
        if self._is_sending or not (self._entries or self._is_closed):
            return
        wait_s = self._paused_until - self._publisher.loop.time()
        if self._timer is not None:
            if wait_s > 0:
                return
            self._timer.cancel()
            self._timer = None
        if wait_s > 0:
            self._timer = self._publisher.loop.call_later(wait_s, self._on_timer)
        else:
            self._is_sending = True
            self._publisher.loop.create_task(self._send())

    def _on_timer(self) -> None:
        self._timer = None
        self._send_soon()

    async def _send(self) -> None:
        pause_s = BATCH_S
        try:
            while self._entries:
                watchers = await self._publisher.redis(self._command(self._entries.pop(0)))
                pause_s = BATCH_S if watchers > 0 else _UNWATCHED_PAUSE_S
            if self._is_closed:
                await self._publisher.redis(self._publisher.commands.end_command(self._job_id))
        except RedisError:
            pause_s = _FAILURE_PAUSE_S
        except Exception:
            log.exception("progress_publisher_failed", job_id=self._job_id)
            self._entries.clear()
        self._pending_chars = sum(entry.size for entry in self._entries)
        self._paused_until = self._publisher.loop.time() + max(
            pause_s, _PAUSE_PER_STREAM_S * self._publisher.active_streams
        )
        self._is_sending = False
        if not self._is_closed:
            self._send_soon()

    def _command(self, entry: "_ProgressEntry") -> Command[int]:
        assert self._entry_ids is not None
        text = json_text.dumps({"job_id": self._job_id, "attempt": self._attempt, **entry.to_dict()})
        self._stored_sizes.append(len(text))
        while sum(self._stored_sizes) > MAX_STORED_BYTES and len(self._stored_sizes) > 1:
            del self._stored_sizes[0]
        return self._publisher.commands.publish_command(
            self._job_id, self._entry_ids.next(), text.decode(), len(self._stored_sizes)
        )


@dataclass
class _ProgressEntry:
    """Pieces that are published together."""

    offset: int
    texts: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    progress: Any = None
    size: int = 0  # characters

    def continues_at(self, offset: int) -> bool:
        """Return whether a text that begins at this offset continues this entry."""
        return bool(self.texts) and self.offset + self.size == offset

    def to_dict(self) -> dict[str, Any]:
        if self.texts:
            return {"offset": self.offset, "text": "".join(self.texts)}
        if self.values:
            return {"offset": self.offset, "pieces": self.values}
        return {"progress": self.progress}


def _size(value: Any) -> int:
    return len(json_text.dumps(value))
