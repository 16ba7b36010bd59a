"""Python clients call the task directly: with our code, or with nothing but Celery and the broker's address."""

import json
import subprocess
import sys

import pytest
from celery import Celery

from tests.support.http_api import HttpApi
from tools.cluster.stack import REPO, Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# Runs in a separate process, as a client does.
_CLIENT = """
import json, sys
from celery import chain, chord, group
from tasks import JobFailed, infer
from tasks.celery_app import celery

later = celery.tasks["celery.accumulate"]

def chain_of(result):
    while result is not None:
        yield result
        result = result.parent

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
told["linked"] = [prompt(child.get(timeout=60)) for child in last.children]
header = [infer.s(MODEL, {"prompt": str(n), "seconds": 0.01}) for n in range(2)]
told["chord"] = prompt(chord(header)(infer.si(MODEL, {"prompt": "body"})).get(timeout=60))
steps = [infer.si(MODEL, {"prompt": str(n), "seconds": 0.01}) for n in range(3)]
told["chain"] = [prompt(r.get(timeout=60)) for r in reversed([*chain_of((steps[0] | steps[1] | steps[2])())])]
second = (steps[0] | steps[1])()
second.get(timeout=60)
told["children"] = [child.id for child in second.parent.children] == [second.id]
told["passed"] = prompt(chain(infer.s(MODEL, {"prompt": "passed"}), infer.s(model=MODEL))().get(timeout=60))
parts = [chain(infer.si(MODEL, {"prompt": "x"}), infer.si(MODEL, {"prompt": str(n)})) for n in range(2)]
told["chains in a chord"] = prompt(chord(parts)(infer.si(MODEL, {"prompt": "end"})).get(timeout=60))
told["chains in a group"] = sorted(prompt(r) for r in group(parts)().get(timeout=60))
inner = group(infer.si(MODEL, {"prompt": str(n)}) for n in range(2))
told["a group in a chain"] = prompt(
    chain(infer.si(MODEL, {"prompt": "x"}), inner, infer.si(MODEL, {"prompt": "last"}))().get(timeout=60)
)
told["a task of celery's own"] = chain(infer.si(MODEL, {"prompt": "x"}), later.s(index=0))().get(timeout=60)
broken = chain(infer.si(MODEL, {"fail": "invalid"}), infer.si(MODEL, {"prompt": "never"}))()
try:
    broken.get(timeout=60)
except JobFailed as error:
    told["broken"] = error.args[0]
failing = infer.si(MODEL, {"fail": "invalid"})
fallback = infer.si(MODEL, {"prompt": "fallback"}).set(task_id="fallback-job")
failing.apply_async(link_error=fallback)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def model(stack: Stack, api: HttpApi) -> str:
    api.register("called", stack.server("called-api1", 4), retry_backoff=0.1, retry_backoff_max=0.1)
    return "called"


def test_delay_apply_async_group_chord_and_link_give_the_results_of_jobs(
    stack: Stack, api: HttpApi, model: str
) -> None:
    script = f"MODEL = {model!r}\n{_CLIENT}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=stack.env, cwd=REPO, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)

    assert (results["delay"], results["apply_async"], results["retried"], results["chord"]) == ("a", "b", "r", "body")
    assert sorted(results["group"]) == ["0", "1", "2"]
    assert (results["linked"], results["children"]) == (["linked"], True)
    assert (results["chain"], results["passed"]) == (["0", "1", "2"], "passed")
    assert (results["chains in a chord"], results["chains in a group"]) == ("end", ["0", "1"])
    assert (results["a group in a chain"], results["a task of celery's own"]["prompt"]) == ("last", "x")
    assert results["broken"] == "job_failed"
    eventually(lambda: api.call("GET", "/queue/jobs/fallback-job").ok, "the errback has submitted its job", 60)
    assert api.ended("fallback-job")["status"] == "completed"
    assert (results["failed"], results["unknown"]) == ("JobFailed", "unknown_model")
    job = api.job(results["id"])
    assert (job["status"], job["priority"]) == ("completed", 1)


def test_a_bare_client_sends_the_task_by_name_and_gets_the_result(stack: Stack, api: HttpApi, model: str) -> None:
    assert stack.valkey is not None
    with Celery(broker=stack.valkey.url, backend=stack.valkey.url) as bare:
        sent = bare.send_task("infer", args=[model, {"prompt": "bare", "seconds": 0.01}], countdown=1)

        assert sent.get(timeout=60)["prompt"] == "bare"
    assert api.job(sent.id)["status"] == "completed"


def test_a_bare_client_composes_jobs_with_celerys_canvas(stack: Stack, api: HttpApi, model: str) -> None:
    assert stack.valkey is not None
    script = f"BROKER, MODEL = {stack.valkey.url!r}, {model!r}\n{_BARE}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=stack.home, env={}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "chain": "third",
        "chord": "body",
        "linked": "linked",
        "group in a chain": ["0", "1"],
        "options": ["unknown_model", "invalid_job", "invalid_job", "invalid_job", "invalid_job"],
    }


# Without our code on its path: nothing but Celery.
_BARE = """
import json, sys
from celery import Celery, chain, chord, group

sys.path = [entry for entry in sys.path if entry]
app = Celery(broker=BROKER, backend=BROKER)

def infer(prompt, **options):
    takes = {"prompt": prompt, "seconds": 0.01}
    return app.signature("infer", args=(MODEL, takes), immutable=True, options=options)

told = {}
told["chain"] = chain(infer("first"), infer("second"), infer("third"))().get(timeout=60)["prompt"]
told["chord"] = chord([infer("0"), infer("1")])(infer("body")).get(timeout=60)["prompt"]
infer("x", link=infer("linked", task_id="linked-by-a-bare-client")).apply_async().get(timeout=60)
told["linked"] = app.AsyncResult("linked-by-a-bare-client").get(timeout=60)["prompt"]
both = chain(infer("x"), group(infer("0"), infer("1")))()
told["group in a chain"] = sorted(found["prompt"] for found in both.get(timeout=60))

def code(*args, **more):
    try:
        app.send_task("infer", args=args, **more).get(timeout=60)
    except Exception as error:
        assert type(error).__name__ == "JobFailed", repr(error)
        return error.args[0]

told["options"] = [
    code("nobody-knows-it", {}),
    code([1, 2], MODEL),
    code(MODEL, {}, kwargs={"constraint": {}}),
    code(MODEL, {}, time_limit=5),
    code(),
]
print(json.dumps(told))
"""


def test_a_bare_client_gets_the_error_of_an_unknown_model(stack: Stack, model: str) -> None:
    assert stack.valkey is not None
    bare = Celery(broker=stack.valkey.url, backend=stack.valkey.url)
    with bare, pytest.raises(Exception, match="nobody-knows-it"):
        bare.send_task("infer", args=["nobody-knows-it", {}]).get(timeout=60)


def test_a_canceled_job_ends_the_waiting_of_its_client(stack: Stack, api: HttpApi) -> None:
    assert stack.valkey is not None
    api.call("PUT", "/admin/model-configs/never-served", json={})
    with Celery(broker=stack.valkey.url, backend=stack.valkey.url) as bare:
        sent = bare.send_task("infer", args=["never-served", {}])
        eventually(lambda: api.call("GET", f"/queue/jobs/{sent.id}").ok, "the job is admitted")
        assert api.call("POST", f"/queue/jobs/{sent.id}/cancel").status_code == 200

        with pytest.raises(Exception, match=r"[Cc]anceled"):
            sent.get(timeout=60)
