"""One connection to the gateway: the handshake, and the requests that come over it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from slotkeeper import signatures
from slotkeeper.agent.config import AgentConfig
from slotkeeper.agent.identity import AgentIdentity
from slotkeeper.agent.node_routes import NodeRoutes
from slotkeeper.process import package_version
from slotkeeper.serve.http_server import Request, Response
from slotkeeper.serve.logs import log_failure
from slotkeeper.tunnel import handshake
from slotkeeper.tunnel.frames import (
    MAX_MESSAGE_BYTES,
    SUBPROTOCOL,
    FrameType,
    TunnelError,
    decode_control,
    encode_json_frame,
)
from slotkeeper.tunnel.handshake import Hello
from slotkeeper.tunnel.sender import Sender
from slotkeeper.tunnel.streams import (
    BodyEnded,
    ControlReceived,
    DataReceived,
    RequestReceived,
    Side,
    StreamReset,
    Tunnel,
    WindowOpened,
)

_PING_S, _PONG_S = 20, 10  # NAT and proxies forget a silent connection after 30 to 60 s.
_OPEN_S = 10
_WELCOME_S = 30.0  # The gateway stores what the node declares before it says welcome.
_MAX_STREAMS = 100_000  # The gateway bounds them by the slots that it admits.

log = logging.getLogger("slotkeeper.agent")


class _StreamOver(Exception):
    """The gateway has given the request up, or the connection has ended."""


class _Inbound:
    """A request that is being received, or whose response is being sent."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head, self.body = head, bytearray()
        self.can_send = asyncio.Event()
        self.turn = asyncio.Lock()  # The parts of the response are sent in order.
        self.is_over = False

    def request(self) -> Request:
        """Return the request, whose body has arrived."""
        given = self.head.get("headers")
        headers = {str(name).lower(): str(value) for name, value in given.items()} if isinstance(given, dict) else {}
        path = str(self.head.get("path", "")).partition("?")[0]
        return Request(str(self.head.get("method", "")), path, headers, bytes(self.body))


