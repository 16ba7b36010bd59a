"""Outages of Redis, the database and servers: no job is lost or runs twice, and no operator has to act."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import requests
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import make_url

from routing.dispatch.outcome import OutcomeKind
from routing.maintenance import task_runs
from routing.maintenance.reaper import RenewalGrace
from routing.maintenance.server_report import ServerReport
from routing.queue import queues
from routing.queue.leases import Renewal
from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.errors import DatabaseUnavailable, TooManyRequests
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import Reason, State
from slotkeeper.redis.connections import connect
from slotkeeper.redis.keys import Keys
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tasks import maintenance
from tests.support import passes
from tests.support.builders import at_once
from tests.support.cluster import LEASE_S, Cluster, started_cluster
from tests.support.ends import cool_down
from tests.support.harness import LEASE_MS, OFFER_MS, Harness
from tests.support.silence import between
from tools.cluster.postgres_process import Postgres
from tools.cluster.stack import eventually
from tools.cluster.valkey_process import Valkey

_ANSWERED_WITHIN_S = 10 + 3  # Ten are promised.
# Two seconds are promised; twice that is for a machine that has much else to do.
_FREE_WITHIN_MS = 4_000

# -- Redis -----------------------------------------------------------------------------------------------------


def _flushed(valkey: Valkey) -> Iterator[None]:
    valkey.flush()
    yield


def _killed(valkey: Valkey) -> Iterator[None]:
    valkey.kill()
    yield
    valkey.start()


def _lost(valkey: Valkey) -> Iterator[None]:
    valkey.kill()
    yield
    shutil.rmtree(valkey.folder / "appendonlydir")
    valkey.start()


def _frozen(valkey: Valkey) -> Iterator[None]:
    with frozen(valkey):
        yield


def _full(valkey: Valkey) -> Iterator[None]:
    with valkey.client() as redis:
        redis.config_set("maxmemory", 1)
        yield
        redis.config_set("maxmemory", 0)


@contextmanager
def frozen(valkey: Valkey) -> Iterator[None]:
    """It is there, and does not answer."""
    assert valkey._process is not None
    os.kill(valkey._process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(valkey._process.pid, signal.SIGCONT)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(_flushed, id="FLUSHALL"),
        pytest.param(_killed, id="killed, and back with what it had"),
        pytest.param(_lost, id="killed, and back empty"),
        pytest.param(_frozen, id="it does not answer"),
        pytest.param(_full, id="out of memory"),
    ],
)
def test_after_an_outage_of_redis_every_job_runs_once_and_in_order(
    cluster: Cluster, gone: Callable[[Valkey], Any]
) -> None:
    outage: Callable[[Valkey], AbstractContextManager[None]] = contextmanager(gone)
    cluster.ensure_workers(1)
    model, gate = cluster.model(1), cluster.gate()
    running = cluster.submit(model, gate)
    cluster.sent(model)
    waiting = [cluster.submit(model, 0.02, priority=priority) for priority in (5, 9, 1, 5)]

    assert cluster.stack.valkey is not None
    with outage(cluster.stack.valkey):
        waiting += [cluster.submit(model, 0.02, priority=priority) for priority in (1, 5, 5, 5)]
        if gone is not _flushed:
            eventually(_passed(LEASE_S), "leases would have expired", every_s=0.1)

    gate.open()
    jobs = [cluster.until(job_id, "completed") for job_id in (running, *waiting)]
    assert [(job.attempts, job.crashes) for job in jobs] == [(1, 0)] * len(jobs)
    ran = [run["job_id"] for run in cluster.runs(model)]
    in_turn = [running, *(waiting[n] for n in (2, 4, 0, 3, 5, 6, 7, 1))]
    assert sorted(ran) == sorted(in_turn), "once each"
    if gone in (_flushed, _lost):
        assert ran == in_turn, "an emptied queue is rebuilt before it opens"
    else:  # The next sweep enqueues the jobs accepted meanwhile; the order within each lane holds.
        priority = {job.id: job.priority for job in jobs}
        for of in (1, 5, 9):
            assert [job for job in ran if priority[job] == of] == [
                job for job in in_turn if priority[job] == of
            ]  # ORDER-1


def test_a_script_call_that_timed_out_is_not_sent_again(harness: Harness, valkey: Valkey) -> None:
    harness.register()
    impatient = harness.a_dispatcher(connect(valkey.url, 0.2))
    cool_down(impatient, "zimg", "none")  # Redis knows the script now: another call is one message
    calls = _scripts_run(harness.redis)

    with frozen(valkey), pytest.raises(RedisError):
        cool_down(impatient, "zimg", "gpu")

    eventually(lambda: _scripts_run(harness.redis) > calls, "the script runs after all", 5, 0.01)
    assert cool_down(harness.dispatcher, "zimg", "gpu") == 2_000, "this is the second failure in a row, not the third"
    assert _scripts_run(harness.redis) == calls + 2


def _scripts_run(redis: Redis) -> int:
    counted = redis.info("commandstats")
    return sum(counted[name]["calls"] for name in ("cmdstat_fcall",) if name in counted)


def test_a_job_whose_enqueue_timed_out_is_queued_once_and_runs_once(harness: Harness, valkey: Valkey) -> None:
    harness.register()
    impatient = harness.a_dispatcher(connect(valkey.url, 0.2))
    impatient.submit([harness.a()], LOCAL_IDENTITY)
    harness.run_all()  # Redis knows the script.

    with frozen(valkey):
        (receipt,) = impatient.submit([harness.a()], LOCAL_IDENTITY)

    job_id = receipt.accepted.id
    eventually(lambda: harness.queue.lease_of(job_id), "the job is offered after all, without a notification", 5, 0.01)
    assert harness.offered() == []
    passes.reconcile(harness.dispatcher)
    assert harness.queue.waiting() == [] and list(harness.queue.taken().values()) == [job_id]
    harness.later(10_000)
    assert passes.reap(harness.dispatcher) == 0, "it keeps its slot until a worker looks for work"
    assert harness.run_all() == [job_id]
    assert harness.job(job_id).attempt == 1


def test_a_redis_that_does_not_answer_is_waited_for_once_and_not_at_every_submit(
    harness: Harness, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_PAUSE_S", 60.0)
    harness.register()
    impatient = harness.a_dispatcher(connect(valkey.url, 0.2))
    asked = []
    run = impatient.queues.scripts.run
    monkeypatch.setattr(impatient.queues.scripts, "run", lambda command: asked.append(command) or run(command))
    with frozen(valkey):
        receipts = [impatient.submit([harness.a()], LOCAL_IDENTITY)[0] for _ in range(3)]
    assert len(asked) == 1
    passes.reconcile(harness.dispatcher)
    assert harness.run_all() == [receipt.accepted.id for receipt in receipts]


def test_a_submit_uses_redis_only_after_the_job_is_on_the_disk(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut could leave a job in Redis that the database has lost."""
    harness.register()
    harness.submit()  # This job gets the slot.
    steps: list[str] = []
    scripts, sync = harness.dispatcher.queues.scripts, harness.database._group._writer.sync
    run = scripts.run
    monkeypatch.setattr(harness.database._group._writer, "sync", lambda: (steps.append("disk"), sync()))
    monkeypatch.setattr(scripts, "run", lambda command: steps.append(command.target.script) or run(command))
    (receipt,) = harness.dispatcher.submit([harness.a()], LOCAL_IDENTITY)
    assert steps == ["disk", "enqueue"]
    assert receipt.position is not None and receipt.position.ahead == 0


