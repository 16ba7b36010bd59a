"""One run's call to its server: submit the job, or resume it, and find out how it ends.

The request of the run goes through these states:

    NOT_SENT ──► SENT ──► CONFIRMED      its result is known: a response came, or the request was not sent after all
                    └───► UNCONFIRMED    no response came, and the server has not reported the run since

A run that another worker submitted, and whose id at its server is stored, is CONFIRMED from the beginning.  The flags
of the LeaseWatch (lost, stop, drain, cancel) and the run's longest time end it from outside.
"""

import asyncio
import random
import time
from collections.abc import Awaitable
from enum import Enum
from typing import Protocol, TypeGuard

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.earlier_requests import EarlierRequest
from routing.dispatch.outcome import RUN_DIED, Outcome, OutcomeKind, StopReason
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from tasks.servers import RunDetails, ServerSession
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.run_health import CRASHED, JOB_NOT_FOUND, EarlierRequestWait, RunHealth
from tasks.worker.run_requests import RunRequests

_CANCEL_WAIT_S = 5.0  # A server that goes on for so long after its cancel is not waited for.
_HEALTH_PERIOD_S = 1.0

_CANCELED = Outcome(OutcomeKind.CANCELED, message="Canceled.")
CANCELED_UNSENT = Outcome(OutcomeKind.CANCELED, message="Canceled before it was sent.")
_CANCELED_UNCONFIRMED = Outcome(
    OutcomeKind.CANCELED, message="Canceled; the server did not confirm it.", server_still_running=True
)
_OVERDUE_UNSENT = Outcome(
    OutcomeKind.OVERDUE,
    code="deadline_passed",
    message="The job's deadline (ttl) had passed before it was sent to a server.",
)


class RunStore(Protocol):
    """What a call stores and reads of its run."""

    def store_remote_id(self, remote_id: str | None) -> Awaitable[bool]:
        """Store the server's own id of the job; None: it has none.  Returns False if the run is over."""

    def store_sent_time(self) -> Awaitable[bool]:
        """Store that the request of the run is sent now, later than its start.  Returns False if the run is over."""

    def find_earlier_request(self) -> Awaitable[EarlierRequest | None]:
        """Return the request of an earlier worker, as the database has it; None: there is none."""

    def longest_usual_ms(self) -> Awaitable[int]:
        """Return how long a run of the model takes at most, usually."""

    def is_lease_held(self, *, fresh: bool) -> Awaitable[bool]:
        """Return whether the run may use its slot now.  `fresh`: by a question to Redis that begins now."""


class RequestState(Enum):
    """How far the request of a run has come; see above."""

    NOT_SENT = "not sent"
    SENT = "sent"
    UNCONFIRMED = "unconfirmed"
    CONFIRMED = "confirmed"


