"""Generate the second half of the page of presets from `tasks/servers/presets`."""

import shlex
from pathlib import Path

import orjson

from tasks.servers import presets

_PAGE = Path(__file__).resolve().parents[2] / "docs/reference/presets.md"
_MARK = "<!-- python -m tools.reference writes what follows -->\n"


def _generated() -> str:
    rows = ["| preset | servers | how it was checked |", "| --- | --- | --- |"]
    for name in presets.names():
        info = presets.info(name)
        rows.append(f"| [`{name}`](#{name}) | {info.servers} | {info.evidence}: {info.checked} |")
    return "\n\n".join([_MARK + "## All presets", "\n".join(rows), *map(_section, presets.names())]) + "\n"


def _section(name: str) -> str:
    info = presets.info(name)
    payload = shlex.quote(orjson.dumps(info.payload).decode())
    commands = [
        f"slotkeeper models configure MODEL preset={name}",
        f"slotkeeper servers register MODEL SERVER {info.endpoint} --slots {info.slots}",
        f"slotkeeper submit MODEL {payload}",
    ]
    notes = "\n".join(f"- {note}" for note in info.notes)
    parts = [
        f"### {name}",
        f"{info.title}. {info.servers}.",
        notes,
        "<!-- not run: it needs such a server -->\n```sh\n" + "\n".join(commands) + "\n```",
    ]
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """Return the Markdown of the page: its first half unchanged, then the generated one."""
    return _PAGE.read_text("utf-8").partition(_MARK)[0] + _generated()
