"""Amounts of credits as people write and read them."""

import pytest

from slotkeeper.credit_amounts import format_credits, parse_credits


@pytest.mark.parametrize(
    ("text", "micro"),
    [
        ("3.2", 3_200_000),
        ("1,000", 10**9),
        ("0.000001", 1),
        ("12", 12_000_000),
        ("0", 0),
        ("1,234,567.5", 1234567500000),
    ],
)
def test_an_amount_is_read_in_credits(text: str, micro: int) -> None:
    assert parse_credits(text) == micro


@pytest.mark.parametrize("text", ["", "-1", "0,5", "1,25", "1_0", "1e9", "1e999999", "nan", "0.0000001", "١", "1" * 13])
def test_an_ambiguous_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no amount of credits, such as 12"):
        parse_credits(text)


@pytest.mark.parametrize(("micro", "text"), [(1, "0.000001"), (-2_500_000, "-2.5"), (10**9, "1,000"), (0, "0")])
def test_an_amount_is_shown_in_credits(micro: int, text: str) -> None:
    assert format_credits(micro) == text
