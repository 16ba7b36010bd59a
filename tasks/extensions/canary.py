"""A canary: a message that goes the way of a job, and takes no slot.

It comes by the broker to the worker that has sent it, goes through its event loop to Redis and to the database, and is
timed.  A worker that has received none lately is not ready, even if it reports that it is alive.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog
from kombu import Exchange, Queue

from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.db import Write
from tasks.celery_app import celery
from tasks.config import TaskSettings
from tasks.offer_messages import publish_queue
from tasks.worker.event_loop import WorkerLoop

log = structlog.get_logger(__name__)

PERIOD_S = 5.0
TASK = "slotkeeper.canary"
_MAX_AGE_S = 15.0
_EXPIRES_S = 300.0  # of a queue without a consumer, on brokers that delete such queues


class Canary:
    """The canaries of one worker."""

    def __init__(self, worker_loop: WorkerLoop, workers: WorkerCapacity) -> None:
        self._worker_loop, self._workers = worker_loop, workers
        self._queue: Queue | None = None
        self._sent: dict[str, float] = {}  # token -> when, monotonic s
        self._count = 0
        self._sent_s = float("-inf")
        self._received_s: float | None = None
        self._latency_s = 0.0

    def make_queue(self, node: str) -> Queue:
        """Return the queue of this worker alone.  `node`: its name among Celery's workers, which outlives it."""
        name = f"canary.{node}"
        arguments = {"x-queue-type": "classic"} if TaskSettings().broker_queues == "quorum" else None
        self._queue = Queue(
            name,
            Exchange("canary", "direct"),
            name,
            auto_delete=True,
            expires=_EXPIRES_S,
            queue_arguments=arguments,  # Quorum queues are not deleted with their last consumer.
        )
        return self._queue

    def send_if_due(self) -> None:
        """Send a canary, unless the last was sent less than PERIOD_S ago."""
        now, queue = time.monotonic(), self._queue
        if queue is None or now - self._sent_s < PERIOD_S:
            return
        self._sent_s = now
        self._count += 1
        token = f"{id(self)}.{self._count}"
        sent = self._sent.copy()  # `receive`, in another thread, takes out of it meanwhile.
        self._sent = {sent_token: sent_s for sent_token, sent_s in sent.items() if now - sent_s < _MAX_AGE_S}
        self._sent[token] = now
        publish_queue().put(lambda: canary.apply_async((token,), queue=queue, retry=False, expires=_MAX_AGE_S))

    def receive(self, token: str) -> None:
        """Pass a canary that has come by the broker on to the event loop, and do not wait for that.

        One of another process, or one that took too long, is not counted.
        """
        sent_s = self._sent.pop(token, None)
        if sent_s is not None:
            self._worker_loop.call_soon(lambda: self._worker_loop.spawn_background(self._measure(sent_s)))

    async def _measure(self, sent_s: float) -> None:
        async with asyncio.timeout(_MAX_AGE_S):
            await self._worker_loop.redis(self._workers.total_command())
            await self._worker_loop.commit(Write(lambda tx: None))
        self._received_s = time.monotonic()
        self._latency_s = self._received_s - sent_s

    def facts(self) -> dict[str, Any]:
        """Return the latency of the last canary, `canary_ms`, and its age, `canary_age_ms`; None: none has come."""
        if self._received_s is None:
            return {"canary_ms": None, "canary_age_ms": None}
        age_ms = round((time.monotonic() - self._received_s) * 1000)
        return {"canary_ms": round(self._latency_s * 1000, 3), "canary_age_ms": age_ms}


_receivers: list[Callable[[str], None]] = []


@celery.task(name=TASK, ignore_result=True, send_events=False)
def canary(token: str) -> None:
    """Receive a canary."""
    for receive in _receivers:
        receive(token)


def consume(canary: Canary, consumer: Any) -> None:
    """Have Celery's consumer receive canaries; called in its thread, each time that it has connected.

    It consumes from the next turn of its loop on: before that it has no callbacks, and a message that the broker pushes
    would end it.
    """
    _receivers[:] = [canary.receive]
    queue = canary.make_queue(consumer.hostname)
    celery.amqp.queues.select_add(queue)
    consumer.hub.call_soon(consumer.add_task_queue, queue.name)
