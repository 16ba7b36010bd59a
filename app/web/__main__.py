"""The process `web`: python -m app.web."""

import asyncio
import os
import resource
import signal
import sys
from typing import NoReturn

import structlog
import uvloop
from flask import Flask

from app.config import AppSettings
from app.factory import create_app
from app.page.sessions import Visited
from app.web.connection import Connection
from app.web.door import Door
from app.web.owners import Owners
from foundation.errors import SlotkeeperError
from foundation.garbage import collect_rarely
from insight.said import Watching
from registry.tenants import Tenants
from registry.visits import Visits
from tasks import alive, wiring

log = structlog.get_logger(__name__)

_BACKLOG = 2048
_SPARE_FILES = 1024  # for the record, Redis, and what the process has open besides connections
_STOP_S = 8.0
_TURN_S = 0.001


def main() -> NoReturn:
    settings = AppSettings()
    try:
        app = create_app(settings)
    except (SlotkeeperError, OSError) as error:
        raise SystemExit(f"Error: {error}") from error
    sys.setswitchinterval(_TURN_S)  # No thread that reads a large body keeps the others waiting.
    collect_rarely()
    living = alive.begin("web", wiring.processes())
    record = wiring.database()
    visited = Visited(settings.port, Visits(record))
    owners = Owners(Tenants(record) if settings.require_keys else None, visits=visited, read_visits=visited.read)
    uvloop.run(_serve(app, settings, owners))
    living.end()
    # Threads that are still at work would be waited for; the record is safe whenever this ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(app: Flask, settings: AppSettings, owners: Owners) -> None:
    """Until a signal says to stop; then what is begun is answered first."""
    loop = asyncio.get_running_loop()
    door = Door(app, settings, owners, loop, _places(settings.max_connections), wiring.database())
    door.watch_by(Watching(wiring.scripts()))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: Connection(door), settings.host, settings.port, backlog=_BACKLOG)
    door.tick()
    log.info("web_listens", host=settings.host, port=settings.port)
    await stop.wait()
    server.close()
    door.stop()
    until = loop.time() + _STOP_S
    while len(door.crowd) and loop.time() < until:
        await asyncio.sleep(0.02)


def _places(wanted: int) -> int:
    """Connections that there are files for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted + _SPARE_FILES
    if soft < enough:
        soft = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(wanted, max(soft - _SPARE_FILES, soft // 2))


if __name__ == "__main__":
    main()
