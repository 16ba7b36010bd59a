"""Token streams from a real server through a real worker to a client, also when a part of the chain dies."""

import itertools
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import requests

from tools.cluster.stack import Process, RefServer, Stack, eventually

pytestmark = pytest.mark.timeout(180)

MODEL = "parrot"
_SHORT = {"SLOTKEEPER_LEASE_MS": "3000", "SLOTKEEPER_RENEW_EVERY_MS": "500"}
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def _installation(tmp_path_factory) -> Iterator[tuple[Stack, RefServer]]:
    """One for all tests.  Leases are short, and yet long enough for a machine that has much else to do."""
    with Stack(tmp_path_factory.mktemp("tokens"), _SHORT) as found:
        server = found.server("gpu1", 2, function="slotkeeper.serve.demo:parrot")
        found.web()
        found.maintenance()
        found.beat()
        put = requests.put(f"{found.url}/admin/model-configs/{MODEL}", json={"preset": "slot-protocol-stream"})
        assert put.ok, put.text
        registered = {"model": MODEL, "server": "gpu1", "endpoint": server.endpoint, "slots": 2}
        assert requests.post(f"{found.url}/admin/register", json=registered).ok
        yield found, server


@pytest.fixture
def running(_installation: tuple[Stack, RefServer]) -> tuple[Stack, RefServer]:
    """The installation, with a live worker."""
    found, _ = _installation
    if not [
        process
        for process in found.processes.values()
        if process.name.startswith("worker") and process.popen.poll() is None
    ]:
        a_worker(found)
    return _installation


def a_worker(found: Stack) -> Process:
    """One more, which takes jobs."""
    worker = found.worker(f"worker{next(_numbers)}")
    eventually(lambda: " ready." in worker.log, f"{worker.name} is ready", 60)
    return worker


def submit(url: str, prompt: str, seconds: float) -> str:
    payload = {"prompt": prompt, "seconds": seconds}
    return requests.post(f"{url}/queue/submit", json={"model": MODEL, "payload": payload}).json()["job_id"]


class Reader:
    """Who follows a job's stream."""

    def __init__(self, url: str, job_id: str, last: str | None = None) -> None:
        headers = {"Last-Event-ID": last} if last else {}
        self._answer = requests.get(f"{url}/queue/jobs/{job_id}/stream", stream=True, timeout=60, headers=headers)
        self.last: str | None = last
        self._lines = self._answer.iter_lines(chunk_size=1, decode_unicode=True)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        name = ""
        for line in self._lines:
            field, _, value = line.partition(": ")
            if field == "id":
                self.last = value
            elif field == "event":
                name = value
            elif field == "data":
                yield name, orjson.loads(value)

    def next(self, wanted: str) -> dict[str, Any]:
        return next(data for name, data in self if name == wanted)

    def close(self) -> None:
        self._answer.close()


def test_tokens_are_streamed_during_the_run_and_the_whole_text_is_the_result(running):
    found, _ = running
    job = submit(found.url, "one two three four five six", 0.3)
    text, types = "", []
    for name, data in Reader(found.url, job):
        types.append(name)
        if name == "progress":
            assert data["offset"] == len(text)
            text += data["text"]
    assert types[-1] == "job.completed" and types.count("progress") > 1
    result = requests.get(f"{found.url}/queue/jobs/{job}").json()["result"]
    assert text == result == "one two three four five six"


def test_a_client_that_reconnects_misses_and_repeats_no_token(running):
    found, _ = running
    job = submit(found.url, "a b c d e f g h", 0.2)
    text, last, ended = "", None, False
    while not ended:
        reader = Reader(found.url, job, last)
        for name, data in reader:
            ended = name == "job.completed"
            if name == "progress":
                assert data["offset"] == len(text)
                text += data["text"]
                break
        last = reader.last
        reader.close()
    assert text == "a b c d e f g h"


def test_the_death_of_a_worker_restarts_the_text_of_a_stream_and_loses_no_token(running):
    found, server = running
    first = next(
        process
        for process in found.processes.values()
        if process.name.startswith("worker") and process.popen.poll() is None
    )
    before = len(server.journal.read_text().splitlines())
    words = " ".join(f"w{n}" for n in range(60))
    job = submit(found.url, words, 0.25)  # Its server still speaks when the second worker comes to it.
    reader = Reader(found.url, job)
    begun = reader.next("progress")
    assert (begun["attempt"], begun["offset"]) == (1, 0)
    a_worker(found)
    first.kill()
    text, attempt = begun["text"], 1
    for name, data in reader:
        if name == "progress":
            if data["attempt"] > attempt and data["offset"] == 0:
                text, attempt = "", data["attempt"]
            assert data["offset"] <= len(text)
            text = text[: data["offset"]] + data["text"]
    assert attempt > 1 and text == words
    ended = requests.get(f"{found.url}/queue/jobs/{job}").json()
    assert (ended["status"], ended["result"]) == ("completed", words)
    eventually(lambda: len(server.journal.read_text().splitlines()) == before + 1, "the job has run once")


def test_a_job_completes_though_redis_loses_its_progress(running):
    found, _ = running
    job = submit(found.url, " ".join("abcdefghijkl"), 0.2)
    reader = Reader(found.url, job)
    reader.next("progress")
    assert found.valkey is not None
    found.valkey.kill()
    found.valkey.start()
    ended = requests.get(f"{found.url}/queue/jobs/{job}?wait=60", timeout=90).json()
    assert (ended["status"], ended["result"]) == ("completed", " ".join("abcdefghijkl"))
    reader.close()
