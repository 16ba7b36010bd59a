"""The process `web`: python -m app.server."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import NoReturn

import structlog
import uvicorn
import uvloop

from app.auth.access import key_cache_of
from app.config import AppSettings
from app.factory import create_app
from app.listening import connection_limit, listen
from app.server.application import WebApplication
from app.server.http_protocol import LimitedHttpProtocol
from app.watched import renew_watched
from routing.progress import ProgressFollower
from slotkeeper import logs
from slotkeeper.config import exit_if_refused
from slotkeeper.process import tune_garbage_collection
from tasks import liveness, services

log = structlog.get_logger(__name__)

_STOP_S = 8
_ADVICE = "Set SLOTKEEPER_HOST to an address of this host, or SLOTKEEPER_PORT to a free port."
_SWITCH_INTERVAL_S = 0.001


def main() -> NoReturn:
    with exit_if_refused():
        settings = AppSettings()
        settings.check_tls()
        flask = create_app(settings)
        sockets = listen(settings.host, settings.port, "The API", _ADVICE)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)  # So that a thread that parses a large body does not delay the others.
    tune_garbage_collection()
    process_report = liveness.start_reporting("web", services.processes())
    database = services.database()
    progress_follower = ProgressFollower(services.scripts())
    web = WebApplication(
        flask,
        settings,
        key_cache_of(flask),
        connection_limit(settings.max_connections),
        database,
        progress_follower,
        partial(renew_watched, services.dispatcher()),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn has its own handlers, and raises the signal again at the end.
    uvloop.run(serve(web, uvicorn.Server(configuration(web, settings)), sockets))
    process_report.end()
    # A normal exit would wait for running threads.  The database is consistent at any time.
    logs.flush()
    sys.stdout.flush()
    os._exit(0)


def configuration(web: WebApplication, settings: AppSettings) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    return uvicorn.Config(
        web,
        settings.host,
        settings.port,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ssl_certfile=settings.tls_certificate or None,
        ssl_keyfile=settings.tls_key or None,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=_STOP_S,
    )


async def serve(web: WebApplication, server: uvicorn.Server, sockets: list[socket.socket]) -> None:
    """Serve until a signal stops the process."""
    timeouts = asyncio.create_task(web.run_timeouts())
    timeouts.add_done_callback(lambda _: server.handle_exit(signal.SIGTERM, None))  # Without it no timeout applies.
    log.info("web_listens", host=server.config.host, port=server.config.port)
    await server.serve(sockets)
    timeouts.cancel()
    with suppress(asyncio.CancelledError):
        await timeouts


if __name__ == "__main__":
    main()
