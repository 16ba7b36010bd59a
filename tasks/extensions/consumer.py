"""Celery's consumer, which rejects malformed messages: each once, with one line in the log.

Celery trusts the clients that may write to its queues.  It reads a message piece by piece, in the loop that receives
all messages: there, a list in the place of a name ends the worker, and the message goes back to the next worker.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog
from celery.app.task import Context
from celery.exceptions import NotRegistered
from celery.worker.consumer import Consumer as CeleryConsumer

from tasks.celery_app import celery
from tasks.extensions import control  # noqa: F401  Its commands take the place of Celery's.
from tasks.offer_messages import publish_queue
from tasks.results import JobFailed
from tasks.services import dispatcher

log = structlog.get_logger(__name__)

_MAX_ID_CHARS = 255
_MAX_SHOWN_CHARS = 80
_REFUSED_PAUSE_S = 1.0
_EMBEDDED = ("callbacks", "chain", "chord", "errbacks")


class Malformed(Exception):
    """This cannot be the message of a task; says what is wrong with it."""


class Consumer(CeleryConsumer):
    """Hands on what may be a task, and rejects the rest."""

    connection_errors: tuple[type[Exception], ...]
    channel_errors: tuple[type[Exception], ...]
    prefetch_multiplier: int

    @property
    def max_prefetch_count(self) -> int:
        """Return how many messages it may hold.  Celery's own is 0 while the pool is full: to a broker, no limit."""
        return int(self.pool.limit * self.prefetch_multiplier)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = super().create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> None:
            try:
                validate_message(message)
                handle(message)
            except self.connection_errors:
                raise
            except Exception as error:
                self._reject(message, error)

        return on_task_received

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        log.warning("broker_not_connected", error=str(exc))
        self._pause_if_refused(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        super().on_connection_error_after_connected(exc)
        self._pause_if_refused(exc)

    def _pause_if_refused(self, error: Exception) -> None:
        """Pause before the next try at a broker that answers and refuses; Celery would try again at once."""
        if isinstance(error, self.channel_errors) and not isinstance(error, self.connection_errors):
            time.sleep(_REFUSED_PAUSE_S)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._reject(message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self._reject(message, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self._reject(message, Malformed("no task"))

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Reject the message as Celery does, and notify the clients that wait for its result as well."""
        headers, (_, _, embedded) = split_message(message)
        message.reject_log_error(log, self.connection_errors)
        log.warning("unknown_task", task=_excerpt(headers["task"]), id=_excerpt(headers["id"]))
        request = Context({**headers, **(embedded or {})})
        publish_queue().put(partial(_report_failure, request, NotRegistered(headers["task"])))

    def _reject(self, message: Any, error: Exception) -> None:
        headers = message.headers if isinstance(message.headers, dict) else {}
        reason = str(error) if isinstance(error, Malformed) else type(error).__name__
        log.warning("message_rejected", why=reason, task=_excerpt(headers.get("task")), id=_excerpt(headers.get("id")))
        if not message.acknowledged:
            message.reject_log_error(log, self.connection_errors)
        if _is_id(headers.get("id")):
            request = Context(id=headers["id"], delivery_info={})
            publish_queue().put(
                partial(_report_failure, request, JobFailed("invalid_message", f"The message is no task: {reason}."))
            )


def _report_failure(request: Context, error: Exception) -> None:
    """Notify the clients that wait for a message that was rejected.  A job of that id ends by itself."""
    if dispatcher().store.get_state(str(request.id)) is None:
        celery.backend.mark_as_failure(str(request.id), error, request=request, store_result=not request.ignore_result)


def _excerpt(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN_CHARS] if isinstance(value, str) else type(value).__name__


# -- the shape of a task ---------------------------------------------------------------------------------------


def validate_message(message: Any) -> None:
    """Raises Malformed, or whatever the decoding of the body raises."""
    headers, (args, kwargs, embedded) = split_message(message)
    for name, is_valid in _FIELDS.items():
        if not is_valid(headers.get(name)):
            raise Malformed(f"{name} cannot be {type(headers.get(name)).__name__}")
    if not isinstance(args, list) or not _is_mapping(kwargs):
        raise Malformed("no list of arguments and mapping of named ones")
    _check_embedded(embedded)
    properties = message.properties
    if not all(_is_text_or_none(properties.get(name)) for name in ("reply_to", "correlation_id")):
        raise Malformed("properties")


def split_message(message: Any) -> tuple[Mapping[str, Any], tuple[Any, Any, Any]]:
    """Headers and (args, kwargs, embedded) of a message of Celery's protocol 2, or 1."""
    headers, body = message.headers, message.payload
    if not _is_mapping(headers) or not _is_mapping(message.properties):
        raise Malformed("no headers")
    if "task" in headers:
        if not isinstance(body, list | tuple) or len(body) != 3:
            raise Malformed("the body is not (args, kwargs, embedded)")
        return headers, (body[0], body[1], body[2])
    if not _is_mapping(body):
        raise Malformed("no task")
    embedded = {name: body.get(name) for name in _EMBEDDED if name != "chain"}
    fields = {name: value for name, value in body.items() if name not in _EMBEDDED}
    return fields, (list(fields.get("args") or ()), fields.get("kwargs") or {}, embedded)


def _check_embedded(embedded: Any) -> None:
    if embedded is None:
        return
    if not _is_mapping(embedded) or embedded.keys() - set(_EMBEDDED):
        raise Malformed("embedded fields")
    for name in ("callbacks", "chain", "errbacks"):
        steps = embedded.get(name)
        if steps is not None and not (isinstance(steps, list) and all(map(_is_signature, steps))):
            raise Malformed(f"{name} are no signatures")
    if embedded.get("chord") is not None and not _is_signature(embedded["chord"]):
        raise Malformed("chord is no signature")


def _is_signature(step: Any) -> bool:
    return (
        _is_mapping(step)
        and isinstance(step.get("task"), str)
        and isinstance(step.get("args") or [], list | tuple)
        and _is_mapping(step.get("kwargs") or {})
        and _is_mapping(step.get("options") or {})
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _MAX_ID_CHARS


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_count_or_none(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _are_limits(value: Any) -> bool:
    return not value or (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(limit is None or isinstance(limit, int | float) for limit in value)
    )


def _are_texts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_text, value)))


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "task": _is_text,
    "id": _is_id,
    **dict.fromkeys(("eta", "expires", "group", "lang", "origin", "parent_id", "root_id", "shadow"), _is_text_or_none),
    **dict.fromkeys(("argsrepr", "kwargsrepr"), _is_text_or_none),
    **dict.fromkeys(("group_index", "ignore_result", "replaced_task_nesting", "retries"), _is_count_or_none),
    "timelimit": _are_limits,
    "stamped_headers": _are_texts,
    "stamps": lambda value: value is None or _is_mapping(value),
    "headers": lambda value: value is None or _is_mapping(value),
}
