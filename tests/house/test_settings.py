"""The documents describe each setting that the code reads."""

import re

from pydantic_settings import BaseSettings

from app.config import SETTINGS
from tests.house.rule import for_each
from tests.house.tree import REPO, python_files
from tools.reference.settings import explained

_PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
_CLASSES = tuple(SETTINGS.values())
_OF_TESTS = {"SLOTKEEPER_CRASH_AT", "SLOTKEEPER_STOP_AT"}


def _in_code(pattern: str) -> set[str]:
    return {found for path in python_files() for found in re.findall(pattern, path.read_text(), re.MULTILINE)}


def _settings() -> set[str]:
    fields = {f"{kind.model_config['env_prefix']}{name}".upper() for kind in _CLASSES for name in kind.model_fields}
    return fields | _in_code(r'environ[^"\n]*"(SLOTKEEPER_[A-Z_]+)"') - _OF_TESTS


def test_all_settings_classes_are_checked() -> None:
    assert _in_code(r"^class (\w+)\(Settings\)") == {kind.__name__ for kind in _CLASSES}


@for_each(sorted(_settings()))
def test_each_setting_is_documented(name: str) -> None:
    assert any(f"`{name}`" in page.read_text() for page in _PAGES)


def test_each_documented_setting_exists() -> None:
    documented = {name for page in _PAGES for name in re.findall(r"^\| `(SLOTKEEPER_[A-Z_]+)`", page.read_text(), re.M)}
    assert documented <= _settings()


@for_each(_CLASSES)
def test_each_setting_has_a_docstring_of_one_sentence(kind: type[BaseSettings]) -> None:
    docstrings = explained(kind)
    assert sorted(kind.model_fields.keys() - docstrings.keys()) == []
    texts = {name: docstrings[name] for name in kind.model_fields}
    assert [name for name, text in texts.items() if not text.endswith(".") or "…" in text or "|" in text] == []
