"""The requests of one run to its server, sent over the connections of an event loop."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import uvloop

from routing.dispatch.outcome import BAD_ANSWER, Outcome, OutcomeKind
from slotkeeper.urls import refuses_connections
from tasks.servers.adapter import HttpRequest, ServerAdapter
from tasks.servers.compiled import CompiledHealth, CompiledStep
from tasks.servers.description import Description
from tasks.servers.http_client import SPOOL_AFTER_BYTES, HttpClient, HttpExchange
from tasks.servers.responses import FailureReason, NoResponse, Response, parse_in_subprocess
from tasks.servers.stream_reader import OnPiece, Piece, StreamReader, ignore_piece
from tasks.servers.templates import TemplateError, TemplateValues
from tasks.servers.values import MAX_DEADLINE_S, Health, HealthKind, RunDetails

ResponseFuture: TypeAlias = "asyncio.Future[Response | NoResponse]"
"""The end of an abandoned exchange."""

_MAX_HEALTH_S = 60.0
_PROCESS_END_POLLS_S = (0.0, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4)  # pauses before each poll
_CUT_OFF = Outcome(OutcomeKind.UNKNOWN, code="cut_short", message="The call was cut short.")

T = TypeVar("T")


class _CutOff(Exception):
    """The session was cut off: the submit was not sent, or its response is not awaited."""


class ServerSession:
    """The requests of one run to its server.

    No method raises because of a server, a payload or a description: all faults become an Outcome or a Health.

    on_piece: called with each piece of a streamed response, and with the progress that a poll returns.
    """

    def __init__(self, server: ServerAdapter, http: HttpClient, on_piece: OnPiece = ignore_piece) -> None:
        self._server, self._http, self._on_piece = server, http, on_piece
        self._submit: HttpExchange | None = None
        self._is_cut_off = False
        self.is_broken = False  # The connection broke during the submit, before the response was complete.
        self.abandoned: ResponseFuture | None = None  # the end of a submit that was abandoned

    @property
    def description(self) -> Description:
        """Return the description of the server."""
        return self._server.description

    @property
    def is_node(self) -> bool:
        """Return whether the server is a node, whose results have to be verified."""
        return self._server.is_node

    def given_id_of(self, run: RunDetails) -> str | None:
        """Return the server's id of this attempt, as ServerAdapter.given_id_of does."""
        return self._server.given_id_of(run)

    # -- the steps of a description --------------------------------------------------------------------------

    async def submit(self, run: RunDetails) -> Outcome:
        """Submit the job, once.

        UNREACHABLE: certainly nothing was sent, or a gateway responded 502 or 504 (`bad_gateway`).
        UNKNOWN: the server may run the job; do not send it again until that is known.  UNKNOWN also if the session is
        cut off before the response.
        """
        values = self._values(run, self.given_id_of(run))
        reader = self._server.make_stream_reader(values, self._on_piece)
        try:
            outcome = await self._run_step(self._server.compiled.submit, values, _deadline_of(run), reader)
        except TemplateError as error:
            return Outcome(error.kind, code=error.code, message=str(error))
        except _CutOff:
            return _CUT_OFF
        finally:
            self._submit = None
        return outcome or Outcome(OutcomeKind.RETRY, code=BAD_ANSWER)

    async def status(self, run: RunDetails, remote_id: str) -> Outcome:
        """Poll the run.  A poll that fails is PENDING: the caller decides how long it polls.

        If the description has a result step, the result of a finished run is fetched, too.  Some servers delete a
        result that was read, so store it at once.
        """
        values, deadline_s = self._values(run, remote_id), _deadline_of(run)
        try:
            outcome = await self._poll(values, deadline_s)
            outcome = await self._with_fetched_result(outcome, values, deadline_s)
        except TemplateError as error:
            return Outcome(OutcomeKind.PENDING, code=error.code, message=str(error), remote_id=remote_id)
        if outcome.progress is not None:
            self._on_piece(Piece(progress=outcome.progress))
        return outcome

    async def fetch_result(self, run: RunDetails, remote_id: str | None, outcome: Outcome) -> Outcome:
        """Fetch the result of a run that ended by a push."""
        values = self._values(run, remote_id or self.given_id_of(run))
        try:
            return await self._with_fetched_result(outcome, values, _deadline_of(run))
        except TemplateError as error:
            return Outcome(OutcomeKind.PENDING, code=error.code, message=str(error), remote_id=remote_id)

    async def cancel(self, run: RunDetails, remote_id: str | None = None) -> bool:
        """Send each of the described cancel requests; return whether the server accepts one.

        Whether that frees the slot is described by `description.cancel_frees_slot`.  Without the server's id of the
        run, the job's id is sent: the server received it in X-Job-Id.
        """
        values = self._values(run, remote_id or self.given_id_of(run) or run.job_id)
        is_accepted = False
        for step in self._server.compiled.cancel:
            try:
                outcome = await self._run_step(step, values, _deadline_of(run))
            except TemplateError:
                continue
            is_accepted |= outcome is not None and outcome.kind is OutcomeKind.CANCELED
        return is_accepted

    async def health(self) -> Health:
        """Return what the server reports of itself.  DOWN: it does not respond, but jobs may still run there."""
        step, requests = self._server.compiled.health, self._server.requests
        if step is None:
            return Health(HealthKind.UNKNOWN, message="this server's description has no health check")
        deadline_s = time.monotonic() + step.request.connect_s + min(step.request.read_s, _MAX_HEALTH_S)
        try:
            request = requests.build(step, requests.template_values(None), deadline_s)
        except TemplateError as error:
            return Health(HealthKind.UNKNOWN, message=str(error))
        reply = await self.send(step, request)
        if isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET:
            # The server may have closed a kept connection at this moment.  A health check may be sent again.
            reply = await self.send(step, request)
        return step.judge.read(reply, self._server.secrets_to_redact(None))

    def _values(self, run: RunDetails, remote_id: str | None) -> TemplateValues:
        return self._server.requests.template_values(run, remote_id)

    async def _poll(self, values: TemplateValues, deadline_s: float) -> Outcome:
        for step in self._server.compiled.status:
            outcome = await self._run_step(step, values, deadline_s)
            if outcome is not None:
                return outcome
        return Outcome(OutcomeKind.PENDING, code=BAD_ANSWER, remote_id=values.remote_id)

    async def _with_fetched_result(self, outcome: Outcome, values: TemplateValues, deadline_s: float) -> Outcome:
        step = self._server.compiled.result
        if outcome.kind is not OutcomeKind.DONE or step is None:
            return outcome
        return await self._run_step(step, values, deadline_s) or outcome

    async def _run_step(
        self, step: CompiledStep, values: TemplateValues, deadline_s: float, reader: StreamReader | None = None
    ) -> Outcome | None:
        """Send the request of a step and judge the response.  Raises TemplateError: then nothing was sent."""
        reply = await self.send(step, self._server.requests.build(step, values, deadline_s, reader))
        if reader is not None and reader.is_stream:
            return reader.outcome(reply)
        outcome = step.judge.outcome(reply, self._server.response_context(values))
        # A server that is starting may respond as if the job were at fault: then its health decides (`only_when_up`).
        if (
            outcome is None
            or outcome.kind is not OutcomeKind.FAILED
            or not step.judge.depends_on_health(reply, values.remote_id)
        ):
            return outcome
        health = await self.health()
        if health.kind not in (HealthKind.BUSY, HealthKind.DOWN):
            return outcome
        return Outcome(
            OutcomeKind.BUSY, code="busy", message=f"{outcome.message} (the health check says {health.kind})"
        )

    # -- exchanges -------------------------------------------------------------------------------------------

    async def send(self, step: CompiledStep | CompiledHealth, request: HttpRequest) -> Response | NoResponse:
        """Send the request of a step, once.  Return its response, or why there is none.

        A large response is parsed in a subprocess: to parse 64 MiB here would hold the interpreter's lock for seconds,
        and delay all other runs of the worker.
        """
        if step is self._server.compiled.submit:
            reply = await self._send_submit(request)
        else:
            reply = await self._http.send(*request).reply
        if isinstance(reply, Response) and reply.size > SPOOL_AFTER_BYTES:
            async with self._http.large_response_lock:
                reply.set_json(*await parse_in_subprocess(reply.file or reply.body, self._server.pointers))
        return reply

    async def _send_submit(self, request: HttpRequest) -> Response | NoResponse:
        if self._is_cut_off:
            raise _CutOff
        self._submit = self._http.send(*request)
        reply = await self._submit.reply
        if self._submit.is_abandoned:
            self.abandoned = self._submit.reply
        self.is_broken = isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET and not self._is_cut_off
        if self._is_cut_off:
            raise _CutOff
        return reply

    def cut_off(self) -> None:
        """End the submit and close its connection.  A submit that was not sent yet is never sent."""
        self._is_cut_off = True
        if self._submit is not None:
            self._submit.cut_off()

    def abandon(self) -> None:
        """End the submit as `cut_off` does, but observe its exchange if its end shows that the run is over.

        `abandoned` is then a future for that end.  For a server without status or a health check, it is the only early
        sign that the slot is free.
        """
        self._is_cut_off = True
        if self._submit is not None:
            self._submit.abandon(FailureReason.TIMEOUT)

    async def is_run_over(self, run: RunDetails) -> bool:
        """Wait for the end of an abandoned submit, and return whether it shows that the run is over."""
        if self.abandoned is None:
            return False
        reply = await self.abandoned
        if isinstance(reply, NoResponse):
            return reply.reason is FailureReason.RESET and await self.has_process_ended()
        return self._server.is_run_over(run, reply)

    async def has_process_ended(self) -> bool:
        """Return whether the server's process has ended after its connection broke: its address refuses connections.

        A supervisor may soon start the next process, so the first check is made at once, and more in the next second.
        """
        for pause_s in _PROCESS_END_POLLS_S:
            await asyncio.sleep(pause_s)
            if await self.refuses_connections():
                return True
        return False

    async def refuses_connections(self) -> bool:
        """Return whether no process listens at the server's address."""
        return await asyncio.to_thread(refuses_connections, self._server.endpoint)


def _deadline_of(run: RunDetails) -> float:
    return time.monotonic() + min(run.deadline_s, MAX_DEADLINE_S)


def run_with_http_client(function: Callable[[HttpClient], Coroutine[Any, Any, T]]) -> T:
    """Run `function` with an HttpClient in a new event loop, and return its result; for a thread without an event loop.

    It keeps no connections: such calls are rarer than servers close idle connections.
    """

    async def run() -> T:
        http = HttpClient(asyncio.get_running_loop())
        try:
            return await function(http)
        finally:
            http.close()

    return uvloop.run(run())


def call_server(server: ServerAdapter, function: Callable[[ServerSession], Coroutine[Any, Any, T]]) -> T:
    """Call a server from a thread that has no event loop, such as `call_server(server, ServerSession.health)`."""
    return run_with_http_client(lambda http: function(ServerSession(server, http)))
