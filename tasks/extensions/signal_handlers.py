"""Handlers of Celery's signals: logs, start-up checks, liveness, garbage collection.

Flower loads only this module, so it imports the others inside the handlers.
"""

import threading

from celery.signals import beat_init, setup_logging, worker_init, worker_ready

from slotkeeper import logs
from slotkeeper.config import exit_if_refused
from slotkeeper.process import tune_garbage_collection
from tasks.config import TaskSettings


@setup_logging.connect
def _configure_logs(loglevel: int | str | None = None, **_: object) -> None:
    """Configure the logs in place of Celery, in workers, beat and Flower."""
    logs.configure(loglevel or TaskSettings().log_level, TaskSettings().log_format)


@worker_ready.connect
def _report_maintenance(**_: object) -> None:
    """Report a worker of the maintenance queue as alive.  A worker that runs jobs reports in its boot step."""
    from tasks.beat import QUEUE
    from tasks.celery_app import celery

    if QUEUE in celery.amqp.queues.consume_from:
        _start_reporting("maintenance")


@worker_ready.connect
def _tune_garbage_collection(**_: object) -> None:
    tune_garbage_collection()


def _start_reporting(role: str) -> None:
    from tasks import liveness
    from tasks.services import processes

    liveness.start_reporting(role, processes())


@worker_init.connect
@beat_init.connect
def _prepare(**_: object) -> None:
    """Bound the decompression of messages, and do what every process does first."""
    if threading.current_thread() is not threading.main_thread():
        return  # This is beat in a thread of a worker, which has done it.
    from tasks import startup
    from tasks.extensions.transport import limit_decompression

    limit_decompression()
    with exit_if_refused():  # Celery only logs another exception of a signal handler.
        startup.prepare()


@beat_init.connect
def _report_beat(**_: object) -> None:
    if threading.current_thread() is threading.main_thread():
        _start_reporting("beat")
