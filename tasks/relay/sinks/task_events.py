"""A sink that publishes jobs as Celery's task events, so that Flower and other receivers show every job.

The events are made from the outbox and not by the workers, so they include jobs that are queued or delayed.  Each event
has all fields of its task, because a receiver may have started after the earlier events.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
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
from tasks import offer_messages
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


class _Run(NamedTuple):
    worker: str
    began_s: float


class TaskEventSink:
    """Publishes each transition of a job as the corresponding task event of Celery."""

    retention = 10_000
    """The number of tasks that `slotkeeper flower` keeps in memory."""

    def __init__(self, app: Celery, database: Database) -> None:
        self._app, self._database = app, database
        self._dispatcher: EventDispatcher | None = None
        self._connection: Any = None
        self._errors: tuple[type[BaseException], ...] = (
            OperationalError,
            OSError,
            *app.connection_for_write().connection_errors,
        )

    def resume_after(self, position: int) -> int:
        return position

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        """Publish the events of a batch as one message, in order.  Raises SinkUnavailable, DatabaseUnavailable."""
        try:
            transitions = [published for published in batch if published.type.startswith("job.")]
            results, runs = self._results(transitions), self._runs(transitions)
            dispatcher, has_no_worker = self._connect(), False
            for transition in transitions:
                for type_, hostname, fields in _task_events(transition.event, runs, results):
                    has_no_worker |= hostname == CLIENT_HOSTNAME and type_ != "task-sent"
                    _send(dispatcher, type_, hostname, fields)
            _flush(dispatcher, has_no_worker)
        except self._errors as error:
            self.close()
            raise SinkUnavailable(str(error) or type(error).__name__) from error

    def publish_active(self) -> None:
        """Publish the latest events of queued and running jobs again, at most 500 of each, for new receivers.

        They change nothing in a receiver that has them already.  Raises SinkUnavailable, DatabaseUnavailable.
        """
        with self._database.read() as connection:
            queued, running = (
                connection.execute(_ACTIVE, {"p_state": state}).all() for state in (State.QUEUED, State.RUNNING)
            )
        runs = self._read_runs([row.id for row in running], _NEWEST)
        try:
            dispatcher = self._connect()
            for row in queued:
                if row.attempt == 0:  # Later attempts are shown as retried; this event would undo that.
                    _send(dispatcher, "task-sent", CLIENT_HOSTNAME, _task(row, row.created_ms / 1000))
            for row in running:
                if (run := runs.get(row.id)) is not None:
                    for type_ in ("task-received", "task-started"):
                        _send(dispatcher, type_, run.worker, _task(row, run.began_s))
            _flush(dispatcher, any(run.worker == CLIENT_HOSTNAME for run in runs.values()))
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

    def _runs(self, transitions: Sequence[PublishedEvent]) -> dict[str, _Run]:
        """Return the runs that were in progress before these transitions, by job."""
        first = {published.key: published for published in reversed(transitions)}
        ids = [
            job_id
            for job_id, published in first.items()
            if published.type != _STARTED and not _is_submit(published.event)
        ]
        return self._read_runs(ids, transitions[0].number) if ids else {}

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


def _task_events(
    event: Mapping[str, Any], runs: dict[str, _Run], results: Mapping[str, str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the types, host names and fields of the task events for one transition, and update `runs`."""
    data, job = event["data"], event["subject"]
    at_s = datetime.fromisoformat(data["at"]).timestamp()
    run = runs.pop(job, None)
    if event["type"] == _STARTED:
        run = runs[job] = _Run(data.get("worker") or CLIENT_HOSTNAME, at_s)
    worker = CLIENT_HOSTNAME if run is None else run.worker
    task = _request(data) | {"uuid": job, "timestamp": at_s}
    match event["type"]:
        case "job.enqueued" | "job.delayed" if _is_submit(event):
            yield "task-sent", worker, task
        case "job.started":
            yield "task-received", worker, task
            yield "task-started", worker, task
        case "job.enqueued" | "job.delayed" if data["why"] != Reason.DUE:
            yield "task-retried", worker, task | {"exception": _reason(data), "traceback": ""}
        case "job.completed":
            runtime = {} if run is None else {"runtime": at_s - run.began_s}
            yield "task-succeeded", worker, task | runtime | {"result": results.get(job, "")}
        case "job.failed" | "job.dlq":
            yield "task-failed", worker, task | {"exception": _reason(data), "traceback": ""}
        case "job.canceled" | "job.expired" as ended:
            expired = ended == "job.expired"
            yield "task-revoked", worker, task | {"terminated": run is not None, "signum": None, "expired": expired}


def _is_submit(event: Mapping[str, Any]) -> bool:
    return event["data"]["why"] in _SUBMITTED


def _request(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that describe the task, as in its message."""
    args, kwargs = offer_messages.displayed_args(data["model"])
    queue = offer_messages.queue_name(data["model"])
    return {
        "name": offer_messages.TASK,
        "args": args,
        "kwargs": kwargs,
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


def _flush(dispatcher: EventDispatcher, has_no_worker: bool) -> None:
    """Publish the buffered events.

    has_no_worker: some of them name CLIENT_HOSTNAME, which receivers would list as a worker that is online.
    """
    dispatcher.flush()
    if has_no_worker:
        dispatcher.send("worker-offline")


def _send(dispatcher: EventDispatcher, type_: str, hostname: str, fields: Mapping[str, Any]) -> None:
    """Buffer an event that names the job's worker as its host instead of the process that publishes it."""

    def make_event(type_: str, **fields: Any) -> Any:
        return Event(type_, **fields | {"hostname": hostname})

    dispatcher.send(type_, Event=make_event, **fields)
