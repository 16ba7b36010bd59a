"""Logs: one line for each event, bounded in length, and without what clients and servers have sent.

    2026-11-22T03:51:20.123Z info    room_rebuilt fleet=zimg jobs=0

Ours and those of the libraries leave by the same handler, on standard error.  Of an error that nobody expected the
line has its kind and the places that it went through.  What it says is left out, unless its kind can only speak of
our own code: the text of a ValueError may be a client's prompt.  So are arguments and results in Celery's lines, and
whatever a library appends in further lines.  At the level DEBUG nothing is left out.
"""

import logging
import sys
import threading
import traceback
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog

LONGEST_VALUE = 300  # characters
LONGEST_LINE = 4000
_PLACES = 12  # of an error: the innermost, where it was raised
_OURS = ("jobs", "routing", "tasks", "app")
_LEFT_OUT = frozenset({"args", "kwargs", "exc", "traceback", "return_value"})  # of what Celery says of a task
# Their texts name attributes, files and addresses; those of other errors may hold anything.
_SPEAK_OF_CODE = (OSError, ImportError, AttributeError, NameError, TypeError, RuntimeError, MemoryError)


def configure(level: int | str = logging.WARNING) -> None:
    """Let all that this process logs leave as such lines: ours from INFO on, that of the libraries from `level` on."""
    handler = _StandardError()
    handler.setFormatter(_Lines())
    root = logging.getLogger()
    root.handlers = [it for it in root.handlers if not isinstance(it, _StandardError)] + [handler]
    root.setLevel(level)
    for name in _OURS:
        logging.getLogger(name).setLevel(min(root.level, logging.INFO))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, _summarize_error, _render],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    )
    threading.excepthook = _thread_failed


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Lines(logging.Formatter):
    """A record as one line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        said = record.getMessage() if record.name.startswith(_OURS) or _is_verbose() else _said(record)
        if record.exc_info and record.exc_info[1] is not None:
            said = f"{said} error={summary(record.exc_info[1])!r}"
        return _cut(f"{at}Z {record.levelname.lower():<7} {_visible(said)}", LONGEST_LINE)


def _said(record: logging.LogRecord) -> str:
    """What a library says, without what it only quotes."""
    if isinstance(record.args, Mapping):
        kept = {name: "…" if name in _LEFT_OUT else value for name, value in record.args.items()}
        return (str(record.msg).strip() % kept).partition("\n")[0]
    template = str(record.msg).strip()
    if "\n" in template:  # A report, with contents in it.
        return template.partition("\n")[0]
    return record.getMessage().strip().partition("\n")[0]


def summary(error: BaseException) -> str:
    """The kind of an error, what it says if that speaks of our code, and the places, the innermost first."""
    text = f": {_cut(str(error), LONGEST_VALUE)}" if isinstance(error, _SPEAK_OF_CODE) or _is_verbose() else ""
    frames = traceback.extract_tb(error.__traceback__)[-_PLACES:]
    places = " < ".join(f"{frame.name} ({_short(frame.filename)}:{frame.lineno})" for frame in reversed(frames))
    return f"{type(error).__name__}{text}" + (f" in {places}" if places else "")


def _short(path: str) -> str:
    return "/".join(path.rsplit("/", 2)[-2:])


def _summarize_error(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    found = event.pop("exc_info", None)
    error = sys.exc_info()[1] if found is True else found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
        event["error"] = summary(error)
    return event


def _render(_: object, __: str, event: MutableMapping[str, Any]) -> str:
    name = str(event.pop("event", ""))
    return " ".join([name, *(f"{key}={_value(value)}" for key, value in event.items())])


def _value(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    plain = text.isprintable() and not set(text) & set(" =\"'") and text
    return text if plain and len(text) <= LONGEST_VALUE else repr(_cut(text, LONGEST_VALUE))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _visible(text: str) -> str:
    return "".join(ch if ch.isprintable() else repr(ch)[1:-1] for ch in text)


def _is_verbose() -> bool:
    return logging.getLogger().level <= logging.DEBUG


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not issubclass(failed.exc_type, SystemExit):
        logging.getLogger("jobs").error("thread_failed error=%r", summary(failed.exc_value))
