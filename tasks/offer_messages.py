"""The wake-up message for an offer: a Celery task message that carries ids, never the job itself."""

import atexit
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from queue import Full
from typing import Any

import structlog
from celery import Celery
from celery.app.amqp import task_message
from celery.app.task import Context
from kombu.utils import json

from routing.queries.trace_spans import JOB
from routing.queue.queues import Offer
from slotkeeper.jobs.values import Job
from slotkeeper.process import singleton
from tasks import tracing
from tasks.celery_app import celery
from tasks.threads import WorkQueue

TASK = "infer"
_MODEL_PREFIX = "gpu."  # begins the names of their queues
_OFFER_FIELDS = ("fleet", "lease", "slot", "server", "number")

# What Celery knows of a task beside its arguments, by its names in apply_async, and the key that submitted it.
# The database stores it as JSON.
_ENVELOPE = (
    "callbacks",
    "chain",
    "chord",
    "errbacks",
    "group_id",
    "group_index",
    "ignore_result",
    "key_id",
    "key_owner",
    "parent_id",
    "root_id",
    "stamped_headers",
    "stamps",
)


def queue_name(model: str) -> str:
    return f"{_MODEL_PREFIX}{model}"


def is_model_queue(queue: str) -> bool:
    """Whether a queue is some model's."""
    return queue.startswith(_MODEL_PREFIX)


def pack_envelope(options: Mapping[str, Any]) -> str:
    """Return the options of apply_async that concern clients that wait for the job's end, as JSON."""
    return json.dumps({name: options[name] for name in _ENVELOPE if options.get(name) is not None})


def task_context(job: Job) -> Context:
    """Return the job as the request of a Celery task.  Celery publishes the end of a task with its request."""
    envelope = json.loads(job.envelope or "{}")
    group = envelope.pop("group_id", None)
    trace = tracing.outgoing_traceparent(job.id, job.traceparent, JOB)  # what follows it is in its trace
    headers = {} if trace is None else {"traceparent": trace}
    return Context(
        envelope, id=job.id, task=TASK, group=group, headers=headers, called_directly=False, delivery_info={}
    )


def build_message(offer: Offer, failures: int) -> task_message:
    """Return the message for an offer; `failures` is what Celery and Flower call retries.

    The end of this task is not published: clients that wait for the job are notified from the database (results.py).
    """
    job_id, template = offer.job_id, _message_template(offer.model)
    offered = {name: getattr(offer, name) for name in _OFFER_FIELDS}
    headers = {**template.headers, "id": job_id, "root_id": job_id, "retries": failures, OFFER_HEADER: offered}
    return template._replace(headers=headers, properties={**template.properties, "correlation_id": job_id})


@lru_cache(maxsize=1024)
def _message_template(model: str) -> task_message:
    """Return what is the same in all messages for a model."""
    return celery.amqp.as_task_v2(
        "", TASK, args=(model,), ignore_result=True, argsrepr=f"({model!r},)", kwargsrepr="{}"
    )


def displayed_args(model: str) -> tuple[str, str]:
    """Return the arguments and named arguments of the messages for a model, for display."""
    headers = _message_template(model).headers
    return headers["argsrepr"], headers["kwargsrepr"]


def read_offer(job_id: str, args: Sequence[Any], headers: Mapping[str, Any] | None) -> Offer | None:
    """Return the open offer that a message carries.  Whether it still stands, the claim in Redis decides.

    None: it cannot be read, such as one of another release; it counts as lost, and the offer is made again.
    """
    found = (headers or {}).get(OFFER_HEADER)
    if not args or not isinstance(found, dict):
        return None
    fields = {"job_id": job_id, "model": args[0], **{name: found.get(name) for name in _OFFER_FIELDS}}
    is_valid = all(isinstance(value, int if name == "number" else str) for name, value in fields.items())
    return Offer(**fields) if is_valid else None


_declared_queues: set[str] = set()
"""Queues that this process has declared at the broker; for kombu to look at each message is a third of the work."""
_kept_producers: dict[Celery, Any] = {}
"""The producer of the last message, if it is not in use: to take one from Celery's pool and return it is a quarter."""


def publish_offer(offer: Offer, priority: int, failures: int) -> None:
    """Send the message to the model's queue.  Raises what kombu raises.

    `celery.send_task` would do, but takes twice the processor time: 0.67 ms a message instead of 0.35, in the process
    that answers submits, which takes some 2 ms for each.
    """
    queue = queue_name(offer.model)
    producer = _kept_producers.pop(celery, None) or celery.producer_pool.acquire(block=True)
    try:
        celery.amqp.send_task_message(
            producer,
            TASK,
            build_message(offer, failures),
            queue=queue,
            priority=priority,
            retry=False,  # The offer expires and is made again; no thread must wait for a broker that is away.
            declare=() if queue in _declared_queues else None,
        )
    except BaseException:
        producer.release()  # The pool checks its connection before it is used again.
        raise
    _declared_queues.add(queue)
    if _kept_producers.setdefault(celery, producer) is not producer:
        producer.release()


OFFER_HEADER = "slotkeeper"


def is_wake_up(headers: Mapping[str, Any] | None) -> bool:
    """Whether a message carries an offer; else it is a bare task from a client without this code."""
    return OFFER_HEADER in (headers or {})


log = structlog.get_logger(__name__)

_MAX_PENDING = 10_000
_EXIT_FLUSH_S = 2.0


class Publisher:
    """Sends messages one after another, in a thread: no other thread waits for the broker."""

    def __init__(self, max_pending: int = _MAX_PENDING) -> None:
        self._queue: WorkQueue[Callable[[], object]] = WorkQueue("publisher", self._send, max_pending=max_pending)

    def put(self, send: Callable[[], object]) -> None:
        """Have `send` called soon; what it raises is logged.  Dropped if too many wait already."""
        try:
            self._queue.put(send)
        except (Full, RuntimeError) as error:
            log.warning("message_dropped", error=repr(error))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all messages are sent; False: that takes longer."""
        return self._queue.flush(timeout_s)

    def _send(self, sends: list[Callable[[], object]]) -> None:
        for send in sends:
            try:
                send()
            except Exception as error:
                log.warning("message_not_sent", error=str(error))


@singleton
def publish_queue() -> Publisher:
    """The process's Publisher, made on first use; before the process ends, it has a moment to send what is left."""
    publisher = Publisher()
    atexit.register(publisher.flush, _EXIT_FLUSH_S)
    return publisher
