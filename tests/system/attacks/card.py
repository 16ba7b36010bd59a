"""The score card of attacks, for people."""

from collections.abc import Container, Sequence

from tests.system.attacks.frame import PHASES, Played
from tests.system.attacks.table import Row


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


def lines_of_table(table: Sequence[Row], failed: Container[str], skipped: Container[str]) -> list[str]:
    """By door: what was tried, what had to be true meanwhile and afterwards, and whether it was."""
    shown, held = [], 0
    for number, row in enumerate(table):
        bad = [test for test in row.tests if test in failed]
        unseen = [test for test in row.tests if test in skipped]
        held += not bad
        word = "FAILED " if bad else "skipped" if unseen else "held   "
        door = row.door if not number or table[number - 1].door != row.door else ""
        shown.append(f"{door:<20} {word} {row.tried}: {row.during}; then {row.after}")
        shown += [f"{'':<29}{test}" for test in (*bad, *unseen)]
    return [*shown, "", f"{held} of {len(table)} rows of the table hold."]
