"""The page of presets: its second half is written from `tasks/servers/presets`."""

import shlex
from pathlib import Path

import orjson

from tasks.servers import presets

_PAGE = Path(__file__).resolve().parents[2] / "docs/reference/presets.md"
_MARK = "<!-- python -m tools.reference writes what follows -->\n"


def _generated() -> str:
    rows = ["| preset | servers | how it was checked |", "| --- | --- | --- |"]
    for name in presets.names():
        about = presets.info(name)
        rows.append(f"| [`{name}`](#{name}) | {about.servers} | {about.evidence}: {about.checked} |")
    return "\n\n".join([_MARK + "## All presets", "\n".join(rows), *map(_section, presets.names())]) + "\n"


def _section(name: str) -> str:
    about = presets.info(name)
    payload = shlex.quote(orjson.dumps(about.payload).decode())
    commands = [
        f"slotkeeper models configure MODEL preset={name}",
        f"slotkeeper servers register MODEL SERVER {about.endpoint} --slots {about.slots}",
        f"slotkeeper submit MODEL {payload}",
    ]
    notes = "\n".join(f"- {note}" for note in about.notes)
    parts = [
        f"### {name}",
        f"{about.title}. {about.servers}.",
        notes,
        "<!-- not run: it needs such a server -->\n```sh\n" + "\n".join(commands) + "\n```",
    ]
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    return _PAGE.read_text("utf-8").partition(_MARK)[0] + _generated()
