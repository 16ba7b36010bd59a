"""No message ends a worker or is read twice; valid messages before and after it get results."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from tests.support.cluster import Cluster
from tools.cluster.stack import eventually

pytestmark = pytest.mark.e2e

MARK = "never-to-be-logged"
DEEP = "[" * 50_000 + "]" * 50_000


@pytest.fixture(scope="module")
def bare(cluster: Cluster) -> Iterator[Celery]:
    assert cluster.stack.valkey is not None
    with Celery(broker=cluster.stack.valkey.url, backend=cluster.stack.valkey.url) as client:
        yield client


def _headers(**changes: Any) -> dict[str, Any]:
    return {"lang": "py", "task": "infer", "id": "malformed", "retries": 0, "timelimit": [None, None]} | changes


def _message(headers: Any = None, body: Any = None, raw_body: str | None = None, **changes: Any) -> str:
    """A message as kombu writes it, with anything in it changed."""
    if body is None:
        body = [["zimg", {"prompt": MARK}], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    encoded = base64.b64encode((json.dumps(body) if raw_body is None else raw_body).encode()).decode()
    properties = {
        "correlation_id": "malformed",
        "reply_to": "",
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": "celery"},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": f"tag-{hash((str(headers), str(body), str(changes))) & 0xFFFFFF}",
    } | changes.pop("properties", {})
    return json.dumps(
        {
            "body": encoded,
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": _headers() if headers is None else headers,
            "properties": properties,
        }
        | changes
    )


def _with_header(name: str, value: Any) -> str:
    return _message(_headers(**{name: value}))


def _embedding(**embedded: Any) -> str:
    return _message(body=[["zimg", {}], {}, embedded])


RAW = {
    "an empty list": "[]",
    "a number": "7",
    "null": "null",
    "no json": "{",
    "nesting": DEEP,
    "a decimal that is none": '{"headers": {"__type__": "decimal", "__value__": "x"}}',
    "no properties": '{"body": "", "headers": {}}',
    "no tag": '{"body": "", "headers": {}, "properties": {}}',
    "a tag that is a list": _message(properties={"delivery_tag": []}),
    "a place that is a text": _message(properties={"delivery_info": "celery"}),
    "no place": _message(properties={"delivery_info": {}}),
    "a body that is no base64": _message(body="x", properties={"body_encoding": "none-such"}),
    "headers that are a list": _message([]),
    "headers that are a text": _message("x"),
    "no task": _message({"id": "malformed"}),
    "an unknown task": _with_header("task", "nobody.knows.it"),
    "another content type": _message(**{"content-type": "application/x-python-serialize"}),
    "a content type that is a list": _message(**{"content-type": []}),
    "compressed by nobody": _message(_headers(compression="none-such")),
    "a compression that is a list": _message(_headers(compression=[])),
    **{
        f"{name}: {value!r}": _with_header(name, value)
        for name in ("task", "id", "retries", "timelimit", "eta", "expires", "stamps", "stamped_headers", "group")
        for value in ([], {}, ["x"], {"x": []}, 1.5e308, "x", True)
        if not (name in ("task", "id", "group") and value == "x")
        and not (name in ("stamps", "timelimit") and not value)
    },
    **{
        f"body: {body!r}"[:40]: _message(body=body)
        for body in ([], {}, "x", 7, [1, 2], [1, 2, 3], [[], [], []], [[], {}, []], [[], {}, {}, {}], ["x", {}, {}])
    },
    "a nested body": _message(raw_body=f"[[{DEEP}], {{}}, {{}}]"),
    "a body that is no json": _message(raw_body="{"),
    "a body with a decimal that is none": _message(raw_body='[[{"__type__": "decimal", "__value__": "x"}], {}, {}]'),
    "a chain of texts": _embedding(chain=["x"]),
    "a chain of one that is no list": _embedding(chain={"task": "infer"}),
    "links without a task": _embedding(callbacks=[{}]),
    "errbacks that are a number": _embedding(errbacks=7),
    "a chord that is a text": _embedding(chord="x"),
    "an embedded id": _embedding(id=["x"]),
    "options that are a list": _embedding(callbacks=[{"task": "infer", "options": [1]}]),
    "protocol 1 without a mapping": _message({}, body=[1]),
    "protocol 1 with lists": _message({}, body={"task": [], "id": [], "args": 7, "kwargs": 7}),
    "an offer of nothing": _message(_headers(slotkeeper={}), [["zimg"], {}, {}]),
    "an offer that is a list": _message(_headers(slotkeeper=[[]]), [[["zimg"]], {}, {}]),
}


def _in_hands(cluster: Cluster) -> set[bytes]:
    """Return the messages that workers have taken and not acknowledged; a killed worker leaves some for an hour."""
    with cluster.redis() as redis:
        return set(redis.hkeys("unacked"))


def _all_are_read(cluster: Cluster, before: set[bytes]) -> bool:
    with cluster.redis() as redis:
        return redis.llen("celery") == 0 and _in_hands(cluster) <= before


def test_no_message_ends_a_worker_or_is_read_twice(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(0)
    before = _in_hands(cluster)
    worker = cluster.start_worker()
    model = cluster.model(2)
    for chunk in (list(RAW.values())[start : start + 10] for start in range(0, len(RAW), 10)):
        with cluster.redis() as redis:
            for raw in chunk:
                redis.lpush("celery", raw)
        honest = bare.send_task("infer", args=[model, {"prompt": "honest", "seconds": 0.01}])
        assert honest.get(timeout=60)["prompt"] == "honest"
    assert worker.popen.poll() is None
    eventually(lambda: _all_are_read(cluster, before), "everything is acknowledged")
    assert worker.log.count("ready.") == 1, "and never lost its connection"
    assert MARK not in worker.log
    assert max(map(len, worker.log.splitlines())) < 2_000


_BROADCASTS = "/0.celery.pidbox"


def test_no_broadcast_ends_a_worker(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(0)
    worker = cluster.start_worker()
    with cluster.redis() as redis:
        for raw in RAW.values():  # Celery subscribes again after some of them.
            eventually(lambda raw=raw: redis.publish(_BROADCASTS, raw), "it listens")
    honest = bare.send_task("infer", args=[cluster.model(), {"prompt": "honest", "seconds": 0.01}])
    assert honest.get(timeout=60)["prompt"] == "honest"
    assert worker.popen.poll() is None
    assert bare.control.ping(timeout=5, limit=1, destination=None)


@pytest.mark.parametrize("body", [[], [[], {}], ["x", {}, {}], [[], [], {}]], ids=str)
def test_the_client_of_a_message_that_is_no_task_gets_an_error(cluster: Cluster, bare: Celery, body: Any) -> None:
    cluster.ensure_workers(1)
    job_id = f"no-task-{abs(hash(str(body)))}"
    with cluster.redis() as redis:
        redis.lpush("celery", _message(_headers(id=job_id), body))
    with pytest.raises(Exception, match="invalid_message"):
        bare.AsyncResult(job_id).get(timeout=60)


def test_the_client_of_a_job_after_an_unknown_task_gets_an_error(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(1)
    following = bare.signature("infer", args=("zimg", {}), immutable=True).set(task_id="after-an-unknown-task")
    bare.send_task("nobody.knows.it", chain=[following])
    with pytest.raises(Exception, match=r"nobody\.knows\.it"):
        bare.AsyncResult("after-an-unknown-task").get(timeout=60)


def test_a_message_with_the_id_of_a_job_changes_nothing_about_it(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(1)
    model, gate = cluster.model(), cluster.gate()
    sent = bare.send_task("infer", args=[model, gate.payload | {"prompt": "mine"}])
    cluster.sent(model)
    before = _in_hands(cluster)
    with cluster.redis() as redis:
        redis.lpush("celery", _message(_headers(id=sent.id), []))
        redis.lpush("celery", _message(_headers(id=sent.id), [["nobody-knows-it", {}], {}, {}]))
    eventually(lambda: _all_are_read(cluster, before), "both have been read")
    assert sent.state == "PENDING"
    gate.open()
    assert sent.get(timeout=60)["prompt"] == "mine"
