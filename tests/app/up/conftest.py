"""A supervisor with tiny programs as its children."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.up.guardian import Guardian
from app.up.supervisor import Signals, Supervisor
from tests.app.up.tiny_programs import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    logs = tmp_path / "logs"
    logs.mkdir()
    messages: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP
    with Signals() as signals, Guardian() as guardian:
        supervisor = Supervisor(signals, guardian, os.environ, tmp_path, logs, messages.append)
        yield Bench(supervisor, tmp_path, messages)
        supervisor.stop()
    signal.signal(signal.SIGHUP, before)
