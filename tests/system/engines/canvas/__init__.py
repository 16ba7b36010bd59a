"""`infer` and Celery's canvas, called by an application of somebody else's, with the fixtures of pytest-celery."""
