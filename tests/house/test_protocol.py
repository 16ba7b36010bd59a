"""docs/reference/slot-protocol.md and the checks of `slotkeeper conform` agree."""

import re
from pathlib import Path

from slotkeeper.conform.protocol_checks import CHECKS

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/slot-protocol.md").read_text("utf-8")
_MARK = re.compile(r"\[`([a-z-]+)`\](?!\()")


def _marked() -> dict[str, set[str]]:
    """By check: the sections in which its name stands."""
    found: dict[str, set[str]] = {}
    for section in re.split(r"^#{2,3} ", PAGE, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        for name in _MARK.findall(text):
            found.setdefault(name, set()).add(title)
    return found


def test_each_check_is_named_in_the_section_that_it_tests():
    marked = _marked()
    for check in CHECKS:
        titles = marked.get(check.name, set())
        assert any(title.startswith(check.section) for title in titles), (
            f"{check.name} does not stand in {check.section}"
        )


def test_no_clause_names_a_check_that_does_not_exist():
    assert set(_marked()) == {check.name for check in CHECKS}


def test_each_must_of_the_slot_protocol_names_its_check():
    clauses = [
        clause for line in PAGE.splitlines() for clause in line.split(". ") if re.search(r"(?<!\*)\bMUST\b", clause)
    ]
    assert len(clauses) > 10
    assert [clause for clause in clauses if not _MARK.search(clause)] == []


def test_each_check_has_a_unique_name_and_a_sentence_that_describes_it():
    assert [check.name for check in CHECKS if not check.says.endswith(".") and not check.says.endswith(").")] == []
    assert len({check.name for check in CHECKS}) == len(CHECKS)
