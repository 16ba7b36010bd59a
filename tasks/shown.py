"""A run as a task of Celery: what is shown of it to `inspect`, to signals and in the log.

Celery's own tracer does this for a function that a thread is in from beginning to end; a run is in no thread.
"""

import logging
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import structlog
from billiard.einfo import ExceptionInfo
from celery import signals
from celery.app import trace
from celery.exceptions import Ignore, Retry
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request, create_request_cls  # type: ignore[attr-defined]
from celery.worker.state import reserved_requests, task_reserved
from celery.worker.strategy import logger as strategy

from dispatch.outcome import Outcome
from foundation import exact
from foundation.crash import crash_at
from jobs.states import State
from jobs.store import Moved
from routing.queues import Offer
from tasks import messages
from tasks.requests import own_requests
from tasks.telling import JobFailed

log = structlog.get_logger(__name__)


class ServerFault(Exception):
    """The server answered with an error or with nonsense, and the job waits to be tried again: (code, message)."""


def in_celerys_words(moved: Moved, outcome: Outcome) -> Any:
    """The result that a run's task has, or the exception that it ends with."""
    match moved.to:
        case State.COMPLETED:
            return outcome.result
        case State.QUEUED:
            return Retry(f"Back to its place: {outcome.message or outcome.kind}")
        case State.DELAYED:
            crash_at("retry_committed")
            fault = ServerFault(outcome.code or "server_error", outcome.message)
            return Retry("The server answered wrongly; the job waits in the record.", fault)
        case State.CANCELED | State.EXPIRED as ended:
            return Ignore(ended.value)
        case _:
            return JobFailed(outcome.code or outcome.kind.value, outcome.message)


class Reception:
    """Tells a consumer of Celery's of runs that no message brought, in the words that its strategy has for messages.

    The strategy's own way leads through the pool, and asks for much that such a run cannot have.
    """

    def __init__(self, consumer: Any) -> None:
        task, eventer = consumer.app.tasks[messages.TASK], consumer.event_dispatcher
        base, host = symbol_by_name(task.Request), consumer.hostname
        made = create_request_cls(base, task, consumer.pool, host, eventer, app=consumer.app)

        def whole(offer: Offer, failures: int, way: Mapping[str, Any]) -> Request:
            message = messages.handed_on(offer, failures, way)
            return made(message, hostname=host, eventer=eventer, app=consumer.app, task=task)

        self._request = own_requests(base, whole, task, eventer)
        self._consumer = consumer

    def receive(self, offer: Offer, failures: int) -> Request:
        """The request of a run that this worker has begun by itself."""
        request: Request = self._request(offer, failures, messages.HANDED_ON)
        if strategy.isEnabledFor(logging.INFO):
            strategy.info(trace.LOG_RECEIVED, {"name": request.name, "id": request.id})
        if signals.task_received.receivers:
            signals.task_received.send(sender=self._consumer, request=request)
        task_reserved(request)
        return request

    def in_place_of(self, brought: Request, offer: Offer, failures: int) -> Request:
        """A request of which a message is not kept for as long as its run lasts; that is acknowledged."""
        brought.acknowledge()
        request: Request = self._request(offer, failures, _shared(*brought.delivery_info.items()))
        task_reserved(request)
        reserved_requests.discard(brought)
        return request


@lru_cache(maxsize=1024)
def _shared(*items: tuple[str, Any]) -> Mapping[str, Any]:
    """One for all that came the same way."""
    return dict(items)


class Shown:
    """One run's task, from the loop.  What Celery, or a receiver of its signals, does wrong is logged, no more."""

    __slots__ = ("_began", "_request")

    def __init__(self, request: Request | None = None) -> None:
        self._request = request
        self._began = time.monotonic()

    def introduce(self, reception: Reception, offer: Offer, failures: int) -> None:
        """Have Celery hear of a run that no message brought; and keep of one that a message brought what it asks."""
        try:
            if self._request is None:
                self._request = reception.receive(offer, failures)
            else:
                self._request = reception.in_place_of(self._request, offer, failures)
        except Exception as error:
            log.warning("task_not_shown", job_id=offer.job_id, error=repr(error))

    def began(self) -> None:
        self._tell(self._begin)

    def ended(self, with_: Any) -> None:
        """`with_`: the run's result, or an exception."""
        self._tell(self._end, with_)

    def _tell(self, how: Any, *args: Any) -> None:
        if self._request is None:
            return
        try:
            how(self._request, *args)
        except Exception as error:
            log.warning("task_not_shown", job_id=self._request.id, error=repr(error))

    def _begin(self, request: Request) -> None:
        request.on_accepted(os.getpid(), time.monotonic())  # type: ignore[arg-type]
        task = request.task
        if signals.task_prerun.receivers:
            signals.task_prerun.send(
                sender=task, task_id=request.id, task=task, args=request.args, kwargs=request.kwargs
            )

    def _end(self, request: Request, found: Any) -> None:
        took_s = time.monotonic() - self._began
        if isinstance(found, Exception):
            state = self._end_with(request, found)
        else:
            state = "SUCCESS"
            if trace.logger.isEnabledFor(logging.INFO):
                shown = _beginning(found, request.task.resultrepr_maxsize)
                _say(trace.LOG_SUCCESS, request, runtime=took_s, return_value=shown)
            request.on_success((False, None, took_s))
            if signals.task_success.receivers:
                signals.task_success.send(sender=request.task, result=exact.unwritten(found), runtime=took_s)
        if signals.task_postrun.receivers:
            signals.task_postrun.send(
                sender=request.task,
                task_id=request.id,
                task=request.task,
                args=request.args,
                kwargs=request.kwargs,
                retval=exact.unwritten(found),
                state=state,
            )

    def _end_with(self, request: Request, error: Exception) -> str:
        info = _info(error)
        request.on_failure(info, return_ok=True)
        match error:
            case Retry():
                _say(trace.LOG_RETRY, request, exc=error)
                context = request._context  # type: ignore[attr-defined]
                signals.task_retry.send(sender=request.task, request=context, reason=error, einfo=info)
                return "RETRY"
            case Ignore():
                _say(trace.LOG_IGNORED, request, description="ignored")
                return "IGNORED"
            case _:
                _say(_LOG_FAILED, request, exc=error)
                signals.task_failure.send(
                    sender=request.task,
                    task_id=request.id,
                    exception=error,
                    args=request.args,
                    kwargs=request.kwargs,
                    traceback=error.__traceback__,
                    einfo=info,
                )
                return "FAILURE"


def _beginning(result: Any, longest: int) -> str:
    """The beginning of a result, as JSON."""
    text = result.beginning(longest + 1) if isinstance(result, exact.Unparsed) else exact.dumps(result)
    return text[:longest].decode(errors="replace") + ("…" if len(text) > longest else "")


_LOG_FAILED = "Task %(name)s[%(id)s] raised: %(exc)s"


def _say(line: str, request: Request, **facts: Any) -> None:
    if trace.logger.isEnabledFor(logging.INFO):
        trace.logger.info(line, {"name": request.name, "id": request.id, **facts})


def _info(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except Exception:
        return ExceptionInfo()
