"""docs/settings.md, written from what the settings say of themselves: `python -m tests.house.settings_page`."""

import ast
import inspect
import textwrap

from pydantic_settings import BaseSettings

from app.config import AppSettings
from app.up.roles import UpSettings
from routing.config import RoutingSettings
from slotkeeper.config import DatabaseTimeouts, StorageSettings
from tasks.config import EventSettings, TaskSettings
from tests.house.tree import REPO

PAGE = REPO / "docs/settings.md"
CHAPTERS: dict[str, type[BaseSettings]] = {
    "The record": StorageSettings,
    "How long the record may keep anybody waiting": DatabaseTimeouts,
    "Redis, slots, offers and waiting": RoutingSettings,
    "Workers, messages and webhooks": TaskSettings,
    "Where events are published to": EventSettings,
    "The API": AppSettings,
    "`slotkeeper up`": UpSettings,
}
_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_min_rate": "bytes a second"}
_TOP = """# Settings

All are environment variables; the defaults suit one machine. What several machines need is in
[several-machines.md](several-machines.md). [web.md](web.md) says more on the API's connections,
[secrets.md](secrets.md) on secrets. Processes that belong together get the same of them, but for those of one role.

This page is written by `python -m tests.house.settings_page` from the settings' own explanations.
"""
_COMMANDS = """
## Commands that ask the API

| variable | default | unit | |
|---|---|---|---|
| `SLOTKEEPER_URL` | `http://127.0.0.1:PORT` | | where commands find the API |
| `SLOTKEEPER_KEY` | empty | | the tenant's key that commands show it |
"""


def explained(kind: type[BaseSettings]) -> dict[str, str]:
    """Each field's explanation: the string below it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    told = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            told[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return told


def page() -> str:
    return _TOP + "".join(_chapter(title, kind) for title, kind in CHAPTERS.items()) + _COMMANDS


def _chapter(title: str, kind: type[BaseSettings]) -> str:
    told, prefix = explained(kind), str(kind.model_config["env_prefix"])
    rows = [
        f"| `{(prefix + name).upper()}` | {_default(field.default)} | {_unit(name)} | {told[name]} |\n"
        for name, field in kind.model_fields.items()
        if (kind, name) != (TaskSettings, "port")  # The API's.
    ]
    return f"\n## {title}\n\n| variable | default | unit | |\n|---|---|---|---|\n" + "".join(rows)


def _default(value: object) -> str:
    return "empty" if value in ("", None) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