class Cancellation:
    """The cancel of a run at its server, sent beside the run, which may be waiting for its response."""

    def __init__(self, session: ServerSession, requests: RunRequests) -> None:
        self._session, self._requests = session, requests
        self._task: asyncio.Task[None] | None = None
        self._waits_until_s: float | None = None  # monotonic: how long the server is waited for
        self.frees_slot = False  # The server accepted it, and its description says that this frees the slot.

    def start(self, call: "ServerCall") -> None:
        """Send the cancel, once, and give up the request if no response follows in time."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(call))

    async def send(self, remote_id: str | None) -> None:
        is_accepted = await self._session.cancel(self._requests.poll_details, remote_id)
        self.frees_slot = is_accepted and self._session.description.cancel_frees_slot == "immediate"

    def outcome(self) -> Outcome | None:
        """Return the outcome of the canceled run; None: its server still has time to end it."""
        if self.frees_slot:
            return _CANCELED
        now_s = time.monotonic()
        if self._waits_until_s is None:
            self._waits_until_s = now_s + _CANCEL_WAIT_S
        return _CANCELED_UNCONFIRMED if now_s > self._waits_until_s else None

    async def _run(self, call: "ServerCall") -> None:
        self._waits_until_s = time.monotonic() + _CANCEL_WAIT_S
        await self.send(call.remote_id)
        if not call.has_submit_ended:
            await asyncio.sleep(_CANCEL_WAIT_S)
            if not call.has_submit_ended:
                self._session.abandon()


class ServerCall:
    """The call of one run, in the event loop.

    may_be_at_server: an earlier worker, which stopped or was lost, may have sent the request.
    """

    def __init__(
        self,
        active: ActiveRun,
        watch: LeaseWatch,
        session: ServerSession,
        requests: RunRequests,
        store: RunStore,
        *,
        has_one_slot: bool = False,
        may_be_at_server: bool = False,
    ) -> None:
        """`has_one_slot`: as in RunHealth."""
        self._run, self._watch, self._session, self._requests, self._store = active.run, watch, session, requests, store
        self._health = RunHealth(session, requests, has_one_slot)
        self._cancellation = Cancellation(session, requests)
        self._may_be_at_server = may_be_at_server
        self.remote_id = active.run.remote_id
        self._is_resumed = self.remote_id is not None
        self._request = RequestState.CONFIRMED if self._is_resumed else RequestState.NOT_SENT
        watch.sent = self._is_resumed
        self._was_resent = False
        # The moment of the first poll within its period: runs that began together would each need a connection.
        self._first_pause = random.random()
        self._unreadable = ""  # what was wrong with the last response to a poll; "": nothing

    async def run(self) -> Outcome | StopReason:
        """Return the outcome of the run: never PENDING or UNKNOWN.  Raises DatabaseUnavailable."""
        self._watch.on_change(self._on_watch_change)
        try:
            outcome = await (self._check() if self._is_resumed else self._submit_after_earlier_request())
            while _is_undecided(outcome):
                if not await self._store_remote_id(outcome.remote_id):
                    return StopReason.LOST
                await self._wait(outcome)
                outcome = await self._end_from_outside(outcome) or await self._check()
        finally:
            self._watch.clear_callback()
        return outcome if isinstance(outcome, StopReason) else self._with_server_state(outcome)

    @property
    def has_submit_ended(self) -> bool:
        """Whether the request has come to an end, with or without a response."""
        return self._request in (RequestState.CONFIRMED, RequestState.UNCONFIRMED)

    def _with_server_state(self, outcome: Outcome) -> Outcome:
        """Return the outcome, which says whether the server still runs a job that it calls canceled: some do."""
        is_canceled = outcome.kind is OutcomeKind.CANCELED and self._request is not RequestState.NOT_SENT
        if is_canceled and self._session.description.cancel_frees_slot == "no":
            return outcome._replace(server_still_running=True)
        return outcome

    # -- submit ----------------------------------------------------------------------------------------------

    async def _submit_after_earlier_request(self) -> Outcome | StopReason:
        """Submit the job, as soon as no earlier request of it can be at the server."""
        if (reason := self._stop_reason()) is not None:
            return reason
        if self._watch.cancel:
            return CANCELED_UNSENT
        if self._requests.is_overdue:
            return _OVERDUE_UNSENT
        if self._may_be_at_server:
            # A server that joins a repeated request to its run receives it at once.
            is_joined = self._session.description.submit.idempotent
            if not is_joined and (outcome := await self._wait_for_earlier_request()) is not None:
                return outcome
            self._requests.count_time_from(now_ms())  # The wait for the earlier request is not the run's own time.
            self._watch.awaits = ""
            if not await self._store.store_sent_time():
                return StopReason.LOST
        if self._session.description.is_found_by_given_id and not await self._store_remote_id(
            self._session.given_id_of(self._requests.poll_details)
        ):
            return StopReason.LOST
        details = self._requests.make_submit_details()
        if not await self._store.is_lease_held(fresh=self._may_be_at_server):
            return await self._leave_unsent()
        if self._watch.cancel:  # It came while something else was awaited; the server does not have the request.
            return CANCELED_UNSENT
        self._watch.sent = True
        return await self._submit(details)

    async def _leave_unsent(self) -> Outcome | StopReason:
        """Return the outcome of a run whose slot may be another job's, as soon as nothing of its job is at the server.

        The job then waits in its lane.  To offer it again in this slot would only bring it back here.
        """
        is_over = not self._may_be_at_server or self._watch.earlier_request_is_over
        outcome = None if is_over else await self._wait_for_earlier_request()
        if outcome is not None:
            return outcome
        if self.remote_id is not None:  # The next run would ask for it; that there is none would cost a crash.
            await self._store.store_remote_id(None)
        return StopReason.UNSENT

    async def _wait_for_earlier_request(self) -> Outcome | StopReason | None:
        """Wait until the request of an earlier worker has left the server; None: it has."""
        wait = EarlierRequestWait(self._session, self._health, self._requests, self._store.find_earlier_request)
        while True:
            if (reason := self._stop_reason()) is not None:
                return reason
            if self._watch.cancel:
                return _CANCELED._replace(server_still_running=True)
            if await wait.is_over():
                self._watch.earlier_request_is_over = True
                return None
            self._watch.awaits = wait.awaits
            if self._requests.is_overdue:
                return await self._time_out(Outcome(OutcomeKind.UNKNOWN, message=wait.message))
            await self._watch.sleep(_HEALTH_PERIOD_S)

    async def _submit(self, details: RunDetails) -> Outcome:
        self._request = RequestState.SENT
        outcome = await self._session.submit(details)
        is_unknown = outcome.kind is OutcomeKind.UNKNOWN
        self._request = RequestState.UNCONFIRMED if is_unknown else RequestState.CONFIRMED
        crash_at("run_sent")
        if not self._session.is_broken or not is_unknown:
            return outcome
        if await self._session.has_process_ended():
            return CRASHED
        self._health.keep_for(await self._store.longest_usual_ms() / 1000)
        return outcome

    async def _submit_again(self) -> Outcome:
        """Send the request once more, under its key: the server returns a recent result, or runs the job now.

        Maintenance may find at the same time that the server does not have the run, seize its lease and end it.  It
        looks at the sent time after that, and the lease is checked here after the sent time: one of them notices.
        """
        if not await self._store.store_sent_time():
            return Outcome(OutcomeKind.UNKNOWN, message="The run is over.")
        details = self._requests.make_submit_details()
        if not await self._store.is_lease_held(fresh=True):  # The database is asked soon whether the run still counts.
            return Outcome(OutcomeKind.UNKNOWN, message="Its slot may be another job's.")
        self._was_resent = True
        return await self._submit(details)

    @property
    def _may_submit_again(self) -> bool:
        """Whether only the connection was lost: once, and not if the job may have brought its server down."""
        return not self._was_resent and not self._health.was_down

    async def _store_remote_id(self, remote_id: str | None) -> bool:
        """Store the run's id at the server, so that another worker can resume the run.  Returns False if it is over.

        This is before the first poll, and for an id that the worker gives, before the request.
        """
        if remote_id is None or remote_id == self.remote_id:
            return True
        if not await self._store.store_remote_id(remote_id):
            return False
        self.remote_id = remote_id
        crash_at("run_remote_noted")
        return True

    # -- wait and check --------------------------------------------------------------------------------------

    async def _wait(self, last: Outcome) -> None:
        """Wait until the server is asked again, or a flag of the watch is set."""
        self._watch.awaits = self._awaited(last)
        if self._stop_reason() is None:
            await self._watch.sleep(self._pause_s(last))

    def _awaited(self, last: Outcome) -> str:
        """Return what the run waits for, as a sentence; "": it runs as it should."""
        if last.kind is OutcomeKind.UNKNOWN:
            return self._health.awaited_response()
        return f"Its server has not told how the run is, and is asked again: {last.message}." if last.code else ""

    def _pause_s(self, last: Outcome) -> float:
        period_s = self._requests.config.poll_interval if last.kind is OutcomeKind.PENDING else _HEALTH_PERIOD_S
        if self._watch.cancel:  # It may have come during the question to the server, and has its own time limit.
            return min(period_s, _HEALTH_PERIOD_S)
        period_s, self._first_pause = period_s * self._first_pause, 1.0
        return max(min(period_s, self._requests.left_s), 0)

    async def _check(self) -> Outcome:
        """Ask the server how the run is."""
        if self._session.description.mode == "callback":
            return await self._health.check_while_awaiting_push()
        return await (self._check_health() if self.remote_id is None else self._poll(self.remote_id))

    async def _poll(self, remote_id: str) -> Outcome:
        outcome = await self._session.status(self._requests.poll_details, remote_id)
        is_unconfirmed = self._request is RequestState.UNCONFIRMED and outcome.code != RUN_DIED
        if outcome.kind is OutcomeKind.LOST and is_unconfirmed and self._may_submit_again:
            return await self._submit_again()  # The server never had it.
        if outcome.kind is OutcomeKind.PENDING and outcome.code:
            self._health.was_down = True  # It did not say how the run is: it may be down, and by this very job.
        elif outcome.kind is OutcomeKind.PENDING:
            self._request = RequestState.CONFIRMED
        return await self._end_if_unreadable(outcome)

    async def _end_if_unreadable(self, outcome: Outcome) -> Outcome:
        """Return the outcome; if the server sends the same unreadable JSON again, as one that ends the run."""
        last, self._unreadable = self._unreadable, outcome.message if outcome.is_faulty_json else ""
        if not outcome.is_faulty_json or (last != outcome.message and self._session.description.keeps_results):
            return outcome
        has_ended = await self._health.has_run_ended()
        return outcome._replace(kind=OutcomeKind.RETRY, server_still_running=not has_ended)

    async def _check_health(self) -> Outcome:
        """Find out by the server's health how a run is whose request has no response: its slot is held meanwhile."""
        outcome = await self._health.check()
        # A job under which servers have died may be what ends them: it is sent to one at a time.
        if outcome is JOB_NOT_FOUND and self._may_submit_again and not self._run.crashes:
            return await self._submit_again()
        return outcome

    # -- ends from outside -----------------------------------------------------------------------------------

    async def _end_from_outside(self, last: Outcome) -> Outcome | StopReason | None:
        """Return how the run ends by its watch or its longest time; None: it goes on."""
        if (reason := self._stop_reason()) is not None:
            return reason
        if self._watch.cancel:
            return self._cancellation.outcome()
        return None if self._requests.left_s > 0 else await self._time_out(last)

    def _stop_reason(self) -> StopReason | None:
        """Return why this worker must not go on with the run."""
        if self._watch.lost:
            return StopReason.LOST if self._watch.sent else StopReason.UNSENT
        return StopReason.STOPPED if self._watch.stop or (self._watch.drain and self._is_resumable) else None

    @property
    def _is_resumable(self) -> bool:
        """Whether another worker can ask the server for this run, and the run outlives our connection."""
        return self.remote_id is not None and (self.has_submit_ended or not self._requests.ends_on_disconnect)

    def _on_watch_change(self) -> None:
        """React to a flag of the watch, in the loop."""
        if self._stop_reason() is not None:
            self._session.cut_off()
        elif self._watch.cancel:
            self._cancellation.start(self)

    async def _time_out(self, last: Outcome) -> Outcome:
        """Cancel the run at its server, and return the outcome of a run that has taken too long."""
        kind, code, message = OutcomeKind.RETRY, "timed_out", "Exceeded max_poll_time."
        if self._requests.is_overdue:
            kind, code = OutcomeKind.OVERDUE, "deadline_passed"
            message = "The job's own deadline (ttl) passed while it ran."
        await self._cancellation.send(self.remote_id)
        if last.message:
            message = f"{message} Last: {last.message}"
        return Outcome(kind, code=code, message=message, server_still_running=not self._cancellation.frees_slot)


def _is_undecided(outcome: Outcome | StopReason) -> TypeGuard[Outcome]:
    return isinstance(outcome, Outcome) and outcome.kind in (OutcomeKind.PENDING, OutcomeKind.UNKNOWN)
