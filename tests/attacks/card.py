"""The score card of attacks, for people."""

from collections.abc import Sequence

from tests.attacks.frame import PHASES, Played


def lines(played: Sequence[Played]) -> list[str]:
    """One line for each check of each attack: the longest that it took in each phase, and whether it held."""
    shown = [f"{'attack':<46}{'what must be true':<34}" + "".join(f"{phase:>9}" for phase in PHASES)]
    for it in played:
        for number, (check, phases) in enumerate(it.seen.items()):
            times = "".join(f"{seen.longest_s:>8.2f}{'!' if seen.wrong else 's'}" for seen in phases.values())
            shown.append(f"{it.attack.name if not number else '':<46}{check:<34}{times}")
        shown += [f"    {words}" for words in it.wrong]
    failed = sum(bool(it.wrong) for it in played)
    return [*shown, "", f"{len(played) - failed} of {len(played)} attacks are withstood."]
