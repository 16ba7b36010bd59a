"""Who sends a request, and what that one may do: the same at every interface."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from slotkeeper.errors import InvalidJob, InvalidRequest, ScopeMissing
from slotkeeper.registry.tenant_limits import NO_RATE, RateLimit


class Scope(StrEnum):
    """What a key may be used for.  OPERATE includes all others, for all tenants; the others are for its own tenant."""

    SUBMIT = "submit"  # submit, and cancel own jobs
    READ = "read"  # jobs, results, streams, batches, webhooks
    MANAGE = "manage"  # its dead jobs, webhooks and webhook secret
    KEYS = "keys"  # its keys.  Apart from MANAGE, so that a leaked key cannot make one that outlives its own rotation.
    AUDIT = "audit"  # the audit log of all tenants
    OPERATE = "operate"


FIRST_SCOPES = frozenset({Scope.SUBMIT, Scope.READ, Scope.MANAGE})
"""Scopes of a tenant's first key, unless others are named."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant.  Its limits are in the catalog, since they change while its key is in use."""

    name: str


@dataclass(frozen=True, slots=True)
class Identity:
    """A tenant, and what one of its keys may be used for.

    key_id: None: no key was needed.  key_rate: a limit on submits with this key.
    """

    tenant: Tenant
    key_id: str | None
    scopes: frozenset[Scope]
    key_rate: RateLimit = NO_RATE

    @property
    def operates(self) -> bool:
        return Scope.OPERATE in self.scopes

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or self.operates

    def require(self, scope: Scope) -> None:
        """Raises ScopeMissing."""
        if not self.may(scope):
            given = format_scopes(self.scopes) or "nothing"
            raise ScopeMissing(
                f"This needs a key with the scope {scope.value}, and this key has: {given}.", scope=scope.value
            )

    def tenant_of_job(self, named: str | None) -> str:
        """Return the tenant of a job: the named one, or else its own.  Raises InvalidJob: it may not act for that."""
        if named is None or named == self.tenant.name or self.operates:
            return named or self.tenant.name
        raise InvalidJob("tenant", f"this key is of tenant {self.tenant.name!r} and may not submit for {named!r}")

    def may_give(self, scopes: Iterable[Scope]) -> bool:
        """Return whether this key may do all that another with these scopes may do."""
        return all(self.may(scope) for scope in scopes)


LOCAL_IDENTITY = Identity(Tenant("default"), None, frozenset(Scope))
"""Used while no keys are required, which is possible only on the loopback address."""


def by_tenant(name: str | None) -> str:
    """Return " by tenant 'NAME'", for a sentence; "" without keys: then all requests are those of one tenant."""
    return "" if name in (None, "", LOCAL_IDENTITY.tenant.name) else f" by tenant {name!r}"


def parse_scopes(words: Collection[str]) -> frozenset[Scope]:
    """Return these scopes.  Raises InvalidRequest."""
    known = [scope.value for scope in Scope]
    unknown = next((word for word in words if word not in known), None)
    if unknown is not None or not words:
        what = f"{unknown!r} is no scope" if unknown is not None else "a key needs a scope"
        raise InvalidRequest("scopes", f"{what}; there are {', '.join(known)}")
    return frozenset(Scope(word) for word in words)


def format_scopes(scopes: Iterable[Scope]) -> str:
    """Return scopes as words, always in the same order."""
    given = set(scopes)
    return " ".join(scope.value for scope in Scope if scope in given)
