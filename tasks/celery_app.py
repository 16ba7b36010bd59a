"""The Celery application.  Its settings are in celeryconfig.py."""

from celery import Celery
from click import Option

_MODULES = [
    *("extensions.bootsteps", "extensions.canary", "extensions.control", "extensions.signal_handlers"),
    *("inference", "maintenance", "webhooks.delivery_loop"),
]

celery = Celery("slotkeeper", include=[f"tasks.{name}" for name in _MODULES])
celery.config_from_object("celeryconfig")
celery.set_default()
celery.user_options["worker"].add(
    Option(["--embedded-beat"], is_flag=True, help="Be beat, too, in a thread that needs no messages.")
)
# As a string: only a worker resolves it, so that beat and Flower do not load the worker.
celery.steps["worker"].add("tasks.extensions.bootsteps:EmbeddedBeatStep")
