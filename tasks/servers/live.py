"""A server spoken to from an event loop: what `Server` says, carried out without waiting in a thread."""

import asyncio
from typing import TypeAlias, TypeVar

from dispatch.outcome import Kind, Outcome
from foundation.addresses import refuses
from tasks.servers.answers import Answer, Break, Broken
from tasks.servers.body import FILED_FROM
from tasks.servers.call import Call, Health
from tasks.servers.client import Server, Talk
from tasks.servers.description import Description
from tasks.servers.inspection import inspect
from tasks.servers.stream import Piece, Tell, tell_nobody
from tasks.servers.wires import Exchange, Wires

T = TypeVar("T")

End: TypeAlias = "asyncio.Future[Answer | Broken]"
"""For the end of an exchange whose answer nobody waits for."""

_DEATH_SHOWS_S = (0.0, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4)  # between looks
_CUT = Outcome(Kind.UNKNOWN, code="cut_short", message="The call was cut short.")


class Live:
    """One run's talk with its server.  `tell` is given what the server says while it is at it."""

    __slots__ = ("_is_cut", "_server", "_submit", "_tell", "_wires", "abandoned", "is_broken")

    def __init__(self, server: Server, wires: Wires, tell: Tell = tell_nobody) -> None:
        self._server, self._wires, self._tell = server, wires, tell
        self._submit: Exchange | None = None
        self._is_cut = False
        self.is_broken = False  # The server broke the connection under the submit, without an answer.
        self.abandoned: End | None = None  # The end of a submit that was given up before it was answered.

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
                if self._submit.is_abandoned:
                    self.abandoned = self._submit.reply
                self.is_broken = isinstance(reply, Broken) and reply.how is Break.RESET and not self._is_cut
                if not self._is_cut:
                    ask = talk.send(await self._inspected(reply))
        except StopIteration as ended:
            return ended.value
        finally:
            self._submit = None
        return _CUT

    async def _inspected(self, reply: Answer | Broken) -> Answer | Broken:
        """An answer that would keep all threads waiting is read in a process of its own."""
        if isinstance(reply, Answer) and reply.size > FILED_FROM:
            async with self._wires.one_inspection:
                reply.inspected(await inspect(reply.file or reply.body, self._server.pointers))
        return reply

    def cut(self) -> None:
        """The answer to the submit is not waited for any more; one that is not sent yet is not sent."""
        self._is_cut = True
        if self._submit is not None:
            self._submit.cut()

    def abandon(self) -> None:
        """As `cut`, but where the answer would tell that the run is over, its end is still observed (`abandoned`)."""
        self._is_cut = True
        if self._submit is not None:
            self._submit.abandon(Break.TIMEOUT)

    async def is_over(self, call: Call) -> bool:
        """Observe a submit that was given up to its end: whether the server has done with the run by then."""
        if self.abandoned is None:
            return False
        reply = await self.abandoned
        if isinstance(reply, Broken):
            return reply.how is Break.RESET and await self.has_died()
        return self._server.is_over(call, reply)

    async def has_died(self) -> bool:
        """Whether the process behind a connection that broke has ended: its address refuses connections.

        A supervisor may start the next process soon, so it is looked at once, and some times in the next second.
        """
        for pause_s in _DEATH_SHOWS_S:
            await asyncio.sleep(pause_s)
            if await self.refuses():
                return True
        return False

    async def refuses(self) -> bool:
        """Whether no process listens at the server's address."""
        return await asyncio.to_thread(refuses, self._server.endpoint)

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
                ask = talk.send(await self._inspected(await self._wires.begin(*ask).reply))
        except StopIteration as ended:
            return ended.value
