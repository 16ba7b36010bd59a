"""`infer` in Celery's canvas, called by a foreign application, with the fixtures of pytest-celery."""
