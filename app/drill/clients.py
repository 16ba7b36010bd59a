"""Clients that submit honestly: each job under one Idempotency-Key, again and again until it is accepted."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count

import orjson
import requests

from app.drill.checker import Receipt
from app.drill.jobs import Order

_AGAIN = frozenset({429, 503})
_TIMEOUT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_PATIENCE_S = 120.0
NO_ANSWER = "no answer"
NOT_ASKED_TO_WAIT = "without Retry-After"


class Clients:
    """Submits `orders` from several threads."""

    def __init__(self, url: str, orders: Sequence[Order], threads: int) -> None:
        self._url = f"{url}/queue/submit"
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
        fine = {NO_ANSWER, "200", "202", *(str(status) for status in _AGAIN)}
        return {answer: times for answer, times in self.answers.items() if answer not in fine}

    def _work(self) -> None:
        with requests.Session() as session:
            session.trust_env = False
            while not self._stop.is_set() and (number := next(self._next)) < len(self._orders):
                order = self._orders[number]
                self._stop.wait(max(self.began_s + order.at_s - time.monotonic(), 0))
                if not self._stop.is_set():
                    self._submit(session, order)

    def _submit(self, session: requests.Session, order: Order) -> None:
        body = orjson.dumps({"model": order.model, "payload": order.payload, "priority": order.tier})
        headers = {"Content-Type": "application/json", "Idempotency-Key": f"drill-{order.number}"}
        sent_ns, pause_s = time.monotonic_ns(), _FIRST_PAUSE_S
        while not self._stop.is_set() and time.monotonic_ns() - sent_ns < _PATIENCE_S * 1e9:
            status, job_id, told_s = self._ask(session, body, headers)
            if job_id is not None:
                self._accepted(Receipt(job_id, order.model, order.tier, sent_ns, time.monotonic_ns()))
                return
            if status is not None and status < 500 and status not in _AGAIN:
                break
            self._stop.wait(told_s if told_s is not None else pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        with self._lock:
            self.gave_up.append(order.number)

    def _ask(
        self, session: requests.Session, body: bytes, headers: dict[str, str]
    ) -> tuple[int | None, str | None, float | None]:
        """(status, id of the accepted job, seconds to wait)."""
        try:
            answer = session.post(self._url, body, headers=headers, timeout=(5, _TIMEOUT_S))
            job_id = str(answer.json()["job_id"]) if answer.ok else None
        except (requests.RequestException, ValueError, KeyError, TypeError):
            self._count(NO_ANSWER)
            return None, None, None
        after = answer.headers.get("Retry-After", "")
        told_s = float(after) if after.isdigit() else None
        polite = answer.status_code not in _AGAIN or told_s is not None
        self._count(str(answer.status_code) if polite else f"{answer.status_code} {NOT_ASKED_TO_WAIT}")
        return answer.status_code, job_id, told_s

    def _count(self, answer: str) -> None:
        with self._lock:
            self.answers[answer] += 1

    def _accepted(self, receipt: Receipt) -> None:
        with self._lock:
            if receipt.job_id in self._ids:
                self.doubled.append(receipt.job_id)
            self._ids.add(receipt.job_id)
            self.receipts.append(receipt)
