"""All processes of a machine share one time, also when its wall clock is set."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from migrations import migrate
from slotkeeper.clock import Clock
from slotkeeper.db import Database, clock_offset, shared_clock
from slotkeeper.registry.catalog import Catalog

START_MS = 1_800_000_000_000
MINUTE_S = 61.0


class Process:
    """One process on the machine: it shares the monotonic clock, and may have a wrong wall clock."""

    def __init__(self, machine: "Machine") -> None:
        self.machine, self.wrong_by_ms, self.clock = machine, 0, Clock()
        self.catalog = Catalog(machine.database)

    def sync(self) -> "Process":
        self.machine.acts = self
        self.catalog.get_version()
        return self

    def now_ms(self) -> int:
        self.machine.acts = self
        return self.clock.now_ms()


class Machine:
    """Its two clocks, which the test sets."""

    def __init__(self, database: Database) -> None:
        self.database, self.steady_s, self.set_by_ms = database, 1_000.0, 0
        self.acts: Process

    def later(self, seconds: float) -> None:
        self.steady_s += seconds

    def right_ms(self) -> int:
        return START_MS + round(self.steady_s * 1000) + self.set_by_ms


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    url = f"sqlite:///{tmp_path}/record.db"
    migrate.upgrade(url)
    with closing(Database(url)) as database:
        found = Machine(database)
        monkeypatch.setattr(shared_clock.time, "monotonic", lambda: found.steady_s)
        monkeypatch.setattr(
            shared_clock.time, "time_ns", lambda: (found.right_ms() + found.acts.wrong_by_ms) * 1_000_000
        )
        monkeypatch.setattr(clock_offset, "read_boot_id", lambda: "a-boot")
        monkeypatch.setattr(shared_clock.clock, "adjust", lambda *reading: found.acts.clock.adjust(*reading))
        yield found


def _two(machine: Machine) -> tuple[Process, Process]:
    one, other = Process(machine), Process(machine)
    for process in (one, other, one):  # The first stores the offset, and reads it the next time.
        process.sync()
    return one, other


@pytest.mark.parametrize("wrong_by_ms", [30_000, -30_000, 3_600_000])
def test_a_process_with_a_wrong_wall_clock_uses_the_shared_clock(machine: Machine, wrong_by_ms: int) -> None:
    one, other = _two(machine)
    one.wrong_by_ms = wrong_by_ms
    machine.later(10)
    one.sync()
    assert one.now_ms() == other.now_ms() == machine.right_ms()


def test_a_temporary_step_of_the_wall_clock_changes_nothing(machine: Machine) -> None:
    one, other = _two(machine)
    before = one.now_ms()
    machine.set_by_ms = 3_600_000
    for _ in range(3):
        machine.later(10)
        one.sync()
    assert one.now_ms() == other.sync().now_ms() == before + 30_000
    machine.set_by_ms = 0
    machine.later(MINUTE_S)
    assert one.sync().now_ms() == machine.right_ms()


def test_all_processes_follow_a_lasting_step_of_the_wall_clock(machine: Machine) -> None:
    one, other = _two(machine)
    machine.set_by_ms = 3_600_000
    one.sync()
    machine.later(MINUTE_S)
    for process in (one, one, other):
        process.sync()
    assert one.now_ms() == other.now_ms() == machine.right_ms()


def test_the_clock_offset_is_not_kept_after_a_reboot(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    _two(machine)
    monkeypatch.setattr(clock_offset, "read_boot_id", lambda: "another-boot")
    machine.steady_s, machine.set_by_ms = 5.0, 7_000_000
    late = Process(machine).sync().sync()
    assert late.now_ms() == machine.right_ms()
    with machine.database.read() as connection:
        rows = connection.exec_driver_sql("SELECT name FROM counters WHERE name LIKE 'clock:%'").scalars().all()
    assert rows == ["clock:another-boot"]


def test_a_machine_without_a_boot_id_uses_its_wall_clock(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_offset, "read_boot_id", lambda: "")
    one, _ = _two(machine)
    machine.set_by_ms = 3_600_000
    assert one.sync().now_ms() == machine.right_ms()
