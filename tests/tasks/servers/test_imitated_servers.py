"""The rules that every server must follow, tested with imitations of real servers, each with its description.

To add a server, add an Imitation with its description as it is stored, and with the responses of the real server.
Nothing else changes: a description is data, without code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from tasks.servers import Description, HealthKind, RunDetails, ServerAdapter, compile_description, from_shorthand
from tasks.servers.responses import Response
from tests.support.blocking import Blocking
from tests.support.scripted import Scripted, Seen, answer

CALL = RunDetails("job-1", 1, {"prompt": "a cat"}, callback_url="http://me/cb", deadline_s=5.0)
RESULT = {"image": "x"}
HTML = answer(b"<html>", 502)


@dataclass(frozen=True)
class Imitation:
    """An imitation of one server: its description, and its response to a request in a situation."""

    name: str
    description: Description
    respond: Callable[[str, Seen], bytes]  # situation, request -> response
    healthy: bytes  # response to a health check
    endpoint: str = "/generate"
    situations: set[str] = field(default_factory=set)  # besides done, failed and busy
    running_jobs: int | None = None  # number of jobs in the healthy response

    def __str__(self) -> str:
        return self.name


def _describe(**parts: Any) -> Description:
    stored = Description.model_validate(parts).model_dump_json()  # as the database stores it
    return Description.model_validate_json(stored)


def _slot_protocol(situation: str, request: Seen) -> bytes:
    if request.method == "POST":
        return {
            "busy": answer({"error": "no free slot"}, 503, Retry_After="2"),
            "wrong": answer({"error": "prompt is missing"}, 422),
        }.get(situation) or answer({"status": "processing", "job_id": "srv-1"})
    return {
        "done": answer({"status": "completed", "result": RESULT}),
        "failed": answer({"status": "failed", "error": "boom"}),
        "running": answer({"status": "processing", "job_id": "srv-1"}),
        "forgotten": answer({"error": "unknown job"}, 404),
        "poll refused": answer({"error": "slow down"}, 429),
    }[situation]


def _own_fields(situation: str, request: Seen) -> bytes:
    if request.method == "POST":
        return answer(b"", 503) if situation == "busy" else answer({"request_id": 17})
    assert request.path == "/v1/jobs/17"
    return {
        "done": answer({"status": "done", "result": RESULT}),
        "failed": answer({"status": "error"}),
        "running": answer({"status": "running"}),
    }[situation]


COG = _describe(
    mode="sync",
    given_id="{{job/attempt_id}}",
    submit={
        "method": "PUT",
        "path": "/predictions/{{job/attempt_id}}",
        "body": {"input": "{{payload}}"},
        "rules": [{"if": {"pointer": "/status", "value": "succeeded"}, "then": "done"}],
        "result": "/output",
    },
    cancel={"path": "/predictions/{{id}}/cancel", "frees_slot": "eventual"},
    health={
        "path": "/health-check",
        "active": None,
        "job_ids": None,
        "rules": [
            {"if": {"pointer": "/status", "value": ["BUSY", "STARTING"]}, "then": "busy"},
            {"if": {"pointer": "/status", "value": ["SETUP_FAILED", "DEFUNCT"]}, "then": "down"},
        ],
    },
)


def _cog(situation: str, request: Seen) -> bytes:
    assert request.path == "/predictions/job-1-1" and request.json == {"input": CALL.payload}
    return {
        "done": answer({"id": "job-1-1", "status": "succeeded", "output": RESULT}),
        "failed": answer({"id": "job-1-1", "status": "failed", "error": "boom", "output": None}),
        "busy": answer({"detail": "Already running a prediction"}, 409),
        "wrong": answer({"detail": [{"loc": ["body", "input"], "msg": "field required"}]}, 422),
    }[situation]


TORCHSERVE = _describe(
    mode="sync",
    submit={
        "rules": [
            {"if": {"status": 200}, "then": "done"},
            {"if": {"status": 503, "pointer": "/type", "value": "InternalServerException"}, "then": "retry"},
        ],
        "result": "",
    },
    health={"path": "/metrics", "active": {"metric": "queue_length"}, "running": False},
    cancel=None,
)


def _torchserve(situation: str, _request: Seen) -> bytes:
    return {
        "done": answer(RESULT),
        "failed": answer({"code": 503, "type": "InternalServerException", "message": "Prediction failed"}, 503),
        "busy": answer({"code": 503, "type": "ServiceUnavailableException", "message": "No worker is available"}, 503),
        "wrong": answer({"code": 400, "type": "BadRequestException", "message": "no input"}, 400),
    }[situation]


COMFYUI = _describe(
    mode="async",
    given_id="{{job/attempt_id}}",
    submit={
        "path": "/prompt",
        "body": {"prompt": "{{payload}}", "prompt_id": "{{job/attempt_id}}"},
        "id": "/prompt_id",
    },
    status=[
        {
            "path": "/history/{{id}}",
            "result": "/{{id}}/outputs",
            "rules": [
                {"if": {"pointer": "/{{id}}/status/status_str", "value": "success"}, "then": "done"},
                {"if": {"pointer": "/{{id}}/status/status_str", "value": "error"}, "then": "retry"},
                {"if": {"status": 200, "pointer": ""}, "then": "next"},  # {}: queued, running or unknown
            ],
        },
        {
            "path": "/queue",
            "rules": [
                {"if": {"status": 200, "mentions_id": True}, "then": "pending"},
                {"if": {"status": 200, "pointer": "/queue_running"}, "then": "lost"},
            ],
        },
    ],
    health={
        "path": "/queue",
        "active": {"count": "/queue_running"},
        "job_ids": "/queue_running",
        "job_ids_item": "/1",
    },
)


def _comfyui(situation: str, request: Seen) -> bytes:
    if request.method == "POST":
        assert request.json == {"prompt": CALL.payload, "prompt_id": "job-1-1"}
        return {
            "busy": answer(b"", 503),
            "wrong": answer({"error": {"type": "invalid_prompt", "message": "bad graph"}, "node_errors": {}}, 400),
        }.get(situation) or answer({"prompt_id": "job-1-1", "number": 3, "node_errors": {}})
    if request.path == "/queue":
        running = [[3, "job-1-1", {}, {}, []]] if situation == "running" else [[4, "job-1-11", {}, {}, []]]
        return answer({"queue_running": running, "queue_pending": []})
    return {
        "done": answer({"job-1-1": {"outputs": RESULT, "status": {"status_str": "success", "completed": True}}}),
        "failed": answer({"job-1-1": {"outputs": {}, "status": {"status_str": "error", "completed": False}}}),
        "poll refused": HTML,
    }.get(situation) or answer({})


RUNPOD = _describe(
    mode="async",
    submit={
        "path": "/run",
        "body": {"input": "{{payload}}"},
        "id": "/id",
        "rules": [{"if": {"pointer": "/status", "value": ["IN_QUEUE", "IN_PROGRESS"]}, "then": "pending"}],
    },
    status={
        "result": "/output",
        "rules": [
            {"if": {"pointer": "/status", "value": "COMPLETED"}, "then": "done"},
            {"if": {"pointer": "/error", "value": "Job ID not found"}, "then": "lost"},  # its status is 200, too
            {"if": {"pointer": "/status", "value": ["FAILED", "TIMED_OUT"]}, "then": "retry"},
            {"if": {"pointer": "/status", "value": "CANCELLED"}, "then": "canceled"},
            {"if": {"pointer": "/status", "value": ["IN_QUEUE", "IN_PROGRESS"]}, "then": "pending"},
        ],
    },
    health=None,
)


def _runpod(situation: str, request: Seen) -> bytes:
    if request.method == "POST":
        return answer(b"", 429) if situation == "busy" else answer({"id": "test-1", "status": "IN_PROGRESS"})
    return {
        "done": answer({"id": "test-1", "status": "COMPLETED", "output": RESULT}),
        "failed": answer({"id": "test-1", "status": "FAILED", "error": "boom"}),
        "running": answer({"id": "test-1", "status": "IN_PROGRESS"}),
        "forgotten": answer({"id": "test-1", "status": "FAILED", "error": "Job ID not found"}),
        "another": answer({"id": "test-2", "status": "COMPLETED", "output": "not ours"}),
    }[situation]


BENTOML = _describe(
    mode="async",
    submit={
        "path": "/generate/submit",
        "id": "/task_id",
        "rules": [{"if": {"pointer": "/task_id"}, "then": "pending"}],
    },
    status={
        "path": "/generate/status?task_id={{id}}",
        "rules": [{"if": {"pointer": "/status", "value": "failure"}, "then": "retry"}],
    },
    result={"path": "/generate/get?task_id={{id}}", "result": ""},
    cancel={"method": "PUT", "path": "/generate/cancel?task_id={{id}}", "frees_slot": "no"},
    health={"path": "/readyz", "active": None, "job_ids": None},
)


def _bentoml(situation: str, request: Seen) -> bytes:
    if request.method == "POST":
        return answer(b"Too many requests", 429) if situation == "busy" else answer({"task_id": "t 1"})
    assert request.path.endswith("?task_id=t%201")
    if "/get" in request.path:
        return answer(RESULT)
    return {
        "done": answer({"task_id": "t 1", "status": "success"}),
        "failed": answer({"task_id": "t 1", "status": "failure"}),
        "running": answer({"task_id": "t 1", "status": "in_progress"}),
        "poll refused": answer(b"Too many requests", 429),  # refused because the job is running
        "forgotten": answer({"error": "task not found"}, 404),
    }[situation]


KSERVE = _describe(
    mode="sync",
    submit={
        "path": "/v2/models/cat/infer",
        "body": {"id": "{{job/attempt_id}}", "inputs": ["{{payload/prompt}}"]},
        "rules": [
            {"if": {"status": 200}, "then": "done"},
            {"if": {"status": 500, "text": "unexpected (shape|datatype)"}, "then": "failed"},
        ],
        "result": "/outputs/0",
    },
    health={"path": "/v2/models/cat/ready", "active": None, "job_ids": None},
)


def _kserve(situation: str, request: Seen) -> bytes:
    assert request.json["id"] == "job-1-1"
    return {
        "done": answer({"id": "job-1-1", "outputs": [RESULT]}),
        "failed": answer({"error": "CUDA error"}, 500),
        "busy": answer({"error": "exceeds maximum queue size"}, 503),
        "wrong": answer({"error": "unexpected shape for input 'x'"}, 500),
    }[situation]


IMITATIONS = [
    Imitation(
        "slot protocol",
        Description(),
        _slot_protocol,
        answer({"active_jobs": 2, "job_ids": ["a", "b"]}),
        situations={"running", "forgotten", "poll refused", "wrong"},
        running_jobs=2,
    ),
    Imitation(
        "slot protocol with own fields",
        from_shorthand("async", "/v1/jobs/{id}", "request_id"),
        _own_fields,
        answer({"active_jobs": 0}),
        situations={"running"},
        running_jobs=0,
    ),
    Imitation("cog", COG, _cog, answer({"status": "READY"}), situations={"wrong"}),
    Imitation(
        "torchserve",
        TORCHSERVE,
        _torchserve,
        answer(b'# TYPE queue_length gauge\nqueue_length{model="m"} 3\n'),
        situations={"wrong"},
        running_jobs=3,
    ),
    Imitation(
        "comfyui",
        COMFYUI,
        _comfyui,
        answer({"queue_running": [[3, "p1", {}]], "queue_pending": []}),
        situations={"running", "forgotten", "poll refused", "wrong"},
        running_jobs=1,
    ),
    Imitation("runpod", RUNPOD, _runpod, answer(b""), situations={"running", "forgotten", "another"}),
    Imitation("bentoml", BENTOML, _bentoml, answer(b""), situations={"running", "forgotten", "poll refused"}),
    Imitation("kserve v2", KSERVE, _kserve, answer(b""), situations={"wrong"}),
]


def imitations_with(situation: str) -> list[Imitation]:
    return [imitation for imitation in IMITATIONS if situation in imitation.situations]


@pytest.fixture
def run() -> Iterator[Callable[[Imitation, str], Outcome]]:
    """Return a function that submits a job to an imitation, polls it once if it is pending, and returns the outcome."""

    def run_job(imitation: Imitation, situation: str) -> Outcome:
        with Scripted(lambda request: imitation.respond(situation, request)) as http_server:
            endpoint = http_server.url + imitation.endpoint
            server = Blocking(ServerAdapter(endpoint, compile_description(imitation.description)))
            outcome = server.submit(CALL)
            if outcome.kind is OutcomeKind.PENDING:
                assert outcome.remote_id
                outcome = server.status(CALL, outcome.remote_id)
            return outcome

    yield run_job


@pytest.mark.parametrize("imitation", IMITATIONS, ids=str)
def test_a_job_that_succeeds_is_done_with_its_result(imitation, run):
    assert run(imitation, "done") == Outcome(OutcomeKind.DONE, result=RESULT)


@pytest.mark.parametrize("imitation", IMITATIONS, ids=str)
def test_a_full_server_costs_the_job_nothing(imitation, run):
    assert run(imitation, "busy").kind is OutcomeKind.BUSY


@pytest.mark.parametrize("imitation", IMITATIONS, ids=str)
def test_a_job_that_fails_at_the_server_costs_a_retry(imitation, run):
    assert run(imitation, "failed").kind is OutcomeKind.RETRY


@pytest.mark.parametrize("imitation", imitations_with("wrong"), ids=str)
def test_an_invalid_request_fails_the_job(imitation, run):
    assert run(imitation, "wrong").kind is OutcomeKind.FAILED


@pytest.mark.parametrize("imitation", imitations_with("running"), ids=str)
def test_a_running_job_is_pending(imitation, run):
    outcome = run(imitation, "running")
    assert outcome.kind is OutcomeKind.PENDING and outcome.code == ""


@pytest.mark.parametrize("imitation", imitations_with("poll refused"), ids=str)
def test_a_refused_poll_leaves_the_job_pending(imitation, run):
    outcome = run(imitation, "poll refused")
    assert (outcome.kind, outcome.code) == (OutcomeKind.PENDING, "poll_failed")


@pytest.mark.parametrize("imitation", imitations_with("forgotten"), ids=str)
def test_a_job_that_the_server_does_not_know_is_lost(imitation, run):
    assert run(imitation, "forgotten").kind is OutcomeKind.LOST


@pytest.mark.parametrize("imitation", imitations_with("another"), ids=str)
def test_the_result_of_another_job_is_ignored(imitation, run):
    outcome = run(imitation, "another")
    assert (outcome.kind, outcome.result) == (OutcomeKind.PENDING, None)


@pytest.mark.parametrize("imitation", [imitation for imitation in IMITATIONS if imitation.description.health], ids=str)
def test_a_healthy_server_is_up_with_its_number_of_jobs(imitation):
    with Scripted(lambda _request: imitation.healthy) as http_server:
        health = Blocking(ServerAdapter(http_server.url + imitation.endpoint, imitation.description)).health()
    assert (health.kind, health.active_jobs) == (HealthKind.UP, imitation.running_jobs)


@pytest.mark.parametrize("imitation", IMITATIONS, ids=str)
def test_a_server_that_closes_the_connection_leaves_the_outcome_unknown(imitation):
    def close_connection(sock: Any) -> None:
        raise ConnectionAbortedError

    with Scripted(lambda _request: close_connection) as http_server:
        server = Blocking(ServerAdapter(http_server.url + imitation.endpoint, imitation.description))
        assert server.submit(CALL).kind is OutcomeKind.UNKNOWN


def test_a_busy_cog_is_not_down():
    with Scripted(lambda _request: answer({"status": "BUSY"})) as http_server:
        assert Blocking(ServerAdapter(http_server.url, COG)).health().kind is HealthKind.BUSY


def test_cog_can_push_its_result():
    description = _describe(
        mode="callback",
        given_id="{{job/attempt_id}}",
        submit={
            "method": "PUT",
            "path": "/predictions/{{job/attempt_id}}",
            "headers": {"Prefer": "respond-async"},
            "body": {"input": "{{payload}}", "webhook": "{{callback_url}}", "webhook_events_filter": ["completed"]},
            "id": "/id",
        },
        callback={"rules": [{"if": {"pointer": "/status", "value": "succeeded"}, "then": "done"}], "result": "/output"},
    )
    with Scripted(lambda _request: answer({"id": "job-1-1", "status": "starting"}, 202)) as http_server:
        server = Blocking(ServerAdapter(http_server.url, description))
        accepted = server.submit(CALL)
        assert accepted == Outcome(OutcomeKind.PENDING, remote_id="job-1-1")
        (request,) = http_server.seen
        assert request.json["webhook"] == "http://me/cb" and request.headers["prefer"] == "respond-async"
        push = Response(200, {}, b'{"id":"job-1-1","status":"succeeded","output":[1]}')
        pushed = server.read_push(CALL, accepted.remote_id, push)
    assert pushed == Outcome(OutcomeKind.DONE, result=[1])
