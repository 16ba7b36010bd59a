"""The usage of a tenant: counted once, by UTC day and model, and limited."""

from datetime import date

import pytest

from routing.dispatch.outcome import OutcomeKind
from routing.queries.job_counters import EventCounter
from slotkeeper.clock import now_ms
from slotkeeper.errors import TooManyRequests
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.usage import (
    DAY_MS,
    SlotTimes,
    Usage,
    UsageKey,
    add_usage,
    delete_old_days,
    month_end_ms,
    read_usage,
)
from tests.support.api import Api
from tests.support.harness import Harness

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])


def _count(harness: Harness) -> None:
    while EventCounter(harness.database).count_new_events():
        pass


def _run(harness: Harness, ms: int, kind: OutcomeKind = OutcomeKind.DONE, **fields: object) -> None:
    harness.submit(**fields)
    run = harness.start()
    harness.later(ms)
    harness.settle(run, kind)


def test_a_run_counts_once_on_the_day_of_its_end_also_if_it_failed(harness: Harness) -> None:
    harness.register(1, max_retries=0)
    _run(harness, 2_000, tenant="acme")
    _run(harness, 500, OutcomeKind.FAILED, tenant="acme")
    _count(harness)
    _run(harness, 1_000, OutcomeKind.RETRY, tenant="acme")
    _run(harness, 3, OutcomeKind.BUSY, tenant="acme")
    day = harness.now // DAY_MS
    harness.later(DAY_MS)
    _count(harness)
    _count(harness)
    used = read_usage(harness.database, "acme", 0, 1 << 20)
    assert used == {UsageKey("acme", day, "zimg"): Usage(slot_ms=3_503, runs=3, accepted=4, completed=1, ended=2)}
    assert read_usage(harness.database, "other", 0, 1 << 20) == {}


def test_another_process_counts_nothing_twice(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.register(1)
    _run(harness, 100)
    late = EventCounter(harness.database)
    monkeypatch.setattr(late, "_position", lambda: 0)
    _count(harness)
    before = read_usage(harness.database, "default", 0, 1 << 20)
    assert late.count_new_events() == 0
    assert read_usage(harness.database, "default", 0, 1 << 20) == before


@pytest.mark.parametrize("word, ends_ms", [("day", lambda now: now - now % DAY_MS + DAY_MS), ("month", month_end_ms)])
def test_a_tenant_over_its_slot_time_limit_can_submit_again_in_the_next_period(harness: Harness, word, ends_ms) -> None:
    harness.register(1)
    acme = harness.limited("acme", **{f"slot_s_per_{word}": 2})
    _run(harness, 1_900, tenant="acme")
    _count(harness)
    (receipt,) = harness.dispatcher.submit([harness.a(tenant="acme")], acme)
    (left,) = receipt.rates
    assert (left.name, left.quota, left.left, left.unit) == (f"slot-seconds-{word}", 2, 1, "slot-seconds")
    run = harness.start()
    harness.later(100)
    harness.settle(run)
    _count(harness)
    with pytest.raises(TooManyRequests, match=f"has used 2 seconds of slots this {word}") as refused:
        harness.submit(tenant="acme")
    assert refused.value.facts["limit"] == f"slot_s_per_{word}"
    assert [rate.left for rate in refused.value.rates] == [0]
    harness.submit(tenant="other")
    ends = ends_ms(harness.now)
    assert harness.now + refused.value.retry_after_s * 1000 == pytest.approx(ends, abs=1000)
    harness.set_clock(ends)
    harness.submit(tenant="acme")


def test_slot_times_are_read_at_most_every_five_seconds(harness: Harness) -> None:
    harness.register(1)
    now = [0.0]
    times = SlotTimes(harness.database, clock=lambda: now[0])
    assert times.of("default", harness.now) == (0, 0)
    _run(harness, 100)
    _count(harness)
    assert times.of("default", harness.now) == (0, 0)
    now[0] = 5.0
    assert times.of("default", harness.now) == (100, 100)
    harness.database.close()
    now[0] = 10.0
    assert times.of("default", harness.now) == (100, 100)


def test_old_days_are_deleted(harness: Harness) -> None:
    harness.register(1)
    _run(harness, 100)
    _count(harness)
    delete_old_days(harness.database, harness.now + 400 * DAY_MS)
    assert read_usage(harness.database, "default", 0, 1 << 20) != {}
    delete_old_days(harness.database, harness.now + 401 * DAY_MS)
    assert read_usage(harness.database, "default", 0, 1 << 20) == {}


@KEYED
def test_a_later_tenant_of_a_name_does_not_see_what_the_earlier_one_has_used(api: Api) -> None:
    root = api.with_key("root", Scope.OPERATE)
    yesterday = now_ms() // DAY_MS - 1
    api.database.write(lambda tx: add_usage(tx, {UsageKey("acme", yesterday, "zimg"): Usage(slot_ms=1_000, runs=1)}))
    acme, path = api.with_key("acme"), f"/tenants/acme/usage?from={date.fromordinal(yesterday + 719_163)}"
    assert api.client.get(path, headers=acme).json["usage"] == []
    assert [row["slot_s"] for row in api.client.get(path, headers=root).json["usage"]] == [1.0]


@KEYED
def test_a_tenant_reads_its_usage_as_json_and_as_a_table(api: Api) -> None:
    root, acme = api.with_key("root", Scope.OPERATE), api.with_key("acme")
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    api.submitted(acme)
    EventCounter(api.database).count_new_events()
    answer = api.client.get("/tenants/me/usage", headers=acme).json
    assert (answer["tenant"], [(row["model"], row["accepted"]) for row in answer["usage"]]) == ("acme", [("zimg", 1)])
    by_model = api.client.get("/tenants/acme/usage?by=model", headers=root).json["usage"]
    assert [(row["day"], row["accepted"], row["slot_s"]) for row in by_model] == [(None, 1, 0.0)]
    table = api.client.get("/tenants/me/usage", headers=acme | {"Accept": "text/csv"})
    assert table.content_type == "text/csv; charset=utf-8"
    assert table.text.splitlines()[0] == "day,model,slot_s,runs,accepted,completed,ended"
    assert table.text.splitlines()[1].endswith(",zimg,0.0,0,1,0,0")
    assert api.client.get("/tenants/root/usage", headers=acme).status_code == 404
    assert api.client.get("/tenants/me/usage?from=2030-02-01&to=2030-01-01", headers=acme).json["field"] == "to"
    assert api.client.get("/tenants/me/usage?from=1990-01-01&to=1990-01-31", headers=acme).json["usage"] == []
