"""Prints the table server × scene after the tests."""

import pytest

from tests.nightly.live_presets.servers import SCENE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[str, dict[str, str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == SCENE:
                    server, scene, result = value
                    rows.setdefault(server, {})[scene] = result
    if not rows:
        return
    scenes = sorted({scene for row in rows.values() for scene in row})
    terminalreporter.section("server × scene")
    terminalreporter.line("| server | " + " | ".join(scenes) + " |")
    terminalreporter.line("|---" * (len(scenes) + 1) + "|")
    for server, row in sorted(rows.items()):
        terminalreporter.line(f"| {server} | " + " | ".join(row.get(scene, "–") for scene in scenes) + " |")
