"""Push delivery: a POST with the end of a run to the callback URL of its call."""

import http.client
import logging
import threading
import time
from urllib.parse import urlsplit

import orjson

from slotkeeper.serve.protocol_responses import status_body
from slotkeeper.serve.run_scheduler import Callback, Run

log = logging.getLogger("slotkeeper.serve")

TRIES = 4
FIRST_PAUSE_S = 0.5  # doubled after each try
TIMEOUT_S = 5.0


class Pusher:
    """A sender of pushes, each in a separate thread, so that a slow receiver does not delay other pushes.

    A push can be lost: after the last try it is dropped.  `/status` has the same body.
    """

    def __init__(self, pause_s: float = FIRST_PAUSE_S) -> None:
        self._pause_s = pause_s
        self._threads: set[threading.Thread] = set()

    def push(self, run: Run, callback: Callback) -> None:
        """Deliver the end of a run in the background."""
        body = orjson.dumps(status_body(run))
        thread = threading.Thread(target=self._deliver, args=(callback, body), name=f"push-{run.id}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no push is in progress.  Returns False if one still is after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._threads))

    def _deliver(self, callback: Callback, body: bytes) -> None:
        try:
            self._post_with_retries(callback, body)
        finally:
            self._threads.discard(threading.current_thread())

    def _post_with_retries(self, callback: Callback, body: bytes) -> None:
        pause_s = self._pause_s
        for try_number in range(TRIES):
            if try_number:
                time.sleep(pause_s)
                pause_s *= 2
            try:
                status = post(callback, body)
            except (OSError, http.client.HTTPException) as error:
                log.warning("push to %r: %r", urlsplit(callback.url).netloc, error)
                continue
            # The push was accepted, or refused because of an unknown token or job: a retry cannot help.
            if status < 500 and status != 429:
                return


def post(callback: Callback, body: bytes) -> int:
    """POST once and return the HTTP status.  Follows no redirect and uses no proxy.

    Raises OSError or HTTPException.
    """
    url = urlsplit(callback.url)
    connection_type = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(url.hostname or "", url.port, timeout=TIMEOUT_S)
    try:
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {callback.token}"}
        connection.request("POST", path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def usable(url: str) -> bool:
    """Return True for an http or https URL with a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
