"""The message of a bare client is the only copy of its job, until a worker has stored the job."""

import subprocess
import sys

import pytest

import celeryconfig
from tests.support.cluster import Cluster
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

_RESTORED_EVERY_S = 10  # kombu's transport looks for such messages so often.
_TAKE_AND_DIE = """
import os
from tasks.celery_app import celery
with celery.connection_for_read() as connection:
    queue = celery.amqp.queues["celery"](connection.default_channel)
    print(queue.get().headers["id"], flush=True)
    os._exit(1)  # as SIGKILL would: nothing is given back
"""
_SEND = """
import sys
from tasks.celery_app import celery
print(celery.send_task("infer", (sys.argv[1], {"seconds": 0.01}), expires=float(sys.argv[2])).id)
"""


def _python(cluster: Cluster, script: str, *args: str) -> str:
    command = [sys.executable, "-P", "-c", script, *args]
    done = subprocess.run(command, env=cluster.stack.env, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "expires_s, state", [(600.0, "completed"), (0.5, "expired")], ids=["in time", "expired meanwhile"]
)
def test_a_message_of_a_dead_worker_is_redelivered_and_runs_once_unless_it_has_expired(
    cluster: Cluster, expires_s: float, state: str
):
    cluster.ensure_workers(0)
    model = cluster.model(1)
    job_id = _python(cluster, _SEND, model, str(expires_s))
    assert _python(cluster, _TAKE_AND_DIE) == job_id
    with cluster.redis() as redis:
        assert redis.zcard("unacked_index") == 1
        (tag,) = redis.zrange("unacked_index", 0, -1)
        redis.zadd("unacked_index", {tag: 0})  # So long ago; visibility_timeout is over.
        cluster.ensure_workers(1)
        eventually(lambda: not redis.zcard("unacked_index"), "the message is taken again and acknowledged", 60)
    eventually(lambda: cluster.store.get(job_id), "the job is stored")
    cluster.until(job_id, state)
    assert [run["job_id"] for run in cluster.runs(model)] == ([job_id] if state == "completed" else [])


def test_the_broker_redelivers_the_messages_of_a_dead_worker_within_a_minute():
    assert celeryconfig.broker_transport_options["visibility_timeout"] + _RESTORED_EVERY_S < 60
