"""The gates of admission, in the order in which a submit passes them; the first that refuses is what a client hears.

`placed`: some server suits it, where the model wants that; `state`: model and tenant take jobs; `capacity`, `variety`:
so many wait, so many different ones; `deadline`: it can start in time; `rate`: so many a second.  `gate` is the shape
that they have: a new bound is a file like those, and a line here.
"""

from admission.gates import (
    capacity,
    deadline,
    placed,
    rate,
    state,
    variety,
)

GATES = (
    placed.GATE,
    state.GATE,
    capacity.GATE,
    variety.GATE,
    deadline.GATE,
    rate.GATE,
)
