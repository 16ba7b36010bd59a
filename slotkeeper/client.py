"""A client of the REST API: submit jobs, wait for them, and read every list of the API.

While the API is away, `submit`, `get_job`, `cancel` and `wait_for_job` repeat their requests, which may be sent twice:
a submit carries an Idempotency-Key.  docs/how-to/python-client.md has examples.
"""

import json
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NotRequired, TypedDict, cast
from urllib.parse import quote

import requests

from slotkeeper.client_errors import ApiError, ApiUnreachable, ClientError, OutcomeUnknown

__all__ = [
    "PATIENCE_S",
    "ApiError",
    "ApiUnreachable",
    "Batch",
    "BatchResult",
    "Client",
    "ClientError",
    "Job",
    "JobFault",
    "OutcomeUnknown",
    "is_final",
]

_TIMEOUT_S = 30.0
_LONGEST_WAIT_S = 20.0
_NOTIFY_EVERY_S = 2
_NDJSON = "application/x-ndjson"
_CHUNK_LINES, _CHUNK_BYTES = 500, 1 << 20
_PAUSE_S = 0.25  # before asking again what was answered sooner than asked for
_AGAIN = (429, 503)
_OF_PROXIES = (502, 504)  # Without a code of the API: a proxy says so while the API starts again.
PATIENCE_S = 300.0
"""How long a client waits for an API that is away; a restart takes seconds."""
_NOT_SLOTKEEPER = "What answers at {url} is not Slotkeeper: set SLOTKEEPER_URL to its address."
_ACTIVE_STATES = ("queued", "delayed", "running")


class JobFault(TypedDict):
    """Why a job failed, or why its last attempt did."""

    code: str | None
    message: str | None


class Job(TypedDict):
    """A job, as `GET /queue/jobs/{id}` shows it.  The fields below are the most used ones; the API may add others."""

    job_id: str
    status: str
    model: NotRequired[str]
    tenant: NotRequired[str]
    priority: NotRequired[int]
    position: NotRequired[int | None]
    attempts: NotRequired[int]
    server: NotRequired[str | None]
    result: NotRequired[Any]
    error: NotRequired[JobFault | None]
    last_error: NotRequired[JobFault | None]
    created_at: NotRequired[str]
    started_at: NotRequired[str | None]
    completed_at: NotRequired[str | None]


class Batch(TypedDict):
    """A batch, as `GET /batches/{id}` shows it.  The API may add other fields."""

    batch: str
    status: str
    next_line: int | None
    refused: int
    jobs: int
    ended: int
    by_state: dict[str, int]
    name: NotRequired[str | None]
    paused: NotRequired[bool]
    deadline: NotRequired[str | None]
    completed_at: NotRequired[str | None]


class BatchResult(TypedDict):
    """What came of a line.  status: of its job; `refused`: it could not be accepted; `removed`: its job was removed."""

    line: int
    status: str
    job_id: str | None
    custom_id: NotRequired[str | None]
    result: NotRequired[Any]
    error: NotRequired[dict[str, Any]]


