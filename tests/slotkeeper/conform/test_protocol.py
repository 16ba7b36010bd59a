"""The slot protocol, clause by clause: `slotkeeper conform` as tests, of the reference server or of any other."""

import pytest

from slotkeeper.conform.check_context import ServerUnderTest
from slotkeeper.conform.check_runner import CheckStatus, run_check
from slotkeeper.conform.protocol_checks import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_the_server_keeps_the_clause(served: ServerUnderTest, check: Check):
    verdict = run_check(check, served)
    if verdict.ended is CheckStatus.SKIPPED:
        pytest.skip(verdict.why)
    assert verdict.ended is CheckStatus.PASSED, verdict.why
