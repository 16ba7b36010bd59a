"""The yardstick: bare Celery, a task that makes the same call and records nothing."""

import os

import requests
from celery import Celery

app = Celery("bare", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    worker_prefetch_multiplier=4,
    task_ignore_result=True,
    worker_pool="threads",
    worker_send_task_events=False,
)

_session = requests.Session()
_session.trust_env = False
_session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=128))


@app.task(name="call")
def call(url: str, payload: dict[str, object]) -> None:
    # Slots are counted by the server: bare Celery holds none, so it says nothing of being a dispatcher.
    _session.post(url, json=payload, timeout=60).raise_for_status()