class Client:
    """Calls one Slotkeeper.  Every method raises ClientError: ApiError, ApiUnreachable or OutcomeUnknown.

    url: the API's address, such as "http://127.0.0.1:8000".  key: a tenant's key, if the API requires one.
    ca: the file with the certificates, as PEM, of the authority that signed the API's; None: those that requests has;
    False: the certificate is not checked, which is for addresses of this machine alone.
    Not thread-safe: make one client for each thread.
    """

    def __init__(self, url: str, key: str | None = None, ca: str | Literal[False] | None = None) -> None:
        self.url = url.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False  # A proxy or a .netrc of the user is not meant for this.
        self._session.verify = ca is not False and (ca or True)  # requests takes "" for False
        if ca is False:
            warnings.filterwarnings("ignore", message="Unverified HTTPS request")
        self._session.headers["User-Agent"] = "slotkeeper-client"
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"

    def submit(
        self,
        model: str,
        payload: Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
        on_pause: Callable[[ClientError], object] = lambda error: None,
        **options: Any,
    ) -> Job:
        """Submit a job and return it as it was accepted; it is stored then.

        options: the fields of `POST /queue/submit`, such as priority, ttl, not_before, constraints, callback_url.
        idempotency_key: the same key within a day is the same job; a random one if left out.  While the API is away or
        refuses temporarily, the request is repeated under this key for at most `patience_s`, and `on_pause` is called
        with the error before each pause.
        """
        sent = {"Idempotency-Key": idempotency_key or secrets.token_hex(16), **(headers or {})}
        body = {"model": model, "payload": payload, **options}
        return self._job(self.retry(partial(self.post, "/queue/submit", body, sent), patience_s, on_pause))

    def get_job(self, job_id: str, patience_s: float = PATIENCE_S) -> Job:
        """Return the job as it is now, with its result if it has ended."""
        return self._job(self.retry(partial(self.get, _path_of(job_id)), patience_s))

    def cancel(self, job_id: str, patience_s: float = PATIENCE_S) -> Job:
        """Cancel a job and return it.  A running job ends when its server has stopped it; a result may come first.

        A job that is canceled already is returned, too.  Raises ApiError with status 409 if it has ended otherwise.
        """
        return self._job(self.retry(partial(self.post, f"{_path_of(job_id)}/cancel"), patience_s))

    def submit_batch(
        self,
        lines: Iterable[Mapping[str, Any] | bytes],
        *,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
        on_chunk: Callable[[Batch], object] = lambda batch: None,
        on_pause: Callable[[ClientError], object] = lambda error: None,
        **head: Any,
    ) -> Batch:
        """Submit lines, each a job, as one batch, and return it; all lines were received then, and it takes no more.

        lines: with the fields of `POST /queue/submit` and `custom_id`; JSON as bytes is sent as it is.
        head: the fields of `POST /batches`, such as model, name, on_error, window, callback_url.
        idempotency_key: the same key and head is the same batch, whose lines go on where they stopped; a random one if
        left out.  While the API is away, busy or limits the rate, requests are repeated for at most `patience_s` each,
        and `on_pause` is called with the error before each pause.  on_chunk: called with the batch before the first
        line, and after each chunk.

        A line that the API cannot accept does not raise: `refused` counts them, and `iter_batch_errors` says why.
        """
        sent = {"Idempotency-Key": idempotency_key or secrets.token_hex(16), **(headers or {})}
        batch = self._batch(self.retry(partial(self.post, "/batches", head, sent), patience_s, on_pause))
        on_chunk(batch)
        path, received, known = f"/batches/{batch['batch']}", 0, batch["next_line"] or 0
        for chunk in _cut(lines):
            while received + len(chunk) > known:
                part = chunk[max(known - received, 0) :]
                address, body = f"{path}/lines?from={received + len(chunk) - len(part)}", b"\n".join(part)
                send = partial(self.post, address, body, {"Content-Type": _NDJSON, **(headers or {})})
                known = self.retry(send, patience_s, on_pause)["next_line"]
                on_chunk(cast(Batch, {**batch, "next_line": known}))
            received += len(chunk)
        close = partial(self.post, f"{path}/close", {"lines": received})
        return self._batch(self.retry(close, patience_s, on_pause))

    def get_batch(self, batch_id: str, patience_s: float = PATIENCE_S) -> Batch:
        """Return the progress of a batch."""
        return self._batch(self.retry(partial(self.get, _path_of_batch(batch_id)), patience_s))

    def wait_for_batch(
        self,
        batch_id: str,
        timeout_s: float | None = None,
        notify: Callable[[Batch], object] = lambda batch: None,
        patience_s: float = PATIENCE_S,
    ) -> Batch:
        """Return a batch once all its jobs have ended, or as it is after `timeout_s`.

        `notify` is called with the batch every two seconds.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            batch = self.get_batch(batch_id, patience_s)
            if batch["status"] == "ended" or (until is not None and time.monotonic() > until):
                return batch
            notify(batch)
            time.sleep(_NOTIFY_EVERY_S)

    def iter_results(self, batch_id: str, first: int = 0, *, ended: bool = False) -> Iterator[BatchResult]:
        """Yield the results of a batch in the order of its lines, from line `first` on.

        ended: leave out lines whose jobs have not ended.
        """
        for line in self.iter_result_lines(batch_id, first, ended=ended):
            yield json.loads(line)

    def iter_result_lines(self, batch_id: str, first: int = 0, *, ended: bool = False) -> Iterator[bytes]:
        """Yield the same as JSON texts."""
        path = f"{_path_of_batch(batch_id)}/results"
        following: str | None = str(first)
        while following is not None:
            send = partial(self._send, "GET", path, params={"from": following, **({"ended": "true"} if ended else {})})
            answer = self.retry(lambda send=send: _require_ok(send(), self.url))  # type: ignore[misc]
            yield from answer.content.splitlines()
            following = answer.headers.get("Next-Line")

    def iter_batch_errors(self, batch_id: str, first: int = 0) -> Iterator[dict[str, Any]]:
        """Yield why lines of a batch were refused: line, custom_id, code, field, message."""
        path, following = f"{_path_of_batch(batch_id)}/errors", first
        while following is not None:
            page = self.get(path, **{"from": following, "limit": 1000})
            yield from page["errors"]
            following = page["next_line"]

    def cancel_batch(self, batch_id: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Cancel all jobs of a batch that have not ended, and return how many were `canceled` and are `canceling`."""
        path = f"{_path_of_batch(batch_id)}/cancel"
        total = {"canceled": 0, "canceling": 0, "remaining": 1}
        while total["remaining"]:
            done = self.retry(partial(self.post, path), patience_s)
            total = {name: done[name] + (total[name] if name != "remaining" else 0) for name in total}
        return {"batch": batch_id, **total}

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
        """Send a request and return the JSON of its response; None if that is empty."""
        return _read(self._send(method, path, body=body, params=params, headers=headers, timeout_s=timeout_s), self.url)

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> requests.Response:
        """Send a request and return its response."""
        sent = dict(headers or {})
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            return self._session.request(
                method,
                self.url + path,
                data=data,
                params=params,
                headers=sent,
                timeout=(5, timeout_s),
                allow_redirects=False,  # The API sends none; a foreign redirect would get the payload.
            )
        except requests.Timeout as error:
            raise ApiUnreachable(
                f"No answer from {self.url} in time: look whether it is overloaded, and try again."
            ) from error
        except requests.exceptions.SSLError as error:
            raise ClientError(_explain_tls(self.url, error)) from error
        except requests.ConnectionError as error:
            raise ApiUnreachable(
                f"Nothing answers at {self.url}: start it with `slotkeeper up`, or set SLOTKEEPER_URL, "
                "or SLOTKEEPER_HOME to the state folder of an installation on this machine."
            ) from error
        except requests.exceptions.ChunkedEncodingError as error:
            raise ApiUnreachable(f"The answer of {self.url} broke off: try again.") from error
        except (OSError, ValueError) as error:  # RequestException, and a file of `ca` that cannot be read.
            raise ClientError(f"{self.url} cannot be asked: {error}") from error

    def retry(
        self,
        send: Callable[[], Any],
        patience_s: float = PATIENCE_S,
        on_pause: Callable[[ClientError], object] = lambda error: None,
    ) -> Any:
        """Call `send` and return its value; repeat it while the API is away, busy (429, 503), or a proxy says so.

        The pauses are those that the API names, else 0.5 s and longer each time, `patience_s` in all.  For requests
        that may be sent twice.  `on_pause` is called with the error before each pause.
        """
        until = time.monotonic() + patience_s
        wait_s = 0.5
        while True:
            try:
                return send()
            except (ApiError, ApiUnreachable) as error:
                if not _is_temporary(error):
                    raise
                wanted_s = error.retry_after_s if isinstance(error, ApiError) else None
                pause_s = wait_s if wanted_s is None else wanted_s
                if time.monotonic() + pause_s > until:
                    raise
                on_pause(error)
            time.sleep(pause_s)
            wait_s = min(wait_s * 2, 15.0)

    def wait_for_job(
        self,
        job_id: str,
        timeout_s: float | None = None,
        notify: Callable[[Job], object] | None = None,
        patience_s: float = PATIENCE_S,
        on_pause: Callable[[ClientError], object] = lambda error: None,
    ) -> Job:
        """Return the job once it has ended, or as it is after `timeout_s`.

        `notify` is called with the job every two seconds.  While the API is away, as in a restart, the client waits
        for it, at most `patience_s`, and calls `on_pause` with the error before each pause.  Raises OutcomeUnknown
        after that.
        """
        longest_s = _LONGEST_WAIT_S if notify is None else _NOTIFY_EVERY_S
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = longest_s if until is None else min(until - time.monotonic(), longest_s)
            send = partial(self.get, _path_of(job_id), wait=max(left_s, 0))
            try:
                job = self._job(self.retry(send, patience_s, on_pause))
            except (ApiError, ApiUnreachable) as error:
                if not _is_temporary(error):
                    raise
                command = f"slotkeeper job {job_id} --wait"
                raise OutcomeUnknown(
                    f"{error.message}  How job {job_id} ends is not known here; go on waiting by: {command}"
                ) from error
            if is_final(job) or (until is not None and time.monotonic() + _PAUSE_S > until):
                return job
            if notify is not None:
                notify(job)
            time.sleep(_PAUSE_S)  # The API does not let everybody wait when too many do.

    def _job(self, answer: Any) -> Job:
        if not (isinstance(answer, dict) and "job_id" in answer and "status" in answer):
            raise ClientError(_NOT_SLOTKEEPER.format(url=self.url))
        return cast(Job, answer)

    def _batch(self, answer: Any) -> Batch:
        if not (isinstance(answer, dict) and "batch" in answer and "next_line" in answer):
            raise ClientError(_NOT_SLOTKEEPER.format(url=self.url))
        return cast(Batch, answer)

    def iter_pages(self, path: str, items: str, limit: int, **params: Any) -> Iterator[dict[str, Any]]:
        """Yield at most `limit` entries of a paged list.  `items`: the name of the list in each page, as "jobs"."""
        cursor = None
        while limit > 0:
            page = self.get(path, limit=min(limit, 200), cursor=cursor, **params)
            if not (isinstance(page, dict) and isinstance(page.get(items), list) and "next_cursor" in page):
                raise ClientError(_NOT_SLOTKEEPER.format(url=self.url))
            yield from page[items][:limit]
            limit -= len(page[items])
            cursor = page["next_cursor"]
            if cursor is None:
                return


