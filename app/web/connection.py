"""One connection: reads heads and bodies, each within its time and size, and writes answers in their order."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from app.web.gateway import Answer, BadHead, environ_of
from app.web.owners import Kind, Owner, TooManyKeys
from app.web.request import LONGEST_HEAD, LONGEST_TARGET, MOST_HEADERS, Request

if TYPE_CHECKING:
    from app.web.door import Door
    from app.web.stream import Stream

_LONGEST_FRAMING = 64 << 10  # bytes of a chunked body that are no content, before it goes on
_HEARD_OUT = 32 << 20  # bytes of a body that is refused; a client that cannot send on never reads why
_HEARD_OUT_S = 5.0
_PIECE = 1 << 10  # bytes read of heads at one go: many requests fit into few bytes, and each holds far more
_LEFT_S = 5.0  # for which a client that sends no more may wait for a thread
_MOST_UNSENT = 128 << 10  # bytes of a stream that its client has not read; then it is closed, and may come again
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(asyncio.BufferedProtocol):
    """As asyncio has it: called from the event loop's thread only."""

    def __init__(self, door: "Door") -> None:
        self._door = door
        self.address = ""
        self.bytes_owner, self.bytes_held = "", 0
        self._peer = ("", 0)
        self._requests: deque[Request] = deque()  # The first is being answered, or read.
        self._since = door.now()  # of the present pause
        self._silent = 0  # bytes since the last that were content
        self._unsent = 0  # bytes of an answer
        self._any_answered = False
        self._ahead = bytearray()  # What has come and is not read yet.
        self._going_on = False
        self._ended: float | None = None  # since when the client sends no more
        self._closing = False
        self._hearing_out: float | None = None  # since when
        self._heard_out = 0  # bytes
        self._stream: Stream | None = None  # that is being sent
        self._when_sent: Callable[[], None] | None = None
        self.when_left: Callable[[], None] = _nothing
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._parser = HttpRequestParser(self)

    @property
    def is_served(self) -> bool:
        """It waits for an answer."""
        return bool(self._requests) and self._requests[0].served and not self._unsent

    @property
    def has_left(self) -> bool:
        """Nobody waits for the answer, as far as can be told: who only sends no more looks like who is gone."""
        return self._closing or (self._ended is not None and self._door.now() - self._ended > _LEFT_S)

    # -- the transport ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # `resume_writing` shall tell that all is sent.
        self._peer = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.address = self._peer[0]
        self._door.crowd.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._door.crowd.leave(self)
        self.when_left()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._door.arriving

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            return
        if self._hearing_out is not None:
            self._forget(nbytes)
            return
        self._door.crowd.heard(self)
        self._ahead += memoryview(self._door.arriving)[:nbytes]
        self._go_on()
        if self._ahead:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The client sends no more; whether it may still read."""
        self._ended = self._door.now()
        if self._hearing_out is not None or self._stream is not None:
            return False  # Who follows a stream and sends no more has left: its place is for others.
        self._go_on()
        return True

    def resume_writing(self) -> None:
        """All is sent."""
        if self._unsent:
            self._unsent = 0
            self._end_request()
        elif self._when_sent is not None:
            then, self._when_sent = self._when_sent, None
            then()

    # -- reading ---------------------------------------------------------------------------------------------

    def _read_on(self) -> bool:
        """Read some of what has come.  False: nothing has."""
        if not self._ahead:
            return self._end_reading() if self._ended is not None else self._ask_for_more()
        size = max(_PIECE, self._requests[-1].missing if self._requests else 0)
        piece = bytes(self._ahead[:size])
        del self._ahead[:size]
        self._silent += len(piece)
        try:
            with suppress(HttpParserUpgrade):  # To nothing; what follows is not read, as it may be no HTTP.
                self._parser.feed_data(piece)
        except HttpParserError:
            self._refuse(400, "malformed_request", "This is no HTTP/1.1.")
        self._check_silence()
        return True

    def _ask_for_more(self) -> bool:
        self._transport.resume_reading()
        return False

    def _end_reading(self) -> bool:
        """The client sends no more, and all is read."""
        if not self._requests:
            self._close()
            return False
        self._refuse(400, "incomplete_body", "The request broke off; nothing was done.  Send it again.")
        return True

    def _check_silence(self) -> None:
        """Heads, chunk extensions and trailers have no end of their own."""
        if not self._requests or self._requests[-1].complete:
            return
        if self._requests[-1].environ is None:
            if self._silent > LONGEST_HEAD:
                self._refuse(431, "head_too_large", _LARGE_HEAD)
        elif self._silent > _LONGEST_FRAMING:
            self._refuse(400, "malformed_request", "Its chunks hold next to nothing.")

    def _forget(self, size: int) -> None:
        self._heard_out += size
        if self._heard_out > _HEARD_OUT:
            self.give_way()

    # -- the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._requests.append(Request(self._door.now()))

    def on_url(self, target: bytes) -> None:
        self._requests[-1].target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        self._requests[-1].add_header(name, value)

    def on_headers_complete(self) -> None:
        request, parser = self._requests[-1], self._parser
        self._silent = 0
        request.began = self._door.now()
        request.close = not parser.should_keep_alive() or parser.should_upgrade()
        if len(request.target) > LONGEST_TARGET:
            self._refuse(414, "address_too_long", f"An address may have {LONGEST_TARGET} bytes.")
        elif request.is_head_too_large:
            self._refuse(431, "head_too_large", _LARGE_HEAD)
        else:
            self._read_head(request)

    def _read_head(self, request: Request) -> None:
        method, version = self._parser.get_method().decode("latin-1"), self._parser.get_http_version()
        try:
            request.environ = environ_of(method, version, request.target, request.headers, self._peer)
        except BadHead as error:
            self._refuse(400, "malformed_request", f"In this request {error}.")
            return
        request.limit = self._door.limit_of(request.path)
        try:
            request.owner = self._door.owner_of(self, request)
        except TooManyKeys:
            self._refuse(503, "too_many_keys", "Too many keys that are new here come from your address.", 1)

    def on_body(self, data: bytes) -> None:
        request = self._requests[-1]
        self._silent = 0
        if request.unread:
            return
        if len(request.body) + len(data) > request.limit:
            request.body += data[: request.limit + 1 - len(request.body)]
            request.unread = True
        elif self._door.may_hold(self, request, len(data)):
            request.body += data
        else:
            self._refuse(429, "too_many_bytes", "You send too much at once; let what you have begun end first.", 1)

    def on_message_complete(self) -> None:
        self._silent = 0
        self._requests[-1].complete = True

    # -- requests --------------------------------------------------------------------------------------------

    def owned(self, request: Request, owner: Owner) -> None:
        """It is known now whose request it is."""
        request.owner = owner
        self._go_on()

    def _go_on(self) -> None:
        """Do all that can be done now.  Whatever ends here within it goes on by it, not by another."""
        if self._going_on:
            return
        self._going_on = True
        try:
            while not self._closing and self._hearing_out is None and self._step():
                pass
        finally:
            self._going_on = False

    def _step(self) -> bool:
        """Do one thing for the first request, or read.  False: there is nothing to do before something comes."""
        request = self._requests[0] if self._requests else None
        if request is None or (request.refusal is None and request.environ is None):
            return self._read_on()
        if request.served:
            return False
        if request.refusal is not None:
            request.served = True
            self.answer(request, request.refusal)
            return True
        if request.owner is None:
            return False
        if request.owner.kind in (Kind.OPERATOR, Kind.TENANT):
            self._door.crowd.trust(self)
        if self._is_ready(request, request.owner):
            request.served = True
            self._door.serve(self, request)
            return True
        self._invite(request)
        return self._read_on()

    def _is_ready(self, request: Request, owner: Owner) -> bool:
        """Whether the application can answer: all is here, or what is here is enough to be refused."""
        if not request.complete:
            request.unread = request.is_too_large or (
                owner.kind is Kind.STRANGER and self._door.wants_key(request.path)
            )
        return request.complete or request.unread

    def _invite(self, request: Request) -> None:
        """To send the body, if the client waits for that."""
        assert request.environ is not None
        waits = request.environ.pop("HTTP_EXPECT", "").lower() == "100-continue" and request.version == "1.1"
        if waits and not request.body:
            self._transport.write(_CONTINUE)

    def _refuse(self, status: int, code: str, detail: str, retry_after_s: int | None = None) -> None:
        """Answer the request that is being read with a refusal, when its turn comes, and read no other."""
        if not self._requests or self._requests[-1].complete:
            self._requests.append(Request(self._door.now()))
        request = self._requests[-1]
        request.refuse(Answer.problem(status, code, detail, request.path, retry_after_s))

    def answer(self, request: Request, answer: Answer) -> None:
        """Send it, and go on with the next request."""
        if self._closing:
            return
        self._door.crowd.release(self)
        if not self._door.hold_answer(self, request, len(answer.body)):
            self.give_way()
            return
        request.close = request.close or request.unread or self._door.stopping
        self._transport.write(answer.encode(request.method, request.version, close=request.close))
        self._unsent = self._transport.get_write_buffer_size()
        self._since = self._door.now()
        if not self._unsent:
            self._end_request()

    # -- streams ---------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._door.now()

    def open_stream(self, request: Request, head: Answer, stream: "Stream") -> None:
        """Answer with a body that has no end yet."""
        if self._closing:
            return
        request.close = True
        self._stream = stream
        self._since = self._door.now()
        self._transport.write(head.encode_head(request.version))

    def send(self, data: bytes) -> None:
        """More of the stream.  A client that has not read what came before is closed."""
        if self._closing:
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent > _MOST_UNSENT:
            self.give_way()
            return
        if not unsent:
            self._since = self._door.now()
        self._transport.write(data if self._requests[0].version == "1.0" else b"%x\r\n%b\r\n" % (len(data), data))

    def when_sent(self, then: Callable[[], None]) -> None:
        """Call `then` when the client has read all, or as good as."""
        if self._transport.get_write_buffer_size():
            self._when_sent = then
        else:
            then()

    def end_stream(self) -> None:
        if self._closing or self._stream is None:
            return
        self._stream = None
        if self._requests[0].version != "1.0":
            self._transport.write(b"0\r\n\r\n")
        self._unsent = self._transport.get_write_buffer_size()
        self._since = self._door.now()
        if not self._unsent:
            self._end_request()

    def _watch_stream(self, stream: "Stream", now_s: float) -> None:
        waits = self._transport.get_write_buffer_size() and now_s - self._since > self._door.settings.send_timeout_s
        if waits or self.has_left:
            self.give_way()
        else:
            stream.tick(now_s)

    def _end_request(self) -> None:
        self._door.crowd.release(self)
        request = self._requests.popleft()
        self._since, self._any_answered = self._door.now(), True
        if request.unread and not request.complete and self._ended is None:
            self._hear_out()
        elif request.close:
            self._close()
        else:
            self._go_on()

    def _hear_out(self) -> None:
        """Let the client send the rest of what is refused, and keep none of it: else it never reads why."""
        self._hearing_out = self._door.now()
        self._ahead.clear()
        self._transport.write_eof()
        self._transport.resume_reading()

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Close what takes too long.  Called about every second."""
        settings = self._door.settings
        if self._hearing_out is not None:
            if now_s - self._hearing_out > _HEARD_OUT_S:
                self.give_way()
        elif self._stream is not None:
            self._watch_stream(self._stream, now_s)
        elif self._unsent:
            self._watch_sending(now_s)
        elif self.is_served:
            if self.has_left and not self._requests[0].begun:
                self.give_way()
        elif not self._requests:
            if now_s - self._since > (settings.keep_alive_s if self._any_answered else settings.head_timeout_s):
                self._close()
        elif self._requests[0].is_too_slow(now_s, settings):
            self._refuse(408, "request_too_slow", "The request did not arrive in time; nothing was done.")
            self._go_on()

    def _watch_sending(self, now_s: float) -> None:
        settings, left = self._door.settings, self._transport.get_write_buffer_size()
        if left <= self._unsent - settings.body_min_rate:
            self._unsent, self._since = left, now_s
        elif now_s - self._since > settings.send_timeout_s:
            self.give_way()

    def close_if_idle(self) -> None:
        """The process stops."""
        if not self._requests:
            self._close()

    def give_way(self) -> None:
        self._closing = True
        self._transport.abort()

    def _close(self) -> None:
        self._closing = True
        self._transport.close()


def _nothing() -> None:
    pass


_LARGE_HEAD = f"A head may have {MOST_HEADERS} headers, and {LONGEST_HEAD} bytes."
