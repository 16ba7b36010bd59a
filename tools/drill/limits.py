"""Derive the limits on runs from the changes that an operator made.  Pure."""

from collections.abc import Iterable, Sequence

from tools.cluster.cluster import ServerSpec, operated
from tools.drill.conduct_checks import Limit
from tools.drill.fault_schedule import Change, Kind
from tools.drill.faults import InjectedFault


def limits_in_force(injected: Iterable[InjectedFault], servers: Sequence[ServerSpec]) -> list[Limit]:
    """Return the limits that runs must keep, and when they hold; a change of policy limits nothing."""
    limits = []
    for injection in injected:
        if injection.fault.kind is Kind.OPERATOR and injection.undo_began_ns:
            server = operated(injection.fault, servers)
            most, limited = _limit(Change(injection.fault.how), server, servers)
            if most is not None:
                what = f"{injection.fault.how} of {server.name}"
                limits.append(Limit(what, frozenset(limited), most, injection.effect_ns, injection.undo_began_ns))
    return limits


def _limit(change: Change, server: ServerSpec, servers: Sequence[ServerSpec]) -> tuple[int | None, list[str]]:
    """Return how many runs may be active at once (None: any number), and on which servers."""
    of_model = [other.name for other in servers if other.model == server.model]
    match change:
        case Change.SLOTS:
            return max(server.slots // 2, 1), [server.name]
        case Change.REMOVAL | Change.DRAIN:
            return 0, [server.name]
        case Change.PAUSE:
            return 0, of_model
        case Change.LIMIT:
            return 1, of_model
        case Change.POLICY:
            return None, []
