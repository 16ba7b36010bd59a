import orjson
import pytest

from tasks.servers.compiled import compile_description
from tasks.servers.description import Description, HealthStep
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.rules import HealthJudge
from tasks.servers.values import HealthKind

METRICS = b"""# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a}b"} 2.0
vllm:num_requests_running{engine="1"} 1 1700000000
vllm:num_requests_running_total 99
plain 4
broken NaN
"""


def _judge(step: HealthStep) -> HealthJudge:
    health = compile_description(Description(health=step)).health
    assert health is not None
    return health.judge


def read_health(body, status=200, **step):
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return _judge(HealthStep.model_validate(step)).read(Response(status, {}, raw))


def test_a_count_without_ids_is_enough():
    report = read_health({"active_jobs": 2})
    assert (report.kind, report.active_jobs, report.job_ids) == (HealthKind.UP, 2, None)


def test_ids_without_a_count_are_counted():
    assert read_health({"job_ids": ["a", "b"]}).active_jobs == 2


def test_a_missing_count_is_not_zero():
    report = read_health({"status": "ok"})
    assert (report.kind, report.active_jobs, report.job_ids) == (HealthKind.UP, None, None)


@pytest.mark.parametrize("count", [-1, True, "2", 1.5, [], {}, 10**12])
def test_an_invalid_count_is_garbage(count):
    assert read_health({"active_jobs": count}).kind is HealthKind.GARBAGE


@pytest.mark.parametrize("ids", ["a", {"a": 1}, [None], [["a"]], [True], 1])
def test_invalid_ids_are_garbage(ids):
    report = read_health({"active_jobs": 1, "job_ids": ids})
    assert (report.kind, report.active_jobs) == (HealthKind.GARBAGE, None)


@pytest.mark.parametrize("body", [b"", b"<html>", b"NaN"])
def test_a_report_with_described_values_that_is_not_json_is_garbage(body):
    assert read_health(body).kind is HealthKind.GARBAGE


@pytest.mark.parametrize("kind", ["down", "busy"])
def test_a_health_rule_that_matches_needs_no_report(kind):
    rule = {"if": {"text": "SETUP_FAILED"}, "then": kind}
    assert read_health(b"SETUP_FAILED: no weights", rules=[rule]).kind is HealthKind(kind)


def test_a_report_without_described_values_needs_no_body():
    assert read_health(b"", active=None, job_ids=None).kind is HealthKind.UP


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (503, "busy"),
        (429, "busy"),
        (502, "down"),
        (500, "garbage"),
        (404, "foreign"),
        (401, "foreign"),
        (302, "foreign"),
    ],
)
def test_the_state_of_an_error_response_depends_on_its_status(status, kind):
    report = read_health({"active_jobs": 0, "job_ids": []}, status)
    assert (report.kind, report.active_jobs, report.job_ids) == (kind, None, None)


@pytest.mark.parametrize(("reason", "kind"), [("timeout", "busy"), ("connect", "down"), ("reset", "down")])
def test_the_state_without_a_response_depends_on_the_failure(reason, kind):
    assert _judge(HealthStep()).read(NoResponse(FailureReason(reason))).kind == kind


def test_a_list_can_be_counted_and_its_elements_contain_the_ids():
    queue = {"running": [[0, "p1", {}], [1, "p2", {}]]}
    report = read_health(queue, active={"count": "/running"}, job_ids="/running", job_ids_item="/1")
    assert (report.active_jobs, report.job_ids) == (2, frozenset({"p1", "p2"}))


@pytest.mark.parametrize(
    ("body", "active", "ids"),
    [
        ({"running": [["p1"]], "waiting": [["p2"], ["p3"]]}, 3, frozenset({"p1", "p2", "p3"})),
        ({"running": [["p1"]], "waiting": []}, 1, frozenset({"p1"})),
        ({"running": [["p1"]]}, None, None),
    ],
)
def test_lists_of_running_and_waiting_jobs_can_be_summed(body, active, ids):
    report = read_health(
        body, active={"count": ["/running", "/waiting"]}, job_ids=["/running", "/waiting"], job_ids_item="/0"
    )
    assert (report.active_jobs, report.job_ids) == (active, ids)


def test_numbers_and_metrics_can_be_summed():
    assert read_health({"run": 2, "wait": 3}, active={"pointer": ["/run", "/wait"]}, job_ids=None).active_jobs == 5
    assert read_health(METRICS, active={"metric": ["plain", "vllm:num_requests_running"]}).active_jobs == 7
    assert read_health(METRICS, active={"metric": ["plain", "absent"]}).active_jobs is None


@pytest.mark.parametrize(
    ("metric", "active"), [("vllm:num_requests_running", 3), ("plain", 4), ("absent", None), ("broken", None)]
)
def test_a_metric_is_summed_over_its_labels(metric, active):
    report = read_health(METRICS, active={"metric": metric}, running=False)
    assert (report.kind, report.active_jobs, report.running_count) == (HealthKind.UP, active, False)


def test_a_rule_can_read_the_state_from_the_body():
    rules = [
        {"if": {"pointer": "/status", "value": "BUSY"}, "then": "busy"},
        {"if": {"pointer": "/status", "value": ["SETUP_FAILED", "DEFUNCT"]}, "then": "down"},
    ]
    kinds = [read_health({"status": word}, rules=rules).kind for word in ("READY", "BUSY", "DEFUNCT")]
    assert kinds == [HealthKind.UP, HealthKind.BUSY, HealthKind.DOWN]


def test_an_idle_server_is_up_without_a_count():
    ready = {"if": {"pointer": "/status", "value": "READY"}, "then": "idle"}
    report = read_health({"status": "READY"}, rules=[ready])
    assert (report.kind, report.is_idle, report.active_jobs) == (HealthKind.UP, True, None)
    busy = {"if": {"pointer": "/status", "value": "BUSY"}, "then": "busy"}
    report = read_health({"status": "BUSY"}, rules=[ready, busy])
    assert (report.kind, report.is_idle, report.active_jobs) == (HealthKind.BUSY, False, None)


@pytest.mark.parametrize(
    ("body", "started", "expected"),
    [
        ({"at": "2026-11-24T10:00:00Z"}, {"pointer": "/at"}, "2026-11-24T10:00:00Z"),
        ({"at": 17.5}, {"pointer": "/at"}, "17.5"),
        ({"at": None}, {"pointer": "/at"}, None),
        (b"process_start_time_seconds 1.7e9\nrunning 1\n", {"metric": "process_start_time_seconds"}, "1.7e9"),
        (b"running 1\n", {"metric": "process_start_time_seconds"}, None),
    ],
)
def test_the_value_that_identifies_the_process_is_read(body, started, expected):
    active = {"metric": "running"} if isinstance(body, bytes) else {"pointer": "/active_jobs"}
    assert read_health(body, started=started, active=active).started == expected
