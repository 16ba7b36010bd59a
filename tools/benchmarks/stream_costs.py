"""Measure how open streams slow down submits: python -m tools.benchmarks.stream_costs [STREAMS] [WAITING] [ROUNDS].

Starts a separate installation and submits jobs one by one: without listeners, and while STREAMS (1000) are open and
WAITING (1000) requests wait for a job.  Both alternate in ROUNDS (3), so that other load on the machine affects both.
One stream in ten follows all events, the others a job that waits.
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
_FOLLOWS_ALL = 10  # One stream in so many follows all events.
_AT_ONCE = 50
_LEFT_S = 8.0  # until the API has noticed that the clients have disconnected


def main() -> None:
    arguments = [int(argument) for argument in sys.argv[1:]]
    streams, waiting, rounds = [*arguments, *(1000, 1000, 3)[len(arguments) :]]
    alone, with_streams = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as home, Stack(Path(home), {"SLOTKEEPER_MAX_STREAMS": str(streams)}) as stack:
        stack.web()
        web = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
        _request(web, "PUT", "/admin/model-configs/bench", {})
        job = _submit(web)["job_id"]
        _time_submits(web)  # a warm-up
        for _ in range(rounds):
            alone += _time_submits(web)
            with_streams += _time_submits_with_streams(web, stack.port, job, streams, waiting)
    for name, took in (("no listeners", alone), (f"{streams} streams, {waiting} waiting", with_streams)):
        p50, p99 = statistics.median(took), statistics.quantiles(took, n=100)[-1]
        sys.stdout.write(f"submit, {name}: p50 {p50 * 1000:.2f} ms, p99 {p99 * 1000:.2f} ms\n")
    sys.stdout.write(
        f"p50 with streams divided by p50 without: {statistics.median(with_streams) / statistics.median(alone):.2f}\n"
    )


def _request(web: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    web.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    answer = web.getresponse()
    text = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {path} was answered {answer.status}")
    document: dict[str, Any] = json.loads(text)
    return document


def _submit(web: http.client.HTTPConnection) -> dict[str, Any]:
    return _request(web, "POST", "/queue/submit", {"model": "bench", "payload": {"prompt": "a sunset"}})


def _time_submits(web: http.client.HTTPConnection) -> list[float]:
    """Submit jobs one by one, and return how long each submit took, in seconds."""
    took = []
    for _ in range(_SUBMITS):
        began = time.perf_counter()
        _submit(web)
        took.append(time.perf_counter() - began)
    return took


def _time_submits_with_streams(
    web: http.client.HTTPConnection, port: int, job: str, streams: int, waiting: int
) -> list[float]:
    listening, stop = multiprocessing.Event(), multiprocessing.Event()
    counts: multiprocessing.Queue[int] = multiprocessing.Queue()
    listeners = multiprocessing.Process(target=_listen, args=(port, job, streams, waiting, listening, stop, counts))
    listeners.start()
    if not listening.wait(120):
        raise RuntimeError("not all could listen")
    took = _time_submits(web)
    time.sleep(1.0)
    stop.set()
    received = counts.get(timeout=60)
    listeners.join()
    time.sleep(_LEFT_S)
    expected = _SUBMITS * len(range(0, streams, _FOLLOWS_ALL))
    sys.stdout.write(f"{received} of {expected} events were received\n")
    return took


def _listen(
    port: int, job: str, streams: int, waiting: int, listening: Event, stop: Event, counts: "multiprocessing.Queue[int]"
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    counts.put(asyncio.run(_open_connections(port, job, streams, waiting, listening, stop)))


async def _open_connections(port: int, job: str, streams: int, waiting: int, listening: Event, stop: Event) -> int:
    """Open streams and waiting requests until `stop`, and return the number of received events of submits."""
    gate = asyncio.Semaphore(_AT_ONCE)
    received = [0]  # a list, so that the tasks can change it
    paths = ["/stream" if n % _FOLLOWS_ALL == 0 else f"/queue/jobs/{job}/stream" for n in range(streams)]
    readers = await asyncio.gather(*[_follow(gate, port, path, received) for path in paths])
    readers += await asyncio.gather(*[_wait(gate, port, job) for _ in range(waiting)])
    await asyncio.sleep(2.0)
    received[0] = 0
    listening.set()
    while not stop.is_set():
        await asyncio.sleep(0.1)
    for reader in readers:
        reader.cancel()
    return received[0]


async def _follow(gate: asyncio.Semaphore, port: int, path: str, received: list[int]) -> asyncio.Task[None]:
    """Open a stream, and return the task that reads it."""
    async with gate:
        reader = await _get(port, path)
        line = await reader.readline()
        if b" 200 " not in line:
            raise RuntimeError(f"{path} was answered {line!r}")
        await reader.readuntil(b"retry: ")

    async def read() -> None:
        while data := await reader.read(1 << 16):
            received[0] += data.count(b"event: job.enqueued") if path == "/stream" else 0

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
    reader._slotkeeper_writer = writer  # type: ignore[attr-defined]  # A reference, or it would be closed.
    return reader


if __name__ == "__main__":
    main()
