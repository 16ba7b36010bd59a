"""Clients that submit honestly: each job under one Idempotency-Key, again and again until it is accepted."""

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

_AGAIN = frozenset({429, 503})
_TIMEOUT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_PATIENCE_S = 120.0
_LATE_S = 10.0  # by then a submit has its answer, whatever is wrong
_LEAST_TTL_S = 0.5
_NOT_STORED = "nothing was stored"
NO_ANSWER = "no answer"
HOPELESS = "422 hopeless"
"""A deadline that cannot be kept as things stand."""
NOT_ASKED_TO_WAIT = "without Retry-After"


@dataclass(frozen=True, slots=True)
class _Answer:
    """To one submit.  `status` None: there was none."""

    status: int | None = None
    job_id: str | None = None
    wait_s: float | None = None
    deduplicated: bool = False
    denial: str | None = None
    """What it said of the job, if that was that it is not stored."""


def _is_hopeless(order: PlannedJob, status: int) -> bool:
    return status == 422 and order.expires_s is not None


def _named(order: PlannedJob, status: int) -> str:
    return HOPELESS if _is_hopeless(order, status) else str(status)


def _denial(answer: requests.Response, told: Any) -> str | None:
    """A 503 may leave open whether the job was stored, and says so; a 429 may not."""
    if answer.status_code == 429:
        return "429"
    said = f"{told.get('title', '')} {told.get('detail', '')}".strip() if isinstance(told, dict) else ""
    return said if _NOT_STORED in said.lower() else None


class Clients:
    """Submits `orders` from several threads."""

    def __init__(self, url: str, orders: Sequence[PlannedJob], threads: int, hook: Callable[[int], str]) -> None:
        """`hook`: where the end of the job of that number is told."""
        self._url, self._hook = f"{url}/queue/submit", hook
        self._orders = orders
        self._next = count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, name=f"client-{n}", daemon=True) for n in range(threads)]
        self.receipts: list[Receipt] = []
        self.gave_up: list[int] = []
        self.answers: Counter[str] = Counter()
        self.doubled: list[str] = []
        """Ids of jobs that were given for two different orders."""
        self.lies: list[str] = []
        """Answers that a job was not stored, which it was."""
        self.late: list[str] = []
        """Answers that took too long."""
        self.orders_of: dict[str, PlannedJob] = {}
        """By the id of the job that each became."""
        self.began_s = 0.0
        self._ids: set[str] = set()

    def start(self) -> None:
        self.began_s = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Submit no more."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Whether all are through by then."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def refusals(self) -> dict[str, int]:
        """Answers that a client cannot make sense of: neither accepted nor told to come again."""
        fine = {NO_ANSWER, HOPELESS, "200", "202", *(str(status) for status in _AGAIN)}
        return {answer: times for answer, times in self.answers.items() if answer not in fine}

    def _work(self) -> None:
        with requests.Session() as session:
            session.trust_env = False
            while not self._stop.is_set() and (number := next(self._next)) < len(self._orders):
                order = self._orders[number]
                self._stop.wait(max(self.began_s + order.at_s - time.monotonic(), 0))
                if not self._stop.is_set():
                    self._submit(session, order)

    def _submit(self, session: requests.Session, order: PlannedJob) -> None:
        body = orjson.dumps(self._body(order))
        headers = {"Content-Type": "application/json", "Idempotency-Key": f"drill-{order.number}"}
        sent_ns, pause_s = time.monotonic_ns(), _FIRST_PAUSE_S
        denied: str | None = None  # what said that nothing was stored; None: something may have been
        while not self._stop.is_set() and time.monotonic_ns() - sent_ns < _PATIENCE_S * 1e9:
            answer = self._ask(session, body, headers, order)
            if answer.job_id is not None:
                self._accepted(Receipt(answer.job_id, order.model, order.priority, sent_ns, time.monotonic_ns()), order)
                if answer.deduplicated and denied:
                    self._note(self.lies, f"order {order.number} was stored as {answer.job_id}, answered: {denied}")
                return
            if answer.status is not None and answer.status < 500 and answer.status not in _AGAIN:
                if _is_hopeless(order, answer.status):
                    return
                break
            first = pause_s == _FIRST_PAUSE_S
            denied = answer.denial if answer.denial and (first or denied) else None
            self._stop.wait(answer.wait_s if answer.wait_s is not None else pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        with self._lock:
            self.gave_up.append(order.number)

    def _body(self, order: PlannedJob) -> dict[str, Any]:
        body: dict[str, Any] = {"model": order.model, "payload": order.payload, "priority": order.priority}
        if order.hooked:
            body["callback_url"] = self._hook(order.number)
        if order.expires_s is not None:  # Once for all tries: a key stands for one body.
            body["ttl"] = round(max(self.began_s + order.expires_s - time.monotonic(), _LEAST_TTL_S), 3)
        return body

    def _ask(self, session: requests.Session, body: bytes, headers: dict[str, str], order: PlannedJob) -> "_Answer":
        began_s = time.monotonic()
        try:
            answer = session.post(self._url, body, headers=headers, timeout=(5, _TIMEOUT_S))
            told = answer.json()
            job_id = str(told["job_id"]) if answer.ok else None
        except (requests.RequestException, ValueError, KeyError, TypeError):
            self._count(NO_ANSWER)
            return _Answer()
        finally:
            took_s = time.monotonic() - began_s
            if took_s > _LATE_S:
                self._note(self.late, f"order {order.number} after {took_s:.1f} s")
        after = answer.headers.get("Retry-After", "")
        wait_s = float(after) if after.isdigit() else None
        polite = answer.status_code not in _AGAIN or wait_s is not None
        self._count(_named(order, answer.status_code) if polite else f"{answer.status_code} {NOT_ASKED_TO_WAIT}")
        return _Answer(answer.status_code, job_id, wait_s, bool(told.get("deduplicated")), _denial(answer, told))

    def _count(self, answer: str) -> None:
        with self._lock:
            self.answers[answer] += 1

    def _note(self, where: list[str], what: str) -> None:
        with self._lock:
            where.append(what)

    def _accepted(self, receipt: Receipt, order: PlannedJob) -> None:
        with self._lock:
            self.orders_of[receipt.job_id] = order
            if receipt.job_id in self._ids:
                self.doubled.append(receipt.job_id)
            self._ids.add(receipt.job_id)
            self.receipts.append(receipt)
