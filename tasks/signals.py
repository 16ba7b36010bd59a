"""What Celery's processes are told to do first; Flower, which is one of them, loads nothing else of ours."""

import threading

from celery.signals import beat_init, setup_logging, worker_init

from jobs import logs
from tasks.config import TaskSettings


@setup_logging.connect
def _log(loglevel: int | str | None = None, **_: object) -> None:
    """Celery asks for its own way of logging; this takes its place, also in beat and Flower."""
    logs.configure(loglevel or TaskSettings().log_level)


@worker_init.connect
@beat_init.connect
def _begin(**_: object) -> None:
    """As all processes begin; and what messages unpack to is bounded."""
    if threading.current_thread() is not threading.main_thread():
        return  # Beat that is embedded in a worker, which has begun.
    from jobs.errors import SlotkeeperError
    from tasks import startup
    from tasks.packed import bound_unpacking

    bound_unpacking()
    try:
        startup.begin()
    except (SlotkeeperError, OSError) as error:  # Celery would only log what a signal's receiver raises.
        raise SystemExit(f"Error: {error}") from error
