"""The list of mutants (tests/nightly/mutants) follows the product and the tests."""

from collections import Counter

from tests.nightly.mutants.all import MUTANTS
from tests.nightly.mutants.operators import REPO, MisplacedMutantError
from tests.nightly.mutants.runner import locate_test


def test_the_place_of_each_mutant_is_found_exactly_once():
    problems = [f"{name!r} is the name of {count} mutants" for name, count in _names().items() if count > 1]
    for mutant in MUTANTS:
        try:
            text = (REPO / mutant.file).read_text("utf-8")
            if mutant.apply(text) == text:
                problems.append(f"{mutant.name!r} changes nothing in {mutant.place}")
        except (MisplacedMutantError, OSError) as error:
            problems.append(str(error))
    assert not problems, "\n" + "\n".join(problems)


def test_the_tests_of_each_mutant_exist_exactly_once():
    problems = []
    for mutant in MUTANTS:
        for test in (mutant.still, *mutant.kills):
            try:
                locate_test(test)
            except LookupError as error:
                problems.append(f"{mutant.name!r}: {error}")
    assert not problems, "\n" + "\n".join(problems)


def _names() -> Counter[str]:
    return Counter(mutant.name for mutant in MUTANTS)
