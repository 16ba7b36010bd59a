"""An inference server that ignores idempotency keys: it runs each request at once, and counts its runs.

    python -m tools.drill.plain_server PORT JOURNAL STARTS

It answers a POST with the result, and `GET /health` with the number of its active runs and with their jobs.  A run
continues when its client disconnects, as in most servers that users write.  The files have the format of the drill's
other servers (drill_model.py, slotkeeper/serve/journal.py); a start also has the number of active runs: `at_once`.

Payload: `seconds` and `fails` as in drill_model.py; `garbles`: the first so many attempts are answered with faulty
JSON.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

_FAULTY_JSON = b'{"status": "completed", "result": {"score": NaN}}'


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, journal: str, starts: str) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._lock = threading.Lock()
        self.running: list[str] = []
        self._journal, self._starts = _open(journal), _open(starts)

    def run_job(self, job_id: str, attempt: int, payload: dict[str, Any]) -> tuple[int, bytes]:
        """Return the status and the body of the answer."""
        started_ns = time.monotonic_ns()
        with self._lock:
            self.running.append(job_id)
            at_once = len(self.running)
        run = {"job_id": job_id, "attempt": attempt, "slot": 0}
        _append(self._starts, run | {"at_ns": started_ns, "at_once": at_once})
        time.sleep(float(payload["seconds"]))
        status, body, outcome = _answer(attempt, payload)
        with self._lock:
            self.running.remove(job_id)
        _append(self._journal, run | {"started_ns": started_ns, "ended_ns": time.monotonic_ns(), "outcome": outcome})
        return status, body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(*self.server.run_job(self.headers["X-Job-Id"], int(self.headers["X-Attempt"]), payload))

    def do_GET(self) -> None:
        running = list(self.server.running)
        self._send(200, orjson.dumps({"active_jobs": len(running), "job_ids": running}))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _answer(attempt: int, payload: dict[str, Any]) -> tuple[int, bytes, str]:
    """Return the status, the body, and the outcome for the journal."""
    if attempt <= payload.get("garbles", 0):
        return 200, _FAULTY_JSON, "error"
    if attempt <= payload.get("fails", 0):
        return 500, b'{"error": "this attempt was to fail"}', "error"
    return 200, orjson.dumps({"status": "completed", "result": {"number": payload["number"]}}), "completed"


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _append(file: int, line: dict[str, Any]) -> None:
    os.write(file, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    _Server(int(sys.argv[1]), *sys.argv[2:]).serve_forever()
