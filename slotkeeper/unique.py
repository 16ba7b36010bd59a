"""Short random names that are not secret.  Reading the system's random source for each would be slow."""

import os
import random

_chance = random.Random()
os.register_at_fork(after_in_child=_chance.seed)  # Otherwise both processes would make the same names.


def unique() -> str:
    """Return twelve random hexadecimal digits."""
    return f"{_chance.getrandbits(48):012x}"
