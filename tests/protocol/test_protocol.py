"""The slot protocol, over HTTP alone: any server that wraps the model of gates.py can be put to it."""

import http.client
import json
import time
from urllib.parse import urlsplit

import pytest
import requests

from tests.protocol.support import Served, Stage, a_job_id, until

# Answers to a call


def test_a_call_is_answered_with_the_functions_result(served: Served):
    answer = served.dispatch({"prompt": "a cat"})
    assert answer.status_code == 200
    ended = served.outcome(answer)
    assert (ended["status"], ended["result"]) == ("completed", {"echo": {"prompt": "a cat"}})


def test_the_first_answer_is_that_of_the_mode(stage: Stage):
    answer = stage.served.dispatch({"prompt": "a cat"}).json()
    if stage.served.mode == "sync":
        assert answer == {"status": "success", "result": {"echo": {"prompt": "a cat"}}}
    else:
        assert answer["status"] == "processing"
        assert answer["job_id"]


def test_an_async_run_is_processing_until_it_ends(stage: Stage):
    if stage.served.mode != "async":
        pytest.skip("async only")
    run = stage.begin()
    job_id = run.answer.result(10).json()["job_id"]
    assert stage.served.status(job_id).json()["status"] == "processing"
    run.finish()
    assert stage.served.ended(job_id)["status"] in ("success", "completed", "done")


def test_an_error_of_the_function_may_be_tried_again(served: Served):
    answer = served.dispatch({"fail": "error"})
    assert answer.status_code == (500 if served.mode == "sync" else 200)
    ended = served.outcome(answer)
    assert ended["status"] == "failed"
    assert ended["error"]
    assert ended.get("retryable", True) is True


def test_a_wrong_request_is_final(served: Served):
    answer = served.dispatch({"fail": "invalid"})
    assert answer.status_code == (422 if served.mode == "sync" else 200)
    ended = served.outcome(answer)
    assert (ended["status"], ended["retryable"]) == ("failed", False)
    assert ended["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"no JSON", b"\xff\xfe"])
def test_a_body_that_is_no_json_is_refused_in_json(served: Served, body: bytes):
    answer = requests.post(served.url + served.endpoint, data=body, headers={"X-Source": "dispatcher"}, timeout=5)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]
    assert "Traceback" not in answer.text


def test_a_refused_body_takes_no_slot(served: Served):
    requests.post(served.url + served.endpoint, data=b"{", headers={"X-Source": "dispatcher"}, timeout=5)
    assert served.health()["active_jobs"] == 0


# Slots


def test_as_many_run_at_once_as_there_are_slots_and_not_one_more(stage: Stage):
    """SLOT-1"""
    runs = stage.fill()
    answer = stage.served.dispatch(stage.payload())
    assert answer.status_code == 503
    assert stage.gate.nobody_waits()
    assert stage.served.health()["active_jobs"] == len(runs)


def test_a_full_server_tells_the_dispatcher_that_it_is_busy(stage: Stage):
    """R64, R67"""
    stage.fill()
    answer = stage.served.dispatch(stage.payload())
    assert (answer.status_code, answer.json()["status"]) == (503, "busy")
    assert int(answer.headers["Retry-After"]) >= 1


def test_a_slot_serves_again_after_each_way_to_end(stage: Stage):
    for how in ("return", "error", "invalid"):
        for run in stage.fill():
            run.finish(how)
    assert stage.served.health()["active_jobs"] == 0
    assert stage.begin().finish()["status"] == "completed"


# Direct calls


def test_a_direct_call_runs_at_once_when_a_slot_is_free(stage: Stage):
    assert stage.begin_direct().finish()["status"] == "completed"


def test_a_direct_call_to_a_full_server_waits_and_is_told_its_place(stage: Stage):
    """R65"""
    stage.fill()
    answers = [stage.served.generate(stage.payload()) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.json()["status"] for answer in answers] == ["queued", "queued"]
    assert [answer.json()["position"] for answer in answers] == [1, 2]
    assert stage.served.status(answers[1].json()["job_id"]).json()["position"] == 2


