"""With keys required, a Celery client acts for a tenant: by a token, by SLOTKEEPER_KEY, or by the preceding job."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from tests.support.http_api import HttpApi
from tools.cluster.stack import REPO, Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "owned"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("keyed"), {"SLOTKEEPER_REQUIRE_KEYS": "true"}) as running:
        running.worker()
        running.web()
        yield running


@pytest.fixture(scope="module")
def operator(keyed: Stack) -> HttpApi:
    api = HttpApi(keyed)
    api.session.headers["Authorization"] = f"Bearer {_key(keyed, 'tenants', 'add', 'ops', '--operate')}"
    api.register(MODEL, keyed.server("owned-api1", 4))
    return api


@pytest.fixture(scope="module")
def acme_key(keyed: Stack) -> str:
    return _key(keyed, "tenants", "add", "acme")


@pytest.fixture(scope="module")
def token(keyed: Stack, operator: HttpApi, acme_key: str) -> str:
    return json.loads(_slotkeeper(keyed, "keys", "token", "acme", "first", "--ttl", "1h", "--json"))["token"]


@pytest.fixture
def bare(keyed: Stack) -> Iterator[Celery]:
    assert keyed.valkey is not None
    with Celery(broker=keyed.valkey.url, backend=keyed.valkey.url) as client:
        yield client


def _slotkeeper(stack: Stack, *words: str) -> str:
    return stack.run([sys.executable, "-P", "-m", "app.cli", *words])


def _key(stack: Stack, *words: str) -> str:
    return json.loads(_slotkeeper(stack, *words, "--json"))["key"]


def _call(stack: Stack, script: str, **env: str) -> dict[str, str]:
    """Run a client that has Slotkeeper installed, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json\nfrom tasks import infer\nMODEL = {MODEL!r}\n{script}"],
        env={**stack.env, **env},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _run_bare(stack: Stack, token: str, script: str) -> dict[str, str]:
    """Run a client that has nothing but Celery, and return what it prints."""
    assert stack.valkey is not None
    url = stack.valkey.url
    lines = ["import json", "from celery import Celery", f"bare = Celery(broker={url!r}, backend={url!r})"]
    lines += [f"MODEL, TOKEN = {MODEL!r}, {token!r}", script]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=stack.home, env={}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _why_failed(bare: Celery, **options: Any) -> str:
    sent = bare.send_task("infer", args=[MODEL, {"seconds": 0}], **options)
    with pytest.raises(Exception) as raised:
        sent.get(timeout=60)
    return str(raised.value)


@pytest.mark.parametrize(
    "headers, expected",
    [
        ({}, "send a token"),
        ({"slotkeeper_token": "sk_" + "a" * 61}, "not a key"),
        ({"slotkeeper_token": "skt_forged"}, "not valid"),
        ({"slotkeeper_token": 7}, "not a key"),
    ],
)
def test_a_message_without_a_token_fails_before_it_is_stored(
    keyed: Stack, operator: HttpApi, bare: Celery, headers: dict[str, object], expected: str
) -> None:
    before = operator.call("GET", "/queue/jobs").json()["jobs"]
    message = _why_failed(bare, headers=headers)
    assert "unauthorized" in message and expected in message
    assert operator.call("GET", "/queue/jobs").json()["jobs"] == before


def test_a_token_submits_for_its_tenant_and_for_no_other(operator: HttpApi, bare: Celery, token: str) -> None:
    headers = {"slotkeeper_token": token}
    sent = bare.send_task("infer", args=[MODEL, {"prompt": "mine", "seconds": 0}], headers=headers)
    assert sent.get(timeout=60)["prompt"] == "mine"
    assert operator.job(sent.id)["tenant"] == "acme"
    message = _why_failed(bare, kwargs={"tenant": "bravo"}, headers=headers)
    assert "may not submit for 'bravo'" in message


def test_a_token_opens_nothing_but_celery(operator: HttpApi, token: str) -> None:
    answer = operator.call("GET", "/queue/jobs", headers={"Authorization": f"Bearer {token}"})
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")


_CANVAS = """
from celery import chord, chain, group

def step(prompt):
    return bare.signature("infer", args=[MODEL, {"prompt": prompt, "seconds": 0}], immutable=True)

def first(prompt):
    return step(prompt).set(headers={"slotkeeper_token": TOKEN})

first("start").apply_async(link=step("linked").set(task_id="linked-step")).get(timeout=60)
ended = chord([chain(first(f"a{n}"), step(f"b{n}")) for n in range(2)])(step("body"))
fanned = chain(first("x"), group(step("y"), step("z")), step("last")).apply_async()
assert (ended.get(timeout=60)["prompt"], fanned.get(timeout=60)["prompt"]) == ("body", "last")
print(json.dumps({"body": ended.id, "last": fanned.id}))
"""


