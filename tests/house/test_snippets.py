"""Code blocks of README and docs/ are valid in the language that they name."""

import pytest

from tests.house.rule import for_each
from tests.support.snippets import CHECKS, PAGES, Snippet, snippets


@for_each([snippet for page in PAGES for snippet in snippets(page)])
def test_a_code_block_is_valid(snippet: Snippet) -> None:
    try:
        CHECKS[snippet.language](snippet.code)
    except (SyntaxError, ValueError) as error:
        raise AssertionError(str(error)) from error


def test_invalid_blocks_are_found() -> None:
    for language, code in (("sh", "if"), ("python", "if"), ("json", '{"a": …}'), ("toml", "a")):
        with pytest.raises((AssertionError, SyntaxError, ValueError)):
            CHECKS[language](code)


def test_every_block_names_a_language_that_is_checked_or_is_plain_text() -> None:
    known = {*CHECKS, "text", "nginx", "yaml", "ini", "mermaid", "{toctree}"}
    fences = [line for page in PAGES for line in page.read_text("utf-8").splitlines() if line.startswith("```")]
    assert {fence.removeprefix("```") for fence in fences} - {""} <= known
