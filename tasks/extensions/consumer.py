"""Celery's consumer, which rejects malformed messages: each once, with one line in the log.

Celery trusts the clients that may write to its queues.  It reads a message piece by piece, in the loop that receives
all messages: there, a list in the place of a name ends the worker, and the message goes back to the next worker.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import structlog
from celery.app.task import Context
from celery.exceptions import NotRegistered
from celery.worker.consumer import Consumer as CeleryConsumer
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

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


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= _MAX_ID_CHARS


def _excerpt(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN_CHARS] if isinstance(value, str) else type(value).__name__


# -- what the message of a task contains -----------------------------------------------------------------------


class _Strict(BaseModel):
    """Values have the JSON type that a field says; nothing is converted."""

    model_config = ConfigDict(strict=True)


class _Headers(_Strict):
    """The headers of Celery's protocol 2, as far as the worker reads them."""

    task: str
    id: Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARS)]
    eta: str | None = None
    expires: str | None = None
    group: str | None = None
    group_index: int | None = None
    lang: str | None = None
    origin: str | None = None
    parent_id: str | None = None
    root_id: str | None = None
    shadow: str | None = None
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    ignore_result: bool | int | None = None
    replaced_task_nesting: int | None = None
    retries: int | None = None
    timelimit: Annotated[list[float | None], Field(min_length=2, max_length=2)] | None = None
    stamped_headers: list[str] | None = None
    stamps: dict[str, Any] | None = None
    headers: dict[str, Any] | None = None


class _Signature(_Strict):
    """A task that follows another."""

    task: str
    args: list[Any] | None = None
    named_args: dict[str, Any] | None = Field(None, validation_alias=AliasPath("kwargs"))
    options: dict[str, Any] | None = None


class _Embedded(_Strict):
    """The third part of a body: the signatures of the tasks that are called next."""

    model_config = ConfigDict(extra="forbid")
    callbacks: list[_Signature] | None = None
    chain: list[_Signature] | None = None
    chord: _Signature | None = None
    errbacks: list[_Signature] | None = None


class _Content(_Strict):
    """The body of a message, and the properties that the worker reads."""

    args: list[Any]
    named_args: dict[str, Any]
    embedded: _Embedded | None
    reply_to: str | None = None
    correlation_id: str | None = None


def validate_message(message: Any) -> None:
    """Raises Malformed, or whatever the decoding of the body raises."""
    headers, (args, kwargs, embedded) = split_message(message)
    try:
        _Headers.model_validate(headers)
        _Content.model_validate({**message.properties, "args": args, "named_args": kwargs, "embedded": embedded})
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise Malformed(f"{fault['loc'][0]}: {fault['msg']}") from None  # What follows in `loc` may be a client's text.


def split_message(message: Any) -> tuple[dict[str, Any], tuple[Any, Any, Any]]:
    """Headers and (args, kwargs, embedded) of a message of Celery's protocol 2, or 1."""
    headers, body = message.headers, message.payload
    if not isinstance(headers, dict) or not isinstance(message.properties, dict):
        raise Malformed("no headers")
    if "task" in headers:
        if not isinstance(body, list | tuple) or len(body) != 3:
            raise Malformed("the body is not (args, kwargs, embedded)")
        return headers, (body[0], body[1], body[2])
    if not isinstance(body, dict):
        raise Malformed("no task")
    embedded = {name: body.get(name) for name in _EMBEDDED if name != "chain"}
    fields = {name: value for name, value in body.items() if name not in _EMBEDDED}
    return fields, (list(fields.get("args") or ()), fields.get("kwargs") or {}, embedded)
