"""Each guard is there for a reason: without it a test fails.  All mutants are tried out, which takes hours."""

import pytest

from tests.nightly.mutants.all import MUTANTS
from tests.nightly.mutants.runner import try_out


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_without_its_guard_a_test_fails(mutant):
    verdict = try_out(mutant)
    assert verdict.is_killed, f"{verdict}\n{verdict.output}"
