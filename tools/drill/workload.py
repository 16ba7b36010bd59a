"""Clients that submit each planned job under one Idempotency-Key, and try again until it is accepted."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import orjson
import requests

from tools.drill.history_checks import Receipt
from tools.drill.jobs import PlannedJob

_RETRIED_STATUSES = frozenset({429, 503})
_TIMEOUT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_PATIENCE_S = 120.0
_LATE_S = 10.0  # An answer that takes longer is a finding, whatever faults there are.
_LEAST_TTL_S = 0.5
_NOT_STORED = "nothing was stored"
NO_ANSWER = "no answer"
HOPELESS = "422 hopeless"
"""The refusal of a deadline that cannot be kept at present."""
NOT_ASKED_TO_WAIT = "without Retry-After"


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to one submit.  `status` None: there was none.  `wait_s`: its Retry-After."""

    status: int | None = None
    job_id: str | None = None
    wait_s: float | None = None
    deduplicated: bool = False
    denial: str | None = None
    """Its text, if that states that the job was not stored."""


def _is_hopeless(planned: PlannedJob, status: int) -> bool:
    return status == 422 and planned.expires_s is not None


def _answer_name(planned: PlannedJob, status: int) -> str:
    return HOPELESS if _is_hopeless(planned, status) else str(status)


def _denial(answer: requests.Response, body: Any) -> str | None:
    """Return the statement that the job was not stored; None: the answer makes none.

    A 429 always means it; a 503 only with these words.
    """
    if answer.status_code == 429:
        return "429"
    text = f"{body.get('title', '')} {body.get('detail', '')}".strip() if isinstance(body, dict) else ""
    return text if _NOT_STORED in text.lower() else None


class Clients:
    """Submits `planned_jobs` from several threads.

    hook: returns the `callback_url` for the number of a planned job.
    """

    def __init__(self, url: str, planned_jobs: Sequence[PlannedJob], threads: int, hook: Callable[[int], str]) -> None:
        self._url, self._hook = f"{url}/queue/submit", hook
        self._planned_jobs = planned_jobs
        self._next = count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"client-{n}", daemon=True) for n in range(threads)]
        self.receipts: list[Receipt] = []
        self.gave_up: list[int] = []
        self.answers: Counter[str] = Counter()
        self.doubled_ids: list[str] = []
        """Job ids that were returned for two different planned jobs."""
        self.false_denials: list[str] = []
        """Answers that a job was not stored, although it was."""
        self.late: list[str] = []
        """Answers that took longer than _LATE_S."""
        self.planned_by_id: dict[str, PlannedJob] = {}
        """Job id -> its planned job."""
        self.began_s = 0.0
        self._ids: set[str] = set()

    def start(self) -> None:
        self.began_s = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop submitting."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads for up to `timeout_s`, and return whether all have ended."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def refusals(self) -> dict[str, int]:
        """Return the count of each answer that neither accepts the job nor asks the client to try again later."""
        expected = {NO_ANSWER, HOPELESS, "200", "202", *(str(status) for status in _RETRIED_STATUSES)}
        return {answer: times for answer, times in self.answers.items() if answer not in expected}

    def _run(self) -> None:
        with requests.Session() as session:
            session.trust_env = False
            while not self._stop.is_set() and (number := next(self._next)) < len(self._planned_jobs):
                planned = self._planned_jobs[number]
                self._stop.wait(max(self.began_s + planned.at_s - time.monotonic(), 0))
                if not self._stop.is_set():
                    self._submit(session, planned)

    def _submit(self, session: requests.Session, planned: PlannedJob) -> None:
        body = orjson.dumps(self._body(planned))
        headers = {"Content-Type": "application/json", "Idempotency-Key": f"drill-{planned.number}"}
        sent_ns, pause_s = time.monotonic_ns(), _FIRST_PAUSE_S
        denial: str | None = None  # the last answer that the job was not stored; None: it may have been
        while not self._stop.is_set() and time.monotonic_ns() - sent_ns < _PATIENCE_S * 1e9:
            answer = self._post(session, body, headers, planned)
            if answer.job_id is not None:
                self._note_receipt(
                    Receipt(answer.job_id, planned.model, planned.priority, sent_ns, time.monotonic_ns()), planned
                )
                if answer.deduplicated and denial:
                    self._note(
                        self.false_denials,
                        f"planned job {planned.number} was stored as {answer.job_id}, but answered: {denial}",
                    )
                return
            if answer.status is not None and answer.status < 500 and answer.status not in _RETRIED_STATUSES:
                if _is_hopeless(planned, answer.status):
                    return
                break
            first = pause_s == _FIRST_PAUSE_S
            denial = answer.denial if answer.denial and (first or denial) else None
            self._stop.wait(answer.wait_s if answer.wait_s is not None else pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        with self._lock:
            self.gave_up.append(planned.number)

    def _body(self, planned: PlannedJob) -> dict[str, Any]:
        body: dict[str, Any] = {"model": planned.model, "payload": planned.payload, "priority": planned.priority}
        if planned.hooked:
            body["callback_url"] = self._hook(planned.number)
        if planned.expires_s is not None:  # Computed once for all attempts: a key belongs to one body.
            body["ttl"] = round(max(self.began_s + planned.expires_s - time.monotonic(), _LEAST_TTL_S), 3)
        return body

    def _post(self, session: requests.Session, body: bytes, headers: dict[str, str], planned: PlannedJob) -> "_Answer":
        began_s = time.monotonic()
        try:
            answer = session.post(self._url, body, headers=headers, timeout=(5, _TIMEOUT_S))
            document = answer.json()
            job_id = str(document["job_id"]) if answer.ok else None
        except (requests.RequestException, ValueError, KeyError, TypeError):
            self._count(NO_ANSWER)
            return _Answer()
        finally:
            took_s = time.monotonic() - began_s
            if took_s > _LATE_S:
                self._note(self.late, f"planned job {planned.number} after {took_s:.1f} s")
        retry_after = answer.headers.get("Retry-After", "")
        wait_s = float(retry_after) if retry_after.isdigit() else None
        is_complete = answer.status_code not in _RETRIED_STATUSES or wait_s is not None
        self._count(
            _answer_name(planned, answer.status_code) if is_complete else f"{answer.status_code} {NOT_ASKED_TO_WAIT}"
        )
        return _Answer(
            answer.status_code, job_id, wait_s, bool(document.get("deduplicated")), _denial(answer, document)
        )

    def _count(self, answer: str) -> None:
        with self._lock:
            self.answers[answer] += 1

    def _note(self, findings: list[str], finding: str) -> None:
        with self._lock:
            findings.append(finding)

    def _note_receipt(self, receipt: Receipt, planned: PlannedJob) -> None:
        with self._lock:
            self.planned_by_id[receipt.job_id] = planned
            if receipt.job_id in self._ids:
                self.doubled_ids.append(receipt.job_id)
            self._ids.add(receipt.job_id)
            self.receipts.append(receipt)