def test_a_submit_needs_one_connection_to_redis_at_a_time(harness: Harness, valkey: Valkey) -> None:
    """Else threads that have one each, of so many as there may be, would find none for the gates, and pass unasked."""
    harness.register(max_waiting=1)
    narrow = harness.a_dispatcher(Redis.from_url(f"{valkey.url}?max_connections=1"))
    receipts = [narrow.submit([harness.a()], LOCAL_IDENTITY) for _ in range(2)]
    assert all(receipt.position for (receipt,) in receipts)
    with pytest.raises(TooManyRequests):
        narrow.submit([harness.a()], LOCAL_IDENTITY)


@pytest.fixture
def reaped() -> Callable[..., bool]:
    """Return a function that returns whether the reaper may reap at a time (s).  A living worker needs 3 s to renew.

    `ahead`: lead of Redis' clock since the first call (s).  `asked`: time of the request to Redis, if it took time (s).
    """
    patience = RenewalGrace()

    def at(now_s: float, ahead: float = 0.0, asked: float | None = None) -> bool:
        return patience.may_reap(now_s if asked is None else asked, now_s, 5_000.0 + now_s + ahead, 3.0)

    at.patience = patience  # type: ignore[attr-defined]
    return at


def test_after_a_redis_outage_the_reaper_waits_until_living_workers_could_renew(reaped: Callable[..., bool]) -> None:
    assert [now for now in (100, 101, 102, 110, 111, 112, 113, 114) if reaped(now)] == [100, 101, 102, 113, 114]


