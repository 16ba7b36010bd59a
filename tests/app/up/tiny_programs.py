"""A supervisor with tiny programs as its children."""

import time
from collections.abc import Callable
from pathlib import Path

from app.up.managed_process import Role
from app.up.supervisor import Supervisor


class Bench:
    """A supervisor, its messages, and the folder in which its children write files."""

    def __init__(self, supervisor: Supervisor, folder: Path, messages: list[str]) -> None:
        self.supervisor, self.folder, self.messages = supervisor, folder, messages

    def start(self, name: str, script: str, **more: object) -> None:
        self.supervisor.start(Role(name, f"sh -c '{script}'", **more))  # type: ignore[arg-type]

    def until(self, condition: Callable[[], object], what: str = "the condition") -> None:
        self.supervisor.wait(lambda: bool(condition()), 20, f"{what} did not come true")

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def lives(pid: int) -> bool:
    """Whether there is such a process that still runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(condition: Callable[[], object], what: str = "the condition", seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {seconds} s"
        time.sleep(0.01)
