import pytest

from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Job
from tests.support.builders import T0


@pytest.fixture
def a_row() -> Job:
    """A queued job as the database returns it."""
    nothing = dict.fromkeys(
        (
            "started_ms",
            "finished_ms",
            "due_ms",
            "deadline_ms",
            "server",
            "slot",
            "lease",
            "remote_id",
            "cancel_requested_ms",
            "callback_url",
            "error_code",
            "error_message",
            "sent_ms",
        )
    )
    counts = dict.fromkeys(("attempt", "waits", "failures", "crashes"), 0)
    return Job(
        id="j",
        seq=1,
        model="zimg",
        state=State.QUEUED,
        why=Reason.SUBMITTED,
        priority=5,
        tenant="default",
        created_ms=T0,
        source="rest",
        **counts,
        **nothing,
    )
