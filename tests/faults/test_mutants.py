"""Each guard is there for a reason: taken out, a test fails (tests/faults/mutants.py).

All of them: `python -m tests.faults.mutants`.  Here a few, chosen anew for each version of the list.
"""

import random
import re

import pytest

from tests.faults.mutants import MUTANTS, REPO, healthy, replaced, try_out

_SAMPLE = 3
CHOSEN = random.Random(len(MUTANTS)).sample(MUTANTS, _SAMPLE)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_guard_stands_where_the_list_says(mutant):
    text = (REPO / mutant.file).read_text("utf-8")
    assert replaced(mutant, text) != text


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant):
    for test in (*mutant.tests, mutant.still):
        path, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (REPO / path).read_text("utf-8"), re.MULTILINE)


def test_no_two_mutants_share_a_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


@pytest.mark.timeout(400)
def test_without_its_guard_a_test_fails():
    assert healthy(CHOSEN) == ""
    for verdict in map(try_out, CHOSEN):
        assert verdict.killed, f"{verdict.mutant.name}: {verdict.words}\n{verdict.output}"
