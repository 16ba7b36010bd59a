"""A full disk: submits are refused, results are kept, and work resumes once space is free."""

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slotkeeper.jobs import ledger
from tests.support.cluster import Cluster, started_cluster
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

_DISK = "32m"
_WAITING = 5


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system of its own can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError) as error:
        while True:
            file.write(b"\0" * 4096)
    assert error.value.errno == errno.ENOSPC
    try:
        yield
    finally:
        filler.unlink()


def _submit(cluster: Cluster, model: str, accepted: list[str]) -> int:
    """Submit a job, and note its id if it was accepted; returns the status."""
    answer = cluster.api.call("POST", "/queue/submit", json={"model": model, "payload": {"seconds": 0.01}})
    if answer.status_code == 202:
        accepted.append(answer.json()["job_id"])
    else:
        assert int(answer.headers["Retry-After"]) >= 1, answer.text
    return answer.status_code


def _refused_readiness(cluster: Cluster) -> dict[str, Any] | None:
    response = cluster.api.call("GET", "/health/ready")
    return response.json() if response.status_code == 503 else None


def test_on_a_full_disk_submits_are_refused_and_a_result_is_kept_until_it_can_be_stored(
    disk: Path, tmp_path: Path
) -> None:
    with started_cluster(tmp_path / "cluster", SLOTKEEPER_DATABASE_URL=f"sqlite:///{disk / 'record.db'}") as cluster:
        cluster.ensure_workers(1)
        model = cluster.model(1)
        gate = cluster.gate()
        accepted = [cluster.submit(model, gate), *(cluster.submit(model, 0.01) for _ in range(_WAITING))]
        cluster.sent(model)

        with full(disk):
            # The last page of the write-ahead log may still have space for one submit.
            eventually(lambda: _submit(cluster, model, accepted) == 503, "a submit is refused")
            ready = eventually(lambda: _refused_readiness(cluster), "readiness reports the full disk")
            assert "its disk is full" in ready["parts"]["database"]["why"]
            gate.open()
            eventually(lambda: cluster.runs(model), "the server has ended the first job")
            assert _submit(cluster, model, accepted) == 503

        jobs = [cluster.until(job_id, "completed") for job_id in accepted]
        assert {(job.attempts, job.failures, job.crashes) for job in jobs} == {(1, 0, 0)}
        assert sorted(run["job_id"] for run in cluster.runs(model)) == sorted(accepted), "each ran once"
        assert sum(ledger.read(cluster.store.database).by_state.values()) == len(accepted), (
            "a refused submit stores no job"
        )
        assert _submit(cluster, model, accepted) == 202
