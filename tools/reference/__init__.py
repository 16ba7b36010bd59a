"""Reference pages that are generated from the code: `python -m tools.reference` writes all of them."""

from collections.abc import Callable
from pathlib import Path

from tools.reference import command_line, presets, rest_api, settings

REPO = Path(__file__).resolve().parents[2]
PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/settings.md": settings.page,
    "docs/reference/presets.md": presets.page,
    "docs/reference/command-line.md": command_line.page,
    "docs/reference/rest-api.md": rest_api.rest_page,
    "docs/reference/errors.md": rest_api.errors_page,
}


def write_pages() -> None:
    """Write all generated pages."""
    for name, page in PAGES.items():
        (REPO / name).write_text(page(), "utf-8")


def outdated_pages() -> list[str]:
    """Return the paths of the pages that differ from what the code generates."""
    return [name for name, page in PAGES.items() if (REPO / name).read_text("utf-8") != page()]
