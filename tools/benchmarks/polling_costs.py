"""Many asynchronous jobs, polled by one worker process: python -m tools.benchmarks.polling_costs [JOBS] [SECONDS].

JOBS (2,000) are handed to a server that lets them run until it is told otherwise, and are asked for every 2 s.  What is
read in SECONDS (30): what the worker's process has grown by for each, what processor time a poll costs it, and how long
its leases have gone without being renewed.  Then it gets kill -9; another goes on, and all jobs end.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests

from app.up.ports import free_port
from tools.benchmarks import stack_calls
from tools.benchmarks.idle_costs import memory_mib, processor_s
from tools.cluster.stack import Process, Stack, eventually

_POLLED_EVERY_S = 2
_WARM_UP = 50  # jobs, after which all is loaded that a run needs
_MOST_WAIT_S = 300


class _Server:
    """Runs whatever it is given until it is told to let go."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}  # id -> the job's
        self.sent = self.polls = 0
        self.goes_on = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
                await reader.readexactly(length)
                body = json.dumps(self._answer(head)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, head: str) -> dict[str, Any]:
        path = head.split(" ", 2)[1]
        if path == "/generate":
            self.sent += 1
            job = head.partition("x-job-id:")[2].partition("\r\n")[0].strip()
            self.jobs[job] = job
            return {"status": "processing", "job_id": job}
        if path.startswith("/status/"):
            self.polls += 1
            return {"status": "processing"} if self.goes_on else {"status": "success", "result": {"ok": True}}
        if path in ("/go-on", "/let-go"):
            self.goes_on = path == "/go-on"
        return {"status": "ok", "sent": self.sent, "jobs": len(self.jobs), "polls": self.polls}


async def _serve(port: int) -> None:
    server = await asyncio.start_server(_Server().serve, "127.0.0.1", port)
    await server.serve_forever()


class _Trial:
    """A worker, a server, and jobs between them."""

    def __init__(self, stack: Stack, jobs: int) -> None:
        self.stack, self.jobs = stack, jobs
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        server = stack.start("server", [sys.executable, "-m", "tools.benchmarks.polling_costs", "serve", str(port)])
        server.source(lambda: self.ask("health"), "it answers")
        stack.maintenance()
        stack.beat()

    def worker(self, name: str) -> Process:
        return self.stack.worker(name, self.jobs + _WARM_UP, level="warning")

    def ask(self, path: str) -> Any:
        try:
            return requests.get(f"{self.url}/{path}", timeout=10).json()
        except requests.ConnectionError:
            return None

    def feed(self, model: str, jobs: int) -> None:
        before = self.ask("health")["jobs"]
        stack_calls.call(self.stack, "serve_polled", model, jobs, _POLLED_EVERY_S, f"{self.url}/generate")
        eventually(lambda: self.ask("health")["jobs"] >= before + jobs, "all jobs are running", _MOST_WAIT_S, 0.5)

    def end(self) -> None:
        self.ask("let-go")
        eventually(lambda: not {"queued", "delayed", "running"} & self.states().keys(), "all end", _MOST_WAIT_S, 1)
        self.ask("go-on")

    def states(self) -> dict[str, int]:
        return {state: count for state, count in stack_calls.call(self.stack, "count_states").items() if count}

    def measure(self, worker: Process, seconds: float) -> None:
        pid = worker.popen.pid
        since_s, began_s, began = time.monotonic(), processor_s(pid), self.ask("health")["polls"]
        oldest = 0
        for _ in range(int(seconds / 5)):
            time.sleep(5)
            held, age, lasts = stack_calls.call(self.stack, "read_leases")
            oldest = max(oldest, age)
        polls, used_s = self.ask("health")["polls"] - began, processor_s(pid) - began_s
        took_s = time.monotonic() - since_s  # Leases are looked at by a process of its own, which takes its time.
        _say(f"{polls / took_s:.0f} polls/s, {1000 * used_s / polls:.3f} ms of processor time each, all included")
        _say(f"{held} leases, the oldest {oldest / 1000:.1f} s after its last renewal; they last {lasts / 1000:.0f} s")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(jobs: int = 2000, seconds: float = 30.0) -> None:
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        trial = _Trial(stack, jobs)
        worker = trial.worker("worker")
        trial.feed("warm-up", _WARM_UP)
        trial.end()
        time.sleep(5)
        idle = memory_mib(worker.popen.pid)[0]
        trial.feed("polled", jobs)
        time.sleep(10)
        grown = memory_mib(worker.popen.pid)[0] - idle
        _say(f"{jobs} jobs: {grown * 1024 / jobs:.1f} KiB each beyond the idle process of {idle:.0f} MiB")
        trial.measure(worker, seconds)
        sent = trial.ask("health")["sent"]
        worker.kill()
        trial.worker("another")
        trial.end()
        again = trial.ask("health")["sent"] - sent
        _say(f"after kill -9: {trial.states()}, {again} requests sent again")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(_serve(int(sys.argv[2])))
    else:
        main(*(int(word) for word in sys.argv[1:]))
