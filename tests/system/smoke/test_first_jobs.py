"""The main path through real processes: a job that succeeds, and one that fails, dies and is retried by a person."""

import pytest

from tests.support.http_api import HttpApi
from tools.cluster.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_job_of_a_model_that_answers_at_once_is_completed(stack: Stack, api: HttpApi, server_name: str) -> None:
    api.register("sync/model.v1", stack.server(server_name, 1))

    job = api.ended(api.submit("sync/model.v1", {"prompt": "a sunset", "seconds": 0.05}, priority=1))

    assert job["status"] == "completed"
    assert job["result"]["prompt"] == "a sunset"
    assert (job["attempts"], job["server"], job["slot"]) == (1, server_name, f"{server_name}-slot0")
    assert job["created_at"] <= job["started_at"] <= job["completed_at"]


def test_a_wrong_answer_is_retried_and_in_the_end_the_job_is_dead_until_a_person_retries_it(
    stack: Stack, api: HttpApi, server_name: str
) -> None:
    server = stack.server(server_name, 1)
    api.register("failing", server, max_retries=1, retry_backoff=0.1, retry_backoff_max=0.1)

    job_id = api.submit("failing", {"fail": "error", "fail_attempts": 2, "seconds": 0.01})

    dead = api.ended(job_id)
    assert dead["status"] == "dead"
    assert dead["error"]["code"] == "max_retries_exceeded"
    assert dead["attempts"] == 2
    assert job_id in [job["job_id"] for job in api.call("GET", "/admin/dlq").json()["jobs"]]

    assert api.call("POST", f"/admin/dlq/{job_id}/retry").ok
    assert api.ended(job_id)["status"] == "completed"
    trail = api.call("GET", f"/queue/jobs/{job_id}/attempts").json()["attempts"]
    assert [attempt["outcome"] for attempt in trail] == ["server_error", "retries_exhausted", "finished"]
