import pytest

from tools.drill.fault_injection import InjectedFault, find_killed
from tools.drill.fault_schedule import Fault, Kind


@pytest.mark.parametrize("kind, killed, count", [("restarts", True, 1), ("restarts", False, 0), ("impatient", True, 0)])
def test_a_process_that_had_time_to_shut_down_and_was_killed_is_named(kind: str, killed: bool, count: int) -> None:
    injection = InjectedFault(Fault(1.0, Kind(kind), "web", 9.0), 0, 0, killed=killed)
    found = find_killed([injection])
    assert len(found) == count and all(line.startswith("web did not shut down in time") for line in found)
