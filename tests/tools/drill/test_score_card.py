"""A clean card passes, and each violation alone makes it fail."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from slotkeeper.jobs.states import State
from tools.drill.conduct_checks import ConductReport
from tools.drill.history_checks import Findings, Overlap, Overtaken, Run
from tools.drill.score_card import ScoreCard

RUN = Run("j", 1, "a", 0, 0, 10)
CLEAN = ScoreCard(
    seed=7,
    command="slotkeeper drill --seed 7",
    findings=Findings(1, {State.COMPLETED: 1}, [], [], {}, [], [], []),
    conduct=ConductReport({"stuck": [], "lies": []}),
    disordered=[],
    faults=[],
    stalled=False,
    answers={"202": 1},
    refusals={},
    gave_up=0,
    doubled_ids=[],
    unheard=0,
    balanced=True,
    submits_per_s=None,
    recovery={},
    rerun=None,
    agreed_s=1.0,
    left_over=[],
    crashes=[],
    slow=[],
    states={"j": State.RUNNING},
)
VIOLATIONS: dict[str, dict[str, Any]] = {
    "lost": {"findings": replace(CLEAN.findings, lost=["j"])},
    "unexpected": {"findings": replace(CLEAN.findings, unexpected=["j"])},
    "overlap": {"findings": replace(CLEAN.findings, overlaps=[Overlap("slot a-slot0", RUN, RUN)])},
    "reversed": {"findings": replace(CLEAN.findings, reversals=["j"])},
    "order": {"disordered": [Overtaken("j", "k", 1, 2, 0, 0)]},
    "stuck": {"conduct": ConductReport({"stuck": ["j waits beside a free slot"], "lies": []})},
    "left over": {"left_over": ["a: j"]},
    "stalled": {"stalled": True},
    "does not balance": {"balanced": False},
    "500 1": {"answers": {"500": 1}, "refusals": {"500": 1}},
    "doubled": {"doubled_ids": ["j"]},
}


def printed(card: ScoreCard) -> str:
    out = StringIO()
    card.show(Console(file=out, width=150))
    return out.getvalue()


def test_a_card_without_a_violation_passes() -> None:
    assert CLEAN.passed
    assert "not passed" not in printed(CLEAN)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_card_with_one_violation_does_not_pass_and_shows_it(name: str) -> None:
    card = replace(CLEAN, **VIOLATIONS[name])
    assert not card.passed
    assert not card.data()["passed"]
    assert "not passed" in printed(card)
    assert name in printed(card)


def test_duplicates_are_shown_and_are_no_violation() -> None:
    card = replace(CLEAN, findings=replace(CLEAN.findings, duplicated={"j": 3}))
    assert card.passed
    assert card.data()["duplicates"] == 2


def test_a_card_shows_the_command_that_repeats_the_drill() -> None:
    assert "slotkeeper drill --seed 7" in printed(CLEAN)
    assert CLEAN.data()["command"] == "slotkeeper drill --seed 7"
