"""A reference server whose function yields streams to each client that requests a stream, and to no other."""

import http.client
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import requests

from slotkeeper.serve import Context, ReferenceServer, ServeConfig

DISPATCHER = {"X-Source": "dispatcher", "X-Job-Id": "j", "X-Attempt": "1", "Idempotency-Key": "j"}
STREAM = {"Accept": "text/event-stream, application/json"}


class Speaker:
    """Says a letter whenever it may."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)

    def __call__(self, payload: dict[str, Any], context: Context) -> Iterator[str]:
        for n, letter in enumerate(payload["say"]):
            if payload.get("waits"):
                assert self.may.acquire(timeout=20)
            context.progress((n + 1) / len(payload["say"]))
            yield letter
        if payload.get("fails"):
            raise RuntimeError("no more letters")


@pytest.fixture
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture
def url(speaker: Speaker) -> Iterator[str]:
    with ReferenceServer(speaker, ServeConfig(port=0)) as server:
        yield server.url


def events(answer: requests.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines(chunk_size=1):
        if line.startswith(b"data: "):
            yield orjson.loads(line[6:])


def post(url: str, payload: dict[str, Any], **headers: str) -> requests.Response:
    return requests.post(f"{url}/generate", json=payload, headers=headers, stream=True, timeout=20)


def test_pieces_are_streamed_as_they_are_made_and_the_last_event_is_the_result(url, speaker):
    response = post(url, {"say": "ab", "waits": True}, **STREAM)
    assert response.headers["Content-Type"] == "text/event-stream"
    received = events(response)
    speaker.may.release()
    assert [next(received), next(received)] == [{"progress": 0.5}, {"piece": "a"}]
    speaker.may.release()
    assert list(received) == [{"progress": 1.0}, {"piece": "b"}, {"status": "success", "result": "ab"}]


def test_a_client_that_requests_no_stream_gets_the_whole_result(url):
    answer = post(url, {"say": "ab"})
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json() == {"status": "success", "result": "ab"}


def test_an_error_in_the_middle_is_the_last_event(url):
    *_, last = events(post(url, {"say": "a", "fails": True}, **STREAM))
    assert (last["status"], last["retryable"]) == ("error", True)


def test_a_client_that_joins_a_run_receives_its_whole_stream(url, speaker):
    first = events(post(url, {"say": "ab", "waits": True}, **DISPATCHER, **STREAM))
    speaker.may.release()
    assert [next(first)["progress"], next(first)["piece"]] == [0.5, "a"]
    second = events(post(url, {"say": "ab", "waits": True}, **(DISPATCHER | {"X-Attempt": "2"}), **STREAM))
    assert [next(second)["progress"], next(second)["piece"]] == [0.5, "a"]
    speaker.may.release()
    assert [list(stream)[-1] for stream in (first, second)] == [{"status": "success", "result": "ab"}] * 2


def test_a_cancel_ends_a_run_between_two_pieces(url, speaker):
    received = events(post(url, {"say": "ab", "waits": True}, **DISPATCHER, **STREAM))
    speaker.may.release()
    next(received)
    assert requests.post(f"{url}/cancel/j").json()["status"] == "canceling"
    speaker.may.release()
    assert list(received)[-1]["status"] == "canceled"


def test_a_status_reports_the_progress_of_a_run(speaker):
    with ReferenceServer(speaker, ServeConfig(port=0, asynchronous=True)) as server:
        run = post(server.url, {"say": "ab", "waits": True}, **STREAM).json()["job_id"]
        speaker.may.release(2)
        while (status := requests.get(f"{server.url}/status/{run}").json())["status"] == "processing":
            assert status.get("progress") in (None, 0.5, 1.0)
        assert status["result"] == "ab"


def test_http_1_0_has_no_chunks(url):
    line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    line._http_vsn, line._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    line.request("POST", "/generate", b'{"say":"ab"}', {**STREAM, "Content-Type": "application/json"})
    assert orjson.loads(line.getresponse().read()) == {"status": "success", "result": "ab"}
    line.close()
