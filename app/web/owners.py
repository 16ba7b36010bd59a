"""Whose request it is, as far as room and turns are concerned.  Whether it may come in is for `app.auth` to say."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from jobs.errors import SlotkeeperError
from jobs.tenants import Tenant, hash_key

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


class Owners:
    """Knows the owner of a request.  Of a key that is new here the record is asked, by `look_up`, in a thread.

    A key that was good is remembered for minutes: that decides nothing but whose turn it is.
    """

    def __init__(
        self, tenant_of: Callable[[str], Tenant | None] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`tenant_of`: whose key it is; None: no keys are asked for."""
        self._tenant_of = tenant_of
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Owner]] = OrderedDict()

    def known(self, authorization: str, address: str) -> Owner | None:
        """The owner; None: `look_up` must say."""
        if self._tenant_of is None:
            return _LOCAL
        key = _bearer(authorization)
        if not key:
            return Owner(address, Kind.STRANGER)
        until, owner = self._known.get(hash_key(key), (0.0, None))
        return owner if self._clock() < until else None

    def look_up(self, authorization: str, address: str) -> Owner:
        """Whose key it is, from the record.  A record that does not answer makes strangers of all."""
        assert self._tenant_of is not None, "without keys everybody is known"
        try:
            tenant = self._tenant_of(_bearer(authorization))
        except SlotkeeperError:
            tenant = None
        if tenant is None:
            return Owner(address, Kind.STRANGER)
        return Owner(tenant.name, Kind.OPERATOR if tenant.admin else Kind.TENANT)

    def remember(self, authorization: str, owner: Owner) -> None:
        if owner.kind is Kind.STRANGER:
            return  # Else whoever makes keys up would fill this.
        while len(self._known) >= _MOST_REMEMBERED:
            self._known.popitem(last=False)
        self._known[hash_key(_bearer(authorization))] = (self._clock() + _REMEMBERED_S, owner)


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
