"""The table names every attack surface, and only tests that exist."""

from pathlib import Path

from tests.system.attacks.all import ALL
from tests.system.attacks.table import ATTACK, SURFACES, TABLE

REPO = Path(__file__).resolve().parents[3]


def test_each_attack_surface_is_in_the_table() -> None:
    assert SURFACES == (
        "HTTP framing",
        "bodies",
        "keys",
        "tenants",
        "streams",
        "webhooks' receivers",
        "servers' answers",
        "push",
        "broker messages",
        "browser origins",
        "names",
        "results",
        "terminal",
        "this machine",
    )


def test_the_tests_of_the_table_exist() -> None:
    for test in (test for row in TABLE for test in row.tests if not test.startswith(ATTACK)):
        path, _, name = test.partition("::")
        assert f"def {name}(" in (REPO / path).read_text("utf-8"), test


def test_each_attack_is_in_the_table() -> None:
    named = [test.removeprefix(ATTACK) for row in TABLE for test in row.tests if test.startswith(ATTACK)]
    assert sorted(named) == sorted(attack.name for attack in ALL)
