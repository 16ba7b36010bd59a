"""Whose request it is, as far as room and turns are concerned.  Whether it may come in is for `app.auth` to say."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from foundation.errors import SlotkeeperError
from registry.tenants import Tenant, hash_key

_REMEMBERED_S = 300.0
_MOST_REMEMBERED = 4096


class Kind(Enum):
    OPERATOR = "operator"  # of a key that may administer
    TENANT = "tenant"
    LOCAL = "local"  # everybody, while no keys are asked for
    STRANGER = "stranger"  # of no valid key


@dataclass(frozen=True, slots=True)
class Owner:
    """Who pays for room and turns: a tenant, or an address that has shown no key."""

    name: str
    kind: Kind


_LOCAL = Owner("", Kind.LOCAL)


class TooManyKeys(Exception):
    """More keys that the record must be asked about come from one address than it can be."""


class Keys(Protocol):
    """The record's keys; registry.tenants.Tenants.  Its methods raise SlotkeeperError while it is away."""

    def by_key(self, key: str) -> Tenant | None:
        """Whose key it is."""

    def by_hash(self) -> Mapping[str, Tenant]:
        """All tenants, by the hash of their key."""


class Owners:
    """Knows the owner of a request.  Of a key that is new here the record is asked, by `look_up`, in a thread.

    All keys are read every few seconds, so that nobody who makes up keys is in the way of one that is good.  One that
    was good is remembered for minutes: that decides nothing but whose turn it is.
    """

    def __init__(
        self,
        keys: Keys | None,
        clock: Callable[[], float] = time.monotonic,
        visits: Callable[[str], str] = lambda _: "",
        read_visits: Callable[[], object] = lambda: None,
    ) -> None:
        """`keys`: None: none are asked for.  `visits`: the hash of the key whose visit a header Cookie shows, or "", as
        far as `read_visits` has read which have ended."""
        self._keys = keys
        self._clock = clock
        self._visits, self._read_visits = visits, read_visits
        self._of_record: Mapping[str, Owner] = {}
        self._known: OrderedDict[str, tuple[float, Owner]] = OrderedDict()

    def known(self, authorization: str, address: str, cookie: str = "") -> Owner | None:
        """The owner; None: `look_up` must say."""
        if self._keys is None:
            return _LOCAL
        key = _bearer(authorization)
        if not key:
            return self._of_record.get(self._visits(cookie) if cookie else "") or Owner(address, Kind.STRANGER)
        hashed = hash_key(key)
        until, owner = self._known.get(hashed, (0.0, None))
        return self._of_record.get(hashed) or (owner if self._clock() < until else None)

    def look_up(self, authorization: str, address: str) -> Owner:
        """Whose key it is, from the record.  A record that does not answer makes strangers of all."""
        assert self._keys is not None, "without keys everybody is known"
        try:
            tenant = self._keys.by_key(_bearer(authorization))
        except SlotkeeperError:
            tenant = None
        return Owner(address, Kind.STRANGER) if tenant is None else _owner(tenant)

    def refresh(self) -> bool:
        """Read all keys, and which visits have ended.

        False: none are asked for, or the record does not answer, which leaves what is known.
        """
        if self._keys is not None:
            with suppress(SlotkeeperError):
                self._read_visits()
                self._of_record = {hashed: _owner(tenant) for hashed, tenant in self._keys.by_hash().items()}
                return True
        return False

    def may_stay(self, authorization: str, cookie: str, owner: Owner) -> bool:
        """Whether what this request has shown is, by the keys that were read last, still a key of such an owner.

        Not so when the key was removed, its visit is over, or its tenant administers no more.
        """
        key = _bearer(authorization)
        found = self._of_record.get(hash_key(key) if key else self._visits(cookie))
        return found is not None and (found.kind is Kind.OPERATOR or owner.kind is not Kind.OPERATOR)

    def remember(self, authorization: str, owner: Owner) -> None:
        if owner.kind is Kind.STRANGER:
            return  # Else whoever makes keys up would fill this.
        while len(self._known) >= _MOST_REMEMBERED:
            self._known.popitem(last=False)
        self._known[hash_key(_bearer(authorization))] = (self._clock() + _REMEMBERED_S, owner)


def _owner(tenant: Tenant) -> Owner:
    return Owner(tenant.name, Kind.OPERATOR if tenant.admin else Kind.TENANT)


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
