"""Guards of runs whose server is registered anew, or removed."""

from tests.faults.mutant import Mutant

_MOVED = "tests/contracts/test_moved_servers.py::"
_BEFORE = f"{_MOVED}test_a_run_is_compared_with_a_report_that_its_own_address_made_before_the_change"


def _mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, "operators", file, old, new, tuple(f"{_MOVED}{test}" for test in tests), _BEFORE)


MOVED = [
    _mutant(
        "a run is compared with the report of another address",
        "routing/maintenance/server_checks.py",
        "    return [job for job in jobs if job.sent_to is None or ",
        "    return [job for job in jobs if True or ",
        "test_a_run_is_not_compared_with_the_report_of_another_address",
        "test_a_polled_run_is_not_compared_with_the_report_of_another_address",
    ),
    _mutant(
        "a run is asked for at the address of today",
        "tasks/server_adapters.py",
        "    return now if sent_to in (None, now) or ",
        "    return now if True or ",
        "test_a_run_is_asked_for_at_the_address_to_which_it_was_sent",
    ),
    _mutant(
        "a run that is resumed forgets the address to which it was sent",
        "slotkeeper/jobs/statements.py",
        "case((_WAS_SENT, jobs.c.sent_to), else_=bindparam",
        "case((_WAS_SENT, None), else_=bindparam",
        "test_a_run_that_is_resumed_keeps_the_address_to_which_it_was_sent",
    ),
    _mutant(
        "an ended job keeps the password of its server's address",
        "slotkeeper/jobs/statements.py",
        '                "sent_to": None,  # It may hold a password.\n',
        "",
        "test_the_address_is_forgotten_when_the_run_is_over",
    ),
    _mutant(
        "servers at one address take each other's runs for foreign ones",
        "routing/maintenance/server_checks.py",
        "known = [*jobs, *_of_others(at_place, server, report)]",
        "known = jobs",
        "test_two_servers_at_one_address_do_not_take_each_others_runs_for_foreign_ones",
    ),
    Mutant(
        "the removal of a server is charged to its jobs",
        "operators",
        "routing/maintenance/decommission.py",
        "            Reason.SERVER_UNREACHABLE,  #",
        "            Reason.SERVER_LOST,  #",
        (
            "tests/contracts/test_routing_removal.py::"
            "test_runs_of_a_server_that_is_removed_by_force_are_lost_and_run_again_elsewhere",
        ),
        _BEFORE,
    ),
]
