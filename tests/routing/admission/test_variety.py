"""The limit of different constraints among queued jobs: one for each tenant, and one for all tenants."""

import pytest

from slotkeeper.errors import InvalidJob, TooManyRequests
from slotkeeper.registry.identity import Identity, Tenant
from tests.support.harness import SETTINGS, Harness


@pytest.fixture
def narrow(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setattr(SETTINGS, "most_constraints", 3)
    monkeypatch.setattr(SETTINGS, "most_constraints_of_all", 5)
    harness.register(1)
    return harness


def asks(memory: int, tenant: str = "default") -> dict[str, object]:
    return {"constraints": {"memory": {"min": memory}}, "tenant": tenant}


def test_a_tenants_different_queued_constraints_are_limited_and_its_jobs_with_them_are_not(narrow):
    for memory in (1, 2, 3, 3, 2, 1):
        narrow.submit(**asks(memory))
    with pytest.raises(TooManyRequests) as refused:
        narrow.submit(**asks(4))
    assert "3 different constraints" in refused.value.detail and refused.value.retry_after_s > 0
    narrow.submit()  # asks for nothing
    narrow.submit(**asks(4, "other"))


def test_the_different_queued_constraints_of_all_tenants_together_are_limited(narrow):
    for memory in range(5):
        narrow.submit(**asks(memory, f"t{memory}"))
    narrow.submit(**asks(0, "new"))
    with pytest.raises(TooManyRequests, match="all tenants"):
        narrow.submit(**asks(9, "new"))


def test_more_different_constraints_at_once_than_ever_fit_are_refused_for_good(narrow):
    with pytest.raises(InvalidJob, match="4 different constraints at once"):
        narrow.submit_all([narrow.a(**asks(n)) for n in range(4)], Identity(Tenant("default"), None, frozenset()))


def test_constraints_of_a_canceled_job_do_not_count_towards_the_limit(narrow):
    jobs = [narrow.submit(**asks(n)) for n in range(3)]
    narrow.dispatcher.cancel(jobs[0])
    narrow.submit(**asks(7))
