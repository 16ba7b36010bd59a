"""Which runs an operator's changes forbid, from their faults.  Pure."""

from collections.abc import Iterable, Sequence

from tools.cluster.cluster import ServerSpec, operated
from tools.drill.conduct_checks import Limit
from tools.drill.fault_schedule import Change, Kind
from tools.drill.faults import InjectedFault


def limits_in_force(struck: Iterable[InjectedFault], servers: Sequence[ServerSpec]) -> list[Limit]:
    """What may not be exceeded, and when; a change of policy forbids nothing."""
    found = []
    for one in struck:
        if one.fault.kind is Kind.OPERATOR and one.mending_ns:
            server = operated(one.fault, servers)
            most, whose = _limit(Change(one.fault.how), server, servers)
            if most is not None:
                what = f"{one.fault.how} of {server.name}"
                found.append(Limit(what, frozenset(whose), most, one.effect_ns, one.mending_ns))
    return found


def _limit(change: Change, server: ServerSpec, servers: Sequence[ServerSpec]) -> tuple[int | None, list[str]]:
    of_model = [it.name for it in servers if it.model == server.model]
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
