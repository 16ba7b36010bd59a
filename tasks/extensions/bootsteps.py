"""Boot steps: a worker consumes each model's queue, drains when it shuts down, and may run beat in a thread."""

import threading
from typing import Any

import structlog
from celery import beat, bootsteps
from celery.signals import worker_shutting_down
from celery.worker import state

from slotkeeper.process import singleton
from tasks import liveness, offer_messages
from tasks.celery_app import celery
from tasks.extensions.canary import Canary, consume
from tasks.services import dispatcher, processes, workers
from tasks.worker.worker import this_worker

log = structlog.get_logger(__name__)

_WATCH_PERIOD_S = 1.0


class ModelQueueWatcher(threading.Thread):
    """Has the worker consume exactly the queues of the models in the catalog, as models come and go."""

    def __init__(self, consumer: Any) -> None:
        super().__init__(name="queue-watch", daemon=True)
        self._consumer = consumer
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self._update_queues()
            except Exception as error:
                log.warning("queue_watch_failed", error=str(error))
            self.ended.wait(_WATCH_PERIOD_S)

    def _update_queues(self) -> None:
        # Compared with the queues that are really consumed, so that a failed change is repeated.
        consumed = {queue.name for queue in self._consumer.task_consumer.queues}
        wanted = {offer_messages.queue_name(model) for model in dispatcher().catalog.get().models}
        # By call_soon: the connection belongs to Celery's thread.
        for queue in sorted(wanted - consumed):
            self._consumer.hub.call_soon(_consume, self._consumer, queue)
        for queue in sorted(name for name in consumed - wanted if offer_messages.is_model_queue(name)):
            self._consumer.hub.call_soon(self._consumer.cancel_task_queue, queue)
            self._consumer.hub.call_soon(_delete_queue, self._consumer, queue)


def _consume(consumer: Any, name: str) -> None:
    # The lookup creates the queue with the type of celeryconfig.py; add_task_queue alone would create a classic one.
    queue = celery.amqp.queues[name]
    consumer.add_task_queue(queue.name)


def _delete_queue(consumer: Any, queue: str) -> None:
    """Delete the queue of a model that was removed or renamed, unless it has messages."""
    try:
        consumer.task_consumer.channel.queue_delete(queue, if_empty=True)
    except Exception as error:  # What remains is a key, or an empty queue, at the broker.
        log.info("queue_not_deleted", queue=queue, error=str(error))


@singleton
def _canary() -> Canary:
    return Canary(this_worker().worker_loop, workers())


@singleton
def _process_report() -> liveness.ProcessReport:
    return liveness.start_reporting("worker", processes(), _facts)


def _facts() -> dict[str, Any]:
    worker, canary = this_worker(), _canary()
    canary.send_if_due()
    facts = {"runs": worker.runs, "capacity": worker.max_runs, "takes": worker.accepts_jobs, "awaits": worker.awaits}
    return facts | canary.facts()


class JobsStep(bootsteps.StartStopStep):
    """Starts the parts of a worker that runs jobs: it consumes the models' queues and reports that it is alive."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._watch: ModelQueueWatcher | None = None
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        if "celery" not in celery.amqp.queues.consume_from:
            return  # A worker for maintenance or other tasks only.
        this_worker().max_runs = parent.pool.limit  # from the option `-c`, or from worker_concurrency
        this_worker().start_consuming(parent)
        consume(_canary(), parent)
        _process_report()
        self._watch = ModelQueueWatcher(parent)
        self._watch.start()

    def stop(self, parent: Any) -> None:
        if self._watch is not None:
            self._watch.ended.set()


celery.steps["consumer"].add(JobsStep)


@worker_shutting_down.connect
def _drain(**_: object) -> None:
    if this_worker.created:
        this_worker().drain()


class BeatThread(threading.Thread):
    """Runs Celery's beat service until `stop`.  If beat ends otherwise, the worker ends with status 1."""

    def __init__(self, service: beat.Service) -> None:
        super().__init__(name="beat", daemon=True)
        self._service = service
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            self._service.start()
        except Exception:
            log.exception("beat_failed")
        finally:
            if not self._stopping.is_set():
                state.should_stop = 1  # type: ignore[assignment]  # the exit status

    def stop(self) -> None:
        self._stopping.set()
        self._service.stop()


class EmbeddedBeatStep(bootsteps.StartStopStep):
    """Runs beat in a thread of the worker, if it has the option `--embedded-beat`.

    Celery's `-B` forks a process instead: it takes 28 MiB, and no process notices when it ends.
    """

    def __init__(self, worker: Any, embedded_beat: bool = False, **options: Any) -> None:
        super().__init__(worker, **options)
        self.enabled = embedded_beat

    def create(self, worker: Any) -> Any:
        return BeatThread(beat.Service(worker.app, scheduler_cls=worker.app.conf.beat_scheduler))
