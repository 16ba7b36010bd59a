"""The process `gateway`: python -m app.gateway."""

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import OK
from typing import NoReturn

import structlog
import uvicorn
import uvloop
from redis.exceptions import RedisError
from websockets.asyncio.server import serve
from websockets.typing import Subprotocol

from app.config import AppSettings, GatewaySettings
from app.gateway.connections import Connections
from app.gateway.node_side import NodeSide, NodeSocket
from app.gateway.worker_side import WorkerSide
from app.listening import connection_limit, listen
from routing.queue.presence import BEAT_S, Presence
from slotkeeper import logs
from slotkeeper.config import exit_if_refused
from slotkeeper.errors import DatabaseUnavailable, InvalidSetting
from slotkeeper.tunnel import handshake
from slotkeeper.tunnel.frames import MAX_MESSAGE_BYTES, SUBPROTOCOL
from tasks import liveness, services, startup
from tasks.gateway_ping import ping_node
from tasks.security.keyring import gateway_keys

log = structlog.get_logger(__name__)

_STOP_S = 20.0
_STOP_WORKERS_S = 2
_PEER_TIMEOUT_S = 4.0
_ping_threads = ThreadPoolExecutor(32, "ping")  # Apart: each may wait for a node that does not answer.
_ADVICE = "Set SLOTKEEPER_NODE_HOST, SLOTKEEPER_NODE_PORT and SLOTKEEPER_GATEWAY_BIND to free addresses of this host."


class _WorkerServer(uvicorn.Server):
    """A uvicorn that is stopped by `should_exit` alone: this process handles signals itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> NoReturn:
    with exit_if_refused():
        settings, tls = GatewaySettings(), AppSettings()
        tls.check_tls()
        startup.prepare()
        if settings.node_port is None:
            raise InvalidSetting("SLOTKEEPER_NODE_PORT is empty: set it to the port to which agents connect.")
        node_sockets = listen(settings.node_host, settings.node_port, "The gateway", _ADVICE)
        worker_sockets = listen(*settings.worker_bind(), "The gateway", _ADVICE)
        services.database()
    report = liveness.start_reporting("gateway", services.processes())
    uvloop.run(run(settings, tls, report.name, node_sockets, worker_sockets))
    report.end()
    logs.flush()
    sys.stdout.flush()
    os._exit(0)


async def run(
    settings: GatewaySettings,
    tls: AppSettings,
    name: str,
    node_sockets: list[socket.socket],
    worker_sockets: list[socket.socket],
) -> None:
    """Serve agents and workers until a signal stops the process."""
    connections = Connections(
        name,
        settings.gateway_address or _address_of(worker_sockets[0]),
        services.dispatcher(),
        services.nodes(),
        Presence(services.scripts()),
    )
    node_side = NodeSide(connections, settings.hosts, connection_limit(settings.node_max), _ping_peer)
    workers = _WorkerServer(_worker_configuration(WorkerSide(connections, gateway_keys())))
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.ensure_future(workers.serve(worker_sockets))
    beat = asyncio.ensure_future(_beat(connections, node_side))
    listeners = [
        await serve(
            node_side.handle,
            sock=one,
            ssl=_tls_context(tls),
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            open_timeout=handshake.HANDSHAKE_S,
            ping_interval=None,
            create_connection=NodeSocket,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=4,
        )
        for one in node_sockets
    ]
    log.info("gateway_listens", nodes=node_sockets[0].getsockname()[:2], workers=connections.address)
    await asyncio.wait({asyncio.ensure_future(stop.wait()), serving}, return_when=asyncio.FIRST_COMPLETED)
    for listener in listeners:
        listener.close(close_connections=False)
    await node_side.stop(_STOP_S)
    beat.cancel()
    workers.should_exit = True
    await serving
    try:
        await connections.end()
    except RedisError as error:
        log.warning("gateway_end_not_noted", error=str(error))


async def _beat(connections: Connections, node_side: NodeSide) -> None:
    """Report that the gateway lives, and close connections that are dead, or whose keys were revoked."""
    while True:
        try:
            node_side.drop_silent()
            result = await connections.beat()
            for connection in result.revoked:
                node_side.close_soon(connection, handshake.CLOSE_REVOKED, "the node was revoked")
            for connection in [] if node_side.is_stopping else result.replaced:
                node_side.close_soon(connection, handshake.CLOSE_REPLACED, "the node has another connection")
        except (RedisError, DatabaseUnavailable) as error:
            log.warning("gateway_not_reported", error=str(error))
        except Exception:  # Without the beat its nodes would get no more jobs.
            log.exception("gateway_beat_failed")
        await asyncio.sleep(BEAT_S)


async def _ping_peer(address: str, node: str) -> bool:
    """Return whether a node answers at another gateway."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_ping_threads, ping_node, address, node, _PEER_TIMEOUT_S) == OK


def _worker_configuration(application: WorkerSide) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",  # A response that is cut on purpose would be an error of the application.
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=600,  # longer than a worker keeps an idle connection
        timeout_graceful_shutdown=_STOP_WORKERS_S,
    )


def _tls_context(settings: AppSettings) -> ssl.SSLContext | None:
    if not settings.tls_certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.tls_certificate, settings.tls_key or None)
    return context


def _address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    main()
