"""One run: a job is handed to its server, and watched until something final can be said about it."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import structlog

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.earlier_requests import RELEASED_MS, EarlierRequest
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.maintenance.server_report import MIN_AGE_MS
from routing.queries.trace_spans import ATTEMPT
from slotkeeper import json_text
from slotkeeper.clock import clock, now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.jobs.values import Run
from slotkeeper.registry.model_config import ModelConfig
from tasks import server_push, tracing
from tasks.servers import Call, Health, HealthKind, ServerSession
from tasks.worker.heartbeat import LeaseWatch

log = structlog.get_logger(__name__)

# How long a server must be gone without a break before a job whose fate is unknown is given up as lost.
_DOWN_LIMIT_S = 10.0
_CANCEL_WAIT_S = 5.0
_HEALTH_PERIOD_S = 1.0
_FEW_RUNS_S = 2.0  # beside `poll_interval`: for so long a server must count too few runs for an earlier one to be there
_REPORT_DELAY_S = MIN_AGE_MS / 1000
_OBSERVE_S = 600.0  # for the end of a run that is given up, at most
_POLL_DEADLINE_S = (
    30.0  # A question takes no longer than this, and may take as long, whatever is left of the run's own time.
)


_AWAITS_EARLIER_REQUEST = (
    "A worker that stopped or was lost may have sent its request, and the server does not join repeated ones: it is"
    " sent again when the server's health no longer shows the job, when its process has ended"
)


async def _always_held(_: LeaseWatch) -> bool:
    return True


async def _finds_none() -> EarlierRequest | None:
    return None


def _is_over_by_count(health: Health, earlier: EarlierRequest | None) -> bool:
    """Return whether a server that only counts its runs has ended an earlier request."""
    if earlier is None or health.job_ids is not None or health.active_jobs is None or not health.running_count:
        return False
    return earlier.is_over_by_count(health.active_jobs)


StoreRemoteId = Callable[[str], Awaitable[bool]]
"""Stores the server's own id of the job; False: this run is over."""


