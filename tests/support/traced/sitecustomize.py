"""Notes which lines of the product a process runs: Python imports this before anything else, where it is on PYTHONPATH.

TRACED_FOLDER holds a file `window` with a number.  When another number stands there, the lines that were run since the
last change are written to `<last number>.<pid>.json`, as pairs of file and line, and the next window begins.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

_FOLDER, _ROOT = Path(os.environ["TRACED_FOLDER"]), os.environ["TRACED_ROOT"] + "/"
_PARTS = frozenset(os.environ["TRACED_PACKAGES"].split())
_LOOK_EVERY_S = 0.005

lines: set[tuple[str, int]] = set()
_is_ours: dict[str, bool] = {}


def _on_call(frame, event, argument):
    file = frame.f_code.co_filename
    ours = _is_ours.get(file)
    if ours is None:
        ours = _is_ours[file] = file.startswith(_ROOT) and file[len(_ROOT) :].partition("/")[0] in _PARTS
    return _on_line if ours else None


def _on_line(frame, event, argument):
    if event == "line":
        lines.add((frame.f_code.co_filename, frame.f_lineno))
    return _on_line


def _watch() -> None:
    global lines
    sys.settrace(None)
    window = ""
    while True:
        found = (_FOLDER / "window").read_text()
        if found != window:
            done, lines = lines, set()
            part = _FOLDER / f"{window or 0}.{os.getpid()}.part"
            part.write_text(json.dumps([[file.removeprefix(_ROOT), line] for file, line in done.copy()]))
            part.rename(part.with_suffix(".json"))
            window = found
        time.sleep(_LOOK_EVERY_S)


threading.Thread(target=_watch, daemon=True).start()
threading.settrace(_on_call)
sys.settrace(_on_call)