def test_steps_of_a_canvas_belong_to_the_tenant_of_the_job_before(keyed: Stack, operator: HttpApi, token: str) -> None:
    """Only the first messages have a token: the body of the chord is sent at the end of its parts."""
    ids = _run_bare(keyed, token, _CANVAS)
    eventually(lambda: operator.call("GET", "/queue/jobs/linked-step").ok, "the linked step is stored")
    jobs = operator.call("GET", "/queue/jobs", params={"limit": 200}).json()["jobs"]
    assert {operator.job(job_id)["tenant"] for job_id in ("linked-step", *ids.values())} == {"acme"}
    assert {job["tenant"] for job in jobs} == {"acme"}


_CHAIN = """
first = bare.signature("infer", args=[MODEL, {"seconds": 8}], immutable=True).set(headers={"slotkeeper_token": TOKEN})
second = (first | bare.signature("infer", args=[MODEL, {"seconds": 0}], immutable=True)).apply_async()
print(json.dumps({"first": second.parent.id, "second": second.id}))
"""


@pytest.mark.usefixtures("acme_key")
def test_a_step_after_a_revoked_key_is_refused(keyed: Stack, operator: HttpApi, bare: Celery) -> None:
    key = json.loads(_slotkeeper(keyed, "keys", "add", "acme", "--name", "short", "--json"))
    brief = json.loads(_slotkeeper(keyed, "keys", "token", "acme", "short", "--json"))["token"]
    ids = _run_bare(keyed, brief, _CHAIN)
    eventually(lambda: operator.call("GET", f"/queue/jobs/{ids['first']}").ok, "the first step is stored")
    _slotkeeper(keyed, "keys", "revoke", "acme", key["key_id"])
    with pytest.raises(Exception, match="not valid any more"):
        bare.AsyncResult(ids["second"]).get(timeout=60)
    assert operator.job(ids["first"])["status"] == "completed"
    assert operator.call("GET", f"/queue/jobs/{ids['second']}").status_code == 404


def test_a_call_of_infer_uses_the_key_of_its_process(
    keyed: Stack, operator: HttpApi, acme_key: str, token: str
) -> None:
    script = 'sent = infer.delay(MODEL, {"prompt": "a"}); print(json.dumps({"id": sent.id}))'
    mine = _call(keyed, script, SLOTKEEPER_KEY=acme_key)
    assert operator.job(mine["id"])["tenant"] == "acme"
    by_token = f'sent = infer.apply_async((MODEL, {{}}), headers={{"slotkeeper_token": {token!r}}})'
    assert operator.job(_call(keyed, f'{by_token}; print(json.dumps({{"id": sent.id}}))')["id"])["tenant"] == "acme"

    refused = """
try:
    infer.delay(MODEL, {}, **ASKED)
except Exception as error:
    print(json.dumps({"code": error.code, "detail": error.detail}))
"""
    assert "set SLOTKEEPER_KEY" in _call(keyed, f"ASKED = {{}}{refused}")["detail"]
    assert _call(keyed, f"ASKED = {{}}{refused}", SLOTKEEPER_KEY="sk_wrong")["code"] == "unauthorized"
    other = _call(keyed, f"ASKED = {{'tenant': 'bravo'}}{refused}", SLOTKEEPER_KEY=acme_key)
    assert "may not submit for 'bravo'" in other["detail"]


@pytest.mark.usefixtures("acme_key")
def test_a_key_without_the_scope_submit_creates_no_job_and_no_token(keyed: Stack, operator: HttpApi) -> None:
    reader = json.loads(_slotkeeper(keyed, "keys", "add", "acme", "--name", "reader", "--scope", "read", "--json"))
    script = """
try:
    infer.delay(MODEL, {})
except Exception as error:
    print(json.dumps({"code": error.code}))
"""
    assert _call(keyed, script, SLOTKEEPER_KEY=reader["key"]) == {"code": "scope_missing"}
    with pytest.raises(subprocess.CalledProcessError) as failed:
        _slotkeeper(keyed, "keys", "token", "acme", "reader")
    assert "scope submit" in failed.value.stderr
    answer = operator.call(
        "POST", "/tenants/me/celery-tokens", json={}, headers={"Authorization": f"Bearer {reader['key']}"}
    )
    assert answer.json()["code"] == "scope_missing"
    given = operator.call("POST", "/tenants/me/celery-tokens", json={"ttl_s": 60})
    assert given.status_code == 201 and given.headers["Cache-Control"] == "no-store"
    assert given.json()["token"].startswith("skt_")
