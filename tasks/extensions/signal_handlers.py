"""What Celery's processes are told to do first; Flower, which is one of them, loads nothing else of ours."""

import threading

from celery.signals import beat_init, setup_logging, worker_init, worker_ready

from slotkeeper import logs
from tasks.config import TaskSettings


@setup_logging.connect
def _configure_logs(loglevel: int | str | None = None, **_: object) -> None:
    """Celery asks for its own way of logging; this takes its place, also in beat and Flower."""
    logs.configure(loglevel or TaskSettings().log_level, TaskSettings().log_format)


@worker_ready.connect
def _report_maintenance(**_: object) -> None:
    """A worker of jobs says so itself, from when it takes some."""
    from tasks.beat import QUEUE
    from tasks.celery_app import celery

    if QUEUE in celery.amqp.queues.consume_from:
        _start_reporting("maintenance")


def _start_reporting(role: str) -> None:
    from tasks import liveness
    from tasks.services import processes

    liveness.start_reporting(role, processes())


@worker_init.connect
@beat_init.connect
def _prepare(**_: object) -> None:
    """As all processes begin; and what messages unpack to is bounded."""
    if threading.current_thread() is not threading.main_thread():
        return  # Beat that is embedded in a worker, which has begun.
    from tasks import startup
    from tasks.extensions.transport import limit_decompression

    limit_decompression()
    startup.prepare_or_exit()  # Celery would only log an error that a signal's receiver raises.


@beat_init.connect
def _report_beat(**_: object) -> None:
    if threading.current_thread() is threading.main_thread():
        _start_reporting("beat")
