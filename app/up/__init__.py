"""`slotkeeper up`: runs the processes of the Procfile, an embedded Valkey and demo servers in the foreground.

It imports no Flask, Celery, SQLAlchemy or redis, to save memory: it runs as long as the installation.
"""
