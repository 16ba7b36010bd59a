"""A sink that publishes jobs as Celery's task events, so that Flower and other receivers show every job.

The events are made from the outbox and not by the workers, so they include jobs that are queued or delayed.  Each event
has all fields of its task and the times of its run, because a receiver may have started after the earlier events.  So
of several transitions of a job in one batch only the last is published; a receiver would show the others very briefly.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

import orjson
from celery import Celery
from celery.events import Event, EventDispatcher
from kombu.exceptions import OperationalError
from sqlalchemy import bindparam, func, select

from slotkeeper.db import Database
from slotkeeper.jobs.events import EVENT_TYPES, TRANSITION_TYPES
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.tables import events, jobs
from tasks import offer_messages
from tasks.extensions import transport
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable

CLIENT_HOSTNAME = "slotkeeper"
"""The host name in the events of jobs that no worker has started."""
_RESULT_SHOWN = 200  # characters
_NEWEST = (1 << 63) - 1  # above all numbers of events
_BUFFER_LIMIT = 100_000  # above the size of any batch, so that the dispatcher publishes only in `_flush`
_RESULTS = select(jobs.c.id, func.substr(jobs.c.result, 1, _RESULT_SHOWN).label("result")).where(
    jobs.c.id.in_(bindparam("p_ids", expanding=True))
)
_LAST_EVENTS = select(events.c.job_id, events.c.type, events.c.at_ms, events.c.data).where(
    events.c.id.in_(
        select(func.max(events.c.id))
        .where(
            events.c.job_id.in_(bindparam("p_ids", expanding=True)),
            events.c.type.in_(sorted(TRANSITION_TYPES)),
            events.c.id < bindparam("p_before"),
        )
        .group_by(events.c.job_id)
    )
)
_STARTED = EVENT_TYPES[State.RUNNING]
_MAX_ACTIVE = 500  # of each state
_ACTIVE = (
    select(jobs.c.id, jobs.c.model, jobs.c.attempt, jobs.c.created_ms)
    .where(jobs.c.state == bindparam("p_state"))
    .order_by(jobs.c.seq)
    .limit(_MAX_ACTIVE)
)
_SUBMITTED = frozenset({Reason.SUBMITTED, Reason.SCHEDULED})
_MAX_RUNS = 20_000  # kept in memory; the database has the others
_SILENCE_S = 1.0  # after a message that no client received


class _Run(NamedTuple):
    worker: str
    began_s: float


class _TaskEvent(NamedTuple):
    type: str
    hostname: str
    fields: dict[str, Any]

    def after(self, earlier: Self) -> Self:
        """Return this event with the time at which its task was sent, if the earlier event has it."""
        sent = earlier.fields["timestamp"] if earlier.type == "task-sent" else earlier.fields.get("sent")
        return self if sent is None else self._replace(fields=self.fields | {"sent": sent})


class TaskEventSink:
    """Publishes each transition of a job as the corresponding task event of Celery."""

    retention = 10_000
    """The number of tasks that `slotkeeper flower` keeps in memory."""

    def __init__(self, app: Celery, database: Database) -> None:
        self._app, self._database = app, database
        self._dispatcher: EventDispatcher | None = None
        self._connection: Any = None
        self._runs: dict[str, _Run] = {}  # in progress, by job; complete since the last `resume_after`, up to _MAX_RUNS
        self._silent_until = 0.0  # Until then no client is expected to listen.
        self._errors: tuple[type[BaseException], ...] = (
            OperationalError,
            OSError,
            *app.connection_for_write().connection_errors,
        )

    def resume_after(self, position: int) -> int:
        self._runs.clear()  # Another relay may have published the transitions in between.
        return position

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        """Publish the last task event of each job in a batch, all in one message.

        If no client received the last message, nothing is published for a second: a receiver that comes meanwhile
        learns of waiting and running jobs by `publish_active`.  Raises SinkUnavailable, DatabaseUnavailable.
        """
        if time.monotonic() < self._silent_until:
            self._runs.clear()
            return
        transitions = [published for published in batch if published.type.startswith("job.")]
        results = self._results(transitions)
        self._load_runs(transitions)
        last: dict[str, _TaskEvent] = {}  # by job, in the order of publication
        for transition in transitions:
            event = _task_event(transition.event, self._runs, results)
            if event is not None:
                earlier = last.pop(transition.key, None)
                last[transition.key] = event if earlier is None else event.after(earlier)
        while len(self._runs) > _MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        self._send_all(last.values())

    def publish_active(self) -> None:
        """Publish the latest events of queued and running jobs again, at most 500 of each, for new receivers.

        They change nothing in a receiver that has them already.  Raises SinkUnavailable, DatabaseUnavailable.
        """
        with self._database.read() as connection:
            queued, running = (
                connection.execute(_ACTIVE, {"p_state": state}).all() for state in (State.QUEUED, State.RUNNING)
            )
        runs = self._read_runs([row.id for row in running], _NEWEST)
        # Later attempts are shown as retried; a `task-sent` would undo that.
        sent = (
            _TaskEvent("task-sent", CLIENT_HOSTNAME, _task(row, row.created_ms / 1000))
            for row in queued
            if row.attempt == 0
        )
        started = (
            _TaskEvent("task-started", run.worker, _task(row, run.began_s))
            for row in running
            if (run := runs.get(row.id)) is not None
        )
        self._send_all([*sent, *started])

    def _send_all(self, events: Collection[_TaskEvent]) -> None:
        """Publish task events as one message.  Raises SinkUnavailable."""
        if not events:
            return
        try:
            dispatcher, has_no_worker = self._connect(), False
            for event in events:
                has_no_worker |= event.hostname == CLIENT_HOSTNAME and event.type != "task-sent"
                if event.type == "task-started":  # as a worker does; the event shows when the job was received
                    _send(dispatcher, event._replace(type="task-received"))
                _send(dispatcher, event)
            dispatcher.flush()
            if transport.count_receivers(self._connection.default_channel) == 0:
                self._silent_until = time.monotonic() + _SILENCE_S
            elif has_no_worker:  # Receivers would list CLIENT_HOSTNAME as a worker that is online.
                dispatcher.send("worker-offline")
        except self._errors as error:
            self.close()
            raise SinkUnavailable(str(error) or type(error).__name__) from error

    def _connect(self) -> EventDispatcher:
        if self._dispatcher is None:
            self._connection = self._app.connection_for_write()
            self._connection.ensure_connection(max_retries=1)
            self._dispatcher = self._app.events.Dispatcher(
                self._connection,
                hostname=CLIENT_HOSTNAME,
                buffer_while_offline=False,
                buffer_group={"task"},
                buffer_limit=_BUFFER_LIMIT,
            )
        return self._dispatcher

    def _results(self, transitions: Iterable[PublishedEvent]) -> dict[str, str]:
        """Return the beginnings of the results of completed jobs, by job."""
        completed = [published.key for published in transitions if published.type == "job.completed"]
        if not completed:
            return {}
        with self._database.read() as connection:
            return {row.id: row.result or "" for row in connection.execute(_RESULTS, {"p_ids": completed})}

    def _load_runs(self, transitions: Sequence[PublishedEvent]) -> None:
        """Read the runs that were in progress before these transitions, if they are not in memory."""
        first = {published.key: published for published in reversed(transitions)}
        ids = [
            job_id
            for job_id, published in first.items()
            if published.type != _STARTED and job_id not in self._runs and not _has_no_run(published.event)
        ]
        if ids:
            self._runs |= self._read_runs(ids, transitions[0].number)

    def _read_runs(self, ids: Sequence[str], before: int) -> dict[str, _Run]:
        """Return the runs of these jobs that were in progress before the event of this number, by job."""
        with self._database.read() as connection:
            found = connection.execute(_LAST_EVENTS, {"p_ids": ids, "p_before": before}).all()
        return {
            row.job_id: _Run(orjson.loads(row.data).get("worker") or CLIENT_HOSTNAME, row.at_ms / 1000)
            for row in found
            if row.type == _STARTED
        }

    def close(self) -> None:
        self._dispatcher = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.collect()


def _task_event(event: Mapping[str, Any], runs: dict[str, _Run], results: Mapping[str, str]) -> _TaskEvent | None:
    """Return the task event for one transition, and update `runs`."""
    data, job = event["data"], event["subject"]
    at_s = datetime.fromisoformat(data["at"]).timestamp()
    run = runs.pop(job, None)
    if event["type"] == _STARTED:
        run = runs[job] = _Run(data.get("worker") or CLIENT_HOSTNAME, at_s)
    worker = CLIENT_HOSTNAME if run is None else run.worker
    task = _request(data) | {"uuid": job, "timestamp": at_s}
    times = {} if run is None else {"received": run.began_s, "started": run.began_s}
    match event["type"]:
        case "job.enqueued" | "job.delayed" if _is_submit(event):
            return _TaskEvent("task-sent", worker, task)
        case "job.started":
            return _TaskEvent("task-started", worker, task)
        case "job.enqueued" | "job.delayed" if data["why"] != Reason.DUE:
            return _TaskEvent("task-retried", worker, task | times | {"exception": _reason(data), "traceback": ""})
        case "job.completed":
            runtime = {} if run is None else {"runtime": at_s - run.began_s}
            return _TaskEvent("task-succeeded", worker, task | times | runtime | {"result": results.get(job, "")})
        case "job.failed" | "job.dlq":
            return _TaskEvent("task-failed", worker, task | times | {"exception": _reason(data), "traceback": ""})
        case "job.canceled" | "job.expired" as ended:
            expired = ended == "job.expired"
            revoked = {"terminated": run is not None, "signum": None, "expired": expired}
            return _TaskEvent("task-revoked", worker, task | times | revoked)
    return None


def _is_submit(event: Mapping[str, Any]) -> bool:
    return event["data"]["why"] in _SUBMITTED


def _has_no_run(event: Mapping[str, Any]) -> bool:
    """Return whether this is the transition of a job that cannot have run just before."""
    return _is_submit(event) or event["data"]["why"] == Reason.DUE


def _request(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that describe the task, as in its message."""
    args, _ = offer_messages.displayed_args(data["model"])
    queue = offer_messages.queue_name(data["model"])
    return {
        "name": offer_messages.TASK,
        "args": args,
        "kwargs": {},  # not as text, which Flower would parse: a quarter of its work for an event
        "retries": max(data["attempt"] - 1, 0),
        "eta": None,
        "expires": None,
        "queue": queue,
        "exchange": "",
        "routing_key": queue,
        "root_id": data["job_id"],
        "parent_id": None,
    }


def _task(row: Any, at_s: float) -> dict[str, Any]:
    """Return the fields of an event of a queued or running job."""
    job = {"job_id": row.id, "model": row.model, "attempt": row.attempt}
    return _request(job) | {"uuid": row.id, "timestamp": at_s}


def _reason(data: Mapping[str, Any]) -> str:
    error = data.get("error")
    return f"{error['code']}: {error['message']}" if error else str(data["why"])


def _send(dispatcher: EventDispatcher, event: _TaskEvent) -> None:
    """Buffer an event that names the job's worker as its host instead of the process that publishes it."""

    def make_event(type_: str, **fields: Any) -> Any:
        return Event(type_, **fields | {"hostname": event.hostname})

    dispatcher.send(event.type, Event=make_event, **event.fields)
