"""Python clients call the task directly: with our code, or with nothing but Celery and the broker's address."""

import json
import subprocess
import sys

import pytest
from celery import Celery

from tests.e2e.conftest import Api
from tests.support.stack import REPO, Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# In a process of its own, as a client is.
_CLIENT = """
import json, sys
from celery import chord, group
from tasks import infer
from tasks.celery_app import celery

def prompt(result):
    return result["prompt"]

told = {}
told["delay"] = prompt(infer.delay(MODEL, {"prompt": "a", "seconds": 0.01}).get(timeout=60))
asked = infer.apply_async((MODEL, {"prompt": "b", "seconds": 0.01}), priority=1, expires=60, countdown=1)
told["apply_async"], told["id"] = prompt(asked.get(timeout=60)), asked.id
told["group"] = [prompt(r) for r in group(infer.s(MODEL, {"prompt": str(n)}) for n in range(3))().get(timeout=60)]
told["retried"] = prompt(infer.delay(MODEL, {"prompt": "r", "fail": "error", "fail_attempts": 1}).get(timeout=60))
try:
    infer.delay(MODEL, {"fail": "invalid"}).get(timeout=60)
except Exception as error:
    told["failed"] = type(error).__name__
try:
    infer.delay("nobody-knows-it", {})
except Exception as error:
    told["unknown"] = error.code
last = infer.apply_async((MODEL, {"prompt": "first"}), link=infer.si(MODEL, {"prompt": "linked"}))
last.get(timeout=60)
told["linked"] = last.id
header = [infer.s(MODEL, {"prompt": str(n), "seconds": 0.01}) for n in range(2)]
told["chord"] = prompt(chord(header)(infer.si(MODEL, {"prompt": "body"})).get(timeout=60))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def model(stack: Stack, api: Api) -> str:
    api.register("called", stack.server("called-api1", 4), retry_backoff=0.1, retry_backoff_max=0.1)
    return "called"


def test_delay_apply_async_group_chord_and_link_give_the_results_of_jobs(stack: Stack, api: Api, model: str) -> None:
    script = f"MODEL = {model!r}\n{_CLIENT}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=stack.env, cwd=REPO, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)

    assert (told["delay"], told["apply_async"], told["retried"], told["chord"]) == ("a", "b", "r", "body")
    assert sorted(told["group"]) == ["0", "1", "2"]
    assert (told["failed"], told["unknown"]) == ("JobFailed", "unknown_model")
    job = api.job(told["id"])
    assert (job["status"], job["priority"]) == ("completed", 1)


def test_a_bare_client_sends_the_task_by_name_and_gets_the_result(stack: Stack, api: Api, model: str) -> None:
    assert stack.valkey is not None
    with Celery(broker=stack.valkey.url, backend=stack.valkey.url) as bare:
        sent = bare.send_task("infer", args=[model, {"prompt": "bare", "seconds": 0.01}], countdown=1)

        assert sent.get(timeout=60)["prompt"] == "bare"
    assert api.job(sent.id)["status"] == "completed"


def test_a_bare_client_is_told_what_is_wrong(stack: Stack, model: str) -> None:
    assert stack.valkey is not None
    bare = Celery(broker=stack.valkey.url, backend=stack.valkey.url)
    with bare, pytest.raises(Exception, match="nobody-knows-it"):
        bare.send_task("infer", args=["nobody-knows-it", {}]).get(timeout=60)


def test_a_canceled_job_ends_the_waiting_of_its_client(stack: Stack, api: Api) -> None:
    assert stack.valkey is not None
    api.call("PUT", "/admin/model-configs/never-served", json={})
    with Celery(broker=stack.valkey.url, backend=stack.valkey.url) as bare:
        sent = bare.send_task("infer", args=["never-served", {}])
        eventually(lambda: api.call("GET", f"/queue/jobs/{sent.id}").ok, "the job is admitted")
        assert api.call("POST", f"/queue/jobs/{sent.id}/cancel").status_code == 200

        with pytest.raises(Exception, match=r"[Cc]anceled"):
            sent.get(timeout=60)
