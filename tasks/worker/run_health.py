"""What the health of a server says of one run: it runs, it has ended, the server is gone, an earlier request is there.

A run whose request has no response, or whose server notifies of the end by itself, is judged by this alone.
"""

import math
import time
from collections.abc import Awaitable, Callable

from routing.dispatch.earlier_requests import RELEASED_MS, EarlierRequest
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.maintenance.server_report import MIN_AGE_MS
from slotkeeper.clock import clock, now_ms
from tasks.servers import Health, HealthKind, RunDetails, ServerSession
from tasks.worker.run_requests import RunRequests

_DOWN_LIMIT_S = 10.0  # A server that is away for so long, without a break, has lost the run.
_FEW_RUNS_S = 2.0  # beside `poll_interval`: for so long a server must count too few runs for an earlier one to be there
_REPORT_DELAY_S = MIN_AGE_MS / 1000  # A request that was sent just before may be missing in the server's report.

_AWAITS_EARLIER_REQUEST = (
    "A worker that stopped or was lost may have sent its request, and the server does not join repeated ones: it is"
    " sent again when the server's health no longer shows the job, when its process has ended"
)

CRASHED = Outcome(
    OutcomeKind.LOST,
    code="server_lost",
    message="The server's process ended under the job: its address refuses connections.",
)
_GONE_AWAY = Outcome(
    OutcomeKind.LOST,
    code="server_lost",
    message="The server went away under the job.",
    server_still_running=True,
)
JOB_NOT_FOUND = Outcome(OutcomeKind.LOST, code="server_lost", message="The server does not know the job any more.")
_CONNECTION_LOST = Outcome(
    OutcomeKind.LOST,
    code="connection_lost",
    message="The server broke the connection under the job, and has not said since that it runs it.",
    server_still_running=True,
)


class RunHealth:
    """Reads the health of one run's server.

    has_one_slot: the server has no other slot, so that a free place there shows that the run has ended.
    """

    def __init__(self, session: ServerSession, requests: RunRequests, has_one_slot: bool = False) -> None:
        self._session, self._requests, self._has_one_slot = session, requests, has_one_slot
        self.was_down = False  # The server did not answer at some time, perhaps because of this very job.
        self._down_since_s: float | None = None  # monotonic
        self._silent_since_s: float | None = None  # monotonic: since when the server is up, and does not notify
        self._broken_until_s: float | None = None  # monotonic: how long a run whose connection broke may go on

    async def check(self) -> Outcome:
        """Return the outcome of a run whose request has no response; UNKNOWN: the server may be running it.

        Only what the server reports, or its lasting absence, ends that.
        """
        health = await self._session.health()
        if await self.refuses_connections(health):
            return CRASHED
        if (outcome := self._outcome_if_down(health)) is not None:
            return outcome
        has_job = self.has_job(health)
        if has_job is False:
            return JOB_NOT_FOUND
        if has_job is None and self._broken_until_s is not None and time.monotonic() >= self._broken_until_s:
            return _CONNECTION_LOST
        return Outcome(OutcomeKind.UNKNOWN, message=health.message)

    async def check_while_awaiting_push(self) -> Outcome:
        """Return the outcome of a run whose server notifies of the end by itself; PENDING: the run goes on.

        The run is lost if the server is gone, or if the server is up, does not list the run, and is silent for longer
        than its description says.
        """
        health = await self._session.health()
        if (outcome := self._outcome_if_down(health)) is not None:
            return outcome
        limit_s, now_s = self._session.description.callback.silent_s, time.monotonic()
        if health.kind not in (HealthKind.UP, HealthKind.UNKNOWN) or _lists_job(health, self._requests.poll_details):
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = now_s
        elif limit_s is not None and now_s - self._silent_since_s >= limit_s:
            message = f"The server is well, and has not pushed the end for {limit_s:g} s."
            return Outcome(OutcomeKind.LOST, code="server_silent", message=message)
        return Outcome(OutcomeKind.PENDING)

    async def has_run_ended(self) -> bool:
        """Return whether the server reports that the run is not there any more."""
        return self.has_job(await self._session.health()) is False

    def has_job(self, health: Health) -> bool | None:
        """Return whether the server runs the job; None: its report does not show it."""
        return False if health.is_idle and self._has_one_slot else _lists_job(health, self._requests.poll_details)

    async def refuses_connections(self, health: Health) -> bool:
        """Return True if the server's process has ended: nothing listens at its address."""
        return health.kind in (HealthKind.DOWN, HealthKind.UNKNOWN) and await self._session.refuses_connections()

    def keep_for(self, seconds: float) -> None:
        """Let a run whose connection broke go on for so long at most, if the health does not show whether it runs."""
        self._broken_until_s = time.monotonic() + seconds

    def awaited_response(self) -> str:
        """Return what a run without a response waits for, as a sentence."""
        if self._broken_until_s is None:
            return "Its request has no answer: its slot is held until the server's health no longer shows the job."
        left_s = max(self._broken_until_s - time.monotonic(), 0)
        return (
            "The connection broke under its request: its slot is held until the server's health no longer shows the"
            f" job, or for {left_s:.0f} s more if that does not tell."
        )

    def _outcome_if_down(self, health: Health) -> Outcome | None:
        """Return the outcome while the server does not answer; None: it does."""
        if health.kind is not HealthKind.DOWN:
            self._down_since_s = None
            return None
        self.was_down = True
        now_s = time.monotonic()
        self._down_since_s = self._down_since_s or now_s
        if now_s - self._down_since_s < _DOWN_LIMIT_S:
            return Outcome(OutcomeKind.UNKNOWN, message=health.message)
        return _GONE_AWAY


