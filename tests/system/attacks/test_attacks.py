"""The quick attacks, one after the other on one Slotkeeper of real processes."""

from collections.abc import Iterator

import pytest

from tests.system.attacks.all import ALL
from tests.system.attacks.card import lines
from tests.system.attacks.frame import Attack, play
from tests.system.attacks.harness import Harness, running_harness

QUICK = [attack for attack in ALL if attack.quick]
_PATIENCE = 10.0  # `make attack` measures times, on a quiet machine.


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with running_harness(tmp_path_factory.mktemp("attacked")) as running:
        yield running


@pytest.mark.e2e
@pytest.mark.parametrize("attack", QUICK, ids=lambda attack: attack.name)
def test_all_checks_hold_before_during_and_after_a_quick_attack(harness: Harness, attack: Attack) -> None:
    played = play(attack, harness, _PATIENCE)
    assert not played.wrong, "\n".join(lines([played]))


def test_attacks_have_unique_names() -> None:
    assert len({attack.name for attack in ALL}) == len(ALL)
