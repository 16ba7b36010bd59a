"""The Celery application.  Its settings stand in celeryconfig.py."""

from celery import Celery

celery = Celery("slotkeeper", include=["tasks.inference", "tasks.maintenance", "tasks.telling", "tasks.webhooks"])
celery.config_from_object("celeryconfig")
celery.set_default()
