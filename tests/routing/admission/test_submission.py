"""Checks of a submission: an error names the field of a bad request, and every bound is exact."""

import json
from typing import Any

import orjson
import pytest

from routing.admission.submission import check_name, encode_payload, prepare_job
from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.values import NewJob
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import Model
from tests.support.builders import a_submission

NOW = 1_800_000_000_000
DAY_S = 86_400


def model(**config: Any) -> Model:
    return Model("zimg", "zimg", config, ModelConfig(**config))


def prepared(config: dict[str, Any] | None = None, **asked: Any) -> NewJob:
    request = a_submission(**({"model": "zimg", "payload": {"prompt": "a cat"}} | asked))
    return prepare_job(request, model(**(config or {})), lambda url: "not allowed" if "inside" in url else None, NOW)


def nested(levels: int, kind: type = list) -> dict[str, Any]:
    """A payload whose innermost value lies so many levels below it."""
    value: Any = "innermost"
    for _ in range(levels - 1):
        value = [value] if kind is list else {"x": value}
    return {"x": value}


# -- what is taken ---------------------------------------------------------------------------------------------


def test_a_minimal_submission_gets_the_defaults():
    job = prepared()
    assert (job.model, job.payload, job.priority, job.tenant) == ("zimg", '{"prompt":"a cat"}', 5, "default")
    assert (job.not_before_ms, job.deadline_ms, job.callback_url, job.idempotency_key) == (None, None, None, None)
    assert len(job.id) == 36 and prepared().id != job.id


def test_every_field_of_a_submission_is_stored_in_the_job():
    asked = {"tenant": "acme", "callback_url": "https://c/h", "priority": 2, "ttl_s": 90.5, "delay_s": 10, "id": "j-1"}
    job = prepared(**asked, idempotency_key="k", source="task", envelope="{}")
    assert (job.tenant, job.callback_url, job.priority, job.id) == ("acme", "https://c/h", 2, "j-1")
    assert (job.deadline_ms, job.not_before_ms) == (NOW + 90_500, NOW + 10_000)
    assert (job.idempotency_key, job.source, job.envelope) == ("k", "task", "{}")


def test_a_submission_may_give_a_start_time_instead_of_a_delay():
    assert prepared(not_before_ms=NOW + 1234).not_before_ms == NOW + 1234
    assert prepared(not_before_ms=NOW - 1).not_before_ms is None, "it has passed"


@pytest.mark.parametrize(("asked", "priority"), [(None, 5), (False, 5), (True, 1), (1, 1), (5, 5), (9, 9)])
def test_a_priority_is_a_number_or_true_for_the_most_urgent(asked, priority):
    assert prepared(priority=asked).priority == priority


@pytest.mark.parametrize(
    "payload", [{}, {"a": None}, {"a": [1, 2.5, True, "ü✓"]}, {"": {"": []}}, {"n": 2**63 - 1}, {"n": 2**70}]
)
def test_a_payload_is_kept_as_it_is(payload):
    assert json.loads(prepared(payload=payload).payload) == payload


def test_a_model_may_give_its_jobs_a_deadline():
    assert prepared({"default_ttl": 60}).deadline_ms == NOW + 60_000
    assert prepared({"default_ttl": 60}, ttl_s=5).deadline_ms == NOW + 5_000


# -- what is refused -------------------------------------------------------------------------------------------

BAD = [
    ("payload", {"payload": None}),
    ("payload", {"payload": [1]}),
    ("payload", {"payload": "text"}),
    ("payload", {"payload": 5}),
    ("payload", {"payload": {"x": float("nan")}}),
    ("payload", {"payload": {"x": [{"y": float("inf")}]}}),
    ("payload", {"payload": {"x": float("-inf")}}),
    ("payload", {"payload": {"x": "a\x00b"}}),
    ("payload", {"payload": {"a\x00": 1}}),
    ("payload", {"payload": {"x": ("fine", "a\x00")}}),
    ("payload", {"payload": {"x": "\ud800"}}),
    ("payload", {"payload": {"x": b"bytes"}}),
    ("payload", {"payload": {"x": {1, 2}}}),
    ("payload", {"payload": {1: "not a text"}}),
    ("payload", {"payload": nested(65)}),
    ("payload", {"payload": nested(65, dict)}),
    ("payload", {"payload": nested(5000)}),
    ("callback_url", {"callback_url": "https://inside/x"}),
    ("callback_url", {"callback_url": "https://c/inside"}),
    ("priority", {"priority": 0}),
    ("priority", {"priority": 10}),
    ("priority", {"priority": -1}),
    ("priority", {"priority": 1.0}),
    ("priority", {"priority": "1"}),
    ("ttl", {"ttl_s": -0.001}),
    ("ttl", {"ttl_s": float("nan")}),
    ("ttl", {"ttl_s": float("inf")}),
    ("ttl", {"ttl_s": 366 * DAY_S + 1}),
    ("ttl", {"ttl_s": True}),
    ("ttl", {"ttl_s": "60"}),
    ("not_before", {"delay_s": -1}),
    ("not_before", {"delay_s": float("nan")}),
    ("not_before", {"delay_s": 366 * DAY_S + 1}),
    ("not_before", {"delay_s": False}),
    ("not_before", {"not_before_ms": NOW + (366 * DAY_S + 1) * 1000}),
    ("ttl", {"ttl_s": 5, "delay_s": 5}),
    ("ttl", {"ttl_s": 5, "delay_s": 6}),
    ("ttl", {"ttl_s": 5, "not_before_ms": NOW + 5000}),
    ("id", {"id": ""}),
    ("id", {"id": "-x"}),
    ("id", {"id": "a" * 65}),
    ("id", {"id": "a b"}),
    ("id", {"id": "a\n"}),
    ("id", {"id": "a/b"}),
    ("id", {"id": "ä"}),
    ("Idempotency-Key", {"idempotency_key": ""}),
    ("Idempotency-Key", {"idempotency_key": "k" * 256}),
    ("Idempotency-Key", {"idempotency_key": "a\nb"}),
    ("Idempotency-Key", {"idempotency_key": "a\x00"}),
    ("Idempotency-Key", {"idempotency_key": "\ud800"}),
]


