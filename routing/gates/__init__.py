"""The gates of admission, in the order in which a submit passes them; the first that refuses is what a client hears.

A new bound is a file like those, and a line here.
"""

from routing.gates import capacity, deadline, placed, rate, state, variety

GATES = (
    placed.GATE,
    state.GATE,
    capacity.GATE,
    variety.GATE,
    deadline.GATE,
    rate.GATE,
)
