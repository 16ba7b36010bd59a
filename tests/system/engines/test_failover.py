"""PostgreSQL fails over: the primary dies under load, and its synchronous standby takes its place."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from app.up.errors import UpError
from app.up.ports import free_port
from slotkeeper.jobs import ledger
from tests.support.cluster import Cluster, started_cluster
from tools.cluster import postgres_server
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.postgres, pytest.mark.timeout(240)]

_CLIENTS = 4
_STANDBY = {"hot_standby": "on", "wal_level": "replica", "max_wal_senders": "4"}


class Pair:
    """A primary and its standby, with separate folders and ports."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self._programs = postgres_server.prepare(folder)
        account = postgres_server.runs_as()
        self._as_account: dict[str, Any] = account.popen if account is not None else {}
        self._folder, self._ends = folder, ends
        self.ports = (free_port(), free_port())
        self.primary = self._start("data", self.ports[0])
        self._run("pg_basebackup", "-D", str(folder / "copy"), "-R", "-c", "fast", *self._at(self.ports[0]))
        self._start("copy", self.ports[1])
        with self._admin(0) as admin:
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            admin.execute("SELECT pg_reload_conf()")
            eventually(
                lambda: admin.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone(),
                "the standby follows",
            )

    @property
    def url(self) -> str:
        """Return a URL that connects to the current primary."""
        ports = ",".join(map(str, self.ports))
        options = "target_session_attrs=read-write&sslmode=disable&gssencmode=disable&connect_timeout=2"
        return f"postgresql+psycopg://{postgres_server.USER}@/postgres?host=127.0.0.1,127.0.0.1&port={ports}&{options}"

    def fail_over(self) -> None:
        os.killpg(self.primary.pid, signal.SIGKILL)
        self.primary.wait()
        with self._admin(1) as admin:
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            admin.execute("SELECT pg_promote(), pg_reload_conf()")

    def _start(self, data: str, port: int) -> "subprocess.Popen[bytes]":
        settings = postgres_server.SETTINGS | _STANDBY | {"listen_addresses": "127.0.0.1", "port": str(port)}
        words = [str(self._programs / "postgres"), "-D", str(self._folder / data), "-k", str(self._folder)]
        words += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self._folder.parent / f"{data}.log").open("wb") as log:
            process = subprocess.Popen(
                words, cwd="/", stdout=log, stderr=log, start_new_session=True, **self._as_account
            )
        self._ends.callback(_kill, process)
        eventually(lambda: _listens(port) and self._answers(port), "PostgreSQL answers")
        return process

    def _answers(self, port: int) -> bool:
        try:
            psycopg.connect(**self._where(port)).close()
        except psycopg.OperationalError:
            return False
        return True

    def _admin(self, number: int) -> "psycopg.Connection[Any]":
        return psycopg.connect(**self._where(self.ports[number]), autocommit=True)

    @staticmethod
    def _where(port: int) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": port, "user": postgres_server.USER, "dbname": "postgres"}

    @staticmethod
    def _at(port: int) -> tuple[str, ...]:
        return "-h", "127.0.0.1", "-p", str(port), "-U", postgres_server.USER

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._programs / program), *words]
        subprocess.run(command, cwd="/", check=True, capture_output=True, **self._as_account)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("postgres")
    for parent in (folder, *folder.parents):  # Another account has to come to its files.
        if parent.owner() == folder.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    with ExitStack() as ends:
        try:
            made = Pair(folder / "servers", ends)
        except UpError as missing:
            pytest.skip(missing.message)
        yield made


class Clients:
    """Threads that submit one job after another.  `accepted`: ids; `refused`: statuses."""

    def __init__(self, cluster: Cluster, model: str) -> None:
        self.accepted: list[str] = []
        self.refused: list[int] = []
        self._town, self._model = cluster, model
        self._over = threading.Event()

    @contextmanager
    def submitting(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._submit) for _ in range(_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _submit(self) -> None:
        while not self._over.is_set():
            answer = self._town.api.call(
                "POST", "/queue/submit", json={"model": self._model, "payload": {"seconds": 0}}
            )
            if answer.status_code == 202:
                self.accepted.append(answer.json()["job_id"])
            else:
                self.refused.append(answer.status_code)


def test_when_postgresql_fails_over_no_accepted_job_is_lost_and_each_ends_once(pair: Pair, tmp_path: Path) -> None:
    with started_cluster(tmp_path / "cluster", SLOTKEEPER_DATABASE_URL=pair.url) as cluster:
        cluster.ensure_workers(1)
        model = cluster.model(4)
        clients = Clients(cluster, model)
        with clients.submitting():
            eventually(lambda: len(clients.accepted) > 30, "jobs are accepted")
            pair.fail_over()
            before = len(clients.accepted)
            eventually(lambda: len(clients.accepted) > before + 30, "jobs are accepted again")

        assert set(clients.refused) <= {503}
        for job_id in clients.accepted:
            job = cluster.until(job_id, "completed")
            assert (job.failures, job.crashes) == (0, 0)
        counts = ledger.read(cluster.store.database).by_state
        assert counts["completed"] >= len(set(clients.accepted)) == len(clients.accepted)
        assert sum(counts.values()) == counts["completed"]
