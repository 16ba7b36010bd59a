"""A job's trace across real processes: whatever befalls it there, all of its spans hang together."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.support.http_api import HttpApi
from tests.support.scripted import Scripted, Seen, answer
from tools.cluster.stack import REPO, RefServer, Stack, eventually

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
from tests.support.collector import Collector

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SPAN = "00f067aa0ba902b7"
_JOB = ["job", "submit"]
_TRY = ["wait", "attempt", "exchange", "settle"]


class Outside(Scripted):
    """An inference server that fails once and then is silent until it may answer; it also receives webhooks."""

    def __init__(self) -> None:
        super().__init__(self._says)
        self.attempts: list[str] = []  # the traceparent of each
        self.hooks: list[str] = []
        self.silent, self.may_answer = threading.Event(), threading.Event()

    def _says(self, seen: Seen) -> bytes:
        if seen.path.endswith("/health"):  # The silent run is not reported as active.
            return answer({"active_jobs": 0, "job_ids": []})
        if seen.method == "GET":
            return answer(b"", 404)
        traceparent = seen.headers["traceparent"]
        if seen.path == "/hook":
            self.hooks.append(traceparent)
            return answer({})
        self.attempts.append(traceparent)
        if len(self.attempts) == 1:
            return answer({"status": "failed", "error": "once"}, 500)
        if len(self.attempts) == 2:
            self.silent.set()
            self.may_answer.wait(120)
        return answer({"status": "success", "result": {}})


@pytest.fixture
def outside() -> Iterator[Outside]:
    with Outside() as found:
        yield found
        found.may_answer.set()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Collector]:
    with Collector() as found:
        yield found


@pytest.fixture(scope="module")
def stack(receiver: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {
        "SLOTKEEPER_WEBHOOK_ALLOW": "127.0.0.1/32",
        "SLOTKEEPER_EVENTS_TO": "redis,otlp",
        "SLOTKEEPER_EVENTS_OTLP_ENDPOINT": receiver.url,
    }
    with Stack(tmp_path_factory.mktemp("traced"), env) as running:
        running.maintenance()
        running.webhooks()
        running.relay()
        running.beat()
        running.worker()
        running.web()
        running.server("traced-api1", 4)
        yield running


@pytest.fixture(scope="module")
def api(stack: Stack) -> HttpApi:
    return HttpApi(stack)


def whole(receiver: Collector, trace_id: str, names: list[str], tops: list[str]) -> None:
    """Wait for these spans of a trace; each has a parent in the trace, except the jobs, whose parents are `tops`."""

    def found() -> list[str]:
        return sorted(span.name for span in receiver.trace(trace_id).values())

    eventually(lambda: len(found()) >= len(names), "all spans arrive", 60)
    assert found() == sorted(names)
    spans = receiver.trace(trace_id)
    above = {span.parent_span_id.hex() for span in spans.values() if span.parent_span_id.hex() not in spans}
    assert above == {*tops}
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())


def test_a_job_with_a_failure_a_lost_worker_and_a_webhook_is_one_whole_trace(
    stack: Stack, api: HttpApi, receiver: Collector, outside: Outside
) -> None:
    trace_id = "a" * 32
    server = RefServer("traced-outside", 0, 1, stack.home, stack.processes["traced-api1"])
    server.endpoint = f"{outside.url}/generate"
    api.register("traced-anyhow", server, retry_backoff=0.1, retry_backoff_max=0.1)
    body = {"model": "traced-anyhow", "payload": {}, "callback_url": f"{outside.url}/hook"}
    answer = api.call("POST", "/queue/submit", json=body, headers={"traceparent": f"00-{trace_id}-{SPAN}-01"})

    assert outside.silent.wait(60)
    stack.processes["worker"].kill()
    stack.worker("worker2")
    eventually(lambda: len(outside.attempts) == 3, "maintenance has given the job to the other worker", 60)

    assert api.ended(answer.json()["job_id"])["status"] == "completed"
    whole(receiver, trace_id, [*_JOB, *_TRY, *_TRY, *_TRY, "webhook"], [SPAN])
    spans = receiver.trace(trace_id)
    of = {name: [id_ for id_, span in spans.items() if span.name == name] for name in ("attempt", "webhook")}
    assert sorted(outside.attempts) == sorted(f"00-{trace_id}-{id_}-01" for id_ in of["attempt"])
    assert {*outside.hooks} == {f"00-{trace_id}-{id_}-01" for id_ in of["webhook"]}


# Runs in a separate process that starts within a trace, as a client does.
_PYTHON = """
import sys
from tasks import infer
infer.delay("traced", {"seconds": 0.01}).get(timeout=60)
infer.apply_async(("traced", {"seconds": 0.01}), headers={"traceparent": sys.argv[1]}).get(timeout=60)
first = infer.si("traced", {"seconds": 0.01}).set(traceparent=sys.argv[2])
(first | infer.si("traced", {"seconds": 0.01}))().get(timeout=60)
"""
_BARE = """
import os, sys
from celery import Celery
bare = Celery(broker=os.environ["SLOTKEEPER_REDIS_URL"], backend=os.environ["SLOTKEEPER_REDIS_URL"])
for given in sys.argv[1:]:
    bare.send_task("infer", args=["traced", {"seconds": 0.01}], headers={"traceparent": given}).get(timeout=60)
