"""Celery's task events as a sink, made from the outbox: Flower, and whoever else receives them, sees every job.

Jobs that wait or are delayed are shown too, and the workers themselves publish no task events.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from celery import Celery
from celery.events import Event, EventDispatcher
from kombu.exceptions import OperationalError
from sqlalchemy import bindparam, func, select

from slotkeeper.db.group_commit import Database
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.tables import jobs
from tasks import offer_messages
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable

CLIENT = "slotkeeper"
"""The host name of events of jobs that no worker has started."""
_RUNS_REMEMBERED = 100_000
_RESULT_SHOWN = 200  # characters
_BATCH = 100_000  # The dispatcher publishes a batch only when it is told to.
_RESULTS = select(jobs.c.id, func.substr(jobs.c.result, 1, _RESULT_SHOWN).label("result")).where(
    jobs.c.id.in_(bindparam("p_ids", expanding=True))
)
_SUBMITTED = frozenset({Reason.SUBMITTED, Reason.SCHEDULED})


class _Run(NamedTuple):
    worker: str
    began_s: float


class TaskEventSink:
    """Publishes each transition of a job as the task event of Celery that says the same."""

    retention = 10_000
    """As many as the tasks that `slotkeeper flower` keeps in its memory."""

    def __init__(self, app: Celery, database: Database) -> None:
        self._app, self._database = app, database
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # by job; the oldest goes first
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
        """Publish the events of a batch as one message, in their order.  Raises SinkAway, RecordUnavailable."""
        try:
            transitions = [published.event for published in batch if published.type.startswith("job.")]
            results = self._results(transitions)
            dispatcher = self._connected()
            for event in transitions:
                for type_, fields in self._task_events(event, results):
                    dispatcher.send(type_, Event=_at_worker(fields.pop("hostname")), **fields)
            dispatcher.flush()
        except self._errors as error:
            self.close()
            raise SinkUnavailable(str(error) or type(error).__name__) from error

    def _connected(self) -> EventDispatcher:
        if self._dispatcher is None:
            self._connection = self._app.connection_for_write()
            self._connection.ensure_connection(max_retries=1)
            self._dispatcher = self._app.events.Dispatcher(
                self._connection,
                hostname=CLIENT,
                buffer_while_offline=False,
                buffer_group={"task"},
                buffer_limit=_BATCH,
            )
        return self._dispatcher

    def _results(self, transitions: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Return the beginnings of the results of jobs that have completed, by job."""
        completed = [event["subject"] for event in transitions if event["type"] == "job.completed"]
        if not completed:
            return {}
        with self._database.read() as connection:
            return {row.id: row.result or "" for row in connection.execute(_RESULTS, {"p_ids": completed})}

    def _task_events(
        self, event: Mapping[str, Any], results: Mapping[str, str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the types and fields of the task events that tell one transition."""
        told, job = event["data"], event["subject"]
        at_s = datetime.fromisoformat(told["at"]).timestamp()
        run = self._runs.get(job)
        common = {"uuid": job, "timestamp": at_s, "hostname": run.worker if run is not None else CLIENT}
        match event["type"]:
            case "job.enqueued" | "job.delayed" if told["why"] in _SUBMITTED:
                yield "task-sent", common | _request(told)
            case "job.started":
                self._note(job, _Run(told.get("worker") or CLIENT, at_s))
                common["hostname"] = self._runs[job].worker
                yield "task-received", common | _request(told)
                yield "task-started", common
            case "job.enqueued" | "job.delayed" if told["why"] != Reason.DUE:
                yield "task-retried", common | {"exception": _reason(told), "traceback": ""}
            case "job.completed":
                runtime = {} if run is None else {"runtime": at_s - run.began_s}
                yield "task-succeeded", common | runtime | {"result": results.get(job, "")}
            case "job.failed" | "job.dlq":
                yield "task-failed", common | {"exception": _reason(told), "traceback": ""}
            case "job.canceled" | "job.expired" as ended:
                expired = ended == "job.expired"
                yield "task-revoked", common | {"terminated": run is not None, "signum": None, "expired": expired}
        if event["type"] != "job.started":
            self._runs.pop(job, None)

    def _note(self, job: str, run: _Run) -> None:
        self._runs[job] = run
        if len(self._runs) > _RUNS_REMEMBERED:
            self._runs.popitem(last=False)

    def close(self) -> None:
        self._dispatcher = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.collect()


def _request(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that describe the task, as a message of it would."""
    arguments, named = offer_messages.displayed_args(told["model"])
    queue = offer_messages.queue_name(told["model"])
    return {
        "name": offer_messages.TASK,
        "args": arguments,
        "kwargs": named,
        "retries": max(told["attempt"] - 1, 0),
        "eta": None,
        "expires": None,
        "queue": queue,
        "exchange": "",
        "routing_key": queue,
        "root_id": told["job_id"],
        "parent_id": None,
    }


def _reason(told: Mapping[str, Any]) -> str:
    error = told.get("error")
    return f"{error['code']}: {error['message']}" if error else str(told["why"])


def _at_worker(hostname: str) -> Any:
    """Return a maker of events that names the worker of the job in place of the process that publishes them."""

    def made(type_: str, **fields: Any) -> Any:
        return Event(type_, **fields | {"hostname": hostname})

    return made
