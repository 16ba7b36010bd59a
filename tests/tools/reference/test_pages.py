"""The generated reference pages are those that the code makes now."""

import pytest

from tools.reference import PAGES, REPO


@pytest.mark.parametrize("name", list(PAGES))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (REPO / name).read_text("utf-8") == PAGES[name](), "run: python -m tools.reference"
