"""A server spoken to in an event loop: what `Server` says, sent by the loop's connections."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import uvloop

from routing.dispatch.outcome import Outcome, OutcomeKind
from slotkeeper.urls import refuses_connections
from tasks.servers.adapter import HttpRequest, ServerAdapter
from tasks.servers.body import SPOOL_AFTER_BYTES
from tasks.servers.call import Call, Health
from tasks.servers.description import Description
from tasks.servers.http_client import HttpClient, HttpExchange
from tasks.servers.inspection import parse_in_subprocess
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.stream_reader import OnPiece, Piece, ignore_piece

T = TypeVar("T")

ResponseFuture: TypeAlias = "asyncio.Future[Response | NoResponse]"
"""For the end of an exchange whose answer nobody waits for."""

_PROCESS_END_POLLS_S = (0.0, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4)  # between looks
_CUT_OFF = Outcome(OutcomeKind.UNKNOWN, code="cut_short", message="The call was cut short.")


class _CutOff(Exception):
    """The answer to the submit is not waited for any more."""


class ServerSession:
    """One run's requests to its server.  `on_piece` is given what the server says while it is at it."""

    __slots__ = ("_http", "_is_cut_off", "_on_piece", "_server", "_submit", "abandoned", "is_broken")

    def __init__(self, server: ServerAdapter, http: HttpClient, on_piece: OnPiece = ignore_piece) -> None:
        self._server, self._http, self._on_piece = server, http, on_piece
        self._submit: HttpExchange | None = None
        self._is_cut_off = False
        self.is_broken = False  # The server broke the connection under the submit, without an answer.
        self.abandoned: ResponseFuture | None = None  # The end of a submit that was given up before it was answered.

    @property
    def description(self) -> Description:
        return self._server.description

    def given_id_of(self, call: Call) -> str | None:
        return self._server.given_id_of(call)

    async def submit(self, call: Call) -> Outcome:
        """As Server.submit; UNKNOWN also if it is cut before the answer is there."""
        try:
            return await self._server.submit(call, self._send_submit, self._on_piece)
        except _CutOff:
            return _CUT_OFF
        finally:
            self._submit = None

    async def _send_submit(self, request: HttpRequest) -> Response | NoResponse:
        """Raises _Cut."""
        if self._is_cut_off:
            raise _CutOff
        self._submit = self._http.send(*request)
        reply = await self._submit.reply
        if self._submit.is_abandoned:
            self.abandoned = self._submit.reply
        self.is_broken = isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET and not self._is_cut_off
        if self._is_cut_off:
            raise _CutOff
        return await self._with_json(reply)

    async def _send(self, request: HttpRequest) -> Response | NoResponse:
        return await self._with_json(await self._http.send(*request).reply)

    async def _with_json(self, reply: Response | NoResponse) -> Response | NoResponse:
        """An answer that would keep all threads waiting is read in a process of its own."""
        if isinstance(reply, Response) and reply.size > SPOOL_AFTER_BYTES:
            async with self._http.large_response_lock:
                reply.set_json(*await parse_in_subprocess(reply.file or reply.body, self._server.pointers))
        return reply

    def cut_off(self) -> None:
        """The answer to the submit is not waited for any more; one that is not sent yet is not sent."""
        self._is_cut_off = True
        if self._submit is not None:
            self._submit.cut_off()

    def abandon(self) -> None:
        """As `cut`, but where the answer would tell that the run is over, its end is still observed (`abandoned`)."""
        self._is_cut_off = True
        if self._submit is not None:
            self._submit.abandon(FailureReason.TIMEOUT)

    async def is_run_over(self, call: Call) -> bool:
        """Observe a submit that was given up to its end: whether the server has done with the run by then."""
        if self.abandoned is None:
            return False
        reply = await self.abandoned
        if isinstance(reply, NoResponse):
            return reply.reason is FailureReason.RESET and await self.has_process_ended()
        return self._server.is_run_over(call, reply)

    async def has_process_ended(self) -> bool:
        """Whether the process behind a connection that broke has ended: its address refuses connections.

        A supervisor may start the next process soon, so it is looked at once, and some times in the next second.
        """
        for pause_s in _PROCESS_END_POLLS_S:
            await asyncio.sleep(pause_s)
            if await self.refuses_connections():
                return True
        return False

    async def refuses_connections(self) -> bool:
        """Whether no process listens at the server's address."""
        return await asyncio.to_thread(refuses_connections, self._server.endpoint)

    async def status(self, call: Call, remote_id: str) -> Outcome:
        outcome = await self._server.status(call, remote_id, self._send)
        if outcome.progress is not None:
            self._on_piece(Piece(progress=outcome.progress))
        return outcome

    async def cancel(self, call: Call, remote_id: str | None = None) -> bool:
        return await self._server.cancel(call, remote_id, self._send)

    async def health(self) -> Health:
        return await self._server.health(self._send)

    async def fetch_result(self, call: Call, remote_id: str | None, outcome: Outcome) -> Outcome:
        return await self._server.fetch_result(call, remote_id, outcome, self._send)


def run_with_http_client(function: Callable[[HttpClient], Coroutine[Any, Any, T]]) -> T:
    """Run `function` from a thread that has no event loop: in one of its own, whose connections are closed at the end.

    For calls that are rare: a server's health is asked less often than connections are kept.
    """

    async def run() -> T:
        http = HttpClient(asyncio.get_running_loop())
        try:
            return await function(http)
        finally:
            http.close()

    return uvloop.run(run())


def call_server(server: ServerAdapter, function: Callable[[ServerSession], Coroutine[Any, Any, T]]) -> T:
    """Call a server from a thread that has no event loop, such as `call_server(server, Live.health)`."""
    return run_with_http_client(lambda http: function(ServerSession(server, http)))
