"""One run: a job is handed to its server, and watched until something final can be said about it."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar

import structlog

from jobs.config import ModelConfig
from jobs.crash import crash_at
from jobs.errors import RecordUnavailable
from jobs.record import Run, now_ms
from jobs.store import Store
from routing import exact
from routing.dispatcher import Task
from routing.fleet import Fleet
from routing.outcome import Kind, Outcome
from tasks import callbacks
from tasks.heartbeat import Hold
from tasks.servers import Call, Health, HealthKind, Line, Plan, Server, compile_plan, for_model

T = TypeVar("T")

log = structlog.get_logger(__name__)

# How long a server must be gone without a break before a job whose fate is unknown is given up as lost.
_DOWN_PATIENCE_S = 10.0
_CANCEL_PATIENCE_S = 5.0
_FIND_OUT_EVERY_S = 1.0
_ASK_S = 30.0  # A question takes no longer than this, and may take as long although the run's own time is over.
_STORE_AGAIN_S = 1.0
_LAST_TRIES_S = 3.0  # A worker that is told to stop goes on trying for so long: another can resume what is stored.


class Misconfigured(Exception):
    """A model is configured, or a server registered, so that no request can be made of it: a fault of that one."""


class LeaseLost(Exception):
    """Another worker has this job now, or nobody: drop what this one did."""


class HandBack(Exception):
    """This worker is going down; another can go on with the job."""


def when_stored(write: Callable[[], T], hold: Hold) -> T:
    """Try until the record takes it, for as long as the run is this worker's.  Raises RecordUnavailable."""
    ends: float | None = None
    while True:
        try:
            return write()
        except RecordUnavailable:
            if hold.stop:
                ends = ends or time.monotonic() + _LAST_TRIES_S
            if hold.lost or (ends is not None and time.monotonic() >= ends):
                raise
            hold.wait(_STORE_AGAIN_S)


@cache
def _plan(model_type: Literal["sync", "async"], template: str | None, id_field: str | None) -> Plan:
    return compile_plan(for_model(model_type, template, id_field))


@lru_cache(maxsize=4096)
def _server(url: str, *description: Any) -> Server:
    return Server(url, _plan(*description))


def server_for(url: str, config: ModelConfig) -> Server:
    """Speaks to the endpoint `url` in the way that the model's configuration describes.  Raises Misconfigured."""
    try:
        return _server(url, config.model_type, config.poll_endpoint_template, config.id_field)
    except ValueError as error:
        raise Misconfigured(str(error)) from error


