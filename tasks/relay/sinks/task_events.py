"""A sink that publishes jobs as Celery's task events, so that Flower and other receivers show every job.

The events are made from the outbox and not by the workers, so they include jobs that are queued or delayed.  Each event
has all fields of its task and the times of its run, because a receiver may have started after the earlier events.  So
of several transitions of a job in one batch only the last is published; a receiver would show the others very briefly.
Of many jobs that are queued at once only the first are published: a list that grows so fast cannot be read, and the
relay and the receiver would compete with the jobs for the processor.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from celery import Celery
from celery.events import Event, EventDispatcher
from kombu.exceptions import OperationalError
from sqlalchemy import bindparam, func, select

from slotkeeper.db import Database
from slotkeeper.jobs.events import EVENT_TYPES, TRANSITION_TYPES
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.outbox.event_reader import OutboxEvent
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
_MAX_SENT = 100  # events `task-sent` of one batch
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


class _Transition(NamedTuple):
    """The last transition of a job in a batch.

    type: of its task event.
    run: that it began or ended; None: the job was waiting.
    sent_s: when the job was submitted, if that is an earlier transition of the batch.
    """

    type: str
    entry: OutboxEvent
    run: _Run | None
    sent_s: float | None

    @property
    def job_id(self) -> str:
        return self.entry.event.job_id

    @property
    def at_s(self) -> float:
        return self.entry.event.at_ms / 1000


class _TaskEvent(NamedTuple):
    type: str
    hostname: str
    fields: dict[str, Any]


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
        transitions = self._last_transitions([item.entry for item in batch if item.type in TRANSITION_TYPES])
        results = self._read_results([last.job_id for last in transitions if last.type == "task-succeeded"])
        self._send_all([_task_event(last, results.get(last.job_id, "")) for last in transitions])

    def _last_transitions(self, entries: Sequence[OutboxEvent]) -> list[_Transition]:
        """Return the last transition of each job, in order; of jobs that were submitted, only the first _MAX_SENT."""
        self._load_runs(entries)
        last: dict[str, _Transition] = {}
        for entry in entries:
            job_id, run = entry.event.job_id, self._update_run(entry)
            type_ = _task_event_type(entry)
            if type_ is not None:
                earlier = last.pop(job_id, None)
                sent_s = earlier and (earlier.at_s if earlier.type == "task-sent" else earlier.sent_s)
                last[job_id] = _Transition(type_, entry, run, sent_s)
        while len(self._runs) > _MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        sent = [job_id for job_id, transition in last.items() if transition.type == "task-sent"]
        for job_id in sent[_MAX_SENT:]:
            del last[job_id]
        return list(last.values())

    def _update_run(self, entry: OutboxEvent) -> _Run | None:
        """Return the run that a transition begins or ends."""
        event, run = entry.event, self._runs.pop(entry.event.job_id, None)
        if event.type == _STARTED:
            run = self._runs[event.job_id] = _Run(event.data.get("worker") or CLIENT_HOSTNAME, event.at_ms / 1000)
        return run

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
            _TaskEvent("task-sent", CLIENT_HOSTNAME, _task(row.id, row.model, row.attempt, row.created_ms / 1000))
            for row in queued
            if row.attempt == 0
        )
        started = (
            _TaskEvent("task-started", run.worker, _task(row.id, row.model, row.attempt, run.began_s))
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

    def _read_results(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the beginnings of the results of these jobs, by job."""
        if not ids:
            return {}
        with self._database.read() as connection:
            return {row.id: row.result or "" for row in connection.execute(_RESULTS, {"p_ids": ids})}

    def _load_runs(self, entries: Sequence[OutboxEvent]) -> None:
        """Read the runs that were in progress before these transitions, if they are not in memory."""
        first = {entry.event.job_id: entry for entry in reversed(entries)}
        ids = [
            job_id
            for job_id, entry in first.items()
            if entry.event.type != _STARTED and job_id not in self._runs and not _has_no_run(entry)
        ]
        if ids:
            self._runs |= self._read_runs(ids, entries[0].event.id)

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


def _task_event_type(entry: OutboxEvent) -> str | None:
    """Return the type of the task event for a transition; None: a delayed job has become due, which is no event."""
    match entry.event.type:
        case "job.enqueued" | "job.delayed":
            if _is_submit(entry):
                return "task-sent"
            return None if entry.event.data["why"] == Reason.DUE else "task-retried"
        case "job.started":
            return "task-started"
        case "job.completed":
            return "task-succeeded"
        case "job.failed" | "job.dlq":
            return "task-failed"
        case _:  # canceled, expired
            return "task-revoked"


def _task_event(transition: _Transition, result: str) -> _TaskEvent:
    """Return the task event of a transition.  `result`: of a completed job."""
    event, run = transition.entry.event, transition.run
    task = _task(event.job_id, transition.entry.model, event.attempt, transition.at_s)
    if transition.sent_s is not None:
        task["sent"] = transition.sent_s
    if run is not None and transition.type != "task-started":
        task |= {"received": run.began_s, "started": run.began_s}
    match transition.type:
        case "task-succeeded":
            task["result"] = result
            if run is not None:
                task["runtime"] = transition.at_s - run.began_s
        case "task-revoked":
            expired = event.type == EVENT_TYPES[State.EXPIRED]
            task |= {"terminated": run is not None, "signum": None, "expired": expired}
        case "task-failed" | "task-retried":
            task |= {"exception": _reason(event.data), "traceback": ""}
    return _TaskEvent(transition.type, CLIENT_HOSTNAME if run is None else run.worker, task)


def _is_submit(entry: OutboxEvent) -> bool:
    return entry.event.data["why"] in _SUBMITTED


def _has_no_run(entry: OutboxEvent) -> bool:
    """Return whether this is the transition of a job that cannot have run just before."""
    return _is_submit(entry) or entry.event.data["why"] == Reason.DUE


def _task(job_id: str, model: str, attempt: int, at_s: float) -> dict[str, Any]:
    """Return the fields that describe the task, as in its message, and the time of the event."""
    args, _ = offer_messages.displayed_args(model)
    queue = offer_messages.queue_name(model)
    return {
        "uuid": job_id,
        "timestamp": at_s,
        "name": offer_messages.TASK,
        "args": args,
        "kwargs": {},  # not as text, which Flower would parse: a quarter of its work for an event
        "retries": max(attempt - 1, 0),
        "eta": None,
        "expires": None,
        "queue": queue,
        "exchange": "",
        "routing_key": queue,
        "root_id": job_id,
        "parent_id": None,
    }


def _reason(data: Mapping[str, Any]) -> str:
    error = data.get("error")
    return f"{error['code']}: {error['message']}" if error else str(data["why"])


def _send(dispatcher: EventDispatcher, event: _TaskEvent) -> None:
    """Buffer an event that names the job's worker as its host instead of the process that publishes it."""

    def make_event(type_: str, **fields: Any) -> Any:
        return Event(type_, **fields | {"hostname": event.hostname})

    dispatcher.send(event.type, Event=make_event, **event.fields)