"""


@pytest.fixture(scope="module")
def model(stack: Stack, api: HttpApi) -> str:
    server = stack.processes["traced-api1"]
    port = int(server.command[server.command.index("--port") + 1])
    found = RefServer("traced-api1", port, 4, stack.home, server)
    eventually(lambda: api.call("GET", "/health/live").ok, "the API answers")
    # `api.register` accepts a model in one test only; this model is for the whole module.
    body = {"model": "traced", "server": found.name, "endpoint": found.endpoint, "slots": found.slots}
    assert api.call("POST", "/admin/register", json=body).ok
    if not [
        name
        for name in ("worker", "worker2")
        if (process := stack.processes.get(name)) and process.popen.poll() is None
    ]:
        stack.worker("worker3")
    return "traced"


def _client(stack: Stack, command: list[str], **environment: str) -> str:
    env = {**stack.env, "SLOTKEEPER_URL": stack.url, **environment}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=REPO, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _given(letter: str) -> tuple[str, str]:
    return letter * 32, f"00-{letter * 32}-{SPAN}-01"


def test_python_clients_are_in_their_trace_and_so_is_what_follows_a_job(
    stack: Stack, receiver: Collector, model: str
) -> None:
    (by_environment, environment), (by_header, header), (by_chain, chain) = map(_given, "bcd")
    _client(stack, ["-c", _PYTHON, header, chain], TRACEPARENT=environment)
    for trace_id in (by_environment, by_header):
        whole(receiver, trace_id, [*_JOB, *_TRY], [SPAN])
    whole(receiver, by_chain, [*_JOB, *_TRY] * 2, [SPAN])


def test_the_header_of_a_message_names_a_trace_and_one_that_is_none_refuses_nothing(
    stack: Stack, receiver: Collector, model: str
) -> None:
    trace_id, given = _given("e")
    _client(stack, ["-c", _BARE, given, "00-nonsense", f"{given}-more"])
    whole(receiver, trace_id, [*_JOB, *_TRY], [SPAN])


def test_a_job_does_not_wait_for_a_refusing_collector_which_gets_the_spans_later(
    api: HttpApi, receiver: Collector, model: str
) -> None:
    trace_id, given = _given("3")
    receiver.status = 401
    before = len(receiver.seen)
    body = {"model": model, "payload": {"seconds": 0.01}}
    answer = api.call("POST", "/queue/submit", json=body, headers={"traceparent": given})
    assert api.ended(answer.json()["job_id"])["status"] == "completed"
    eventually(lambda: len(receiver.seen) > before, "the collector is asked, and refuses")
    receiver.status = 200
    whole(receiver, trace_id, [*_JOB, *_TRY], [SPAN])


def test_commands_are_in_the_trace_that_they_were_called_in(stack: Stack, receiver: Collector, model: str) -> None:
    (by_submit, submit), (by_file, file) = map(_given, ("1", "2"))
    job = {"model": model, "payload": {"seconds": 0.01}}
    lines = stack.home / "jobs.ndjson"
    lines.write_text(f"{json.dumps(job)}\n" * 2)
    _client(stack, ["-m", "app.cli", "submit", model, '{"seconds": 0.01}', "--wait"], TRACEPARENT=submit)
    _client(stack, ["-m", "app.cli", "submit-file", str(lines)], TRACEPARENT=file)
    _client(stack, ["-m", "app.cli", "submit", model, '{"seconds": 0.01}', "--wait"], TRACEPARENT="nonsense\n")
    whole(receiver, by_submit, [*_JOB, *_TRY], [SPAN])
    whole(receiver, by_file, [*_JOB, *_TRY] * 2, [SPAN])
