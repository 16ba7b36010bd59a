"""What a gate is: one bound on submits.

    GATE = Gate("name", Asks.LOOKS, check)

`check` raises a refusal, which says what is wrong and what to do: Conflict (no jobs are accepted now), TooManyRequests
(with the time to wait) or InvalidJob (the job could never be accepted as it is).  If it needs Redis, it returns the
commands, each with a function that judges the reply, so that the commands of all gates take one round trip.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, Generic, TypeVar

from routing.config import RoutingSettings
from routing.queue.queues import Queues
from slotkeeper.jobs.values import NewJob
from slotkeeper.redis.scripts import Command
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.tenants import Tenant

T = TypeVar("T")


class Phase(Enum):
    """What a gate asks of Redis, in the order in which gates stand."""

    LOCAL = auto()
    READ = auto()
    """Something that changes nothing.  Such bounds are no promises: while Redis is away everything is admitted."""
    COUNT = auto()
    """Something that counts the submit; so it is asked when nothing else refuses."""


@dataclass(frozen=True)
class AdmissionRequest:
    """Jobs that shall be accepted all or none.  `tenant`: who submits them, if the door knows; theirs may be others."""

    jobs: Sequence[NewJob]
    tenant: Tenant | None
    now_ms: int

    @cached_property
    def by_account(self) -> dict[tuple[str, str], int]:
        """(model, tenant) -> how many jobs."""
        found: dict[tuple[str, str], int] = {}
        for job in self.jobs:
            account = job.model, job.tenant
            found[account] = found.get(account, 0) + 1
        return found


@dataclass(frozen=True, slots=True)
class LimitContext:
    """Where a gate finds what it goes by."""

    catalog: CatalogCache
    queues: Queues
    settings: RoutingSettings


@dataclass(frozen=True, slots=True)
class RedisCheck(Generic[T]):
    """`judge` raises a refusal if the command's answer is a reason for one."""

    command: Command[T]
    judge: Callable[[T], None]


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on submits."""

    name: str
    asks: Phase
    check: Callable[[AdmissionRequest, LimitContext], Iterable[RedisCheck[Any]]]
