"""Logs: one line for each event, bounded in length, and without what clients and servers have sent.

    2026-11-22T03:51:20.123Z info    queue_rebuilt fleet=zimg jobs=0
    {"at":"2026-11-22T03:51:20.123Z","level":"info","event":"queue_rebuilt","fleet":"zimg","jobs":0}

Lines of Slotkeeper and of the libraries go through one handler to standard error.  The line of an unexpected error
has its class and the functions that it passed.  The error's text is left out unless its class can only describe code:
the text of a ValueError may be a client's prompt.  Arguments and results in Celery's lines, and further lines of a
library's message, are left out too.  At the level DEBUG nothing is left out.

`bind_context` adds facts (job, tenant, trace) to all lines of the current context.

A thread writes the lines, so that no other thread waits for a full pipe, a stopped terminal or a slow disk.  Lines that
do not fit into its queue are dropped and counted; `log_lines_dropped` reports them when lines are written again.
"""

import atexit
import io
import logging
import os
import queue
import re
import sys
import threading
import traceback
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Literal, TypeAlias

import orjson
import structlog

LogFormat: TypeAlias = Literal["console", "json"]

MAX_VALUE_LENGTH = 300  # characters
MAX_LINE_LENGTH = 4000
_MAX_QUEUED = 5_000  # lines
_FLUSH_S = 1.0
_MOST_FACTS, _SHORT_VALUE = 20, 60  # of a line that would be too long
_PLACES = 12  # of an error: the innermost, where it was raised
_OURS = ("slotkeeper", "routing", "tasks", "app", "tools", "migrations", "__main__")
_LEFT_OUT = frozenset({"args", "kwargs", "exc", "traceback", "return_value"})  # of Celery's lines about a task
# Their texts name attributes, files and addresses; those of other errors may hold anything.
_SPEAK_OF_CODE = (OSError, ImportError, AttributeError, NameError, TypeError, RuntimeError, MemoryError)
_NEEDS_QUOTES = re.compile("[ =\"']")
_about: ContextVar[Mapping[str, Any] | None] = ContextVar("about", default=None)


def bind_context(**facts: Any) -> None:
    """Replace the facts that all lines of this context have.

    A fact that is slow to compute is given as a function, which is called when a line is written.
    """
    _about.set(facts)


def configure(level: int | str = logging.WARNING, form: LogFormat = "console") -> None:
    """Send all log lines to standard error: Slotkeeper's from INFO on, the libraries' from `level` on."""
    _writer.start()
    _handler.setFormatter(_Lines() if form == "console" else _JsonLines())
    root = logging.getLogger()
    if _handler not in root.handlers:
        root.addHandler(_handler)
    root.setLevel(level)
    for name in _OURS:
        logging.getLogger(name).setLevel(min(root.level, logging.INFO))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, _say_about, _summarize_error, _hand_over],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    )
    threading.excepthook = _thread_failed
    logging.captureWarnings(True)


def flush(timeout_s: float = _FLUSH_S) -> bool:
    """Wait until all lines so far are written.  Returns False if that takes too long."""
    return _handler.wait_until_empty(timeout_s)


def count_dropped_lines() -> int:
    """Return how many lines of this process were dropped."""
    return _handler.dropped + _writer.failed


class _Handler(QueueHandler):
    """Formats a record in the thread that logs it, and queues the line."""

    def __init__(self) -> None:
        self._lines: queue.Queue[Any] = queue.Queue(_MAX_QUEUED)
        super().__init__(self._lines)
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def enqueue(self, record: Any) -> None:  # The line; the handler's lock is held.
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def wait_until_empty(self, timeout_s: float) -> bool:
        with self._lines.all_tasks_done:
            return self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, timeout_s)

    @property
    def has_caught_up(self) -> bool:
        """Return True if the queue has room for a report of the dropped lines."""
        return self._lines.qsize() < _MAX_QUEUED // 2


class _Writer(QueueListener):
    """A thread that writes queued lines to what is standard error at that moment."""

    def __init__(self, handler: _Handler) -> None:
        super().__init__(handler.queue)
        self._handler = handler
        self._is_started = False
        self.failed = 0  # lines
        self._reported = 0

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if not self._is_started:
            self._is_started = True
            super().start()

    def handle(self, record: Any) -> None:
        """Write a line."""
        try:
            _write(f"{record}\n")
        except OSError:  # The reader has closed the pipe, or the disk is full.
            self.failed += 1
            return
        dropped = self._handler.dropped + self.failed - self._reported
        if dropped and self._handler.has_caught_up:
            self._reported += dropped
            structlog.get_logger(__name__).warning("log_lines_dropped", lines=dropped)