def _explain_tls(url: str, error: Exception) -> str:
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return f"{url} does not speak TLS as it should ({error}): look whether its address begins with http://."
    reason = str(error).partition("certificate verify failed: ")[2].partition("(")[0].strip()
    return (
        f"The certificate of {url} is not trusted ({reason}): name the file with its authority's certificate in "
        "SLOTKEEPER_CA (in Python: Client(url, ca=...)), or correct the address."
    )


def _cut(lines: Iterable[Mapping[str, Any] | bytes]) -> Iterator[list[bytes]]:
    """Yield lines as JSON texts, as many as one request takes.  Empty ones are left out."""
    chunk, size = list[bytes](), 0
    for line in lines:
        text = line.strip() if isinstance(line, bytes) else json.dumps(line).encode()
        if not text:
            continue
        if chunk and (len(chunk) == _CHUNK_LINES or size + len(text) > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(text)
        size += len(text)
    if chunk:
        yield chunk


def _path_of_batch(batch_id: str) -> str:
    return f"/batches/{quote(batch_id, safe='')}"


def _path_of(job_id: str) -> str:
    return f"/queue/jobs/{quote(job_id, safe='')}"


def _is_temporary(error: ApiError | ApiUnreachable) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, ApiUnreachable) or error.status in _AGAIN:
        return True
    return error.status in _OF_PROXIES and not error.code


def is_final(job: Mapping[str, Any]) -> bool:
    """Return whether the job has ended."""
    return job["status"] not in _ACTIVE_STATES


def _read(answer: requests.Response, url: str) -> Any:
    try:
        body = json.loads(answer.content) if answer.content else None
    except ValueError:
        body = None
        if answer.ok:
            raise ClientError(_NOT_SLOTKEEPER.format(url=url)) from None
    if answer.is_redirect or answer.is_permanent_redirect:
        to = answer.headers["Location"]
        raise ClientError(f"{url} sends requests on to {to}: set SLOTKEEPER_URL to the address of the API itself.")
    if answer.ok:
        return body
    problem = body if isinstance(body, dict) else {"title": answer.reason}
    return _refuse(answer, problem)


def _require_ok(answer: requests.Response, url: str) -> requests.Response:
    """Return a response that is no error.  Raises as `_read`."""
    if not answer.ok or answer.is_redirect:
        _read(answer, url)
    return answer


def _refuse(answer: requests.Response, problem: Mapping[str, Any]) -> Any:
    after = answer.headers.get("Retry-After", "")
    raise ApiError(answer.status_code, problem, float(after) if after.isascii() and after.isdigit() else None)
