"""python -m tests.attacks [words]: play the attacks whose names contain a word; all of them without one."""

import sys
import tempfile
from os import getloadavg
from pathlib import Path

from tests.attacks.all import ALL
from tests.attacks.card import lines
from tests.attacks.frame import play
from tests.attacks.stage import staged


def main(words: list[str]) -> int:
    chosen = [it for it in ALL if not words or any(word in it.name for word in words)]
    played, loads = [], [getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        for number, attack in enumerate(chosen):
            print(f"{attack.name} ...", flush=True)
            with staged(Path(folder, str(number))) as stage:
                played.append(play(attack, stage))
                loads.append(getloadavg()[0])
    print("\n".join(["", *lines(played), f"Load while they were played: {min(loads):.1f} to {max(loads):.1f}."]))
    return int(any(it.wrong for it in played))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
