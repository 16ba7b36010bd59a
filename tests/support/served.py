"""The API behind a separate server, for tests that need a real connection."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from app.auth.api_keys import KeyCache
from app.config import AppSettings
from app.server.application import WebApplication
from app.watched import renew_watched
from routing.progress import ProgressFollower
from slotkeeper.jobs.store import JobStore
from slotkeeper.registry.api_keys import ApiKeys, hash_key
from tasks import services
from tests.support.api import Api
from tests.support.web import Web, serving


class KeySessions:
    """Sessions for tests: the cookie is the key."""

    def __call__(self, header: str) -> str:
        return hash_key(header)

    def read(self) -> None:
        pass


@dataclass
class Served:
    """The API behind a separate server."""

    api: Api
    web: Web

    @property
    def application(self) -> WebApplication:
        return self.web.application

    @property
    def address(self) -> tuple[str, int]:
        return self.web.address

    @property
    def store(self) -> JobStore:
        return self.api.dispatcher.store

    def ask(self, path: str, headers: dict[str, str] | None = None, version: str = "1.1") -> socket.socket:
        """Send a GET request and return the connection."""
        connection = socket.create_connection(self.address, 20)
        header_lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        connection.sendall(f"GET {path} HTTP/{version}\r\nHost: localhost\r\n{header_lines}\r\n".encode())
        return connection


@contextmanager
def serve(api: Api) -> Iterator[Served]:
    settings = AppSettings()
    key_cache = KeyCache(ApiKeys(api.database), cast(Any, KeySessions()), 0.0) if settings.require_keys else None
    follower = ProgressFollower(services.scripts())
    keep_watched = partial(renew_watched, api.dispatcher)
    application = WebApplication(
        api.client.application, settings, key_cache, 3000, api.database, follower, keep_watched
    )
    with serving(application) as web:
        yield Served(api, web)
