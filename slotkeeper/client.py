"""A small client of the REST API, for the command line."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import click
import requests

_TIMEOUT_S = 30.0
_LONGEST_WAIT_S = 20.0
_NOTIFY_EVERY_S = 2
_PAUSE_S = 0.25  # before asking again what was answered sooner than asked for
_AGAIN = (429, 503)
_PATIENCE_S = 300.0  # A restart takes seconds.
_NO_KEY = "set SLOTKEEPER_KEY to a tenant's key; `slotkeeper tenants add NAME` on the API's machine makes one."
_GOING_ON = ("queued", "delayed", "running")


class ClientError(click.ClickException):
    """It did not work; the text says what is wrong and what to do."""


class ApiUnreachable(ClientError):
    """Nothing answers at the address, so the outcome of the request is not known."""

    exit_code = 3


class OutcomeUnknown(ClientError):
    """The API stayed away for too long while a job was waited for, so nobody here knows how it ends."""

    exit_code = 3


class ApiError(ClientError):
    """The API has answered with a problem."""

    def __init__(self, status: int, problem: Mapping[str, Any], retry_after_s: float | None) -> None:
        self.status, self.problem, self.retry_after_s = status, problem, retry_after_s
        title, detail = str(problem.get("title") or f"HTTP {status}"), str(problem.get("detail") or "")
        if status == 401:
            detail = _NO_KEY
        super().__init__(f"{title}: {detail}" if detail else title)


class Client:
    """Speaks to one Slotkeeper.  Raises ClientError."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False  # A proxy or a .netrc of the user is not meant for this.
        self._session.headers["User-Agent"] = "slotkeeper-cli"
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str, **params: Any) -> Any:
        return self.request("GET", path, params={name: value for name, value in params.items() if value is not None})

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        return self.request("POST", path, body=body, headers=headers)

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Any:
        """The answer's JSON; None for an empty one."""
        sent = dict(headers or {})
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            answer = self._session.request(
                method, self.url + path, data=data, params=params, headers=sent, timeout=(5, timeout_s)
            )
        except requests.Timeout as error:
            raise ApiUnreachable(
                f"No answer from {self.url} in time: look whether it is overloaded, and try again."
            ) from error
        except requests.ConnectionError as error:
            raise ApiUnreachable(
                f"Nothing answers at {self.url}: start it with `slotkeeper up`, or set SLOTKEEPER_URL."
            ) from error
        except (requests.RequestException, ValueError) as error:
            raise ClientError(f"{self.url} cannot be asked: {error}") from error
        return _read(answer, self.url)

    def retry(
        self,
        ask: Callable[[], Any],
        patience_s: float = _PATIENCE_S,
        on_pause: Callable[[ClientError], object] = lambda error: None,
    ) -> Any:
        """Ask again while the answer is "not now", as long as it says, for at most `patience_s` in all.

        For requests that may be sent twice: reads, and submits under an Idempotency-Key.  `on_pause`: called with the
        error before each pause.
        """
        until = time.monotonic() + patience_s
        wait_s = 0.5
        while True:
            try:
                return ask()
            except (ApiError, ApiUnreachable) as error:
                if not _is_temporary(error):
                    raise
                told_s = error.retry_after_s if isinstance(error, ApiError) else None
                pause_s = wait_s if told_s is None else told_s
                if time.monotonic() + pause_s > until:
                    raise
                on_pause(error)
            time.sleep(pause_s)
            wait_s = min(wait_s * 2, 15.0)

    def wait_for_job(
        self,
        job_id: str,
        timeout_s: float | None = None,
        notify: Callable[[dict[str, Any]], object] | None = None,
        patience_s: float = _PATIENCE_S,
        on_pause: Callable[[ClientError], object] = lambda error: None,
    ) -> dict[str, Any]:
        """Return the job once it has ended, or as it is after `timeout_s`.

        `notify`: gets the job every few seconds.  An API that is away, as in a restart, is asked again for at most
        `patience_s`; then OutcomeUnknown is raised.  `on_pause`: called with the error before each pause.
        """
        longest_s = _LONGEST_WAIT_S if notify is None else _NOTIFY_EVERY_S
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = longest_s if until is None else min(until - time.monotonic(), longest_s)
            ask = partial(self.get, f"/queue/jobs/{job_id}", wait=max(left_s, 0))
            try:
                job: dict[str, Any] = self.retry(ask, patience_s, on_pause)
            except (ApiError, ApiUnreachable) as error:
                if not _is_temporary(error):
                    raise
                again = f"slotkeeper job {job_id} --wait"
                raise OutcomeUnknown(
                    f"{error.message}  How job {job_id} ends is not known here; go on waiting by: {again}"
                ) from error
            if is_final(job) or (until is not None and time.monotonic() + _PAUSE_S > until):
                return job
            if notify is not None:
                notify(job)
            time.sleep(_PAUSE_S)  # The API does not let everybody wait when too many do.

    def iter_pages(self, path: str, items: str, limit: int, **params: Any) -> Iterator[dict[str, Any]]:
        """What stands under `items` in a list that comes in pages, `limit` of them at most."""
        cursor = None
        while limit > 0:
            page = self.get(path, limit=min(limit, 200), cursor=cursor, **params)
            yield from page[items][:limit]
            limit -= len(page[items])
            cursor = page["next_cursor"]
            if cursor is None:
                return


def _is_temporary(error: ApiError | ApiUnreachable) -> bool:
    """Return whether the same request may succeed later."""
    return isinstance(error, ApiUnreachable) or error.status in _AGAIN


def is_final(job: Mapping[str, Any]) -> bool:
    return job["status"] not in _GOING_ON


def _read(answer: requests.Response, url: str) -> Any:
    try:
        body = json.loads(answer.content) if answer.content else None
    except ValueError:
        body = None
        if answer.ok:
            raise ClientError(f"What answers at {url} is not Slotkeeper: set SLOTKEEPER_URL to its address.") from None
    if answer.ok:
        return body
    problem = body if isinstance(body, dict) else {"title": answer.reason}
    return _refuse(answer, problem)


def _refuse(answer: requests.Response, problem: Mapping[str, Any]) -> Any:
    after = answer.headers.get("Retry-After", "")
    raise ApiError(answer.status_code, problem, float(after) if after.isdigit() else None)
