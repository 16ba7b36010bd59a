"""Everything on one machine, in the foreground: the processes of the Procfile, an embedded Valkey, demo servers.

It loads no Flask, Celery, SQLAlchemy or redis, since it stays in memory for as long as the installation runs.
"""
