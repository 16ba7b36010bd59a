"""The score card of attacks, for people."""

from collections.abc import Container, Sequence

from tests.system.attacks.frame import PHASES, Played
from tests.system.attacks.table import Row


def lines(played: Sequence[Played]) -> list[str]:
    """Return a line for each check of each attack: its longest time in each phase, and whether it held."""
    shown = [f"{'attack':<46}{'what must be true':<34}" + "".join(f"{phase:>9}" for phase in PHASES)]
    for result in played:
        for number, (check, phases) in enumerate(result.seen.items()):
            times = "".join(f"{seen.longest_s:>8.2f}{'!' if seen.wrong else 's'}" for seen in phases.values())
            shown.append(f"{result.attack.name if not number else '':<46}{check:<34}{times}")
        shown += [f"    {words}" for words in result.wrong]
    failed = sum(bool(result.wrong) for result in played)
    return [*shown, "", f"{len(played) - failed} of {len(played)} attacks are withstood."]


def lines_of_table(table: Sequence[Row], failed: Container[str], skipped: Container[str]) -> list[str]:
    """Return the score card's lines, by attack surface: the attempt, the required conditions, and whether they held."""
    shown, held = [], 0
    for number, row in enumerate(table):
        bad = [test for test in row.tests if test in failed]
        unseen = [test for test in row.tests if test in skipped]
        held += not bad
        word = "FAILED " if bad else "skipped" if unseen else "held   "
        surface = row.surface if not number or table[number - 1].surface != row.surface else ""
        shown.append(f"{surface:<20} {word} {row.tried}: {row.during}; then {row.after}")
        shown += [f"{'':<29}{test}" for test in (*bad, *unseen)]
    return [*shown, "", f"{held} of {len(table)} rows of the table hold."]
