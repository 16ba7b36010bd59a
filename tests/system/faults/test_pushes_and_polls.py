"""A server that pushes its results is polled as well: each run ends once, by the push or by the poll."""

from collections import Counter

import pytest

from slotkeeper.jobs.states import FINAL_STATES
from tests.support.cluster import Cluster
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

_JOBS, _SLOTS = 40, 4
_RUN_S = 0.1  # as long as the interval of polls, so that both come at the same moment


def test_a_run_that_is_pushed_and_polled_at_the_same_moment_ends_once(cluster: Cluster) -> None:
    cluster.ensure_workers(2)
    model = cluster.model(_SLOTS, "--async", "--push", model_type="async", poll_interval=_RUN_S)
    jobs = [cluster.submit(model, _RUN_S) for _ in range(_JOBS)]

    ended = [cluster.until(job_id, "completed") for job_id in jobs]

    assert {(job.attempts, job.failures, job.crashes) for job in ended} == {(1, 0, 0)}
    assert Counter(run["job_id"] for run in cluster.runs(model)) == Counter(jobs)
    for job_id in jobs:
        ends = [event for event in cluster.store.list_events(job_id) if event.type.removeprefix("job.") in FINAL_STATES]
        assert len(ends) == 1, "JOB-2"
    eventually(lambda: not cluster.taken(model), "all slots are free")