@pytest.mark.parametrize(("field", "asked"), BAD, ids=[f"{field}-{n}" for n, (field, _) in enumerate(BAD)])
def test_a_bad_request_is_refused_with_the_name_of_its_field(field, asked):
    with pytest.raises(InvalidJob) as refused:
        prepared(**asked)
    assert refused.value.field == field and field in refused.value.detail


def test_a_payload_that_contains_itself_is_refused():
    payload: dict[str, Any] = {}
    payload["x"] = payload
    with pytest.raises(InvalidJob):
        prepared(payload=payload)


# -- bounds ----------------------------------------------------------------------------------------------------


def test_the_largest_payload_is_exactly_as_large_as_configured():
    payload = {"x": "é" * 10}  # bytes count, not characters
    size = len(orjson.dumps(payload))
    assert size == 28
    assert encode_payload(payload, size)
    with pytest.raises(InvalidJob, match=f"{size} bytes.*{size - 1}"):
        encode_payload(payload, size - 1)


@pytest.mark.parametrize("kind", [list, dict])
def test_sixty_four_levels_are_taken_and_sixty_five_are_not(kind):
    assert encode_payload(nested(64, kind), 10_000)
    with pytest.raises(InvalidJob, match="64 levels"):
        encode_payload(nested(65, kind), 10_000)


@pytest.mark.parametrize("length", [1, 64])
def test_an_id_of_one_to_sixty_four_letters_is_taken(length):
    assert prepared(id="a" * length).id == "a" * length


@pytest.mark.parametrize("length", [1, 255])
def test_a_key_of_one_to_255_letters_is_taken(length):
    assert prepared(idempotency_key="k" * length).idempotency_key == "k" * length


@pytest.mark.parametrize("ttl_s", [0, 0.001, 366 * DAY_S])
def test_a_ttl_of_nothing_to_a_leap_year_is_taken(ttl_s):
    assert prepared(ttl_s=ttl_s).deadline_ms == NOW + round(ttl_s * 1000)


def test_a_ttl_just_after_not_before_is_taken():
    job = prepared(ttl_s=5.001, delay_s=5)
    assert (job.not_before_ms, job.deadline_ms) == (NOW + 5000, NOW + 5001)


def test_no_delay_is_no_not_before_time():
    assert prepared(delay_s=0).not_before_ms is None


@pytest.mark.parametrize("name", ["a", "zimg", "stable-diffusion-xl", "org/model.v2:latest", "x@y+z_1", "9", "a" * 128])
def test_names_of_models_may_hold_hyphens_dots_slashes(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "a|b", "a b", "a\n", "a{b}", "a*", "ü", "a" * 129, None, 5, "a\x00"])
def test_an_ambiguous_server_name_is_refused(name):
    with pytest.raises(InvalidJob) as refused:
        check_name(name, "server")
    assert refused.value.field == "server"


# -- the fingerprint -------------------------------------------------------------------------------------------


def fingerprint(**asked: Any) -> str:
    return prepared(idempotency_key="k", **asked).fingerprint


def test_the_same_request_has_the_same_fingerprint_at_any_time_and_under_any_id():
    one = prepare_job(a_submission(model="zimg", payload={"a": 1}, idempotency_key="k"), model(), lambda _: None, NOW)
    two = prepare_job(
        a_submission(model="zimg", payload={"a": 1}, idempotency_key="k", id="x"), model(), lambda _: None, NOW + 9999
    )
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize(
    "other",
    [{"payload": {"prompt": "a dog"}}, {"callback_url": "https://c"}, {"priority": 1}, {"ttl_s": 9}, {"delay_s": 9}],
)
def test_another_request_has_another_fingerprint(other):
    assert fingerprint(**other) != fingerprint()


def test_the_start_time_is_part_of_the_fingerprint_and_the_remaining_delay_is_not():
    asked = a_submission(model="zimg", payload={}, idempotency_key="k", not_before_ms=NOW + 60_000)
    prints = {prepare_job(asked, model(), lambda _: None, now).fingerprint for now in (NOW, NOW + 5)}
    assert len(prints) == 1
    assert fingerprint(not_before_ms=NOW + 1) != fingerprint(not_before_ms=NOW + 2)


def test_without_a_key_there_is_no_fingerprint():
    assert prepared().fingerprint == ""