class Watch:
    """One run while it lasts."""

    def __init__(self, task: Task, hold: Hold, store: Store, fleet: Fleet) -> None:
        self._run: Run = task.run
        self._hold = hold
        self._store = store
        self._config = fleet.model(task.run.job.model).config
        self._server = _find_server(fleet, task.run, self._config)
        self._end = time.monotonic() + _seconds_left(task.run, self._config)
        self._line = Line()
        self._call = self._new_call()
        self._question = replace(self._call, deadline_s=max(self._call.deadline_s, _ASK_S))
        self._remote_id = task.run.remote_id
        self._answered = threading.Event()
        self._cancel_until: float | None = None
        self._let_go = False  # The server has said yes to a cancel, and is described as one whose yes frees the slot.
        self._gone_since: float | None = None
        self._may_send_again = True  # once, if the server has been there all the time

    def outcome(self) -> Outcome:
        """Run the job and answer what came of it: never PENDING or UNKNOWN.

        Raises LeaseLost, HandBack, RecordUnavailable.
        """
        if self._server is None:
            return Outcome(Kind.UNREACHABLE, code="server_removed", message="The server was removed.")
        self._hold.listen(on_cancel=self._end_by_cancel, on_end=self._line.cut)
        outcome = self._begin(self._server)
        while outcome.kind in (Kind.PENDING, Kind.UNKNOWN):
            self._keep_remote_id(outcome)
            step = self._poll if self._remote_id is not None else self._find_out
            outcome = self._pause(outcome) or step(self._server)
        return outcome if self._is_over(outcome) else replace(outcome, lingers=True)

    def _is_over(self, outcome: Outcome) -> bool:
        """Whether the server has let go of a run that it calls canceled: some say so and go on."""
        sent = self._answered.is_set() or self._remote_id is not None
        return outcome.kind is not Kind.CANCELED or not sent or self._frees_slot != "no"

    @property
    def _frees_slot(self) -> str:
        cancel = self._server.description.cancel if self._server is not None else None
        return "no" if cancel is None else cancel.frees_slot

    def _begin(self, server: Server) -> Outcome:
        """Hand the job over; or ask for what an earlier worker began, which may have ended long ago."""
        if self._remote_id is not None:
            return self._poll(server)
        self._look_up()  # Nothing has been sent: who shall not go on has nothing to wait for.
        if self._hold.cancel:
            return Outcome(Kind.CANCELED, message="Canceled before it was sent.")
        outcome = server.submit(self._call)
        self._answered.set()
        crash_at("run_sent")
        return outcome

    def _send_again(self, server: Server) -> Outcome:
        """Only the connection was lost: under its key the server answers from its recent results, or runs it now."""
        self._may_send_again = False
        return server.submit(replace(self._call, deadline_s=max(self._end - time.monotonic(), 0.001)))

    def _new_call(self) -> Call:
        run = self._run
        return Call(
            job_id=run.job.id,
            attempt=run.attempt,
            payload=exact.loads(run.payload),
            callback_url=callbacks.url(run.job.id),
            callback_token=callbacks.token(run.job.id, run.attempt),
            deadline_s=max(self._end - time.monotonic(), 0.001),
            line=self._line,
        )

    def _keep_remote_id(self, outcome: Outcome) -> None:
        """The server's id goes into the record before the first poll, so that another worker can resume."""
        found = outcome.remote_id
        if found is None or found == self._remote_id:
            return
        run = self._run
        if not when_stored(lambda: self._store.note_remote(run.job.id, run.attempt, found, now_ms()), self._hold):
            raise LeaseLost
        self._remote_id = found
        crash_at("run_remote_noted")

    def _look_up(self) -> None:
        """Raises LeaseLost, HandBack: this worker shall not go on with the run."""
        if self._hold.lost:
            raise LeaseLost
        if self._hold.stop:
            raise HandBack

    def _pause(self, last: Outcome) -> Outcome | None:
        """Wait one interval; answers an outcome if the waiting itself has come to an end."""
        left = self._end - time.monotonic()
        every_s = self._config.poll_interval if last.kind is Kind.PENDING else _FIND_OUT_EVERY_S
        if not (self._hold.lost or self._hold.stop):
            self._hold.wait(max(min(every_s, left), 0))
        self._look_up()
        if self._hold.cancel:
            return self._cancel()
        if time.monotonic() < self._end:
            return None
        return self._give_up(last)

    def _cancel(self) -> Outcome | None:
        """The server has been told, or is being told; watch for a moment whether it lets go."""
        if self._let_go:
            return Outcome(Kind.CANCELED, message="Canceled.")
        if self._cancel_until is None:
            self._cancel_until = time.monotonic() + _CANCEL_PATIENCE_S
        elif time.monotonic() > self._cancel_until:
            return Outcome(Kind.CANCELED, message="Canceled; the server did not confirm it.", lingers=True)
        return None

    def _end_by_cancel(self) -> None:
        """Ask the server to let go, in a thread of its own: the run's own one may be waiting for the answer.

        A server that goes on regardless is not waited for any longer.
        """
        self._cancel_until = time.monotonic() + _CANCEL_PATIENCE_S
        self._tell_server()
        if self._remote_id is None and not self._answered.wait(_CANCEL_PATIENCE_S):
            self._line.cut()

    def _tell_server(self) -> None:
        if self._server is not None:
            said_yes = self._server.cancel(self._question, self._remote_id)
            self._let_go = said_yes and self._frees_slot == "immediate"

    def _give_up(self, last: Outcome) -> Outcome:
        self._tell_server()
        said = f" Last: {last.message}" if last.message else ""
        return Outcome(Kind.RETRY, code="timed_out", message=f"Exceeded max_poll_time.{said}", lingers=not self._let_go)

    def _poll(self, server: Server) -> Outcome:
        assert self._remote_id is not None
        return server.status(self._question, self._remote_id)

    def _find_out(self, server: Server) -> Outcome:
        """The request was sent and never answered: the server may be running it, so its slot is kept.

        Only its own word, or its lasting absence, ends that.
        """
        health = server.health()
        if health.kind is HealthKind.DOWN:
            self._may_send_again = False
            self._gone_since = self._gone_since or time.monotonic()
            if time.monotonic() - self._gone_since < _DOWN_PATIENCE_S:
                return Outcome(Kind.UNKNOWN, message=health.message)
            return Outcome(Kind.LOST, code="server_lost", message="The server went away under the job.", lingers=True)
        self._gone_since = None
        if _knows(health, self._call) is False:
            if self._may_send_again:
                return self._send_again(server)
            return Outcome(Kind.LOST, code="server_lost", message="The server does not know the job any more.")
        return Outcome(Kind.UNKNOWN, message=health.message)


def _knows(health: Health, call: Call) -> bool | None:
    """Whether the server has the job; None: its report does not say."""
    if health.job_ids is not None:
        return bool({call.job_id, call.attempt_id} & health.job_ids)
    if health.active_jobs is not None and health.running_count:
        return None if health.active_jobs else False
    return None


def _find_server(fleet: Fleet, run: Run, config: ModelConfig) -> Server | None:
    found = fleet.snapshot().servers.get(run.server) or fleet.refresh().servers.get(run.server)
    url = found.endpoints.get(run.job.model) if found else None
    return None if url is None else server_for(url, config)


def _seconds_left(run: Run, config: ModelConfig) -> float:
    """What is left of the longest time that this run may take, or of the job's own deadline."""
    began = run.sent_ms or run.started_ms
    ends = began + config.max_poll_time * 1000
    if run.deadline_ms is not None:
        ends = min(ends, run.deadline_ms)
    return max(ends - now_ms(), 0) / 1000
