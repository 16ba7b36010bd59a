"""Reference pages that are written from the code: `python -m tools.reference` writes all of them anew."""

from collections.abc import Callable
from pathlib import Path

from tools.reference import presets, settings

REPO = Path(__file__).resolve().parents[2]
PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/settings.md": settings.page,
    "docs/reference/presets.md": presets.page,
}


def write_pages() -> None:
    for name, page in PAGES.items():
        (REPO / name).write_text(page(), "utf-8")
