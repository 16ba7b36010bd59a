"""Let time pass while a worker holds a lease and renews it."""

from collections.abc import Callable

from routing.dispatch.dispatcher import Dispatcher
from routing.queue.leases import Lease


def hold(dispatcher: Dispatcher, lease: Lease, later: Callable[[int], object], ms: int) -> None:
    """Call `later`, which sets the clock forward, in steps after which the lease is renewed, `ms` in all."""
    step_ms = dispatcher.settings.lease_ms // 3
    while ms > 0:
        later(min(step_ms, ms))
        dispatcher.leases.renew(lease.fleet, lease.owner, [lease])
        ms -= step_ms
