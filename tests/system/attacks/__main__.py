"""python -m tests.system.attacks [words]: play the attacks whose names contain a word.

Without a word: play all attacks, and run the tests that the table names.
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from os import getloadavg
from pathlib import Path

from tests.system.attacks.all import ALL
from tests.system.attacks.card import lines, lines_of_table
from tests.system.attacks.frame import Attack, Played, play
from tests.system.attacks.harness import running_harness
from tests.system.attacks.table import ATTACK, TABLE


def main(words: list[str]) -> int:
    played = _played([attack for attack in ALL if not words or any(word in attack.name for word in words)])
    print("\n".join(["", *lines(played)]))
    if words:
        return int(any(result.wrong for result in played))
    failed, skipped = _tested()
    failed += Counter(f"{ATTACK}{result.attack.name}" for result in played if result.wrong)
    print("\n".join(["", *lines_of_table(TABLE, failed, skipped)]))
    return int(bool(failed))


def _played(attacks: list[Attack]) -> list[Played]:
    played, loads = [], [getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        for number, attack in enumerate(attacks):
            print(f"{attack.name} ...", flush=True)
            with running_harness(Path(folder, str(number))) as harness:
                played.append(play(attack, harness))
            loads.append(getloadavg()[0])
    print(f"Load of the machine meanwhile: {min(loads):.1f} to {max(loads):.1f}.")
    return played


def _tested() -> tuple[Counter[str], Counter[str]]:
    """Run the table's tests and return counts of failed and of skipped ones, by their names without parameters."""
    tests = sorted({test for row in TABLE for test in row.tests if not test.startswith(ATTACK)})
    print(f"{len(tests)} tests of the other attack surfaces ...", flush=True)
    failed, skipped = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests], check=False)
        cases = list(ET.parse(report).iter("testcase"))
    for case in cases:
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name'].partition('[')[0]}"
        failed[name] += case.find("failure") is not None or case.find("error") is not None
        skipped[name] += case.find("skipped") is not None
    missing = Counter(set(tests) - failed.keys())
    return +failed + missing, +skipped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
