"""Generate the page of settings from the settings classes and the sentence below each of their fields."""

import ast
import inspect
import textwrap

from pydantic_settings import BaseSettings

from app.config import SETTINGS
from tasks.config import TaskSettings

_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_min_rate": "bytes a second"}
_TOP = """# Settings

All settings are environment variables; the defaults suit one machine. [Several machines](../how-to/several-machines.md)
says which ones must have the same value everywhere, [the limits of the API](api-limits.md) explains those of the API's
connections, and [secrets](../how-to/secrets.md) explains the secret.

`python -m tools.reference` writes this page from the code.
"""
_COMMANDS = """
## Commands that ask the API

| variable | default | unit | |
|---|---|---|---|
| `SLOTKEEPER_URL` | `http://127.0.0.1:PORT` | | the API that commands call |
| `SLOTKEEPER_KEY` | empty | | the key that commands send |
| `SLOTKEEPER_CA` | empty | | the file with the certificates, as PEM, of the authority that signed the API's |
"""


def explained(kind: type[BaseSettings]) -> dict[str, str]:
    """Return field -> the string below it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    sentences = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            sentences[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return sentences


def page() -> str:
    """Return the Markdown of the page."""
    return _TOP + "".join(_chapter(title, kind) for title, kind in SETTINGS.items()) + _COMMANDS


def _chapter(title: str, kind: type[BaseSettings]) -> str:
    sentences, prefix = explained(kind), str(kind.model_config["env_prefix"])
    rows = [
        f"| `{(prefix + name).upper()}` | {_default(field.default)} | {_unit(name)} | {sentences[name]} |\n"
        for name, field in kind.model_fields.items()
        if (kind, name) != (TaskSettings, "port")  # It is in the chapter of the API.
    ]
    return f"\n## {title}\n\n| variable | default | unit | |\n|---|---|---|---|\n" + "".join(rows)


def _default(value: object) -> str:
    return "empty" if value in ("", None) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
