"""An inference server as users write them: it answers a POST with the result, and knows no health, no cancel, no ids.

    python -m tests.support.plain_server PORT JOURNAL

Payload: `seconds` to take, or `gate`, a file to wait for; `die` ends the process.  The journal gets a line for each
beginning and each end of a run.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        job = self.headers["X-Job-Id"]
        _note("begins", job)
        if payload.get("die"):
            os._exit(1)
        while payload.get("gate") and not Path(payload["gate"]).exists():
            time.sleep(0.01)
        time.sleep(payload.get("seconds", 0))
        _note("ends", job)
        text = json.dumps({"ok": True}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True


def _note(what: str, job: str) -> None:
    with open(sys.argv[2], "a") as journal:
        journal.write(f"{what} {job}\n")


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
