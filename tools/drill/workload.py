"""The jobs of a drill, a pure function of its seed, and the clients that submit them.

A client submits a job under one Idempotency-Key, and tries again until it is accepted.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import orjson
import requests

from tools.drill.history_checks import Receipt

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
_RUN_S = (0.02, 0.2)
_BURST_RUN_S = (0.5, 1.5)
_MEAN_RUN_S = sum(_RUN_S) / 2
_LONGEST_STRETCH = 20.0
_BUSY_SHARE = 0.7  # of the slots' time until the faults end
_LONG_S = 16.0  # a lease that is not renewed has expired by then, and the server still runs the job
_LONG_EVERY = 100
_FAILS_EVERY = 50
_GARBLES_EVERY = 20  # of the jobs for plain servers
_PLAIN_LONG_SHARE = 0.5  # of the time until the faults end
_HOOKED_EVERY = 4
_PRIORITIES = (5, 5, 5, 1, 9)
PLAIN = "plain"
"""The model whose server ignores idempotency keys, and answers some first attempts with faulty JSON."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job to submit, not before `at_s`."""

    number: int
    at_s: float
    model: str
    priority: int
    payload: Mapping[str, Any]
    hooked: bool = False
    """It has a `callback_url`."""
    expires_s: float | None = None
    """Its deadline, in seconds from the drill's start, as `at_s`; None: it has none."""

    @property
    def seconds(self) -> float:
        return float(self.payload["seconds"])


def plan_jobs(
    seed: int,
    count: int,
    models: Sequence[str],
    slots: int,
    seconds: float,
    burst: float,
    long: bool = True,
    hooks: bool = False,
) -> list[PlannedJob]:
    """Return `count` jobs, in the order of their times.

    The share `burst` (0 … 1) is submitted at once, the others evenly until four fifths of `seconds` are over.  Runs
    take 20 to 200 ms, or longer in proportion if all jobs would end before the faults do.  With `long`, one job in a
    hundred outlives a lease.  One in fifty fails at its first attempt.  With `hooks`, a quarter has a webhook.  A model
    gets jobs in proportion to how often `models` names it.

    With `long`, a plain server has such long runs for half of the time: only a run that outlives its worker's grace
    time shows whether its request is sent a second time meanwhile.
    """
    rng = random.Random(f"{seed} orders")
    long_numbers = set(range(_LONG_EVERY // 2, count, _LONG_EVERY)) if long else set()
    plain_every = max(round(count * models.count(PLAIN) / len(models) / (_PLAIN_LONG_SHARE * seconds / _LONG_S)), 1)
    plain_count = 0
    needed_s = _BUSY_SHARE * seconds * slots - len(long_numbers) * _LONG_S
    stretch = min(max(needed_s / (count * _MEAN_RUN_S), 1.0), _LONGEST_STRETCH)
    at_once = round(count * burst)
    jobs = []
    for number in range(count):
        model, priority = rng.choice(models), rng.choice(_PRIORITIES)
        run_s = rng.uniform(*_RUN_S) * stretch
        plain_count += model == PLAIN
        is_long = plain_count % plain_every == 0 and long if model == PLAIN else number in long_numbers
        payload: dict[str, Any] = {"number": number, "seconds": _LONG_S if is_long else round(run_s, 3)}
        if rng.randrange(_FAILS_EVERY) == 0:
            payload["fails"] = 1
        if model == PLAIN and rng.randrange(_GARBLES_EVERY) == 0:
            payload["garbles"] = 1
        late = max(number - at_once, 0) / max(count - at_once, 1)
        hooked = hooks and number % _HOOKED_EVERY == 0
        jobs.append(PlannedJob(number, round(late * seconds * 0.8, 3), model, priority, payload, hooked))
    return jobs


def plan_deadline_bursts(
    seed: int, first: int, moments: Iterable[tuple[float, float]], size: int, models: Sequence[str], hooks: bool = False
) -> list[PlannedJob]:
    """Return, for each moment (submitted at, deadline; in seconds from the start), `size` jobs with the same deadline.

    first: the number of the first job.  The jobs are the most urgent ones, or they would be refused as hopeless.  Their
    runs take so long that not all of them can start in time.
    """
    rng = random.Random(f"{seed} masses")
    return [
        PlannedJob(
            number=first + burst * size + position,
            at_s=at_s,
            model=rng.choice(models),
            priority=min(_PRIORITIES),
            payload={"number": first + burst * size + position, "seconds": round(rng.uniform(*_BURST_RUN_S), 3)},
            hooked=hooks and position % _HOOKED_EVERY == 0,
            expires_s=until_s,
        )
        for burst, (at_s, until_s) in enumerate(moments)
        for position in range(size)
    ]


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
