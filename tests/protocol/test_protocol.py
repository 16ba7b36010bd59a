"""The slot protocol, clause by clause: `slotkeeper conform` as tests, of the reference server or of any other."""

import pytest

from slotkeeper.conform.checks import CHECKS, Check
from slotkeeper.conform.run import Ended, judge
from slotkeeper.conform.stage import Served


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_the_server_keeps_the_clause(served: Served, check: Check):
    verdict = judge(check, served)
    if verdict.ended is Ended.SKIPPED:
        pytest.skip(verdict.why)
    assert verdict.ended is Ended.PASSED, verdict.why
