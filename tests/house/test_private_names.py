"""The product uses documented names of libraries; each exception is listed here with its reason.

To use another private name, add its row, with the figure that justifies it: at least 5 % on a workload of the
benchmarks, measured alone.  A row without a use fails too.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.private_names import PrivateNames, Use
from tests.house.tree import python_files


class Allowed(NamedTuple):
    """Allowed uses.  `figure`: their measured gain."""

    file: str
    names: tuple[str, ...]
    reason: str
    figure: str


ALLOWED = (
    Allowed(
        "slotkeeper/redis/pipeline.py",
        ("self._redis_connection._writer",),
        "redis-py connects and shakes hands, but gives nobody its transport",
        "10 of 37 us of a round trip (docs/adr/0007-one-event-loop-per-worker.md); not measured on a workload",
    ),
    Allowed(
        "tasks/extensions/transport.py",
        (
            "Channel._brpop_read",
            "Channel._get_client",
            "Channel._receive_one",
            "QoS._delivered",
        ),
        "a malformed message must not stop a worker, and kombu's transport has no place for that",
        "none; an attack instead: tests/system/faults/test_malformed.py",
    ),
    Allowed(
        "tasks/inference.py",
        ("InferRequest(celery.worker.request.Request)",),
        'documented: "Requests and custom requests" in the user guide on tasks',
        "none: no private name",
    ),
    Allowed(
        "tasks/extensions/pool.py",
        ("Pool(celery.concurrency.thread.TaskPool)",),
        "documented: the setting worker_pool takes a class; this one of Celery's own has what other tasks need",
        "none: no private name",
    ),
)


def _uses() -> list[Use]:
    return PrivateNames([path for path in python_files() if "benchmarks" not in path.parts]).uses()


def test_private_names_of_libraries_are_used_only_with_a_stated_reason() -> None:
    known = {(row.file, name) for row in ALLOWED for name in row.names}
    found = _uses()
    assert [f"{use.file}:{use.line} {use.name}" for use in found if (use.file, use.name) not in known] == []
    assert known - {(use.file, use.name) for use in found} == set(), "these rows are not needed any more"


_OWN = """
class Own(Thing):
    def __init__(self):
        self._mine = 1

    def ask(self, other):
        return self._mine + other._mine
"""


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from celery._state import current_app", ["celery._state.current_app"]),
        ("from re import _parser", ["re._parser"]),
        ("import concurrent.futures._base", ["concurrent.futures._base"]),
        ("import sys\nsys.modules['rich'] = None", ["sys.modules"]),
        ("pool._queue.clear()", ["pool._queue"]),
        ("import threading\nclass T(threading.Thread):\n    def _bootstrap(self): ...", ["T._bootstrap"]),
        ("import threading\nclass T(threading.Thread):\n    def run(self): self._target()", ["T._target"]),
        ("from werkzeug.routing import Map\nclass M(Map): ...", ["M(werkzeug.routing.Map)"]),
        (_OWN, []),
        (f"import threading\n{_OWN.replace('Thing', 'threading.Thread')}", []),
        ("row._asdict()", []),
        ("sys = 1\nfrom app._own import thing", []),
    ],
)
def test_uses_of_private_names_are_found_for_libraries_and_not_for_the_product(
    tmp_path: Path, code: str, names: list[str]
) -> None:
    file = tmp_path / "module.py"
    file.write_text(code)
    ast.parse(code)
    assert [use.name for use in PrivateNames([file], tmp_path).uses()] == names
