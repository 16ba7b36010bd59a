"""A server spoken to from an event loop: what `Server` says, carried out without waiting in a thread."""

from typing import TypeVar

from dispatch.outcome import Kind, Outcome
from tasks.servers.call import Call, Health
from tasks.servers.client import Server, Talk
from tasks.servers.description import Description
from tasks.servers.stream import Piece, Tell, tell_nobody
from tasks.servers.wires import Exchange, Wires

T = TypeVar("T")

_CUT = Outcome(Kind.UNKNOWN, code="cut_short", message="The call was cut short.")


class Live:
    """One run's talk with its server.  `tell` is given what the server says while it is at it."""

    __slots__ = ("_is_cut", "_server", "_submit", "_tell", "_wires")

    def __init__(self, server: Server, wires: Wires, tell: Tell = tell_nobody) -> None:
        self._server, self._wires, self._tell = server, wires, tell
        self._submit: Exchange | None = None
        self._is_cut = False

    @property
    def description(self) -> Description:
        return self._server.description

    def known_id(self, call: Call) -> str | None:
        return self._server.known_id(call)

    async def submit(self, call: Call) -> Outcome:
        """As Server.submit; UNKNOWN also if it is cut before the answer is there."""
        talk = self._server.submit_talk(call, self._tell)
        try:
            ask = next(talk)
            while not self._is_cut:
                self._submit = self._wires.begin(*ask)
                reply = await self._submit.reply
                if not self._is_cut:
                    ask = talk.send(reply)
        except StopIteration as ended:
            return ended.value
        finally:
            self._submit = None
        return _CUT

    def cut(self) -> None:
        """The answer to the submit is not waited for any more; one that is not sent yet is not sent."""
        self._is_cut = True
        if self._submit is not None:
            self._submit.cut()

    async def status(self, call: Call, remote_id: str) -> Outcome:
        outcome = await self._carry_out(self._server.status_talk(call, remote_id))
        if outcome.progress is not None:
            self._tell(Piece(progress=outcome.progress))
        return outcome

    async def cancel(self, call: Call, remote_id: str | None = None) -> bool:
        return await self._carry_out(self._server.cancel_talk(call, remote_id))

    async def health(self) -> Health:
        return await self._carry_out(self._server.health_talk())

    async def _carry_out(self, talk: Talk[T]) -> T:
        try:
            ask = next(talk)
            while True:
                ask = talk.send(await self._wires.begin(*ask).reply)
        except StopIteration as ended:
            return ended.value
