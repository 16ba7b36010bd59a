"""A guard that is taken out, and where the tests are that must fail then."""

from dataclasses import dataclass

RECORD = "tests/contracts/test_record.py::"
SUBMIT = "tests/contracts/test_record_submit.py::"
HOOKS = "tests/contracts/test_record_webhooks.py::"
CALLBACK = "tests/contracts/test_api_callback.py::"
USES = "tests/contracts/test_routing_dispatcher.py::"
MAINTENANCE = "tests/contracts/test_routing_reconcile.py::"
SERVERS = "tests/contracts/test_routing_servers.py::"
LEASES = "tests/lua/test_leases.py::"
ORDER = "tests/lua/test_order.py::"
SLOTS = "tests/lua/test_servers.py::"
POLICIES = "tests/unit/routing/test_policies.py::"
IDENTITY = "tests/unit/routing/test_identity.py::"
GUARDS = "tests/faults/test_guards.py::"
WORKERS = "tests/faults/test_workers.py::"
RUNS = "tests/faults/test_runs.py::"
DRAINING = "tests/faults/test_draining.py::"
ORPHANS = "tests/faults/test_identity.py::"
OUTAGES = "tests/faults/test_outages.py::"
CALLS = "tests/contracts/test_task_calls.py::"
MALFORMED = "tests/faults/test_malformed.py::"
TELLINGS = "tests/faults/test_tellings.py::"
MESSAGES = "tests/contracts/test_task_messages.py::"
REVOKES = "tests/faults/test_revokes.py::"
PLACES = "tests/lua/test_policies.py::"


@dataclass(frozen=True)
class Mutant:
    """One guard taken out.  `breaks`: the invariant that then no longer holds, or what its rule is about."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    still: str = f"{USES}test_the_whole_way_of_a_job"
    postgres: bool = False
    """Its tests need PostgreSQL; others are tried on SQLite alone, which is faster."""
