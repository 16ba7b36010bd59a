"""docs/presets.md, of which the second half is written from the presets: `python -m tests.support.presets_page`."""

import shlex
from pathlib import Path

import orjson

from tasks.servers import presets

PAGE = Path(__file__).resolve().parents[2] / "docs/presets.md"
MARK = "<!-- From here on written by python -m tests.support.presets_page -->\n"


def written() -> str:
    """What stands behind the mark."""
    rows = ["| preset | servers | how it was checked |", "| --- | --- | --- |"]
    for name in presets.names():
        about = presets.info(name)
        rows.append(f"| [`{name}`](#{name}) | {about.servers} | {about.evidence}: {about.checked} |")
    return "\n\n".join([MARK + "## All presets", "\n".join(rows), *map(_section, presets.names())]) + "\n"


def _section(name: str) -> str:
    about = presets.info(name)
    payload = shlex.quote(orjson.dumps(about.payload).decode())
    commands = [
        f"slotkeeper models configure MODEL preset={name}",
        f"slotkeeper servers register MODEL SERVER {about.endpoint} --slots {about.slots}",
        f"slotkeeper submit MODEL {payload}",
    ]
    notes = "\n".join(f"- {note}" for note in about.notes)
    parts = [f"### {name}", f"{about.title}. {about.servers}.", notes, "```sh\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join(part for part in parts if part)


def whole() -> str:
    return PAGE.read_text("utf-8").partition(MARK)[0] + written()


if __name__ == "__main__":
    PAGE.write_text(whole(), "utf-8")
