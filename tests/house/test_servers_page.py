"""docs/reference/descriptions.md is true: its examples are descriptions, and it names every field with its default."""

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from tasks.servers import Description, compile_description
from tasks.servers import description as parts
from tests.house.tree import REPO

PAGE = (Path(REPO) / "docs/reference/descriptions.md").read_text("utf-8")
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
CLASSES: list[type[BaseModel]] = [
    Description,
    parts.Submit,
    parts.StatusStep,
    parts.Result,
    parts.Cancel,
    parts.Callback,
    parts.HealthStep,
    parts.CountSource,
    parts.Condition,
    parts.Rule,
    parts.Stream,
    parts.EventCondition,
    parts.EventRule,
    parts.OutputSize,
]


def test_the_examples_of_the_page_are_valid_descriptions():
    described = [example for example in EXAMPLES if "mode" in example]
    assert len(described) == 7
    for example in described:
        compile_description(Description.model_validate(example))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_page_names_every_field(kind):
    names = {field.alias or name for name, field in kind.model_fields.items()}
    assert {name for name in names if f"`{name}`" not in PAGE and f'"{name}"' not in PAGE} == set()


def test_the_page_names_every_outcome_and_source():
    outcomes = {rule for kind in (parts.Submit, parts.StatusStep, parts.Cancel) for rule in kind.meanings}
    sources = {source for step in (parts.Submit, parts.StatusStep, parts.HealthStep) for source in step.sources}
    assert {word for word in outcomes if f"| `{word}` |" not in PAGE} == set()
    assert {source for source in sources if "{{" + source not in PAGE} == set()