def test_the_direct_queue_is_bounded(stage: Stage):
    """R65"""
    stage.fill()
    for _ in range(stage.served.max_direct_queue):
        stage.queue()
    answer = stage.served.generate(stage.payload())
    assert (answer.status_code, answer.json()["error"]) == (503, "Queue full")
    assert stage.served.health()["direct_queue"] == stage.served.max_direct_queue


def test_direct_calls_run_in_the_order_in_which_they_came(stage: Stage):
    running = stage.fill()
    waiting = [stage.queue(name) for name in ("first", "second", "third")]
    running[0].finish()
    for name, job_id in zip(("first", "second", "third"), waiting, strict=True):
        held = stage.gate.arrival()
        assert held.name == name
        held.release()
        assert stage.served.ended(job_id)["result"]["echo"]["name"] == name


def test_the_direct_queue_drains_before_dispatcher_traffic_gets_a_slot(stage: Stage):
    """R43: at every moment between the first direct call that waits and the last one that ends."""
    running = stage.fill()
    waiting = [stage.queue(name) for name in ("first", "second")]
    running[0].finish()
    for name in ("first", "second"):
        held = stage.gate.arrival()
        assert held.name == name
        assert stage.served.dispatch(stage.payload("dispatcher")).status_code == 503
        held.release()
    stage.served.ended(waiting[1])
    assert stage.begin().finish()["status"] == "completed"


# Health


def test_health_counts_runs_that_run_and_names_each_by_the_dispatchers_id(stage: Stage):
    runs = stage.fill()
    now = stage.served.health()
    assert now["active_jobs"] == len(runs)
    assert sorted(now["job_ids"]) == sorted(run.job for run in runs)


def test_health_counts_no_job_that_only_waits(stage: Stage):
    runs = stage.fill()
    job_id = stage.queue()
    now = stage.served.health()
    assert (now["active_jobs"], now["direct_queue"]) == (len(runs), 1)
    assert job_id not in now["job_ids"]


def test_health_answers_while_every_slot_runs_and_calls_wait(stage: Stage):
    stage.fill()
    for _ in range(stage.served.max_direct_queue):
        stage.queue()
    for _ in range(20):
        assert requests.get(f"{stage.served.url}/health", timeout=1).status_code == 200


def test_a_run_is_gone_from_health_when_its_end_is_known(stage: Stage):
    run = stage.begin()
    run.finish()
    assert run.job not in stage.served.health()["job_ids"]


# Status


def test_an_unknown_id_is_not_found(served: Served):
    answer = served.status("nobody-has-this-id")
    assert (answer.status_code, answer.json()["status"]) == (404, "unknown")


def test_a_run_is_found_by_job_and_attempt(stage: Stage):
    """A dispatcher that died before it saved the server's id asks for this one."""
    stage.served.needs("ids")
    run = stage.begin(attempt=3)
    assert stage.served.status(f"{run.job}.3").json()["status"] == "processing"
    run.finish()
    assert stage.served.ended(f"{run.job}.3")["result"]["echo"]["name"] == run.job


def test_the_dispatchers_own_id_finds_the_newest_attempt(stage: Stage):
    stage.served.needs("ids")
    job = a_job_id()
    stage.begin(job, attempt=1).finish("error")
    assert stage.served.status(job).json()["status"] == "failed"
    stage.begin(job, attempt=2).finish()
    assert stage.served.status(job).json()["status"] == "completed"
    assert stage.served.status(f"{job}.1").json()["status"] == "failed"


# Cancel


def test_canceling_an_unknown_id_is_not_found(served: Served):
    served.needs("cancel")
    answer = served.cancel("nobody-has-this-id")
    assert (answer.status_code, answer.json()["status"]) == (404, "unknown")


def test_a_direct_call_that_waits_is_dropped_by_a_cancel(stage: Stage):
    stage.served.needs("cancel")
    running = stage.fill()
    first, second = stage.queue("first"), stage.queue("second")
    assert stage.served.cancel(first).json()["status"] == "canceled"
    assert stage.served.health()["direct_queue"] == 1
    assert stage.served.status(first).json()["status"] == "canceled"
    running[0].finish()
    assert stage.gate.arrival().name == "second"
    assert stage.served.status(second).json()["status"] == "processing"


