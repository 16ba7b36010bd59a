"""What keeps a server's slots from the next job has one word, the same everywhere."""

from typing import Any

import pytest

from routing.queries.server_status import ServerStatus, SlotUse, blocked_by, slot_use

_FREE: dict[str, Any] = {
    "server": "gpu1",
    "absent": False,
    "free": 1,
    "cooling": 0,
    "taken": 1,
    "cooldown_until_ms": 0,
    "breaker": "closed",
    "open_until_ms": 0,
    "open_why": "",
    "opened": 0,
    "loaded": "",
    "swaps": 0,
    "away_since_ms": 0,
    "away_why": "",
    "silent_since_ms": 0,
    "scores": {},
}


@pytest.mark.parametrize(
    ("status", "quarantined", "word"),
    [
        ({}, 1, ""),
        ({"breaker": "open"}, 0, "breaker open"),
        ({"breaker": "probing"}, 0, "being tried by one job"),
        ({"breaker": "half_open"}, 0, ""),
        ({"free": 0, "taken": 2}, 0, "busy"),
        ({"free": 0, "taken": 2}, 1, "busy"),
        ({"free": 0, "taken": 2}, 2, "withheld"),
        ({"free": 0, "taken": 2, "away_since_ms": 1}, 2, "away"),
        ({"free": 0, "taken": 0, "cooling": 2, "away_since_ms": 1}, 0, "away"),
        ({"free": 0, "taken": 0, "cooling": 2}, 0, "in cooldown"),
        ({"free": 0, "taken": 1, "absent": True}, 0, "not connected"),
    ],
)
def test_a_server_is_free_busy_quarantined_away_or_in_cooldown(
    status: dict[str, Any], quarantined: int, word: str
) -> None:
    assert blocked_by(ServerStatus(**_FREE | status), quarantined) == word


@pytest.mark.parametrize(
    ("state", "status", "quarantined", "use"),
    [
        ("online", {}, 0, SlotUse(1, 0, 1, "")),
        ("online", {"free": 0, "taken": 2}, 1, SlotUse(1, 1, 0, "busy")),
        ("online", {"breaker": "open"}, 0, SlotUse(1, 0, 0, "breaker open")),
        ("paused", {}, 0, SlotUse(1, 0, 0, "paused")),
        ("online", {"free": 0, "taken": 0}, 1, SlotUse(0, 1, 0, "withheld")),
    ],
)
def test_a_slot_that_the_next_job_cannot_have_is_not_free(
    state: str, status: dict[str, Any], quarantined: int, use: SlotUse
) -> None:
    assert slot_use(state, ServerStatus(**_FREE | status), quarantined) == use
