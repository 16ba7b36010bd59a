"""The oracle must itself be above suspicion: each act does what it says, and `runs` tells the truth."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests

from tests.support.fake_fleet import (
    CutAfter,
    CutBefore,
    FakeServer,
    Hang,
    Late,
    Refuse,
    Say,
    Trickle,
    Work,
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(slots=2) as running:
        yield running


@pytest.fixture
def polled() -> Iterator[FakeServer]:
    with FakeServer(slots=1, mode="async") as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def send(server: FakeServer, job_id: str, attempt: int = 1, keyed: bool = True, **headers: str) -> requests.Response:
    sent = {"X-Source": "dispatcher", "X-Job-Id": job_id, "X-Attempt": str(attempt), **headers}
    if keyed:
        sent["Idempotency-Key"] = job_id
    return requests.post(server.endpoint, json={"prompt": "x"}, headers=sent, timeout=10)


def health(server: FakeServer) -> Any:
    return requests.get(f"{server.url}/health", timeout=5).json()


def status(server: FakeServer, name: str) -> requests.Response:
    return requests.get(f"{server.url}/status/{name}", timeout=5)


def test_without_a_script_it_does_the_work_and_notes_the_run(server: FakeServer) -> None:
    answer = send(server, "j1", attempt=3)
    assert answer.json() == {"status": "success", "result": {"job": "j1"}}
    (run,) = server.runs
    assert (run.job_id, run.attempt, run.slot, run.outcome) == ("j1", 3, 0, "completed")
    assert run.ended_ns is not None and run.started_ns < run.ended_ns <= time.monotonic_ns()
    assert server.calls[0].body == {"prompt": "x"}


def test_two_runs_have_two_slots_and_a_third_is_told_busy(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    for job in ("j1", "j2"):
        server.script(job, Hang())
    under_way = [pool.submit(send, server, job) for job in ("j1", "j2")]
    assert {server.wait_for("j1").slot, server.wait_for("j2").slot} == {0, 1}
    assert sorted(health(server)["job_ids"]) == ["j1", "j2"]
    assert send(server, "j3").status_code == 503
    server.release("j1")
    server.release("j2")
    assert [answer.result().status_code for answer in under_way] == [200, 200]
    assert server.runs_of("j3") == [] and health(server)["active_jobs"] == 0


def test_one_that_is_not_strict_runs_more_than_it_has_slots_and_says_so(pool: ThreadPoolExecutor) -> None:
    with FakeServer(slots=1, strict=False) as server:
        for job in ("j1", "j2"):
            server.script(job, Hang())
        under_way = [pool.submit(send, server, job) for job in ("j1", "j2")]
        assert server.wait_for("j1").slot == server.wait_for("j2").slot == 0
        assert len(server.active) == 2
        for job in ("j1", "j2"):
            server.release(job)
        assert all(answer.result().ok for answer in under_way)


def test_a_repeated_key_joins_the_run_and_is_later_answered_from_memory(
    server: FakeServer, pool: ThreadPoolExecutor
) -> None:
    server.script("j1", Hang())
    first, second = pool.submit(send, server, "j1"), None
    server.wait_for("j1")
    second = pool.submit(send, server, "j1", 2)
    server.release("j1")
    assert first.result().json() == second.result().json() == send(server, "j1", 3).json()
    assert len(server.runs) == 1


def test_a_run_that_failed_runs_again(server: FakeServer) -> None:
    server.next(Work(ends="error"), Work(ends="invalid"))
    assert [send(server, "j1", n).status_code for n in (1, 2, 3)] == [500, 422, 200]
    assert [run.outcome for run in server.runs] == ["error", "invalid", "completed"]


def test_it_cuts_the_connection_after_the_work_and_remembers_the_result(server: FakeServer) -> None:
    server.next(CutAfter(Work(result={"n": 1})))
    with pytest.raises(requests.ConnectionError):
        send(server, "j1")
    assert [run.outcome for run in server.runs] == ["completed"]
    assert send(server, "j1", 2).json()["result"] == {"n": 1}
    assert len(server.runs) == 1


def test_it_cuts_the_connection_before_the_work_and_nothing_ran(server: FakeServer) -> None:
    server.next(CutBefore())
    with pytest.raises(requests.ConnectionError):
        send(server, "j1")
    assert server.runs == []


def test_a_late_answer_comes_when_the_slot_is_long_free(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    server.script("j1", Late())
    answer: Future[requests.Response] = pool.submit(send, server, "j1")
    run = server.wait_for("j1")
    assert run.done.wait(5) and health(server)["active_jobs"] == 0 and not answer.done()
    server.release("j1")
    assert answer.result().ok


def test_an_answer_trickles(server: FakeServer) -> None:
    server.next(Trickle(every_s=0.005))
    began = time.monotonic()
    assert send(server, "j1").json()["status"] == "success"
    assert time.monotonic() - began > 0.1


@pytest.mark.parametrize("code", [409, 429, 503, 500, 502])
def test_it_refuses_with_any_status_and_runs_nothing(server: FakeServer, code: int) -> None:
    server.next(Refuse(code, retry_after="3"))
    answer = send(server, "j1")
    assert (answer.status_code, answer.headers["Retry-After"]) == (code, "3")
    assert server.runs == [] and send(server, "j1").ok


def test_it_says_what_no_server_should(server: FakeServer) -> None:
    server.next(Say(b"<html>"))
    assert send(server, "j1").text == "<html>"


def test_a_storm_hits_everything_and_passes(server: FakeServer) -> None:
    server.storm(60, 502)
    assert {send(server, "j1").status_code, requests.get(f"{server.url}/health", timeout=5).status_code} == {502}
    server.storm(0)
    assert send(server, "j1").ok


def test_it_forgets_everything_and_leaves_its_callers_without_an_answer(
    server: FakeServer, pool: ThreadPoolExecutor
) -> None:
    send(server, "j0")
    server.script("j1", Hang())
    answer = pool.submit(send, server, "j1")
    run = server.wait_for("j1")
    server.forget()
    with pytest.raises(requests.ConnectionError):
        answer.result()
    assert run.outcome == "forgotten" and run.ended_ns is not None
    assert health(server)["job_ids"] == [] and status(server, "j0").status_code == 404


def test_it_lies_about_its_health_until_it_is_told_not_to(server: FakeServer) -> None:
    server.report(job_ids=["ghost"], active_jobs=7)
    assert health(server) == {"job_ids": ["ghost"], "active_jobs": 7}
    server.report(active_jobs=0)
    assert health(server) == {"active_jobs": 0}
    server.tell_the_truth()
    assert health(server)["job_ids"] == []


def test_it_goes_on_telling_an_old_truth(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    server.freeze_report()
    server.script("j1", Hang())
    answer = pool.submit(send, server, "j1")
    server.wait_for("j1")
    assert health(server)["job_ids"] == []
    server.release("j1")
    answer.result()


def test_an_async_run_is_polled_by_its_own_id_and_by_the_jobs(polled: FakeServer) -> None:
    polled.script("j1", Hang(Work(result=[1])))
    assert send(polled, "j1", 2).json() == {"status": "processing", "job_id": "j1.2"}
    assert status(polled, "j1.2").json() == status(polled, "j1").json() == {"status": "processing", "job_id": "j1.2"}
    polled.release("j1")
    assert polled.runs[0].done.wait(5)
    assert status(polled, "j1.2").json() == {"status": "completed", "job_id": "j1.2", "result": [1]}
    assert status(polled, "other").status_code == 404


def test_a_cancel_ends_a_run(polled: FakeServer) -> None:
    polled.script("j1", Hang())
    send(polled, "j1")
    answer = requests.post(f"{polled.url}/cancel/j1", timeout=5)
    assert answer.json() == {"status": "canceled", "job_id": "j1.1"}
    assert polled.runs[0].outcome == "canceled" and polled.active == []


def test_pushes_show_the_token_of_the_call_or_a_forged_one_and_come_twice(polled: FakeServer) -> None:
    seen: list[tuple[str, str, Any]] = []

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers["Authorization"], body))
            self.send_response(200 if self.headers["Authorization"] == "Bearer right" else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as door:
        threading.Thread(target=door.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{door.server_port}/tasks/callback/j1"
        send(polled, "j1", **{"X-Callback-Url": url, "X-Callback-Token": "right"})
        assert polled.runs[0].done.wait(5)
        assert polled.push("j1", times=2) == [200, 200]
        assert polled.push("j1", {"status": "completed", "result": "forged"}, token="wrong") == [403]
        door.shutdown()
    assert seen[0] == seen[1]
    assert seen[0][2] == {"status": "completed", "job_id": "j1.1", "result": {"job": "j1"}}
    assert seen[2] == ("/tasks/callback/j1", "Bearer wrong", {"status": "completed", "result": "forged"})
