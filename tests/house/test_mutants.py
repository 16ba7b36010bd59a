"""The list of mutants (tests/nightly/mutants) follows the product and the tests."""

from collections import Counter

from tests.nightly.mutants.all import MUTANTS
from tests.nightly.mutants.operators import REPO, MisplacedMutantError
from tests.nightly.mutants.runner import locate_test, read_outcomes


def test_each_mutant_matches_exactly_one_place_in_the_code():
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


def test_a_test_that_fails_with_a_name_error_does_not_kill_a_mutant():
    report = """<testsuites><testsuite>
      <testcase classname="tests.a" name="test_well" />
      <testcase classname="tests.a" name="test_guard[1]"><failure message="assert 1 == 2">E assert</failure></testcase>
      <testcase classname="tests.a" name="test_typo"><failure message="NameError: name 'x'">E</failure></testcase>
    </testsuite></testsuites>"""
    assert read_outcomes(report) == ({"tests/a.py::test_well"}, {"tests/a.py::test_guard"})
