"""Measure the costs of an idle installation: python -m tools.benchmarks.idle_costs [SECONDS].

Starts `slotkeeper up --no-demo` in a temporary folder, waits 20 s, and reads from /proc (Linux) the CPU time of each
process in SECONDS (60), and its memory.  PSS divides shared memory equally between processes, so its sum is the memory
of the installation.  It is lower if other programs run with the same Python.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.up.ports import free_port

_SETTLED_S = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    ports = ("SLOTKEEPER_PORT", "SLOTKEEPER_FLOWER_PORT", "SLOTKEEPER_REDIS_PORT")
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "SLOTKEEPER_HOME": home, **{name: str(free_port()) for name in ports}}
        command = [sys.executable, "-P", "-m", "app.cli", "up", "--no-demo"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as up:
            try:
                assert up.stdout is not None
                while (line := up.stdout.readline()) and not line.startswith("Ctrl-C"):
                    pass
                time.sleep(_SETTLED_S)
                _measure(up.pid, seconds)
            finally:
                up.send_signal(signal.SIGTERM)


def _measure(supervisor: int, seconds: float) -> None:
    pids = [supervisor, *_descendants(supervisor)]
    before = {pid: cpu_seconds(pid) for pid in pids}
    time.sleep(seconds)
    rows = [(100 * (cpu_seconds(pid) - before[pid]) / seconds, *memory_mib(pid), _command(pid)) for pid in pids]
    for cpu, rss, pss, command in rows:
        sys.stdout.write(f"{cpu:5.2f} %  RSS {rss:4.0f}  PSS {pss:4.0f} MiB  {command}\n")
    cpu, rss, pss = (sum(values) for values in list(zip(*rows, strict=True))[:3])
    sys.stdout.write(f"{cpu:5.2f} %  RSS {rss:4.0f}  PSS {pss:4.0f} MiB  all together\n")


def _descendants(parent: int) -> list[int]:
    texts = [path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")]
    children = [int(pid) for text in texts for pid in text.split()]
    return [pid for child in children for pid in (child, *_descendants(child))]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mib(pid: int) -> tuple[float, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return kib["Rss"] / 1024, kib["Pss"] / 1024


def _command(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return " ".join(Path(word).name if word.startswith("/") else word for word in words[:6] if "\n" not in word)


if __name__ == "__main__":
    main()
