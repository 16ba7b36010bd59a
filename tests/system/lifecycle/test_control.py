"""What Celery's remote control shows of a real worker, as docs/how-to/celery.md says."""

from collections.abc import Iterator
from socket import gethostname
from typing import Any

import pytest
from celery import Celery
from redis.exceptions import ConnectionError

from tests.support.cluster import Cluster
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture
def worker(cluster: Cluster) -> Iterator[Any]:
    """What `inspect` shows of one worker, by the name of the command; `None` while it does not answer."""
    cluster.ensure_workers(0)
    name = f"{cluster.start_worker().name}@{gethostname()}"
    assert cluster.stack.valkey is not None
    with Celery(broker=cluster.stack.valkey.url, set_as_current=False) as bare:
        inspect = bare.control.inspect(destination=[name], timeout=5)

        def shown(command: str) -> Any:
            try:
                return (getattr(inspect, command)() or {}).get(name)
            except ConnectionError:  # The broker closed the connection; the next one is new.
                return None

        yield shown


def test_inspect_shows_each_run_of_a_worker_even_one_that_started_without_a_message(
    cluster: Cluster, worker: Any
) -> None:
    model, first, second = cluster.model(1), cluster.gate(), cluster.gate()
    jobs = [cluster.submit(model, first), cluster.submit(model, second)]

    def source(job: str) -> dict[str, Any]:
        def found() -> Any:
            return next((run for run in worker("active") or [] if run["id"] == job), None)

        return eventually(found, f"inspect active shows {job}")

    brought = source(jobs[0])
    assert (brought["name"], brought["args"], brought["server"]) == ("infer", [model], model)
    assert brought["hostname"].startswith("worker") and brought["time_start"] > 0
    first.open()
    handed_on = source(jobs[1])
    assert handed_on["slot"] == brought["slot"], "the slot that the first run has left"
    # The end of the first run is stored behind the start of the second.
    eventually(lambda: [run["id"] for run in worker("active") or []] == [jobs[1]], "the first run is over")
    assert (worker("reserved"), worker("scheduled")) == ([], []), "jobs do not wait at workers"
    assert worker("stats")["pool"]["runs"] == 1
    second.open()
    cluster.until(jobs[1], "completed")
    eventually(lambda: worker("active") == [], "no run is active")
