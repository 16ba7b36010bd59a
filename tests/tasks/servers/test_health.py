import orjson
import pytest

from tasks.servers.call import HealthKind
from tasks.servers.description import HealthStep
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.rules import compile_health


def health(body, status=200, **step):
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return compile_health(HealthStep.model_validate(step)).read(Response(status, {}, raw))


def test_the_count_alone_must_do():
    found = health({"active_jobs": 2})
    assert (found.kind, found.active_jobs, found.job_ids) == (HealthKind.UP, 2, None)


def test_the_ids_alone_are_counted():
    assert health({"job_ids": ["a", "b"]}).active_jobs == 2


def test_no_count_is_not_zero():
    found = health({"status": "ok"})
    assert (found.kind, found.active_jobs, found.job_ids) == (HealthKind.UP, None, None)


@pytest.mark.parametrize("count", [-1, True, "2", 1.5, [], {}, 10**12])
def test_a_count_that_is_no_count_is_garbage(count):
    assert health({"active_jobs": count}).kind is HealthKind.GARBAGE


@pytest.mark.parametrize("ids", ["a", {"a": 1}, [None], [["a"]], [True], 1])
def test_ids_that_are_no_ids_are_garbage(ids):
    found = health({"active_jobs": 1, "job_ids": ids})
    assert (found.kind, found.active_jobs) == (HealthKind.GARBAGE, None)


@pytest.mark.parametrize("body", [b"", b"<html>", b"NaN"])
def test_a_described_health_that_is_not_json_is_garbage(body):
    assert health(body).kind is HealthKind.GARBAGE


def test_a_health_that_promises_nothing_needs_no_body():
    assert health(b"", active=None, job_ids=None).kind is HealthKind.UP


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
def test_a_refused_health_tells_by_its_status(status, kind):
    found = health({"active_jobs": 0, "job_ids": []}, status)
    assert (found.kind, found.active_jobs, found.job_ids) == (kind, None, None)


@pytest.mark.parametrize(("how", "kind"), [("timeout", "busy"), ("connect", "down"), ("reset", "down")])
def test_a_broken_health_tells_by_how_it_broke(how, kind):
    assert compile_health(HealthStep()).read(NoResponse(FailureReason(how))).kind == kind


def test_a_list_can_be_counted_and_its_elements_name_the_jobs():
    queue = {"running": [[0, "p1", {}], [1, "p2", {}]]}
    found = health(queue, active={"count": "/running"}, job_ids="/running", job_ids_item="/1")
    assert (found.active_jobs, found.job_ids) == (2, frozenset({"p1", "p2"}))


@pytest.mark.parametrize(
    ("body", "active", "ids"),
    [
        ({"running": [["p1"]], "waiting": [["p2"], ["p3"]]}, 3, frozenset({"p1", "p2", "p3"})),
        ({"running": [["p1"]], "waiting": []}, 1, frozenset({"p1"})),
        ({"running": [["p1"]]}, None, None),
    ],
)
def test_what_runs_and_what_waits_can_be_added_up(body, active, ids):
    found = health(
        body, active={"count": ["/running", "/waiting"]}, job_ids=["/running", "/waiting"], job_ids_item="/0"
    )
    assert (found.active_jobs, found.job_ids) == (active, ids)


def test_numbers_and_metrics_can_be_added_up():
    assert health({"run": 2, "wait": 3}, active={"pointer": ["/run", "/wait"]}, job_ids=None).active_jobs == 5
    assert health(METRICS, active={"metric": ["plain", "vllm:num_requests_running"]}).active_jobs == 7
    assert health(METRICS, active={"metric": ["plain", "absent"]}).active_jobs is None


METRICS = b"""# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a}b"} 2.0
vllm:num_requests_running{engine="1"} 1 1700000000
vllm:num_requests_running_total 99
plain 4
broken NaN
"""


@pytest.mark.parametrize(
    ("metric", "active"), [("vllm:num_requests_running", 3), ("plain", 4), ("absent", None), ("broken", None)]
)
def test_a_metric_is_summed_over_its_labels(metric, active):
    found = health(METRICS, active={"metric": metric}, running=False)
    assert (found.kind, found.active_jobs, found.running_count) == (HealthKind.UP, active, False)


def test_a_word_in_the_body_can_tell():
    rules = [
        {"if": {"pointer": "/status", "value": "BUSY"}, "then": "busy"},
        {"if": {"pointer": "/status", "value": ["SETUP_FAILED", "DEFUNCT"]}, "then": "down"},
    ]
    kinds = [health({"status": word}, rules=rules).kind for word in ("READY", "BUSY", "DEFUNCT")]
    assert kinds == [HealthKind.UP, HealthKind.BUSY, HealthKind.DOWN]


def test_a_rule_can_say_that_a_place_is_free_which_is_no_count():
    ready = {"if": {"pointer": "/status", "value": "READY"}, "then": "idle"}
    found = health({"status": "READY"}, rules=[ready])
    assert (found.kind, found.is_idle, found.active_jobs) == (HealthKind.UP, True, None)
    busy = {"if": {"pointer": "/status", "value": "BUSY"}, "then": "busy"}
    found = health({"status": "BUSY"}, rules=[ready, busy])
    assert (found.kind, found.is_idle, found.active_jobs) == (HealthKind.BUSY, False, None)


@pytest.mark.parametrize(
    ("body", "started", "found"),
    [
        ({"at": "2026-11-24T10:00:00Z"}, {"pointer": "/at"}, "2026-11-24T10:00:00Z"),
        ({"at": 17.5}, {"pointer": "/at"}, "17.5"),
        ({"at": None}, {"pointer": "/at"}, None),
        (b"process_start_time_seconds 1.7e9\nrunning 1\n", {"metric": "process_start_time_seconds"}, "1.7e9"),
        (b"running 1\n", {"metric": "process_start_time_seconds"}, None),
    ],
)
def test_what_tells_a_process_from_others_is_read(body, started, found):
    active = {"metric": "running"} if isinstance(body, bytes) else {"pointer": "/active_jobs"}
    assert health(body, started=started, active=active).started == found
