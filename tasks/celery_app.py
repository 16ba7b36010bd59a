"""The Celery application.  Its settings stand in celeryconfig.py."""

from celery import Celery
from kombu.transport import TRANSPORT_ALIASES

# Before the first connection, which finds its transport here.
TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "tasks.broker:Transport"))

celery = Celery("slotkeeper", include=["tasks.inference", "tasks.maintenance", "tasks.telling", "tasks.webhooks"])
celery.config_from_object("celeryconfig")
celery.set_default()