class ServerCall:
    """One run while it lasts, in the event loop.  `live` None: its server was removed."""

    __slots__ = (
        "__weakref__",
        "_bad_answer",
        "_broken_until",
        "_cancel_frees_slot",
        "_cancel_until",
        "_canceling",
        "_changes_model",
        "_config",
        "_down_since",
        "_ends_s",
        "_find_earlier_request",
        "_has_one_slot",
        "_has_response",
        "_is_lease_held",
        "_longest_usual_ms",
        "_may_be_at_server",
        "_may_send_again",
        "_model_version",
        "_poll_call",
        "_poll_phase",
        "_remote_id",
        "_resumes",
        "_run",
        "_session",
        "_silent_since",
        "_store_sent_time",
        "_submit_unconfirmed",
        "_watch",
        "_write_remote_id",
    )

    def __init__(
        self,
        active: ActiveRun,
        watch: LeaseWatch,
        config: ModelConfig,
        session: ServerSession | None,
        write_remote_id: StoreRemoteId,
        model_version: str = "",
        changes_model: bool = True,
        is_lease_held: Callable[[LeaseWatch], Awaitable[bool]] = _always_held,
        longest_usual_ms: Callable[[], Awaitable[int]] | None = None,
        find_earlier_request: Callable[[], Awaitable[EarlierRequest | None]] = _finds_none,
        store_sent_time: Callable[[], Awaitable[bool]] | None = None,
        has_one_slot: bool = False,
        may_be_at_server: bool = False,
    ) -> None:
        """`longest_usual_ms`: asks how long a run of the model may take before it is given up; None: to its own end.

        `find_earlier_request`: reads what is known of the request of an earlier worker.  `store_sent_time`: stores that
        the request is sent now; its result is False if the run is over.

        `has_one_slot`: its server has no other, so if that is idle, the run has ended.  `may_be_at_server`: an earlier
        worker, which stopped or was lost, may have sent the request.
        """
        self._run: Run = active.run
        self._find_earlier_request, self._store_sent_time = find_earlier_request, store_sent_time
        self._watch = watch
        self._config = config
        self._session = session
        self._write_remote_id, self._is_lease_held = write_remote_id, is_lease_held
        self._model_version, self._changes_model, self._longest_usual_ms = (
            model_version,
            changes_model,
            longest_usual_ms,
        )
        self._has_one_slot, self._may_be_at_server = has_one_slot, may_be_at_server
        self._ends_s = time.monotonic() + _seconds_left(active.run, config, active.run.sent_ms or active.run.started_ms)
        self._poll_call: Call | None = None
        self._resumes = watch.sent = active.run.remote_id is not None
        self._remote_id = active.run.remote_id
        self._submit_unconfirmed = (
            False  # No answer to the request, and nothing since, has said that the server knows the run.
        )
        self._has_response = False
        self._canceling: asyncio.Task[None] | None = None
        self._cancel_until: float | None = None
        self._cancel_frees_slot = (
            False  # The server has said yes to a cancel, and is described as one whose yes frees the slot.
        )
        self._down_since: float | None = None
        self._broken_until: float | None = None  # Until when a run goes on whose connection the server broke.
        self._silent_since: float | None = None  # Since when a server that tells the end itself is well and has not.
        # When in its interval it is asked: runs that began together each need a connection if asked together.
        self._poll_phase = random.random()
        self._bad_answer = ""  # what was wrong with the last answer to a poll
        self._may_send_again = True  # once, if the server has been there all the time

    async def run(self) -> Outcome | StopReason:
        """Run the job and answer what came of it: never PENDING or UNKNOWN.  Raises DatabaseUnavailable."""
        session = self._session
        if session is None:
            return Outcome(OutcomeKind.UNREACHABLE, code="server_removed", message="The server was removed.")
        self._watch.on_change(self._on_watch_change)
        try:
            outcome = await self._begin(session)
            while isinstance(outcome, Outcome) and outcome.kind in (OutcomeKind.PENDING, OutcomeKind.UNKNOWN):
                if not await self._store_remote_id(outcome.remote_id):
                    return StopReason.LOST
                self._watch.awaits = self._awaited_answer(outcome)
                if self._stop_reason() is None:
                    await self._watch.sleep(self._pause_s(outcome))
                outcome = await self._outcome_after_wait(session, outcome) or await self._check(session)
        finally:
            self._watch.clear_callback()
        if isinstance(outcome, StopReason) or self._has_server_stopped(session, outcome):
            return outcome
        return outcome._replace(server_still_running=True)

    def _awaited_answer(self, found: Outcome) -> str:
        """Return what a run waits for that goes on, as a sentence; "": it runs as it should."""
        if found.kind is OutcomeKind.PENDING:
            return f"Its server has not told how the run is, and is asked again: {found.message}." if found.code else ""
        if self._broken_until is None:
            return "Its request has no answer: its slot is held until the server's health no longer shows the job."
        left_s = max(self._broken_until - time.monotonic(), 0)
        return (
            "The connection broke under its request: its slot is held until the server's health no longer shows the"
            f" job, or for {left_s:.0f} s more if that does not tell."
        )

    def _has_server_stopped(self, session: ServerSession, outcome: Outcome) -> bool:
        """Whether the server has let go of a run that it calls canceled: some say so and go on."""
        sent = self._has_response or self._remote_id is not None
        return outcome.kind is not OutcomeKind.CANCELED or not sent or session.description.cancel_frees_slot != "no"

    async def _begin(self, session: ServerSession) -> Outcome | StopReason:
        """Hand the job over; or ask for what an earlier worker began, which may have ended long ago."""
        if self._resumes:
            return await self._check(session)
        if (
            reason := self._stop_reason()
        ) is not None:  # Nothing has been sent: who shall not go on has nothing to wait for.
            return reason
        if self._watch.cancel:
            return Outcome(OutcomeKind.CANCELED, message="Canceled before it was sent.")
        if self._is_overdue:
            message = "The job's deadline (ttl) had passed before it was sent to a server."
            return Outcome(OutcomeKind.RETRY, code="deadline_passed", message=message)
        if self._may_be_at_server:
            if (ended := await self._wait_for_earlier_request(session)) is not None:
                return ended
            self._ends_s = time.monotonic() + _seconds_left(self._run, self._config, now_ms())  # Its own time begins.
            self._watch.awaits = ""
            if self._store_sent_time is not None and not await self._store_sent_time():
                return StopReason.LOST
        if session.description.is_found_by_given_id and not await self._store_remote_id(
            session.given_id_of(self.poll_call)
        ):
            return StopReason.LOST
        call = self._submit_call
        if not await self._is_lease_held(self._watch):
            return StopReason.UNSENT
        if self._watch.cancel:  # It came while something else was awaited; the server does not have the request.
            return Outcome(OutcomeKind.CANCELED, message="Canceled before it was sent.")
        self._watch.sent = True
        return await self._submit(session, call)

    async def _wait_for_earlier_request(self, session: ServerSession) -> Outcome | StopReason | None:
        """Wait until the request of an earlier worker has left the server; None: the request may be sent.

        A server that joins a repeated request to its run is sent it at once.  Any other could run the job twice at the
        same time, so something must show that it is free of the earlier request: its health, a process that has ended,
        an operator, or that its longest time is over, counted from when that request was sent.
        """
        if session.description.submit.idempotent:
            return None
        began_s, few_since_s = time.monotonic(), math.inf
        while True:
            if (reason := self._stop_reason()) is not None:
                return reason
            if self._watch.cancel:
                return Outcome(OutcomeKind.CANCELED, message="Canceled.", server_still_running=True)
            health = await session.health()
            if health.idempotent or await self._refuses_connections(session, health):
                return None
            earlier, now_s = await self._find_earlier_request(), time.monotonic()
            few_since_s = min(few_since_s, now_s) if _is_over_by_count(health, earlier) else math.inf
            # For a moment, a run that has just ended at the server may be counted here.
            if now_s - few_since_s >= _FEW_RUNS_S + self._config.poll_interval:
                return None
            if self._is_earlier_request_over(session, self._is_known(health), earlier, now_s - began_s):
                return None
            if self._is_overdue:
                return await self._time_out(session, Outcome(OutcomeKind.UNKNOWN, message=health.message))
            await self._watch.sleep(_HEALTH_PERIOD_S)

    def _is_earlier_request_over(
        self, session: ServerSession, is_known: bool | None, earlier: EarlierRequest | None, waited_s: float
    ) -> bool:
        """Return whether the server has ended an earlier request, and say what is awaited if not.

        is_known: whether its health shows the run; None: it does not tell.
        """
        sent_ms = self._run.started_ms if earlier is None else earlier.sent_ms
        moved_ms = clock.moved_since(self._run.clock_offset_ms)
        left_s = (sent_ms + moved_ms - now_ms()) / 1000 + self._config.max_poll_time
        latest = f", or in {max(left_s, 0):.0f} s" if is_known is None else ""
        self._watch.awaits = (
            f"{_AWAITS_EARLIER_REQUEST}{latest}. If the server certainly does not run it any more: "
            f"slotkeeper servers release {self._run.server}"
        )
        if sent_ms == RELEASED_MS or (is_known is None and left_s <= 0):
            return True
        # A request that was sent just before may be missing in the server's report, and its connection still open.
        may_judge = waited_s >= _REPORT_DELAY_S
        return may_judge and (
            is_known is False or (is_known is None and session.description.ends_on_disconnect(self._payload))
        )

    async def _submit(self, session: ServerSession, call: Call) -> Outcome:
        outcome = await session.submit(call)
        self._has_response, self._submit_unconfirmed = True, outcome.kind is OutcomeKind.UNKNOWN
        crash_at("run_sent")
        if not session.is_broken or not self._submit_unconfirmed:
            return outcome
        if await session.has_process_ended():
            return _CRASHED
        if self._longest_usual_ms is not None:
            self._broken_until = time.monotonic() + await self._longest_usual_ms() / 1000
        return outcome

    async def _send_again(self, session: ServerSession) -> Outcome:
        """Only the connection was lost: under its key the server answers from its recent results, or runs it now."""
        call = self._submit_call
        if not await self._is_lease_held(self._watch):  # The database says soon whether the run still counts.
            return Outcome(OutcomeKind.UNKNOWN, message="Its slot may be another job's.", remote_id=self._remote_id)
        self._may_send_again = False
        return await self._submit(session, call)

    @property
    def poll_call(self) -> Call:
        """What all questions about the run, and its cancel, are asked with; most runs are asked nothing."""
        if self._poll_call is None:
            by_payload = self._session is not None and self._session.description.asks_by_payload
            self._poll_call = self._build_call(
                json_text.loads(self._run.payload) if by_payload else None, _POLL_DEADLINE_S
            )
        return self._poll_call

    @property
    def _payload(self) -> Any:
        return json_text.loads(self._run.payload)

    @property
    def _submit_call(self) -> Call:
        """The request itself.  Its payload is read when it is sent: a run that is polled for hours does not keep it."""
        passes_on = self._session is not None and self._session.description.sends_payload_alone
        payload = orjson.Fragment(self._run.payload) if passes_on else json_text.loads(self._run.payload)
        listen_s = min(self._config.max_poll_time, _OBSERVE_S)
        return self._build_call(payload, max(self._ends_s - time.monotonic(), 0.001), listen_s)

    def _build_call(self, payload: Any, deadline_s: float, listen_s: float = 0.0) -> Call:
        run = self._run
        return Call(
            job_id=run.job.id,
            attempt=run.attempt,
            payload=payload,
            callback_url=server_push.push_url(run.job.id),
            callback_token=server_push.push_token(run.job.id, run.attempt),
            deadline_s=deadline_s,
            listen_s=listen_s,
            model=run.job.model,
            model_version=self._model_version,
            swap=self._changes_model,
            traceparent=tracing.outgoing_traceparent(run.job.id, run.traceparent, ATTEMPT, run.attempt),
        )

    async def _store_remote_id(self, found: str | None) -> bool:
        """The run's id at the server goes into the record, so that another worker can resume: before the first poll,
        and where we give it, before the request.  False: this run is over.
        """
        if found is None or found == self._remote_id:
            return True
        if not await self._write_remote_id(found):
            return False
        self._remote_id = found
        crash_at("run_remote_noted")
        return True

    def _stop_reason(self) -> StopReason | None:
        """Why this worker shall not go on with the run."""
        if self._watch.lost:
            return StopReason.LOST if self._watch.sent else StopReason.UNSENT
        return StopReason.STOPPED if self._watch.stop or (self._watch.drain and self._is_resumable) else None

    @property
    def _is_resumable(self) -> bool:
        """Whether another worker can ask the server for this run, and nothing is lost if our connection closes."""
        if self._remote_id is None or self._session is None:
            return False
        return self._resumes or self._has_response or not self._session.description.ends_on_disconnect(self._payload)

    async def _outcome_after_wait(self, session: ServerSession, last: Outcome) -> Outcome | StopReason | None:
        """What the waiting itself has come to, if it is over."""
        if (reason := self._stop_reason()) is not None:
            return reason
        if self._watch.cancel:
            return self._outcome_if_canceled()
        if time.monotonic() < self._ends_s:
            return None
        return await self._time_out(session, last)

    def _pause_s(self, last: Outcome) -> float:
        """How long to wait before the server is asked again."""
        period_s = self._config.poll_interval if last.kind is OutcomeKind.PENDING else _HEALTH_PERIOD_S
        if self._watch.cancel:  # It may have been heard while the server was being asked, and has its own patience.
            return min(period_s, _HEALTH_PERIOD_S)
        period_s, self._poll_phase = period_s * self._poll_phase, 1.0
        return max(min(period_s, self._ends_s - time.monotonic()), 0)

    def _outcome_if_canceled(self) -> Outcome | None:
        """The server has been told, or is being told; watch for a moment whether it lets go."""
        if self._cancel_frees_slot:
            return Outcome(OutcomeKind.CANCELED, message="Canceled.")
        if self._cancel_until is None:
            self._cancel_until = time.monotonic() + _CANCEL_WAIT_S
        elif time.monotonic() > self._cancel_until:
            return Outcome(
                OutcomeKind.CANCELED, message="Canceled; the server did not confirm it.", server_still_running=True
            )
        return None

    def _on_watch_change(self) -> None:
        """A flag of the lease was raised."""
        if self._session is None:
            return
        if self._stop_reason() is not None:
            self._session.cut_off()
        elif self._watch.cancel and self._canceling is None:
            self._canceling = asyncio.get_running_loop().create_task(self._end_by_cancel(self._session))

    async def _end_by_cancel(self, session: ServerSession) -> None:
        """Ask the server to let go, beside the run, which may be waiting for its answer.

        A server that goes on regardless is not waited for any longer.
        """
        self._cancel_until = time.monotonic() + _CANCEL_WAIT_S
        await self._send_cancel(session)
        if not self._resumes and not self._has_response:
            await asyncio.sleep(_CANCEL_WAIT_S)
            if not self._has_response:
                session.abandon()

    async def _send_cancel(self, session: ServerSession) -> None:
        is_accepted = await session.cancel(self.poll_call, self._remote_id)
        self._cancel_frees_slot = is_accepted and session.description.cancel_frees_slot == "immediate"

    async def _time_out(self, session: ServerSession, last: Outcome) -> Outcome:
        await self._send_cancel(session)
        message = f" Last: {last.message}" if last.message else ""
        if self._is_overdue:
            message = f"The job's own deadline (ttl) passed while it ran.{message}"
            return Outcome(
                OutcomeKind.RETRY,
                code="deadline_passed",
                message=message,
                server_still_running=not self._cancel_frees_slot,
            )
        return Outcome(
            OutcomeKind.RETRY,
            code="timed_out",
            message=f"Exceeded max_poll_time.{message}",
            server_still_running=not self._cancel_frees_slot,
        )

    @property
    def _is_overdue(self) -> bool:
        return self._run.is_overdue(now_ms())

    async def _check(self, session: ServerSession) -> Outcome:
        if session.description.mode == "callback":
            return await self._await_push(session)
        return await (self._check_health(session) if self._remote_id is None else self._poll(session, self._remote_id))

    async def _poll(self, session: ServerSession, remote_id: str) -> Outcome:
        outcome = await session.status(self.poll_call, remote_id)
        if outcome.kind is OutcomeKind.LOST and self._submit_unconfirmed and self._may_send_again:
            return await self._send_again(session)  # It has never had it.
        if (
            outcome.kind is OutcomeKind.PENDING and outcome.code
        ):  # It cannot be asked: it may be down, and by this very job.
            self._may_send_again = False
        elif outcome.kind is OutcomeKind.PENDING:
            self._submit_unconfirmed = False
        return await self._end_if_unreadable(session, outcome)

    async def _end_if_unreadable(self, session: ServerSession, outcome: Outcome) -> Outcome:
        """Return the outcome; if the server has answered the same unreadable JSON before, as one that ends the run."""
        last, self._bad_answer = self._bad_answer, outcome.message if outcome.is_faulty_json else ""
        if not outcome.is_faulty_json or (last != outcome.message and session.description.keeps_results):
            return outcome
        has_ended = self._is_known(await session.health()) is False
        return outcome._replace(kind=OutcomeKind.RETRY, server_still_running=not has_ended)

    async def _await_push(self, session: ServerSession) -> Outcome:
        """The server tells the end itself, to the door.  It is lost if the server has gone, or is well, at nothing that
        it tells of, and silent for too long.
        """
        health = await session.health()
        if (outcome_if_down := self._outcome_if_down(health)) is not None:
            return outcome_if_down
        patience_s, now = session.description.callback.silent_s, time.monotonic()
        if health.kind not in (HealthKind.UP, HealthKind.UNKNOWN) or _has_job(health, self.poll_call):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif patience_s is not None and now - self._silent_since >= patience_s:
            message = f"The server is well, and has not told the end for {patience_s:g} s."
            return Outcome(OutcomeKind.LOST, code="server_silent", message=message)
        return Outcome(OutcomeKind.PENDING, remote_id=self._remote_id)

    async def _check_health(self, session: ServerSession) -> Outcome:
        """The request was sent and never answered: the server may be running it, so its slot is kept.

        Only its own word, or its lasting absence, ends that.
        """
        health = await session.health()
        if await self._refuses_connections(session, health):
            return _CRASHED
        if (outcome_if_down := self._outcome_if_down(health)) is not None:
            return outcome_if_down
        known = self._is_known(health)
        if known is False:
            # A job under which servers have died may be what kills them: it is sent to one at a time.
            if self._may_send_again and not self._run.crashes:
                return await self._send_again(session)
            return Outcome(OutcomeKind.LOST, code="server_lost", message="The server does not know the job any more.")
        if known is None and self._broken_until is not None and time.monotonic() >= self._broken_until:
            message = "The server broke the connection under the job, and has not said since that it runs it."
            return Outcome(OutcomeKind.LOST, code="connection_lost", message=message, server_still_running=True)
        return Outcome(OutcomeKind.UNKNOWN, message=health.message)

    async def _refuses_connections(self, session: ServerSession, health: Health) -> bool:
        """Return True if the server's process has ended: nothing listens at its address."""
        return health.kind in (HealthKind.DOWN, HealthKind.UNKNOWN) and await session.refuses_connections()

    def _is_known(self, health: Health) -> bool | None:
        """Return whether the server runs the job; None: its report does not tell."""
        return False if health.is_idle and self._has_one_slot else _has_job(health, self.poll_call)

    def _outcome_if_down(self, health: Health) -> Outcome | None:
        """What it means that nobody answers at the server; None: somebody does."""
        if health.kind is not HealthKind.DOWN:
            self._down_since = None
            return None
        self._may_send_again = False
        self._down_since = self._down_since or time.monotonic()
        if time.monotonic() - self._down_since < _DOWN_LIMIT_S:
            return Outcome(OutcomeKind.UNKNOWN, message=health.message)
        return Outcome(
            OutcomeKind.LOST,
            code="server_lost",
            message="The server went away under the job.",
            server_still_running=True,
        )


_CRASHED = Outcome(
    OutcomeKind.LOST,
    code="server_lost",
    message="The server's process ended under the job: its address refuses connections.",
)


def _has_job(health: Health, call: Call) -> bool | None:
    """Whether the server has the job; None: its report does not say."""
    if health.job_ids is not None:
        return bool({call.job_id, call.attempt_id} & health.job_ids)
    if health.active_jobs is not None and health.running_count:
        return None if health.active_jobs else False
    return None


def _seconds_left(run: Run, config: ModelConfig, began_ms: int) -> float:
    """Return what is left of the longest time of a run that began then, or of the job's own deadline."""
    ends = began_ms + config.max_poll_time * 1000
    if run.deadline_ms is not None:
        ends = min(ends, run.deadline_ms)
    return max(ends - now_ms(), 0) / 1000