def _write(line: str) -> None:
    """Raises OSError."""
    try:
        descriptor = sys.stderr.fileno()
    except io.UnsupportedOperation:
        sys.stderr.write(line)
        return
    # Past the stream, whose lock a blocked write would hold when the interpreter flushes it at its end.
    left = line.encode(errors="backslashreplace")
    while left:
        left = left[os.write(descriptor, left) :]


_handler = _Handler()
_writer = _Writer(_handler)
atexit.register(flush)


class _Lines(logging.Formatter):
    """A record as one line for people."""

    def format(self, record: logging.LogRecord) -> str:
        event, facts = _event(record)
        text = " ".join([event, *(f"{key}={_value(value)}" for key, value in facts.items())])
        return _cut(f"{_at(record)} {record.levelname.lower():<7} {_visible(text)}", MAX_LINE_LENGTH)


class _JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        event, facts = _event(record)
        head = {"at": _at(record), "level": record.levelname.lower(), "event": _shown(event, MAX_VALUE_LENGTH)}
        line = _json(head | {key: _plain(value, MAX_VALUE_LENGTH) for key, value in facts.items() if key not in head})
        if len(line) > MAX_LINE_LENGTH:
            few = list(facts.items())[:_MOST_FACTS]
            head["event"] = _shown(event, _SHORT_VALUE)
            line = _json(head | {key: _plain(value, _SHORT_VALUE) for key, value in few if key not in head})
        return line


def _at(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return f"{at.removesuffix('+00:00')}Z"


def _event(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Return the event and its facts; a library's line has no facts but its error."""
    facts: dict[str, Any] | None = getattr(record, "facts", None)
    if facts is not None:
        return record.getMessage(), facts
    message = record.getMessage() if _is_ours(record) or _is_verbose() else _message_without_values(record)
    error = record.exc_info[1] if record.exc_info else None
    return message, {} if error is None else {"error": summarize_error(error)}


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in _OURS


def _plain(value: object, longest: int) -> object:
    is_plain = value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 64)
    return value if is_plain else _shown(str(value), longest)


def _shown(text: str, longest: int) -> str:
    return _cut(_visible(_cut(text, longest)), longest)


def _json(line: dict[str, object]) -> str:
    return orjson.dumps(line).decode()


def _message_without_values(record: logging.LogRecord) -> str:
    """Return a library's message without the values that it quotes."""
    if isinstance(record.args, Mapping):
        kept = {name: "…" if name in _LEFT_OUT else value for name, value in record.args.items()}
        return (str(record.msg).strip() % kept).partition("\n")[0]
    template = str(record.msg).strip()
    if "\n" in template:  # A report, with contents in it.
        return template.partition("\n")[0]
    return record.getMessage().strip().partition("\n")[0]


def summarize_error(error: BaseException) -> str:
    """The kind of an error, what it says if that speaks of our code, and the places, the innermost first."""
    text = f": {_cut(str(error), MAX_VALUE_LENGTH)}" if isinstance(error, _SPEAK_OF_CODE) or _is_verbose() else ""
    frames = traceback.extract_tb(error.__traceback__)[-_PLACES:]
    places = " < ".join(f"{frame.name} ({_short(frame.filename)}:{frame.lineno})" for frame in reversed(frames))
    return f"{type(error).__name__}{text}" + (f" in {places}" if places else "")


def _short(path: str) -> str:
    return "/".join(path.rsplit("/", 2)[-2:])


def _summarize_error(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    found = event.pop("exc_info", None)
    error = sys.exc_info()[1] if found is True else found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
        event["error"] = summarize_error(error)
    return event


def _say_about(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in (_about.get() or {}).items():
        event.setdefault(name, value() if callable(value) else value)
    return event


def _hand_over(_: object, __: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """The event and its facts, as they are; they are written by the handler's form."""
    return (str(event.pop("event", "")),), {"extra": {"facts": dict(event)}}


def _value(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    plain = text.isprintable() and not _NEEDS_QUOTES.search(text) and text
    return text if plain and len(text) <= MAX_VALUE_LENGTH else repr(_cut(text, MAX_VALUE_LENGTH))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _visible(text: str) -> str:
    return text if text.isprintable() else "".join(ch if ch.isprintable() else repr(ch)[1:-1] for ch in text)


def _is_verbose() -> bool:
    return logging.getLogger().level <= logging.DEBUG


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not issubclass(failed.exc_type, SystemExit):
        logging.getLogger("slotkeeper").error("thread_failed error=%r", summarize_error(failed.exc_value))