class EarlierRequestWait:
    """Waits until the request of an earlier worker, which stopped or was lost, has left the server.

    The server could run the job twice at the same time.  So evidence must show that it does not have the earlier
    request: its health, a process that has ended, an operator, or that its longest time is over, counted from when that
    request was sent.

    find_earlier_request: reads what the database has of that request; None: nothing.
    """

    def __init__(
        self,
        session: ServerSession,
        health: RunHealth,
        requests: RunRequests,
        find_earlier_request: Callable[[], Awaitable[EarlierRequest | None]],
    ) -> None:
        self._session, self._health, self._requests = session, health, requests
        self._find_earlier_request = find_earlier_request
        self._began_s, self._few_since_s = time.monotonic(), math.inf
        self.awaits = ""  # what it waits for, as a sentence
        self.message = ""  # the last message of the server's health

    async def is_over(self) -> bool:
        """Ask the server once, and return whether the request may be sent."""
        health = await self._session.health()
        self.message = health.message
        if health.idempotent or await self._health.refuses_connections(health):
            return True
        earlier, now_s = await self._find_earlier_request(), time.monotonic()
        self._few_since_s = min(self._few_since_s, now_s) if _is_over_by_count(health, earlier) else math.inf
        # For a moment, a run that has just ended at the server may be counted here.
        if now_s - self._few_since_s >= _FEW_RUNS_S + self._requests.config.poll_interval:
            return True
        return self._has_ended(self._health.has_job(health), earlier, now_s - self._began_s)

    def _has_ended(self, has_job: bool | None, earlier: EarlierRequest | None, waited_s: float) -> bool:
        """Return whether the server has ended the earlier request; `has_job`: as RunHealth.has_job returns it."""
        sent_ms = self._requests.run.started_ms if earlier is None else earlier.sent_ms
        moved_ms = clock.moved_since(self._requests.run.clock_offset_ms)
        left_s = (sent_ms + moved_ms - now_ms()) / 1000 + self._requests.config.max_poll_time
        latest = f", or in {max(left_s, 0):.0f} s" if has_job is None else ""
        self.awaits = (
            f"{_AWAITS_EARLIER_REQUEST}{latest}. If the server certainly does not run it any more: "
            f"slotkeeper servers release {self._requests.run.server}"
        )
        if sent_ms == RELEASED_MS or (has_job is None and left_s <= 0):
            return True
        if waited_s < _REPORT_DELAY_S:
            return False
        return has_job is False or (has_job is None and self._requests.ends_on_disconnect)


def _is_over_by_count(health: Health, earlier: EarlierRequest | None) -> bool:
    """Return whether a server that only counts its runs has ended an earlier request."""
    if earlier is None or health.job_ids is not None or health.active_jobs is None or not health.running_count:
        return False
    return earlier.is_over_by_count(health.active_jobs)


def _lists_job(health: Health, run: RunDetails) -> bool | None:
    """Return whether the server's report has the job; None: the report does not show it."""
    if health.job_ids is not None:
        return bool({run.job_id, run.attempt_id} & health.job_ids)
    if health.active_jobs is not None and health.running_count:
        return None if health.active_jobs else False
    return None
