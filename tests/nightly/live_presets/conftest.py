"""The installation that the real servers are put behind; the table server × scene after the tests."""

from collections.abc import Iterator

import pytest

from tests.nightly.live_presets.servers import SCENE
from tests.support.cluster import Cluster, started_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


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
