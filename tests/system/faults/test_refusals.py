"""Redis or the database is there and refuses: no process ends, a run keeps its result, and all goes on afterwards."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from redis import Redis
from sqlalchemy import make_url

from tests.support.cluster import LEASE_S, Cluster, started_cluster
from tools.cluster.postgres_process import Postgres
from tools.cluster.stack import Process, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

_BACK_WITHIN_S = 5.0
"""After the end of a refusal, jobs start again so soon; the bound of the tests is longer, for a busy machine."""


def _processes(cluster: Cluster, worker: Process) -> list[Process]:
    return [worker, *(cluster.stack.processes[name] for name in ("maintenance", "beat", "web"))]


def _part(cluster: Cluster, name: str) -> str:
    """Return what readiness says of a part; "": it is well."""
    return cluster.api.call("GET", "/health/ready").json()["parts"][name]["why"] or ""


def _play(cluster: Cluster, refusal: Callable[[], AbstractContextManager[None]], part: str, names: str) -> None:
    """Let a run end and submit jobs while a dependency refuses requests."""
    (worker,) = cluster.ensure_workers(1)
    model, gate = cluster.model(1), cluster.gate()
    accepted = [cluster.submit(model, gate)]
    cluster.sent(model)
    accepted.append(cluster.submit(model, 0.01))

    with refusal():
        eventually(lambda: names in _part(cluster, part), f"readiness says {names!r} of {part}")
        response = cluster.api.call("POST", "/queue/submit", json={"model": model, "payload": {"seconds": 0.01}})
        if response.status_code == 202:
            accepted.append(response.json()["job_id"])
        else:
            assert (part, response.status_code) == ("database", 503)
        gate.open()
        eventually(lambda: cluster.runs(model), "the server is done with the first job")
        eventually(_have_passed(LEASE_S), "leases would have expired", every_s=0.1)
        assert [one.name for one in _processes(cluster, worker) if one.popen.poll() is not None] == []

    jobs = [cluster.until(job_id, "completed") for job_id in accepted]
    assert [(job.attempt, job.crashes, job.failures) for job in jobs] == [(1, 0, 0)] * len(jobs)
    assert [run["job_id"] for run in cluster.runs(model)] == accepted, "each ran once, in order"
    assert [one.name for one in _processes(cluster, worker) if one.popen.poll() is not None] == []
    eventually(lambda: not _part(cluster, part), f"{part} is well again")


def _have_passed(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


# -- Redis -----------------------------------------------------------------------------------------------------


def _read_only(redis: Redis) -> Iterator[None]:
    redis.replicaof("127.0.0.1", 1)
    try:
        yield
    finally:
        redis.replicaof("no", "one")


def _no_rights(redis: Redis) -> Iterator[None]:
    redis.execute_command("ACL", "SETUSER", "default", "-@write")
    try:
        yield
    finally:
        redis.execute_command("ACL", "SETUSER", "default", "+@all")


def _too_few_replicas(redis: Redis) -> Iterator[None]:
    redis.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        redis.config_set("min-replicas-to-write", 0)


def _cannot_save(redis: Redis) -> Iterator[None]:
    """Its disk is full: as it cannot save, it takes no writes."""
    folder = redis.config_get("dir")["dir"]
    redis.config_set("save", "3600 1000000")
    redis.config_set("dir", "/proc")
    redis.bgsave()
    eventually(lambda: redis.info("persistence")["rdb_last_bgsave_status"] == "err", "it cannot save")
    try:
        yield
    finally:
        redis.config_set("dir", folder)
        redis.bgsave()
        eventually(lambda: redis.info("persistence")["rdb_last_bgsave_status"] == "ok", "it can save")
        redis.config_set("save", "")


@pytest.mark.parametrize(
    "refuse, names",
    [
        pytest.param(_read_only, "READONLY", id="READONLY"),
        pytest.param(_cannot_save, "MISCONF", id="MISCONF"),
        pytest.param(_no_rights, "NOPERM", id="NOPERM"),
        pytest.param(_too_few_replicas, "NOREPLICAS", id="NOREPLICAS"),
    ],
)
def test_redis_answers_and_refuses_writes(cluster: Cluster, refuse: Callable[[Redis], Any], names: str):
    @contextmanager
    def refusal() -> Iterator[None]:
        with cluster.redis() as redis, contextmanager(refuse)(redis):
            yield

    _play(cluster, refusal, "redis", names)


def test_redis_loads_its_data_for_long_after_a_restart(cluster: Cluster) -> None:
    """Redis answers each command with LOADING meanwhile."""
    valkey = cluster.stack.valkey
    assert valkey is not None

    @contextmanager
    def refusal() -> Iterator[None]:
        # Redis answers between two blocks of its data; compressible data would fit in one small block.
        padding = {f"padding:{number}": os.urandom(2_000) for number in range(1_000)}
        with cluster.redis() as redis:
            redis.mset(padding)
            redis.save()
        valkey.kill()
        valkey.start_loading(s_per_key=0.1)
        try:
            yield
        finally:
            valkey.kill()
            valkey.start()
            with cluster.redis() as redis:
                redis.delete(*padding)

    _play(cluster, refusal, "redis", "LOADING")


# -- PostgreSQL ------------------------------------------------------------------------------------------------


def _standby(admin: psycopg.Connection[Any], _: str, __: str) -> Iterator[None]:
    """As after a failover to which connections have followed."""
    admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    admin.execute("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        admin.execute("SET default_transaction_read_only = off")
        admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
        admin.execute("SELECT pg_reload_conf()")


def _full_disk(_: psycopg.Connection[Any], url: str, __: str) -> Iterator[None]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_REFUSE)
        for table in ("jobs", "events", "counters"):
            connection.execute(f"CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON {table} EXECUTE FUNCTION refuse()")
        try:
            yield
        finally:
            for table in ("jobs", "events", "counters"):
                connection.execute(f"DROP TRIGGER full_disk ON {table}")


_REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$
"""


def _revoked(admin: psycopg.Connection[Any], _: str, role: str) -> Iterator[None]:
    """Connections that exist go on, as the server's own are closed by it now and then."""
    admin.execute(f"ALTER ROLE {role} NOLOGIN")
    admin.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", [role])
    try:
        yield
    finally:
        admin.execute(f"ALTER ROLE {role} LOGIN")


@pytest.mark.postgres
@pytest.mark.parametrize(
    "refuse, names",
    [
        pytest.param(_standby, "read-only", id="25006: read-only"),
        pytest.param(_full_disk, "disk is full", id="53100: full"),
        pytest.param(_revoked, "refuses", id="28000: no log-in"),
    ],
)
def test_postgresql_answers_and_refuses(postgres: Postgres, tmp_path: Path, refuse: Callable[..., Any], names: str):
    url = postgres.create()
    admin_url = make_url(url).set(database="postgres").render_as_string(hide_password=False)
    with psycopg.connect(admin_url, autocommit=True) as admin:
        role = "refused"
        admin.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD 'x'")
        own = make_url(url).set(username=role, password="x", drivername="postgresql+psycopg")
        try:
            with started_cluster(
                tmp_path / "cluster", SLOTKEEPER_DATABASE_URL=own.render_as_string(hide_password=False)
            ) as cluster:

                @contextmanager
                def refusal() -> Iterator[None]:
                    with contextmanager(refuse)(admin, url, role):
                        yield

                _play(cluster, refusal, "database", names)
        finally:
            postgres.disconnect_clients(url)
            admin.execute(f"DROP DATABASE {make_url(url).database}")
            admin.execute(f"DROP ROLE {role}")
