"""The baseline: bare Celery with a task that makes the same call and stores nothing."""

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
    # Bare Celery holds no slots, so it does not send a dispatcher's headers; the server counts its slots.
    _session.post(url, json=payload, timeout=60).raise_for_status()
