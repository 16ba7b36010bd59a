"""The lanes of a model, each with the job that is next in it."""

import pytest

from routing.queries.model_status import read_lanes


@pytest.mark.parametrize(("policy", "is_first"), [("edf", "soon"), ("fifo", "late")])
def test_the_first_job_of_a_lane_is_the_one_that_starts_next(harness, policy, is_first):
    harness.register(slots=1, policy=policy)
    harness.submit()
    harness.start()
    jobs = {"late": harness.submit(ttl_s=100), "soon": harness.submit(ttl_s=50)}
    lanes, are_all = read_lanes(harness.dispatcher, harness.dispatcher.catalog.resolve("zimg"))
    assert are_all and [(lane.first.id, lane.waiting, lane.ahead) for lane in lanes] == [(jobs[is_first], 2, 0)]