class GatewayLink:
    """A connection.  `run` returns when it has ended; Raises ConnectionClosed with the gateway's code.

    routes: returns the response to each request; called in a thread.
    status: returns why no jobs are taken now; "": they are.
    on_digest: is given the digest of the declaration that the gateway has confirmed.
    on_key_stored: is given the id of a new key that the gateway accepts.
    """

    def __init__(
        self,
        config: AgentConfig,
        identity: AgentIdentity,
        routes: NodeRoutes,
        threads: Executor,
        status: Callable[[], str],
        on_digest: Callable[[str], None],
        on_key_stored: Callable[[str], None],
    ) -> None:
        self._config, self._identity, self._routes, self._threads = config, identity, routes, threads
        self._status, self._on_digest, self._on_key_stored = status, on_digest, on_key_stored
        self._tunnel = Tunnel(Side.AGENT, _MAX_STREAMS)
        self._inbound: dict[int, _Inbound] = {}
        self._sender: Sender | None = None
        self._loop = asyncio.get_running_loop()
        self._sent_status = ""
        self.number = 0
        self.is_ready, self.gateway_stops, self.is_idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_idle.set()
        self._websocket: ClientConnection | None = None

    async def run(self) -> None:
        """Connect, and serve requests until the connection ends.

        Raises OSError, TimeoutError, TunnelError, ConnectionClosed and other errors of websockets.
        """
        async with connect(
            self._config.gateway,
            ssl=self._config.tls_context(),
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            open_timeout=_OPEN_S,
            ping_interval=_PING_S,
            ping_timeout=_PONG_S,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=4,
        ) as websocket:
            self._websocket = websocket
            async with asyncio.timeout(handshake.HANDSHAKE_S):
                await self._greet(websocket)
            self._sender = Sender(self._tunnel, websocket.send)
            try:
                while True:
                    async with asyncio.timeout(None if self.is_ready.is_set() else _WELCOME_S):
                        message = await websocket.recv()
                    self._receive(message)
            finally:
                self._sender.close()
                self._end_all()

    def report_status(self) -> None:
        """Tell the gateway whether jobs are taken, if that has changed."""
        why_not = self._status()
        if self.is_ready.is_set() and why_not != self._sent_status:
            self._sent_status = why_not
            self._send_control("accepts", yes=not why_not, reason=why_not)

    def send_new_key(self, key: Ed25519PrivateKey) -> None:
        """Ask the gateway to accept a new key, which replaces the present one when it has connected."""
        public, identity = signatures.public_key_of(key), self._identity
        by_old = signatures.sign(identity.key, signatures.ROTATION_TYPE, public)
        by_new = signatures.sign(key, signatures.ROTATION_TYPE, identity.id.encode())
        self._send_control(
            "rotate",
            key=identity.key_id,
            public_key=signatures.encode_bytes(public),
            signature=signatures.encode_bytes(by_old),
            proof=signatures.encode_bytes(by_new),
        )

    async def close(self) -> None:
        """Close the connection."""
        if self._websocket is not None:
            await self._websocket.close()

    # -- the handshake ---------------------------------------------------------------------------------------

    async def _greet(self, websocket: ClientConnection) -> None:
        challenge = decode_control(await websocket.recv())
        if challenge.get("type") != "challenge":
            raise TunnelError("the gateway sends no challenge")
        identity, self._sent_status = self._identity, self._status()
        hello = Hello.signed(
            identity.key,
            signatures.decode_bytes(challenge.get("nonce")),
            node=identity.id,
            host=self._config.host,
            instance=identity.instance,
            agent=package_version(),
            declaration=self._config.declaration(),
            why_not=self._sent_status,
        )
        await websocket.send(encode_json_frame(FrameType.CONTROL, 0, hello.message()))

    # -- requests --------------------------------------------------------------------------------------------

    def _receive(self, message: str | bytes) -> None:
        for event in self._tunnel.receive(message):
            match event:
                case ControlReceived(control):
                    self._on_control(control)
                case RequestReceived(stream, head):
                    self._inbound[stream] = _Inbound(head)
                    self.is_idle.clear()
                case DataReceived(stream, data):
                    self._on_data(stream, data)
                case BodyEnded(stream):
                    if (inbound := self._inbound.get(stream)) is not None:
                        request = inbound.request()
                        self._routes.note_arrival(request)  # Before any poll for this run can be answered.
                        self._threads.submit(self._respond, stream, inbound, request)
                case StreamReset(stream):
                    self._forget(stream)
                case WindowOpened(stream):
                    if (inbound := self._inbound.get(stream)) is not None:
                        inbound.can_send.set()
                case _:
                    pass
        self._wake()

    def _on_control(self, control: dict[str, Any]) -> None:
        match control["type"]:
            case "welcome":
                self.number = int(control.get("connection", 0))
                self._on_digest(str(control.get("declared", "")))
                self.is_ready.set()
            case "go_away":
                self.gateway_stops.set()
            case "key_stored":
                self._on_key_stored(str(control.get("key", "")))
            case "failed":
                log.warning("the gateway refuses: %s", control.get("error"))
            case _:
                pass  # of a newer gateway

    def _on_data(self, stream: int, data: bytes) -> None:
        self._tunnel.consumed(stream, len(data))
        inbound = self._inbound.get(stream)
        if inbound is None:
            return
        # A body that is too large for this node is answered as such, when it has arrived.
        inbound.body += data[: self._config.max_payload_bytes + 1 - len(inbound.body)]

    def _respond(self, stream: int, inbound: _Inbound, request: Request) -> None:
        """Handle a request and send its response.  In a thread."""
        try:
            response = self._routes.handle(request)
            sending = self._in_loop(self._send_head(stream, inbound, response))
            for piece in (response.body,) if response.events is None else response.events:
                sending.result()
                sending = self._in_loop(self._send_piece(stream, inbound, piece))
            # The last piece is not awaited, so that it leaves in one message with the end.
            self._in_loop(self._send_end(stream, inbound)).result()
        except (_StreamOver, RuntimeError):  # RuntimeError: the loop was closed.
            pass
        except Exception as error:
            log_failure(f"{request.method!r} {request.path!r}", error)
            self._loop.call_soon_threadsafe(self._reset, stream)

    def _in_loop(self, sending: Coroutine[Any, Any, None]) -> Future[None]:
        """Send something in the event loop.  The future raises _StreamOver; its end means that it was accepted."""
        return asyncio.run_coroutine_threadsafe(sending, self._loop)

    async def _send_head(self, stream: int, inbound: _Inbound, response: Response) -> None:
        self._check(inbound)
        headers = {name.lower(): value for name, value in response.headers}
        headers["content-type"] = "application/json" if response.events is None else "text/event-stream"
        self._tunnel.respond(stream, {"status": response.status, "headers": headers})

    async def _send_piece(self, stream: int, inbound: _Inbound, piece: bytes) -> None:
        async with inbound.turn:
            self._check(inbound)
            assert self._sender is not None  # Requests come after the handshake.
            await self._sender.send_body(stream, piece, inbound.can_send)
            self._check(inbound)

    async def _send_end(self, stream: int, inbound: _Inbound) -> None:
        async with inbound.turn:
            self._check(inbound)
            self._tunnel.end(stream)
            self._wake()
            self._forget(stream)

    def _check(self, inbound: _Inbound) -> None:
        if inbound.is_over:
            raise _StreamOver

    def _reset(self, stream: int) -> None:
        self._tunnel.reset(stream, "internal")
        self._wake()
        self._forget(stream)

    def _forget(self, stream: int) -> None:
        inbound = self._inbound.pop(stream, None)
        if inbound is not None:
            inbound.is_over = True
            inbound.can_send.set()
        if not self._inbound:
            self.is_idle.set()

    def _end_all(self) -> None:
        self._tunnel.lose()
        for stream in list(self._inbound):
            self._forget(stream)

    def _send_control(self, kind: str, **members: Any) -> None:
        self._tunnel.send_control({"type": kind, **members})
        self._wake()

    def _wake(self) -> None:
        if self._sender is not None:
            self._sender.wake()


def close_code(error: ConnectionClosed) -> tuple[int, str]:
    """Return the code and the reason with which the gateway closed a connection; 0: it broke."""
    return (error.rcvd.code, error.rcvd.reason) if error.rcvd is not None else (0, "the connection broke")
