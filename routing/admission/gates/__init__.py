"""The limits on submits, in the order in which they apply; a client gets the first that refuses."""

from pkgutil import resolve_name

from routing.admission.gates.gate import Limit

LIMITS: tuple[Limit, ...] = tuple(
    resolve_name(f"{__name__}.{name}:GATE")
    for name in (
        "placed",  # some server suits the job, where its model wants that
        "state",  # model and tenant take jobs
        "capacity",  # so many wait
        "variety",  # so many different ones wait
        "deadline",  # it can start in time
        "rate",  # so many a second
    )
)
