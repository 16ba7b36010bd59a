"""Ids of batches, and of the jobs of their lines.

    batch     xxxxxxxx-xxxx-7xxx-yxxx-xxxxxxx00000   a UUIDv7 whose last 17 bits are 0
    line n    xxxxxxxx-xxxx-8xxx-yxxx-xxxxxxx.....   the same with version 8 and n in these bits

So the id of a line's job is known before it is accepted, and results are read in the order of lines by an index.
"""

import secrets
import uuid

from slotkeeper.clock import now_ms

MAX_LINES = 100_000
"""Lines of one batch."""
_LINE_BITS = 17
_LINE_MASK = (1 << _LINE_BITS) - 1
_VERSION_SHIFT, _RANDOM_HIGH_BITS, _RANDOM_LOW_BITS = 76, 12, 62 - _LINE_BITS


def new_batch_id() -> str:
    """Return the id of a new batch; ids sort by the time at which they were made."""
    high = secrets.randbits(_RANDOM_HIGH_BITS) << 64
    low = secrets.randbits(_RANDOM_LOW_BITS) << _LINE_BITS
    return str(uuid.UUID(int=now_ms() << 80 | 7 << _VERSION_SHIFT | high | 0b10 << 62 | low))


def line_job_id(batch: str, line: int) -> str:
    """Return the id of the job of a line, counted from 0."""
    number = uuid.UUID(batch).int & ~(0xF << _VERSION_SHIFT) | 8 << _VERSION_SHIFT | line
    return str(uuid.UUID(int=number))


def line_of(job_id: str) -> int:
    """Return the line of a job that `line_job_id` has named."""
    return uuid.UUID(job_id).int & _LINE_MASK
