"""Amounts of credits for people.  Everything else has micro-credits, as integers."""

from decimal import Decimal, InvalidOperation

MICRO = 1_000_000
"""Micro-credits of a credit."""
_MAX_DIGITS = 30


def format_credits(micro: int) -> str:
    """Return micro-credits as credits: 3.2."""
    whole, rest = divmod(abs(micro), MICRO)
    shown = f"{whole:,}" + (f".{rest:06}".rstrip("0") if rest else "")
    return f"-{shown}" if micro < 0 else shown


def parse_credits(text: str) -> int:
    """Return credits, such as `3.2` or `1,000`, as micro-credits.  Raises ValueError."""
    try:
        if len(text) > _MAX_DIGITS:
            raise InvalidOperation
        micro = Decimal(text.replace(",", "")) * MICRO
        if not micro.is_finite() or micro != micro.to_integral_value():
            raise InvalidOperation
    except InvalidOperation:
        raise ValueError(f"{text[:_MAX_DIGITS]!r} is no amount of credits, such as 12 or 0.5") from None
    return int(micro)
