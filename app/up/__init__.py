"""`slotkeeper up`: runs the processes of the Procfile, an embedded Valkey and demo servers in the foreground.

To save memory it imports no Flask, Celery, SQLAlchemy or redis, unless it has to ask a remote Redis or to make a key:
it runs as long as the installation.
"""
