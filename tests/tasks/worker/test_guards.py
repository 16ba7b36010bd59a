"""Guards that no other suite tests; tests/nightly/mutants removes each one and runs these tests."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from redis.exceptions import RedisError
from sqlalchemy import update

from routing.maintenance import deadlines
from routing.queue.leases import Renewal
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs
from slotkeeper.redis.connections import connect
from tasks.servers import DEFAULT
from tasks.worker.run_requests import RunRequests
from tests.support import passes
from tests.support.fleet_queue import a
from tests.support.harness import LEASE_MS, SECOND, YEAR
from tools.cluster.stack import eventually

MINUTE = 60 * SECOND


def test_no_maintenance_task_ends_a_healthy_run_of_twenty_minutes(harness):
    harness.register(max_poll_time=1200)
    job_id = harness.submit()
    task = harness.start()
    for _ in range(20 * MINUTE // (LEASE_MS - SECOND)):
        harness.later(LEASE_MS - SECOND)
        assert harness.renewal(task) is Renewal.RENEWED
        for run_task in (deadlines.expire_deadlines, passes.reap, passes.reconcile, passes.sweep):
            run_task(harness.dispatcher)
    assert harness.state(job_id) is State.RUNNING
    assert harness.settle(task).moved.to is State.COMPLETED


@pytest.mark.parametrize(("max_poll_time", "left_s"), [(1200, 540), (660, 0), (60, 0), (7200, 6540)])
def test_a_run_may_take_as_long_as_its_model_allows(harness, monkeypatch, max_poll_time, left_s):
    harness.register(max_poll_time=max_poll_time)
    harness.submit()
    task = harness.start()
    harness.later(11 * MINUTE)
    calls = RunRequests(task.run, harness.dispatcher.catalog.resolve("zimg").config, DEFAULT)
    assert calls.make_submit_details().deadline_s == pytest.approx(max(left_s, 0.001), abs=1)


def test_a_job_that_waits_for_a_year_is_not_removed(harness):
    harness.register()
    running, queued, delayed = harness.submit(), harness.submit(), harness.submit(delay_s=360 * 86_400)
    harness.start()
    harness.later(YEAR)
    assert deadlines.purge_ended_jobs(harness.dispatcher, 86_400) == 0
    assert [harness.state(job_id) for job_id in (running, queued, delayed)] == [
        State.RUNNING,
        State.QUEUED,
        State.DELAYED,
    ]


def test_job_3_the_ledger_balances_after_duplicate_submits_and_removal_of_old_jobs(harness):
    harness.register()
    for _ in range(2):
        harness.submit(id="twice")
        assert ledger.read(harness.database).balanced
    harness.run_all()
    harness.later(YEAR)
    assert deadlines.purge_ended_jobs(harness.dispatcher, 86_400) == 1
    found = ledger.read(harness.database)
    assert found.balanced and found.accepted == 1
    assert found.purged[State.COMPLETED] == 1


def test_a_lease_that_outlived_its_run_does_not_end_the_next_one(harness):
    """Redis contains the lease of an earlier run of the job: the reaper removes it, and the newer run continues."""
    harness.register()
    job_id = harness.submit()
    harness.start()
    harness.database.write(lambda tx: tx.connection.execute(update(jobs).values(lease="newer w2")))
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    job = harness.job(job_id)
    assert (job.state, job.attempt, job.crashes) == (State.RUNNING, 1, 0)
    assert harness.queue.taken() == {}
    assert passes.restore_missing(harness) == 1
    assert harness.queue.lease_of(job_id)["lease"] == "newer"


def test_a_late_restore_gives_no_lease_to_a_job_that_waits_again(queue):
    """The run ended after the restore had read the database and before it wrote to Redis."""
    job = a("j", 1)
    queue.open()
    queue.enqueue(job)
    before = queue.dump()
    assert queue.restore((job, "lease", "w1", "gpu-slot0")) == 0
    assert queue.dump() == before


@pytest.mark.parametrize("state", ["waiting", "leased"])
def test_a_job_that_is_in_the_queue_is_not_added_again(queue, state):
    if state == "leased":
        queue.with_slots(1)
    job = a("j", 1)
    queue.enqueue(job)
    assert queue.enqueued(job, job) == (0, [])


def test_lease_1_a_script_whose_answer_was_lost_has_run_once(valkey, client):
    """Redis has run the script and only its response is lost: a repeated script would run a second time."""
    with (
        _proxy_without_script_responses(valkey.port) as port,
        connect(f"redis://127.0.0.1:{port}/0", timeout_s=0.3) as redis,
        pytest.raises(RedisError),
    ):
        redis.eval("return redis.call('INCR', KEYS[1])", 1, "runs")
    eventually(lambda: client.get("runs"), "the script has run")
    assert int(client.get("runs")) == 1


@contextmanager
def _proxy_without_script_responses(port: int) -> Iterator[int]:
    """Start a proxy of the Redis on `port` that drops the responses to scripts, and return the port of the proxy."""

    def forward(client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", port)) as redis:
            while request := client.recv(65536):
                redis.sendall(request)
                response = redis.recv(65536)
                if b"EVAL" not in request:
                    client.sendall(response)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=forward, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
