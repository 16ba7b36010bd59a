"""Who submits a job by Celery, where keys are required (SLOTKEEPER_REQUIRE_KEYS).

    a bare client's message       the token in its header
    a step after a job            the tenant and the key of that job
    a call of `infer`             the token of the calling task's message, or else SLOTKEEPER_KEY

The first is protection.  The last is attribution: such a process has the database's password.
"""

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from routing.config import RoutingSettings
from slotkeeper.clock import now_ms
from slotkeeper.errors import Unauthorized
from slotkeeper.process import singleton
from slotkeeper.registry.api_keys import ApiKeys
from slotkeeper.registry.identity import LOCAL_IDENTITY, Identity, Scope, Tenant
from tasks.celery_app import celery
from tasks.config import TaskSettings
from tasks.security.celery_tokens import TokenSubject, read_token
from tasks.services import database
from tasks.step_tokens import TOKEN_HEADER, current_subject, requires_keys

_MAX_FOUND = 10_000  # keys


def identify_message(headers: Mapping[str, Any] | None) -> Identity:
    """Return who sends a bare client's message.  Raises Unauthorized, ScopeMissing, DatabaseUnavailable."""
    if not requires_keys():
        return LOCAL_IDENTITY
    token = (headers or {}).get(TOKEN_HEADER)
    if token is None:
        raise Unauthorized(
            "This installation requires keys: send a token in the header slotkeeper_token; `slotkeeper keys token` and "
            "POST /tenants/me/celery-tokens make one."
        )
    return _identify(read_token(token))


def identify_caller(headers: Mapping[str, Any] | None) -> Identity:
    """Return who calls `infer` in this process.  `headers`: of the call.  Raises as `identify_message`."""
    if not requires_keys():
        return LOCAL_IDENTITY
    if (subject := current_subject()) is not None:
        return _identify(subject)
    caller = celery.current_worker_task
    token = (headers or {}).get(TOKEN_HEADER) or (caller and (caller.request.headers or {}).get(TOKEN_HEADER))
    if token:
        return _identify(read_token(token))
    if not _own_key():
        raise Unauthorized("This installation requires keys: set SLOTKEEPER_KEY to one with the scope submit.")
    return _check(_lookups().find(_own_key()), "The key in SLOTKEEPER_KEY is not valid.")


@singleton
def _own_key() -> str:
    return TaskSettings().key


def _identify(subject: TokenSubject) -> Identity:
    if subject.key_id is None:  # Its job was accepted before keys were required.
        return Identity(Tenant(subject.tenant), None, frozenset({Scope.SUBMIT}))
    owner = subject.key_owner or subject.tenant
    identity = _check(_lookups().find(subject), f"Key {subject.key_id} of tenant {owner!r} is not valid any more.")
    identity.tenant_of_job(subject.tenant)
    return replace(identity, tenant=Tenant(subject.tenant))


def _check(identity: Identity | None, detail: str) -> Identity:
    if identity is None:
        raise Unauthorized(detail)
    identity.require(Scope.SUBMIT)
    return identity


class KeyLookups:
    """Looks keys up in the database, each once a second, so that a revoked key submits nothing a second later."""

    def __init__(self, keys: ApiKeys, refresh_s: float) -> None:
        self._keys, self._refresh_s = keys, refresh_s
        self._found: dict[str | TokenSubject, tuple[float, Identity | None]] = {}
        self._lock = threading.Lock()

    def find(self, wanted: str | TokenSubject) -> Identity | None:
        """Return whose key this is; None: it is not valid.  Raises DatabaseUnavailable."""
        asked = time.monotonic()
        with self._lock:
            found_at, identity = self._found.get(wanted, (-math.inf, None))
            if asked - found_at < self._refresh_s:
                return identity
            if len(self._found) >= _MAX_FOUND:
                self._found.clear()
        if isinstance(wanted, str):
            identity = self._keys.find(wanted, now_ms())
        else:
            owner = wanted.key_owner or wanted.tenant
            identity = self._keys.find_by_id(owner, wanted.key_id or "", now_ms())
        with self._lock:
            self._found[wanted] = asked, identity
        return identity


@singleton
def _lookups() -> KeyLookups:
    return KeyLookups(ApiKeys(database()), RoutingSettings().catalog_refresh_s)
