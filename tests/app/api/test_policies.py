"""Queueing policies over the REST API: their bounds, the four answers to a submit, and invalid configurations."""

from typing import Any

import pytest

from slotkeeper.jobs.states import Reason, State
from slotkeeper.registry.policies import POLICIES
from tests.support import passes
from tests.support.api import NOTHING, Api, TimedApi
from tests.support.builders import one_of

MINUTE = 60_000


def _measured(api: TimedApi, slots: int = 1, **config: Any) -> None:
    """A model whose runs take a minute, with a job on each slot."""
    api.register(slots=slots)
    api.model(**config)
    for _ in range(5):
        api.submitted()
        api.run(MINUTE)
    for _ in range(slots):
        api.submitted()


def _order(api: Api, *ids: str) -> list[str]:
    """These jobs as they stand in line."""
    place = {job_id: api.client.get(f"/queue/jobs/{job_id}").json["position"] for job_id in ids}
    return sorted(ids, key=lambda job_id: int(place[job_id]))


def _put(api: Api, body: bytes) -> Any:
    return api.client.put("/admin/model-configs/zimg", data=body, content_type="application/json")


# -- the four answers ----------------------------------------------------------------------------------------------


def test_a_submit_to_a_free_slot_reports_that_the_job_is_starting(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    receipt = api.submit().json
    assert (receipt["status"], receipt["next_step"], receipt["position"]) == ("queued", "starting", None)
    assert receipt["estimated_start_s"] == 0
    shown = api.client.get(receipt["links"]["self"]).json
    assert (shown["next_step"], shown["estimated_start_s"]) == ("starting", 0)


def test_queued_with_a_position_and_an_estimate(timed_api: TimedApi) -> None:
    api = timed_api
    _measured(api, slots=2)
    for position in range(1, 5):
        receipt = api.submit().json
        assert (receipt["next_step"], receipt["position"]) == ("waiting", position)
        assert receipt["estimated_start_s"] == position * 30, "a minute each, on two slots"
    assert api.client.get(receipt["links"]["explain"]).json["estimated_start_s"] == 120


def test_queued_before_any_run_was_measured(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    api.submitted()
    receipt = api.submit().json
    assert (receipt["next_step"], receipt["position"], receipt["estimated_start_s"]) == ("waiting", 1, None)


def test_later_and_what_has_started_or_ended(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    assert api.submit(not_before=60).json["next_step"] == "later"
    key = {"Idempotency-Key": "k-1"}
    api.submit(key)
    assert api.submit(key).json["next_step"] == "starting"
    api.run()
    again = api.submit(key).json
    assert (again["status"], again["next_step"], again["position"]) == (State.COMPLETED, None, None)


def test_a_submit_while_redis_is_down_reports_an_unknown_next_step(mortal_api: Api) -> None:
    mortal_api.register()
    mortal_api.valkey.kill()
    receipt = mortal_api.submit().json
    assert (receipt["status"], receipt["next_step"], receipt["estimated_start_s"]) == ("queued", "unknown", None)


def test_a_full_queue_computes_retry_after_from_its_drain_rate(timed_api: TimedApi) -> None:
    api = timed_api
    _measured(api, slots=2, capacity=2)
    accepted = [api.submit().status_code for _ in range(4)]
    answer = api.submit()
    assert (accepted, answer.status_code, answer.json["code"]) == ([202] * 4, 429, "too_many_requests")
    assert int(answer.headers["Retry-After"]) == 30, "two a minute, and there is one too many"
    assert "4 jobs wait" in answer.json["detail"] and "capacity" in answer.json["detail"]
    batch = api.client.post("/queue/submit-batch", json=[{"model": "zimg", "payload": {}}] * 3)
    assert (batch.status_code, batch.headers["Retry-After"]) == (429, "90")


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true"}])
def test_under_fair_the_capacity_applies_to_each_tenant(timed_api: TimedApi, settings: dict[str, str]) -> None:
    api = timed_api
    boss, acme, zeta = api.tenant("boss", admin=True), api.tenant("acme"), api.tenant("zeta")
    api.client.put("/admin/model-configs/zimg", json={"policy": "fair", "capacity": 1}, headers=boss)
    api.submitted(acme)
    answer = api.submit(acme)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "30")
    assert "tenant 'acme'" in answer.json["detail"]
    assert api.submit(zeta).status_code == 202


def test_a_ttl_shorter_than_the_estimated_wait_is_refused(timed_api: TimedApi) -> None:
    api = timed_api
    _measured(api)
    for _ in range(20):
        api.submitted()
    before = api.stored()
    answer = api.submit(ttl=60)
    assert (answer.status_code, answer.json["code"], answer.json["field"]) == (422, "invalid_job", "ttl")
    assert answer.json["ahead"] == 20
    assert answer.json["estimated_start_s"] == 21 * 60
    assert "longer ttl" in answer.json["detail"]
    assert api.stored() == before
    assert api.submit(ttl=3600 * 24).status_code == 202
    assert api.submit(ttl=60, priority=1).status_code == 202, "no job is ahead of it"
    jobs = [{"model": "zimg", "payload": {}}, {"model": "zimg", "payload": {}, "ttl": 60}]
    assert api.client.post("/queue/submit-batch", json=jobs).json["index"] == 1


# -- models and their bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, bounds, sentence",
    [
        ({"policy": "fifo"}, [0] * 9, "A job waits for the work that was accepted before it, and no longer."),
        ({}, [0] + [None] * 8, "A job of priority 1 waits for the work of its priority that was accepted before it"),
        (
            {"policy": "aging", "tier_head_start": 60.0},
            [60 * n for n in range(9)],
            "A job of priority 5 waits for the work that is accepted until 240 s after it, and no longer; each "
            "step counts 60 s.",
        ),
        ({"policy": "fair"}, [None] * 9, "A tenant gets its share of the slots' time by weight"),
    ],
)
def test_a_model_states_the_longest_wait_that_its_policy_can_cause(
    api: Api, config: dict[str, Any], bounds: list[float | None], sentence: str
) -> None:
    api.model(**config)
    shown = api.client.get("/admin/models/zimg").json
    assert list(shown["longest_overtaking_s"].values()) == bounds
    assert list(shown["longest_overtaking_s"]) == [str(priority) for priority in range(1, 10)]
    assert shown["longest_wait"].startswith(sentence)


def test_a_model_states_its_present_load(timed_api: TimedApi) -> None:
    api = timed_api
    _measured(api, slots=2, capacity=10)
    for _ in range(3):
        api.submitted()
    shown = api.client.get("/admin/models/zimg").json
    assert (shown["waiting"], shown["slots"], shown["state"], shown["servers"]) == (3, 2, "online", ["gpu1"])
    assert shown["load"] == {
        "mean_run_s": 60,
        "work_s": 90,
        "limit": 20,
        "breaker": "closed",
        "breaker_until": None,
        "breaker_why": None,
    }


def test_a_models_open_breaker_is_shown(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    api.model(breaker_failures=1)
    api.submitted()
    api.run(1000, Reason.SERVER_ERROR)
    load = api.client.get("/admin/models/zimg").json["load"]
    assert (load["breaker"], load["breaker_until"]) == ("open", "2027-01-15T08:00:06.000Z")
    assert load["breaker_why"] == "failures"
    assert (load["mean_run_s"], load["work_s"]) == (None, None)


def test_without_redis_a_model_is_shown_without_its_load(mortal_api: Api) -> None:
    mortal_api.register()
    mortal_api.valkey.kill()
    shown = mortal_api.client.get("/admin/models/zimg").json
    assert (shown["waiting"], shown["load"], shown["policy"]) == (None, None, "priority")


def test_an_unknown_model_is_not_shown(api: Api) -> None:
    assert api.client.get("/admin/models/nobody").status_code == 404


# -- changes of the policy -----------------------------------------------------------------------------------------


def test_a_policy_set_while_redis_is_down_applies_after_the_sweep(mortal_api: Api) -> None:
    api = mortal_api
    api.model()
    low, urgent = api.submitted(priority=9), api.submitted(priority=1)
    assert _order(api, low, urgent) == [urgent, low]
    api.valkey.kill()
    answer = _put(api, b'{"policy":"fifo"}')
    assert (answer.status_code, answer.json["config"]["policy"]) == (200, "fifo")
    api.valkey.start()
    passes.sweep(api.dispatcher)
    assert _order(api, low, urgent) == [low, urgent]


def test_limits_of_tenants_change_while_it_runs(api: Api) -> None:
    api.register(slots=3)
    api.model(tenant_slots=1)
    for _ in range(3):
        api.submitted()
    assert len(api.notifications.offers) == 1
    api.model(tenant_slots=1, tenant_slot_limits={"default": 2})
    assert len(api.notifications.offers) == 2
    api.model()
    assert len(api.notifications.offers) == 3


# body, field, a word of the reason
BAD: dict[str, tuple[bytes, str, str]] = {
    "unknown policy": (b'{"policy":"random"}', "policy", one_of(POLICIES)),
    "policy is a number": (b'{"policy":1}', "policy", one_of(POLICIES)),
    "weight of nothing": (b'{"weights":{"acme":0}}', "weights.acme", "greater than or equal to 0.001"),
    "weight below nothing": (b'{"weights":{"acme":-1}}', "weights.acme", "greater than or equal to 0.001"),
    "weight too large": (b'{"weights":{"acme":1001}}', "weights.acme", "less than or equal to 1000"),
    "weight endless": (b'{"weights":{"acme":1e999}}', "weights.acme", "finite number"),
    "weight in words": (b'{"weights":{"acme":"2"}}', "weights.acme", "valid number"),
    "weight true": (b'{"weights":{"acme":true}}', "weights.acme", "valid number"),
    "weight of nobody": (b'{"weights":{"":2}}', "weights", "at least 1 character"),
    "weights are a list": (b'{"weights":[1]}', "weights", "dictionary"),
    "capacity below nothing": (b'{"capacity":-1}', "capacity", "greater than or equal to 0"),
    "capacity in parts": (b'{"capacity":1.5}', "capacity", "valid integer"),
    "capacity beyond all": (b'{"capacity":1%s}' % (b"0" * 30), "capacity", "less than or equal to 1000000000"),
    "capacity per slot": (b'{"capacity_per_slot":-1}', "capacity_per_slot", "greater than or equal to 0"),
    "bound below nothing": (b'{"max_waiting":-1}', "max_waiting", "greater than or equal to 0"),
    "bound beyond all": (b'{"max_waiting":1%s}' % (b"0" * 30), "max_waiting", "less than or equal to 1000000000"),
    "no slot for tenants": (b'{"tenant_slots":0}', "tenant_slots", "greater than or equal to 1"),
    "no slot for one": (b'{"tenant_slot_limits":{"a":0}}', "tenant_slot_limits.a", "greater than or equal to 1"),
    "head start of nothing": (b'{"tier_head_start":0}', "tier_head_start", "greater than 0"),
    "head start endless": (b'{"tier_head_start":1e999}', "tier_head_start", "less than or equal to"),
    "affinity below nothing": (b'{"affinity":-1}', "affinity", "greater than or equal to 0"),
    "unmatched in other words": (b'{"unmatched":"maybe"}', "unmatched", "'accept' or 'refuse'"),
    "breaker of nothing": (b'{"breaker_failures":0}', "breaker_failures", "greater than or equal to 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_policy_is_refused_with_its_field_and_the_old_policy_stays(api: Api, case: str) -> None:
    body, field, reason = BAD[case]
    api.model(policy="fifo", weights={"acme": 2.0})
    before = api.client.get("/admin/model-configs/zimg").json
    low, urgent = api.submitted(priority=9), api.submitted(priority=1)
    answer = _put(api, body)
    assert (answer.status_code, answer.json["field"]) == (422, field), answer.text
    assert reason in answer.json["detail"], answer.json["detail"]
    assert api.client.get("/admin/model-configs/zimg").json == before
    assert _order(api, low, urgent) == [low, urgent]


def test_a_nan_in_a_policy_is_malformed_json(api: Api) -> None:
    api.model(policy="fifo")
    answer = _put(api, b'{"weights":{"acme":NaN}}')
    assert (answer.status_code, answer.json["code"]) == (400, "malformed_json")
    assert "NaN" in answer.json["detail"]
    assert api.client.get("/admin/model-configs/zimg").json["overrides"] == {"policy": "fifo"}


def test_a_tenant_of_half_a_character_is_refused(api: Api) -> None:
    answer = _put(api, b'{"weights":{"\\ud800":2}}')
    assert answer.status_code == 422
    assert answer.json["field"].startswith("weights")


@pytest.mark.parametrize("priority", [0, 10, -1, 1.5, "5"])
def test_a_priority_that_there_is_not_is_refused_with_those_that_there_are(api: Api, priority: Any) -> None:
    api.model()
    answer = api.submit(priority=priority)
    assert (answer.status_code, answer.json["field"]) == (422, "priority")
    assert "from 1 (most urgent) to 9" in answer.json["detail"]
    assert api.stored() == NOTHING
