"""The gates of admission, in the order in which a submit passes them; the first that refuses is what a client hears.

`gate` is the shape that they have: a new bound is a file like those named here, and a line here.
"""

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
