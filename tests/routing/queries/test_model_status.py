"""The lanes of a model, each with the job that is next in it."""

import pytest

from routing.queries.model_status import read_lanes


@pytest.mark.parametrize(("policy", "is_first"), [("edf", "soon"), ("fifo", "late")])
def test_the_first_job_of_a_lane_is_the_one_that_starts_next(stage, policy, is_first):
    stage.register(slots=1, policy=policy)
    stage.submit()
    stage.start()
    jobs = {"late": stage.submit(ttl_s=100), "soon": stage.submit(ttl_s=50)}
    lanes, are_all = read_lanes(stage.dispatcher, stage.dispatcher.catalog.resolve("zimg"))
    assert are_all and [(lane.first.id, lane.waiting, lane.ahead) for lane in lanes] == [(jobs[is_first], 2, 0)]
