"""Amounts of credits for people.  Everything else has micro-credits, as integers."""

import re
from decimal import Decimal

MICRO = 1_000_000
"""Micro-credits of a credit."""
_CREDITS = re.compile(r"([0-9]{1,12}|[0-9]{1,3}(,[0-9]{3}){1,3})(\.[0-9]{1,6})?")


def format_credits(micro: int) -> str:
    """Return micro-credits as credits: 3.2."""
    whole, rest = divmod(abs(micro), MICRO)
    shown = f"{whole:,}" + (f".{rest:06}".rstrip("0") if rest else "")
    return f"-{shown}" if micro < 0 else shown


def parse_credits(text: str) -> int:
    """Return credits, such as `3.2` or `1,000`, as micro-credits.  Raises ValueError."""
    if not _CREDITS.fullmatch(text):
        raise ValueError(f"{text[:30]!r} is no amount of credits, such as 12, 0.5 or 1,000")
    return int(Decimal(text.replace(",", "")) * MICRO)
