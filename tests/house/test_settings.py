"""Every setting that the code reads is told in the documentation."""

import re
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from app.config import AppSettings
from app.up.plan import UpSettings
from jobs.config import Limits, RecordSettings
from routing.config import RoutingSettings
from tasks.config import TaskSettings

_REPO = Path(__file__).resolve().parents[2]
_PAGES = [_REPO / "README.md", *sorted((_REPO / "docs").glob("*.md"))]
_CODE = [path for folder in ("app", "client", "jobs", "routing", "tasks") for path in (_REPO / folder).rglob("*.py")]
_CLASSES: list[type[BaseSettings]] = [AppSettings, Limits, RecordSettings, RoutingSettings, TaskSettings, UpSettings]
_OF_TESTS = {"SLOTKEEPER_CRASH_AT"}


def _settings() -> set[str]:
    fields = {f"{kind.model_config['env_prefix']}{name}".upper() for kind in _CLASSES for name in kind.model_fields}
    read = {name for path in _CODE for name in re.findall(r'environ[^"\n]*"(SLOTKEEPER_[A-Z_]+)"', path.read_text())}
    return fields | read - _OF_TESTS


def test_all_classes_of_settings_are_looked_at() -> None:
    found = {name for path in _CODE for name in re.findall(r"^class (\w+)\(BaseSettings\)", path.read_text(), re.M)}
    assert found == {kind.__name__ for kind in _CLASSES}


@pytest.mark.parametrize("name", sorted(_settings()))
def test_a_setting_is_told(name: str) -> None:
    assert any(f"`{name}`" in page.read_text() for page in _PAGES)


def test_no_setting_is_told_that_there_is_not() -> None:
    told = {name for page in _PAGES for name in re.findall(r"^\| `(SLOTKEEPER_[A-Z_]+)`", page.read_text(), re.M)}
    assert told <= _settings()