def test_after_a_failed_pass_the_reaper_waits_until_living_workers_could_renew(reaped: Callable[..., bool]) -> None:
    assert reaped(100)
    reaped.patience.note_failure()  # type: ignore[attr-defined]
    assert [now for now in (102, 103, 104, 105, 106) if reaped(now)] == [105, 106]


def test_after_an_outage_of_redis_the_reaper_waits_for_a_timed_out_renewal_and_its_repetition(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("routing.maintenance.reaper.time", SimpleNamespace(monotonic=lambda: harness.now / 1000))
    patience, settings = RenewalGrace(), harness.dispatcher.settings
    harness.register()
    harness.submit()
    harness.start()
    assert passes.reap(harness.dispatcher, patience) == 0
    harness.later(LEASE_MS)
    patience.note_failure()
    assert passes.reap(harness.dispatcher, patience) == 0
    harness.later(int(settings.redis_timeout_s * 1000) + 2 * settings.renew_every_ms - 1)
    assert passes.reap(harness.dispatcher, patience) == 0
    harness.later(1)
    assert passes.reap(harness.dispatcher, patience) == 1


def test_a_reaper_with_long_intervals_still_reaps(reaped: Callable[..., bool]) -> None:
    assert [now for now in range(100, 140, 5) if reaped(now)] == [100, 110, 120, 130]


@pytest.mark.parametrize("step_s", [3600, 5, -3600])
def test_after_a_step_of_redis_clock_the_reaper_waits_until_living_workers_could_renew(
    reaped: Callable[..., bool], step_s: float
) -> None:
    assert reaped(100) and reaped(100.5)
    assert [now for now in (101, 101.5, 102, 103, 103.9, 104, 104.5) if reaped(now, step_s)] == [104, 104.5]


def test_a_slow_answer_is_no_clock_that_was_set(reaped: Callable[..., bool]) -> None:
    assert reaped(100)
    assert reaped(102, ahead=-1.4, asked=100.5), "it was read at the beginning"
    assert reaped(102.5)


def test_the_reaper_keeps_a_living_workers_lease_that_expired_by_a_clock_step(harness: Harness) -> None:
    harness.register(2)
    job_id = harness.submit()
    task = harness.start()
    patience = RenewalGrace()
    assert passes.reap(harness.dispatcher, patience) == 0
    harness.later(3_600_000)
    assert passes.reap(harness.dispatcher, patience) == 0
    assert harness.renewal(task) is Renewal.RENEWED
    assert harness.job(job_id).crashes == 0


def test_a_dead_holders_lease_does_not_last_as_long_as_redis_clock_was_set_back(harness: Harness) -> None:
    harness.register()
    job_id = harness.submit()
    harness.start()
    harness.set_clock(harness.now - 3_600_000)
    passes.sweep(harness.dispatcher)
    assert passes.reap(harness.dispatcher) == 0
    harness.later(max(LEASE_MS, OFFER_MS))
    assert passes.reap(harness.dispatcher) == 1
    assert harness.offered()[-1] == job_id


def test_cooldowns_and_breakers_do_not_last_as_long_as_redis_clock_was_set_back(harness: Harness) -> None:
    harness.register(2)
    passes.apply_health(harness.dispatcher, {"gpu": ServerReport(up=False)})
    harness.redis.hset(f"{Keys('test').fleet_key('zimg', 'stats')}:server:gpu", "open_until", harness.now + 1_000)
    assert harness.free() == 0
    harness.set_clock(harness.now - 3_600_000)
    passes.sweep(harness.dispatcher)
    harness.submit()
    assert harness.offered(), "a slot is tried again"


def test_a_sweep_that_takes_longer_than_its_period_is_not_joined_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = []

    def slow(_: object) -> None:
        swept.append("begun")
        maintenance.sweep()  # beat does not wait for it

    monkeypatch.setattr(maintenance, "dispatcher", lambda: None)
    monkeypatch.setattr(maintenance, "_sweeper", lambda: SimpleNamespace(sweep=lambda: slow(None)))
    monkeypatch.setattr(maintenance, "scripts", lambda: None)
    monkeypatch.setattr(task_runs, "mark_sweep", lambda _: None)
    monkeypatch.setattr(task_runs.TaskRunRecorder, "note", lambda *_: None)
    maintenance.sweep()
    assert swept == ["begun"]
    maintenance.sweep()
    assert len(swept) == 2


def test_accumulated_messages_of_a_periodic_task_run_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setitem(maintenance.PERIODS_S, "of_this_test", 60.0)
    monkeypatch.setattr(task_runs.TaskRunRecorder, "note", lambda *_: None)
    task = maintenance.PeriodicTask("of_this_test", lambda: done.append("done"))
    monkeypatch.setitem(maintenance._periodic, "of_this_test", task)
    for _ in range(100):
        maintenance.run(["of_this_test"])
    assert done == ["done"]


# -- the database ----------------------------------------------------------------------------------------------


@contextmanager
def locked(database: Database) -> Iterator[None]:
    """Hold an exclusive lock on the database, as another process may."""
    other = database.engine.raw_connection()
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_submit_to_a_locked_database_is_refused_with_a_retry_time_and_stores_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    before = harness.queue.dump()
    monkeypatch.setenv("SLOTKEEPER_DATABASE_LOCK_S", "0.05")
    hasty = Database(harness.database.url)
    dispatcher = harness.a_dispatcher(harness.redis)
    dispatcher.catalog.resolve("zimg")
    dispatcher.store.database = hasty
    try:
        with locked(harness.database), pytest.raises(DatabaseUnavailable) as refused:
            dispatcher.submit([harness.a()], LOCAL_IDENTITY)
    finally:
        dispatcher.store.database = harness.database
        hasty.close()
    assert refused.value.retry_after_s
    assert sum(ledger.read(harness.store.database).by_state.values()) == 0
    assert harness.queue.dump() == before and harness.offered() == []


@contextmanager
def closed(url: str) -> Iterator[None]:
    """Let PostgreSQL close all connections to this database and refuse new ones."""
    name = make_url(url).database
    admin = make_url(url).set(database="postgres", drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


@pytest.mark.e2e
@pytest.mark.postgres
def test_the_database_vanishes_and_a_running_call_keeps_its_result(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.create().replace("postgresql://", "postgresql+psycopg://")
    with started_cluster(tmp_path / "cluster", SLOTKEEPER_DATABASE_URL=url) as cluster:
        cluster.ensure_workers(1)
        model = cluster.model(1)
        gate = cluster.gate()
        running = cluster.submit(model, gate)
        waiting = cluster.submit(model, 0.02)
        cluster.sent(model)

        with closed(url):
            refused = cluster.api.call("POST", "/queue/submit", json={"model": model, "payload": {"seconds": 0}})
            gate.open()
            eventually(lambda: cluster.runs(model), "the server is done")
            again = cluster.api.call("POST", "/queue/submit", json={"model": model, "payload": {"seconds": 0}})
            eventually(_passed(LEASE_S), "the lease would have expired", every_s=0.1)

        for answer in (refused, again):
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["code"] == "record_unavailable"
        jobs = [cluster.until(job_id, "completed") for job_id in (running, waiting)]
        assert [(job.attempts, job.crashes) for job in jobs] == [(1, 0), (1, 0)]
        assert [run["job_id"] for run in cluster.runs(model)] == [running, waiting]
        assert sum(ledger.read(cluster.store.database).by_state.values()) == 2, "a refused submit leaves nothing"
    postgres.drop(url)


@pytest.mark.e2e
@pytest.mark.postgres
def test_while_the_database_does_not_respond_every_request_gets_a_response_in_time(
    postgres: Postgres, tmp_path: Path
) -> None:
    direct = postgres.create()
    with (
        between(direct) as (network, through),
        started_cluster(tmp_path / "cluster", SLOTKEEPER_DATABASE_URL=through) as cluster,
    ):
        model = cluster.model(1)
        job_id = cluster.submit(model, 0.02)
        body = {"model": model, "payload": {"seconds": 0}}
        calls: list[tuple[str, str, Any]] = [
            ("POST", "/queue/submit", body),
            ("POST", f"/queue/jobs/{job_id}/cancel", None),
            ("POST", f"/admin/dlq/{job_id}/retry", None),
            ("GET", f"/queue/jobs/{job_id}", None),
        ]
        eventually(_passed(2), "the API looks for a newer catalog with the next request", every_s=0.1)
        network.silent.set()  # also for connections that come later
        answers = at_once(
            *(partial(_answer_of, cluster.stack.url, *call) for call in calls * 6), timeout_s=_ANSWERED_WITHIN_S + 30
        )
        network.silent = threading.Event()
        assert [getattr(answer, "status_code", answer) for answer in answers] == [503] * len(answers)
        eventually(
            lambda: cluster.api.call("POST", "/queue/submit", json=body).status_code == 202,
            "the API accepts jobs again",
        )
    postgres.drop(direct)


def _answer_of(url: str, method: str, path: str, body: Any) -> requests.Response:
    return requests.request(method, f"{url}{path}", json=body, timeout=_ANSWERED_WITHIN_S)


def _passed(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


# -- servers ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_server_that_is_down_for_a_day_costs_no_job_a_retry_or_a_crash(harness: Harness) -> None:
    harness.register(2, max_retries=0, max_crashes=1)
    ids = [harness.submit() for _ in range(5)]
    for _ in range(144):  # every ten minutes: longer than the longest cooldown
        for _ in range(len(harness.notifications.offers)):
            harness.settle(harness.start(), OutcomeKind.UNREACHABLE)
        harness.later(600_000)
        passes.sweep(harness.dispatcher)
    jobs = [harness.job(job_id) for job_id in ids]
    assert {(job.state, job.failures, job.crashes, job.attempts) for job in jobs} == {(State.QUEUED, 0, 0, 0)}
    assert jobs[0].waits > 100, "the job was tried again and again"
    assert harness.run_all() == ids


@pytest.mark.e2e
def test_after_a_server_is_back_the_first_job_starts_within_five_seconds(cluster: Cluster) -> None:
    cluster.ensure_workers(1)
    model = cluster.model(1)
    cluster.servers[model].process.kill()
    jobs = [cluster.submit(model, 0.02) for _ in range(3)]
    eventually(lambda: cluster.row(jobs[0]).waits >= 2, "it was tried in vain")

    cluster.restart_server(model)
    back = time.time_ns()

    ended = [cluster.until(job_id, "completed") for job_id in jobs]
    assert (cluster.runs(model)[0]["started_wall_ns"] - back) / 1e9 < 5
    assert [run["job_id"] for run in cluster.runs(model)] == jobs
    assert {(job.failures, job.crashes, job.attempts) for job in ended} == {(0, 0, 1)}


@pytest.mark.e2e
@pytest.mark.parametrize("how", [Cluster.model, Cluster.polled_model])
def test_the_slots_of_a_restarted_server_are_free_soon_after_its_first_response(
    cluster: Cluster, how: Callable[[Cluster, int], str]
) -> None:
    cluster.ensure_workers(1)
    model, gate = how(cluster, 2), cluster.gate()
    lost = [cluster.submit(model, gate) for _ in range(2)]
    cluster.sent(model, 2)

    cluster.restart_server(model)
    back_ms = now_ms()

    cluster.sent(model, 2)
    assert now_ms() - back_ms < _FREE_WITHIN_MS
    gate.open()
    jobs = [cluster.until(job_id, "completed") for job_id in lost]
    # A call whose worker has not seen the server away is only sent again; a start that finds it away costs nothing.
    assert all(job.crashes == job.attempts - 1 <= 1 for job in jobs)


@pytest.mark.e2e
def test_a_job_that_kills_its_server_three_times_becomes_dead_and_the_others_complete(cluster: Cluster) -> None:
    cluster.ensure_workers(1)
    model = cluster.model(1, poll_interval=0.1)
    poison = cluster.api.submit(model, {"fail": "crash", "seconds": 0.05})
    others = [cluster.submit(model, 0.02) for _ in range(3)]
    with _restarted_whenever_it_dies(cluster, model):
        dead = cluster.until(poison, "dead", 90)
        assert (dead.why, dead.crashes, dead.failures) == (Reason.CRASHES_EXHAUSTED, 3, 0)
        for job_id in others:
            cluster.until(job_id, "completed")
    assert [run["job_id"] for run in cluster.runs(model)] == others


@pytest.mark.e2e
def test_a_job_that_kills_its_worker_three_times_becomes_dead_and_the_others_complete(cluster: Cluster) -> None:
    cluster.ensure_workers(0)
    cluster.start_workers(3, SLOTKEEPER_CRASH_AT="run_sent")
    model = cluster.model(1)
    poison, good = cluster.submit(model, 0.02), cluster.submit(model, 0.02)

    dead = cluster.until(poison, "dead", 90)

    assert (dead.why, dead.crashes, dead.failures) == (Reason.CRASHES_EXHAUSTED, 3, 0)
    cluster.ensure_workers(1)
    assert cluster.until(good, "completed").crashes == 0


@contextmanager
def _restarted_whenever_it_dies(cluster: Cluster, model: str) -> Iterator[None]:
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            if cluster.servers[model].process.popen.poll() is not None:
                cluster.restart_server(model)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
