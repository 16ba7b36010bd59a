"""One run: a job is handed to its server, and watched until something final can be said about it."""

import time
from functools import cache, lru_cache
from typing import Any, Literal

import orjson
import structlog

from jobs.config import ModelConfig
from jobs.crash import crash_at
from jobs.record import Run, now_ms
from jobs.store import Store
from routing.dispatcher import Task
from routing.fleet import Fleet
from routing.outcome import Kind, Outcome
from tasks import callbacks
from tasks.heartbeat import Hold
from tasks.servers import Call, Health, HealthKind, Plan, Server, compile_plan, for_model

log = structlog.get_logger(__name__)

# How long a server must be gone without a break before a job whose fate is unknown is given up as lost.
_DOWN_PATIENCE_S = 10.0
_CANCEL_PATIENCE_S = 5.0
_FIND_OUT_EVERY_S = 1.0


class LeaseLost(Exception):
    """Another worker has this job now, or nobody: drop what this one did."""


class HandBack(Exception):
    """This worker is going down; another can go on with the job."""


@cache
def _plan(model_type: Literal["sync", "async"], template: str | None, id_field: str | None) -> Plan:
    return compile_plan(for_model(model_type, template, id_field))


@lru_cache(maxsize=4096)
def _server(url: str, *description: Any) -> Server:
    return Server(url, _plan(*description))


def server_for(url: str, config: ModelConfig) -> Server:
    """Speaks to the endpoint `url` in the way that the model's configuration describes."""
    return _server(url, config.model_type, config.poll_endpoint_template, config.id_field)


class Watch:
    """One run while it lasts."""

    def __init__(self, task: Task, hold: Hold, store: Store, fleet: Fleet) -> None:
        self._run: Run = task.run
        self._hold = hold
        self._store = store
        self._config = fleet.model(task.run.job.model).config
        self._server = _find_server(fleet, task.run, self._config)
        self._end = time.monotonic() + _seconds_left(task.run, self._config)
        self._call = self._new_call()
        self._remote_id = task.run.remote_id
        self._cancel_until: float | None = None
        self._gone_since: float | None = None

    def outcome(self) -> Outcome:
        """Run the job and answer what came of it: never PENDING or UNKNOWN.

        Raises LeaseLost, HandBack, RecordUnavailable.
        """
        self._hold.on_cancel = self._tell_server
        if self._server is None:
            return Outcome(Kind.UNREACHABLE, code="server_removed", message="The server was removed.")
        if self._remote_id is None:
            outcome = self._server.submit(self._call)
            crash_at("run_sent")
        else:
            outcome = Outcome(Kind.PENDING, remote_id=self._remote_id)
        while outcome.kind in (Kind.PENDING, Kind.UNKNOWN):
            self._keep_remote_id(outcome)
            step = self._poll if self._remote_id is not None else self._find_out
            outcome = self._pause(outcome) or step(self._server)
        return outcome

    def _new_call(self) -> Call:
        run = self._run
        return Call(
            job_id=run.job.id,
            attempt=run.attempt,
            payload=orjson.loads(run.payload),
            callback_url=callbacks.url(run.job.id),
            callback_token=callbacks.token(run.job.id, run.attempt),
            deadline_s=max(self._end - time.monotonic(), 0.001),
        )

    def _keep_remote_id(self, outcome: Outcome) -> None:
        """The server's id goes into the record before the first poll, so that another worker can resume."""
        if outcome.remote_id is None or outcome.remote_id == self._remote_id:
            return
        if not self._store.note_remote(self._run.job.id, self._run.attempt, outcome.remote_id, now_ms()):
            raise LeaseLost
        self._remote_id = outcome.remote_id
        crash_at("run_remote_noted")

    def _pause(self, last: Outcome) -> Outcome | None:
        """Wait one interval; answers an outcome if the waiting itself has come to an end."""
        left = self._end - time.monotonic()
        every_s = self._config.poll_interval if last.kind is Kind.PENDING else _FIND_OUT_EVERY_S
        self._hold.wait(max(min(every_s, left), 0))
        if self._hold.lost:
            raise LeaseLost
        if self._hold.stop and self._remote_id is not None:
            raise HandBack
        if self._hold.cancel:
            return self._cancel()
        if time.monotonic() < self._end:
            return None
        return self._give_up(last)

    def _cancel(self) -> Outcome | None:
        """The server has been told (`_tell_server`); watch for a moment whether it lets go."""
        if self._cancel_until is None:
            self._cancel_until = time.monotonic() + _CANCEL_PATIENCE_S
        elif time.monotonic() > self._cancel_until:
            return Outcome(Kind.CANCELED, message="Canceled; the server did not confirm it.")
        return None

    def _tell_server(self) -> None:
        """Ask the server to let go.  Not from the thread of the run, which may be waiting for the answer."""
        if self._server is not None:
            self._server.cancel(self._call, self._remote_id)

    def _give_up(self, last: Outcome) -> Outcome:
        self._tell_server()
        said = f" Last: {last.message}" if last.message else ""
        return Outcome(Kind.RETRY, code="timed_out", message=f"Exceeded max_poll_time.{said}")

    def _poll(self, server: Server) -> Outcome:
        assert self._remote_id is not None
        return server.status(self._call, self._remote_id)

    def _find_out(self, server: Server) -> Outcome:
        """The request was sent and never answered: the server may be running it, so its slot is kept.

        Only its own word, or its lasting absence, ends that.
        """
        health = server.health()
        if health.kind is HealthKind.DOWN:
            self._gone_since = self._gone_since or time.monotonic()
            if time.monotonic() - self._gone_since < _DOWN_PATIENCE_S:
                return Outcome(Kind.UNKNOWN, message=health.message)
            return Outcome(Kind.LOST, code="server_lost", message="The server went away under the job.")
        self._gone_since = None
        if _knows(health, self._call) is False:
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
