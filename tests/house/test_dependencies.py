"""All installed packages are documented: hashes in the locks, and reasons in docs/reference/dependencies.md."""

import configparser
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
RUN, DEV = "requirements.txt", "requirements-dev.txt"
_PIN = re.compile(r"(\S+)==(\S+)(?: ; [^\\]+)? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")


def _wanted(group: str) -> list[Requirement]:
    config = configparser.ConfigParser(interpolation=None)
    config.read(REPO / "setup.cfg")
    section, option = {RUN: ("options", "install_requires"), DEV: ("options.extras_require", "dev")}[group]
    return [Requirement(line) for line in config[section][option].splitlines() if line]


def _locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """By package: release and hashes."""
    found: dict[str, tuple[str, list[str]]] = {}
    last = ""
    for line in (REPO / name).read_text().splitlines():
        if pin := _PIN.fullmatch(line):
            last = canonicalize_name(pin[1])
            found[last] = (pin[2], [])
        elif _HASH.fullmatch(line):
            found[last][1].append(line.split(":")[1][:64])
        else:
            assert line.lstrip().startswith("#"), f"{name}: {line!r} is neither a pin nor a hash"
    return found


def _explained() -> set[str]:
    rows = [
        line for line in (REPO / "docs/reference/dependencies.md").read_text().splitlines() if line.startswith("| `")
    ]
    return {canonicalize_name(name) for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.mark.parametrize("lock", [RUN, DEV])
def test_each_locked_package_has_hashes(lock: str) -> None:
    assert [name for name, (_, hashes) in _locked(lock).items() if not hashes] == []


@pytest.mark.parametrize("lock, group", [(RUN, RUN), (DEV, RUN), (DEV, DEV)])
def test_the_locks_contain_each_requirement_in_a_matching_release(lock: str, group: str) -> None:
    locked = _locked(lock)
    for wanted in _wanted(group):
        name = canonicalize_name(wanted.name)
        assert name in locked, f"{name} is not in {lock}: make lock"
        assert wanted.specifier.contains(locked[name][0]), f"{name} {locked[name][0]} in {lock} does not fit: make lock"


def test_the_locks_contain_each_build_requirement_in_a_matching_release() -> None:
    builds = tomllib.loads((REPO / "pyproject.toml").read_text())["build-system"]["requires"]
    for wanted in map(Requirement, builds):
        for lock in (RUN, DEV):
            assert wanted.specifier.contains(_locked(lock)[canonicalize_name(wanted.name)][0])


def test_tests_run_on_what_is_used() -> None:
    dev = _locked(DEV)
    assert {name: dev.get(name) for name in _locked(RUN)} == _locked(RUN)


def test_the_documentation_explains_exactly_the_direct_dependencies() -> None:
    wanted = {canonicalize_name(requirement.name) for group in (RUN, DEV) for requirement in _wanted(group)}
    assert _explained() - wanted == {"hiredis"}
    assert wanted - _explained() == set()


def test_the_makefile_installs_only_packages_with_hashes() -> None:
    installs = [line for line in (REPO / "Makefile").read_text().splitlines() if line.startswith("$(PIP) ")]
    assert installs == [
        "$(PIP) --require-hashes --requirement $(1)",
        "$(PIP) --no-deps --no-build-isolation --editable .",
    ]
