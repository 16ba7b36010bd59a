"""Mutants are tried out: the product is copied, the guard taken out of the copy, and the tests run that must fail.

    python -m tests.nightly.mutants                # all mutants, as a table; exit code 1 if one survives
    python -m tests.nightly.mutants renew seize    # those whose names contain one of these words

To add a guard: a Mutant in the list of its area, with a place that is found exactly once and the tests that fail
without it.  Each of them must fail, and `still` must pass.  The working tree itself is never touched.
"""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.nightly.mutants.all import MUTANTS
from tests.nightly.mutants.operators import REPO, Mutant

_COPIED_BESIDE_PACKAGES = ("docs", "celeryconfig.py", "setup.cfg")
_LONGEST_S, _LONGEST_OF_MUTANT_S = 180, 20
# A mutant that names what does not exist breaks the code, whatever guard it takes out: it proves nothing.
_MISNAMED = re.compile(r"\b(NameError|UnboundLocalError): ")
_TEST = re.compile(r"^\s*(?:async )?def (test_\w+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What came of one mutant: the tests that ought to have failed and did not, and whether `still` failed."""

    mutant: Mutant
    survived: tuple[str, ...]
    is_broken: bool
    output: str

    @property
    def is_killed(self) -> bool:
        return not self.survived and not self.is_broken

    def __str__(self) -> str:
        if self.is_killed:
            return "killed"
        return "breaks everything" if self.is_broken else "SURVIVED " + ", ".join(self.survived)


def try_out(mutant: Mutant) -> Verdict:
    """Run the mutant's tests on a copy in which the guard is missing."""
    still, kills = locate_test(mutant.still), [locate_test(test) for test in mutant.kills]
    with _copy() as folder:
        path = folder / mutant.file
        path.write_text(mutant.apply(path.read_text("utf-8")), "utf-8")
        passed, failed, output = _run(folder, [still, *kills], postgres=mutant.postgres, longest_s=_LONGEST_S)
    survived = tuple(test for test in kills if test not in failed)
    return Verdict(mutant, survived, still not in passed or still in failed, output)


def run_unaltered(mutants: Sequence[Mutant]) -> str:
    """Run the tests of all these mutants on an unaltered copy; answers what fails there, empty: nothing."""
    tests = sorted({locate_test(test) for mutant in mutants for test in (mutant.still, *mutant.kills)})
    longest_s = _LONGEST_S + _LONGEST_OF_MUTANT_S * len(mutants)
    with _copy() as folder:
        needs_postgres = any(mutant.postgres for mutant in mutants)
        passed, failed, output = _run(folder, tests, postgres=needs_postgres, longest_s=longest_s)
    return output if failed or set(tests) - passed else ""


def locate_test(name: str) -> str:
    """The test as pytest is asked for it.  Raises LookupError unless it is defined exactly once."""
    stem, _, function = name.rpartition("::")
    files = [file for file in _files_of_tests()[function] if stem in ("", Path(file).stem)]
    if len(files) != 1:
        raise LookupError(f"{name} is defined {len(files)} times" + (f": {', '.join(files)}" if files else ""))
    return f"{files[0]}::{function}"


@cache
def _files_of_tests() -> defaultdict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for path in sorted((REPO / "tests").rglob("test_*.py")):
        for name in _TEST.findall(path.read_text("utf-8")):
            found[name].append(path.relative_to(REPO).as_posix())
    return found


@contextmanager
def _copy() -> Iterator[Path]:
    packages = [path.parent.name for path in REPO.glob("*/__init__.py")]
    with TemporaryDirectory(prefix="mutant-") as name:
        for part in (*packages, *_COPIED_BESIDE_PACKAGES):
            source, target = REPO / part, Path(name) / part
            if source.is_dir():
                shutil.copytree(source, target)  # With its compiled files: all but one stay valid.
            else:
                shutil.copy(source, target)
        yield Path(name)


def _run(folder: Path, tests: Sequence[str], *, postgres: bool, longest_s: int) -> tuple[set[str], set[str], str]:
    """The tests that passed and those that failed, without their parameters, and the end of the output."""
    report = folder / "report.xml"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLOTKEEPER_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [] if postgres else ["-m", "not postgres"]
    command += [f"--basetemp={folder / 'temp'}", f"--junitxml={report}", *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=longest_s)
    except subprocess.TimeoutExpired:
        return set(), set(), f"The tests took longer than {longest_s} s."
    passed, failed = read_outcomes(report.read_text()) if report.exists() else (set(), set())
    return passed, failed, done.stdout[-4000:] + done.stderr[-2000:]


def read_outcomes(report: str) -> tuple[set[str], set[str]]:
    """The tests that passed and those that failed, by a report in the form of JUnit.

    A test that fails because the mutant names what does not exist is in neither.
    """
    passed, failed = set[str](), set[str]()
    for case in ET.fromstring(report).iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name'].partition('[')[0]}"
        faults = [fault for kind in ("failure", "error") if (fault := case.find(kind)) is not None]
        if not faults:
            passed.add(name)
        elif not any(_MISNAMED.search(f"{fault.get('message')}\n{fault.text}") for fault in faults):
            failed.add(name)
    return passed, failed


def main(words: Sequence[str]) -> int:
    """Try out the mutants whose names contain one of the words, or all; answers the exit code."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    if not chosen:
        sys.stdout.write(f"No mutant has a name that contains {' or '.join(words)}.\n")
        return 2
    if output := run_unaltered(chosen):
        sys.stdout.write(f"With all guards in place a test fails:\n{output}\n")
        return 2
    killed = 0
    for mutant in chosen:
        verdict = try_out(mutant)
        killed += verdict.is_killed
        sys.stdout.write(f"{mutant.breaks:20} {mutant.name:70} {verdict}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{killed} of {len(chosen)} mutants are killed\n")
    return 0 if killed == len(chosen) else 1
