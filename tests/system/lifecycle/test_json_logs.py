"""With SLOTKEEPER_LOG_FORMAT=json each line that Celery's programs log is a JSON object."""

import json
from pathlib import Path

from tests.support.cluster import ready
from tools.cluster.stack import Stack


def test_each_log_line_of_workers_and_beat_is_json(tmp_path: Path) -> None:
    with Stack(tmp_path, {"SLOTKEEPER_LOG_FORMAT": "json"}) as stack:
        programs = [stack.worker(), stack.maintenance(), stack.beat()]
        for program in programs[:2]:
            ready(program)
        programs[2].source(lambda: "Starting" in programs[2].log, "beat has started")
        for program in programs:
            program.kill()
            for line in program.log.splitlines():
                assert json.loads(line)["event"], f"{program.name}: {line}"
