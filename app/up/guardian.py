"""A shell process that ends the children of this process if this process is killed."""

import subprocess
from contextlib import suppress
from types import TracebackType
from typing import IO, Self

# Its standard input ends when this process ends for any reason.  It kills the groups that were not dropped before.
_WATCH = """
trap '' HUP INT TERM
groups=
while read -r word group; do
    kept=
    for one in $groups; do [ "$one" = "$group" ] || kept="$kept $one"; done
    [ "$word" = add ] && kept="$kept $group"
    groups=$kept
done
each() { for one in $groups; do kill -s "$1" -- "-$one" 2>/dev/null && found=1; done; [ -n "$found" ]; }
found=; each TERM || exit 0
for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 1; found=; each 0 || exit 0; done
each KILL
"""


class Guardian:
    """While entered, guards process groups that must end with this process."""

    def __enter__(self) -> Self:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "slotkeeper-guardian"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._stdin.close()
        self._shell.wait()

    def add(self, group: int) -> None:
        """Guard a process group."""
        self._send_line(f"add {group}")

    def drop(self, group: int) -> None:
        """Stop guarding a process group, which has ended."""
        self._send_line(f"drop {group}")

    @property
    def pid(self) -> int:
        return self._shell.pid

    @property
    def _stdin(self) -> IO[str]:
        assert self._shell.stdin is not None
        return self._shell.stdin

    def _send_line(self, line: str) -> None:
        with suppress(OSError):  # The shell was killed.  The installation runs without a guardian.
            self._stdin.write(f"{line}\n")
