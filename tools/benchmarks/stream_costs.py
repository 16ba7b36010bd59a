"""Measure what open streams cost others: python -m tools.benchmarks.stream_costs [STREAMS] [WAITING] [ROUNDS].

Starts an installation of its own.  In turns, so that both meet the same load of the machine, jobs are submitted one by
one while nobody listens, and while STREAMS (1000) are open and WAITING (1000) requests wait for a job.  One stream of
ten follows everything, the others a job that waits.
"""

import asyncio
import http.client
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tools.cluster.stack import Stack

_SUBMITS = 500
_FOLLOWS_ALL = 10  # one of so many
_AT_ONCE = 50
_LEFT_S = 8.0  # until it is noticed that they have left


def main() -> None:
    given = [int(word) for word in sys.argv[1:]]
    streams, waiting, rounds = [*given, *(1000, 1000, 3)[len(given) :]]
    alone, beside = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as home, Stack(Path(home), {"SLOTKEEPER_MAX_STREAMS": str(streams)}) as stack:
        stack.web()
        web = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
        _ask(web, "PUT", "/admin/model-configs/bench", {})
        job = _submit(web)["job_id"]
        _time_submits(web)  # so that all is warm
        for _ in range(rounds):
            alone += _time_submits(web)
            beside += _beside(web, stack.port, job, streams, waiting)
    for name, took in (("nobody listens", alone), (f"{streams} streams, {waiting} waiting", beside)):
        p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[-1]
        sys.stdout.write(f"submit, {name}: p50 {p50 * 1000:.2f} ms, p99 {p99 * 1000:.2f} ms\n")
    sys.stdout.write(f"p50, one over the other: {statistics.median(beside) / statistics.median(alone):.2f}\n")


def _ask(web: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    web.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    answer = web.getresponse()
    text = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {path} was answered {answer.status}")
    found: dict[str, Any] = json.loads(text)
    return found


def _submit(web: http.client.HTTPConnection) -> dict[str, Any]:
    return _ask(web, "POST", "/queue/submit", {"model": "bench", "payload": {"prompt": "a sunset"}})


def _time_submits(web: http.client.HTTPConnection) -> list[float]:
    """How long each took, in seconds."""
    took = []
    for _ in range(_SUBMITS):
        began = time.perf_counter()
        _submit(web)
        took.append(time.perf_counter() - began)
    return took


def _beside(web: http.client.HTTPConnection, port: int, job: str, streams: int, waiting: int) -> list[float]:
    listening, enough = multiprocessing.Event(), multiprocessing.Event()
    told: multiprocessing.Queue[int] = multiprocessing.Queue()
    crowd = multiprocessing.Process(target=_listen, args=(port, job, streams, waiting, listening, enough, told))
    crowd.start()
    if not listening.wait(120):
        raise RuntimeError("not all could listen")
    took = _time_submits(web)
    time.sleep(1.0)
    enough.set()
    heard = told.get(timeout=60)
    crowd.join()
    time.sleep(_LEFT_S)
    expected = _SUBMITS * len(range(0, streams, _FOLLOWS_ALL))
    sys.stdout.write(f"{heard} events were told, of {expected}\n")
    return took


def _listen(
    port: int, job: str, streams: int, waiting: int, listening: Event, enough: Event, told: "multiprocessing.Queue[int]"
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    told.put(asyncio.run(_crowd(port, job, streams, waiting, listening, enough)))


async def _crowd(port: int, job: str, streams: int, waiting: int, listening: Event, enough: Event) -> int:
    """Answers how many events of submits were told."""
    gate = asyncio.Semaphore(_AT_ONCE)
    heard = [0]
    paths = ["/stream" if n % _FOLLOWS_ALL == 0 else f"/queue/jobs/{job}/stream" for n in range(streams)]
    readers = await asyncio.gather(*[_follow(gate, port, path, heard) for path in paths])
    readers += await asyncio.gather(*[_wait(gate, port, job) for _ in range(waiting)])
    await asyncio.sleep(2.0)
    heard[0] = 0
    listening.set()
    while not enough.is_set():
        await asyncio.sleep(0.1)
    for reader in readers:
        reader.cancel()
    return heard[0]


async def _follow(gate: asyncio.Semaphore, port: int, path: str, heard: list[int]) -> asyncio.Task[None]:
    """Comes back when the stream is open."""
    async with gate:
        reader = await _get(port, path)
        line = await reader.readline()
        if b" 200 " not in line:
            raise RuntimeError(f"{path} was answered {line!r}")
        await reader.readuntil(b"retry: ")

    async def read() -> None:
        while data := await reader.read(1 << 16):
            heard[0] += data.count(b"event: job.enqueued") if path == "/stream" else 0

    return asyncio.ensure_future(read())


async def _wait(gate: asyncio.Semaphore, port: int, job: str) -> asyncio.Task[None]:
    async with gate:
        reader = await _get(port, f"/queue/jobs/{job}?wait=60")

    async def read() -> None:
        with suppress(asyncio.CancelledError):
            await reader.read()

    return asyncio.ensure_future(read())


async def _get(port: int, path: str) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    reader._slotkeeper_writer = writer  # type: ignore[attr-defined]  # else it would be closed
    return reader


if __name__ == "__main__":
    main()