@pytest.mark.parametrize("suffix", ["", ".1"], ids=["the dispatcher's id", "the run's id"])
def test_a_run_can_be_canceled(stage: Stage, suffix: str):
    stage.served.needs("cancel")
    run = stage.begin()
    assert stage.served.cancel(run.job + suffix).json()["status"] in ("canceling", "canceled")
    assert run.outcome()["status"] == "canceled"
    assert run.job not in stage.served.health()["job_ids"]


def test_a_cancel_changes_nothing_about_a_run_that_has_ended(stage: Stage):
    stage.served.needs("cancel")
    run = stage.begin()
    run.finish()
    assert stage.served.cancel(run.job).json()["status"] == "completed"
    assert stage.served.status(run.job).json()["status"] == "completed"


# Idempotency


def test_a_completed_call_is_answered_again_without_another_run(stage: Stage):
    stage.served.needs("idempotency")
    job = a_job_id()
    key = {"Idempotency-Key": job}
    first = stage.begin(job, **key).finish()
    again = stage.served.outcome(stage.served.dispatch(stage.payload(), job, attempt=2, **key))
    assert again["result"] == first["result"]
    assert stage.gate.nobody_waits()


def test_a_repeated_call_joins_the_run_and_takes_no_second_slot(stage: Stage):
    stage.served.needs("idempotency")
    job = a_job_id()
    key = {"Idempotency-Key": job}
    run = stage.begin(job, **key)
    joined = stage.later(lambda: stage.served.dispatch(stage.payload(), job, attempt=2, **key))
    if stage.served.mode == "async":
        assert joined.result(10).json()["job_id"] == run.answer.result(10).json()["job_id"]
    assert stage.served.health()["active_jobs"] == 1
    first = run.finish()
    assert stage.served.outcome(joined.result(10))["result"] == first["result"]
    assert stage.gate.nobody_waits()


def test_a_repeated_call_joins_even_when_every_slot_is_taken(stage: Stage):
    """Told "busy", the dispatcher would send it elsewhere, and it would run twice."""
    stage.served.needs("idempotency")
    job = a_job_id()
    key = {"Idempotency-Key": job}
    run = stage.begin(job, **key)
    for _ in range(stage.served.slots - 1):
        stage.begin()
    joined = stage.later(lambda: stage.served.dispatch(stage.payload(), job, attempt=2, **key))
    first = run.finish()
    answer = joined.result(10)
    assert answer.status_code == 200
    assert stage.served.outcome(answer)["result"] == first["result"]


@pytest.mark.parametrize("how", ["error", "invalid"])
def test_a_failed_run_is_not_remembered(stage: Stage, how: str):
    stage.served.needs("idempotency")
    job = a_job_id()
    key = {"Idempotency-Key": job}
    assert stage.begin(job, attempt=1, **key).finish(how)["status"] == "failed"
    assert stage.begin(job, attempt=2, **key).finish()["status"] == "completed"


# The connection


def test_a_connection_serves_many_calls_without_delay(served: Served):
    """An answer in two packets on a socket without TCP_NODELAY costs 40 ms each time: 2 s in all."""
    parts = urlsplit(served.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
    connection.request("GET", "/health")
    connection.getresponse().read()
    sock, started = connection.sock, time.monotonic()
    for _ in range(50):
        connection.request("GET", "/health")
        json.loads(connection.getresponse().read())
        assert connection.sock is sock
    assert time.monotonic() - started < 1.5
    connection.close()


def test_a_caller_that_hangs_up_does_not_take_its_slot_along(stage: Stage):
    parts = urlsplit(stage.served.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
    headers = {"X-Source": "dispatcher", "X-Job-Id": a_job_id(), "X-Attempt": "1"}
    connection.request("POST", stage.served.endpoint, json.dumps(stage.payload()), headers)
    held = stage.gate.arrival()
    connection.close()
    held.release()
    until(lambda: stage.served.health()["active_jobs"] == 0, "the slot's return")
