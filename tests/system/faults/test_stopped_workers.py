"""A worker process that is stopped (SIGSTOP) for longer than its leases hold, at each point of a run."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.cluster import Cluster, started_cluster, thaw
from tools.cluster.stack import Process, eventually

_SHORT_S = 1.0
_POINTS = ("start_claimed", "start_committed", "run_sent", "slot_passed_on", "settle_committed", "end_notified")


@pytest.fixture(scope="module")
def short_town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its leases expire soon."""
    lease = {"SLOTKEEPER_LEASE_MS": "1000", "SLOTKEEPER_RENEW_EVERY_MS": "200", "SLOTKEEPER_OFFER_MS": "1000"}
    with started_cluster(tmp_path_factory.mktemp("short"), **lease) as running:
        yield running


def _is_stopped(process: Process) -> bool:
    with open(f"/proc/{process.popen.pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.e2e
def test_the_only_worker_is_stopped_at_each_point_and_no_slot_ever_has_two_jobs(short_town: Cluster) -> None:
    cluster = short_town
    # The server would run four at once, so its journal shows what was sent to the one slot.
    model = cluster.model(4)
    server = cluster.servers[model]
    changed = {"model": model, "server": model, "endpoint": server.endpoint, "slots": 1}
    assert cluster.api.call("POST", "/admin/register", json=changed).ok
    stops = ",".join(f"{point}:{n}" for n, point in enumerate(_POINTS, 1))
    worker = cluster.start_worker(SLOTKEEPER_STOP_AT=stops)
    jobs = [cluster.submit(model, 0.2) for _ in range(2 * len(_POINTS))]

    for point in _POINTS:
        eventually(lambda: _is_stopped(worker), f"it is stopped at {point}", every_s=0.01)
        eventually(_passed(1.6 * _SHORT_S), "its leases have expired", every_s=0.05)
        thaw(worker)
    ended = [cluster.until(job_id, "completed") for job_id in jobs]

    assert [len([event for event in cluster.why(job.id) if event == "finished"]) for job in ended] == [1] * len(jobs)
    assert _most_at_once(cluster.runs(model)) == 1
    assert sum(job.crashes for job in ended) <= len(_POINTS), "at most the run that a stopped worker held"


def _passed(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def _most_at_once(found: list[dict[str, Any]]) -> int:
    marks = sorted([(run["started_ns"], 1) for run in found] + [(run["ended_ns"], -1) for run in found])
    most = now = 0
    for _, change in marks:
        now += change
        most = max(most, now)
    return most
