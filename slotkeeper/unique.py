"""Text that nobody else makes, and that need not be secret: to ask the system for chance takes long."""

import os
import random

_chance = random.Random()
os.register_at_fork(after_in_child=_chance.seed)  # Else two processes would make the same.


def unique() -> str:
    """Twelve digits, anew at each call."""
    return f"{_chance.getrandbits(48):012x}"
