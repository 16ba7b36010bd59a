"""Policies that only tests have, each a file and a row as those of the product are; see `routing/lua/lib/policy.lua`.

install(monkeypatch)    # from now on scripts and tables know them
"""

from importlib.resources import files

import pytest

from slotkeeper.registry import policies
from slotkeeper.registry.policies import Policy
from tests.support.fleet_queue import FRAGMENTS

ROWS = (
    Policy("doubling", "as aging, each step worth twice the last", lambda at, step_s: (2**at - 2) * step_s, ""),
    Policy("rounds", "the tenant that has had the fewest runs", lambda priority, step_s: None, "", is_by_tenant=True),
)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test is over."""
    for row in ROWS:
        monkeypatch.setitem(policies.POLICIES, row.name, row)
        lua = files(__name__).joinpath(f"{row.name}.lua").read_text("utf-8")
        monkeypatch.setitem(FRAGMENTS, f"lib/policies/{row.name}", lua)
