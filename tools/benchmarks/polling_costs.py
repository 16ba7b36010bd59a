"""Measure a worker that polls many asynchronous jobs: python -m tools.benchmarks.polling_costs [JOBS] [SECONDS].

JOBS (2,000) run on a server until a request ends them, and are polled every 2 s.  In SECONDS (30) the benchmark
measures the worker's memory for each job, its CPU time for each poll, and the longest time between two renewals of a
lease.  Then the worker gets kill -9, another worker resumes the jobs, and all jobs end.
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
from tools.benchmarks.idle_costs import cpu_seconds, memory_mib
from tools.benchmarks.measuring import print_line
from tools.cluster.stack import Process, Stack, eventually

_POLLED_EVERY_S = 2
_WARM_UP = 50  # jobs, after which the worker has loaded all modules that a run needs
_MOST_WAIT_S = 300


class _Server:
    """An inference server whose jobs run until a request to /end-jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}  # the server's id -> the job's id
        self.sent = self.polls = 0
        self.keeps_jobs = True

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
            return {"status": "processing"} if self.keeps_jobs else {"status": "success", "result": {"ok": True}}
        if path in ("/keep-jobs", "/end-jobs"):
            self.keeps_jobs = path == "/keep-jobs"
        return {"status": "ok", "sent": self.sent, "jobs": len(self.jobs), "polls": self.polls}


async def _serve(port: int) -> None:
    server = await asyncio.start_server(_Server().serve, "127.0.0.1", port)
    await server.serve_forever()


class _Benchmark:
    """An installation with a server, and what the benchmark does with them."""

    def __init__(self, stack: Stack, jobs: int) -> None:
        self.stack, self.jobs = stack, jobs
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        server = stack.start("server", [sys.executable, "-m", "tools.benchmarks.polling_costs", "serve", str(port)])
        server.source(lambda: self.request("health"), "it answers")
        stack.maintenance()
        stack.beat()

    def worker(self, name: str) -> Process:
        return self.stack.worker(name, self.jobs + _WARM_UP, level="warning")

    def request(self, path: str) -> Any:
        try:
            return requests.get(f"{self.url}/{path}", timeout=10).json()
        except requests.ConnectionError:
            return None

    def submit(self, model: str, jobs: int) -> None:
        before = self.request("health")["jobs"]
        stack_calls.call(self.stack, "serve_polled", model, jobs, _POLLED_EVERY_S, f"{self.url}/generate")
        eventually(lambda: self.request("health")["jobs"] >= before + jobs, "all jobs are running", _MOST_WAIT_S, 0.5)

    def end_jobs(self) -> None:
        self.request("end-jobs")
        eventually(lambda: not {"queued", "delayed", "running"} & self.states().keys(), "all end", _MOST_WAIT_S, 1)
        self.request("keep-jobs")

    def states(self) -> dict[str, int]:
        return {state: count for state, count in stack_calls.call(self.stack, "count_states").items() if count}

    def measure(self, worker: Process, seconds: float) -> None:
        pid = worker.popen.pid
        since_s, began_s, began = time.monotonic(), cpu_seconds(pid), self.request("health")["polls"]
        oldest = 0
        for _ in range(int(seconds / 5)):
            time.sleep(5)
            held, age, lasts = stack_calls.call(self.stack, "read_leases")
            oldest = max(oldest, age)
        polls, used_s = self.request("health")["polls"] - began, cpu_seconds(pid) - began_s
        took_s = time.monotonic() - since_s  # Reading the leases takes a separate process and some time.
        print_line(
            f"{polls / took_s:.0f} polls/s, {1000 * used_s / polls:.3f} ms of CPU time each, "
            "with all other work of the worker"
        )
        print_line(
            f"{held} leases, the oldest {oldest / 1000:.1f} s after its last renewal; they last {lasts / 1000:.0f} s"
        )


def main(jobs: int = 2000, seconds: float = 30.0) -> None:
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        benchmark = _Benchmark(stack, jobs)
        worker = benchmark.worker("worker")
        benchmark.submit("warm-up", _WARM_UP)
        benchmark.end_jobs()
        time.sleep(5)
        idle = memory_mib(worker.popen.pid)[0]
        benchmark.submit("polled", jobs)
        time.sleep(10)
        grown = memory_mib(worker.popen.pid)[0] - idle
        print_line(f"{jobs} jobs: {grown * 1024 / jobs:.1f} KiB each beyond the idle process of {idle:.0f} MiB")
        benchmark.measure(worker, seconds)
        sent = benchmark.request("health")["sent"]
        worker.kill()
        benchmark.worker("another")
        benchmark.end_jobs()
        again = benchmark.request("health")["sent"] - sent
        print_line(f"after kill -9: {benchmark.states()}, {again} requests sent again")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(_serve(int(sys.argv[2])))
    else:
        main(*(int(word) for word in sys.argv[1:]))
