"""Each argument and option of a call of `infer` has its effect, or is refused by its name."""

import inspect
import os
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, signature
from celery.canvas import Signature
from kombu.utils import json

from routing.admission.job_request import REQUEST_FIELDS
from routing.admission.submission import Submission, prepare_job
from routing.queries import job_list
from slotkeeper.clock import now_ms
from slotkeeper.errors import IdempotencyConflict, InvalidJob
from slotkeeper.registry.identity import LOCAL_IDENTITY
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import Model
from tasks import inference
from tasks import options as call_options
from tasks.inference import infer
from tests.support.builders import T0
from tests.support.harness import Harness
from tools.cluster.stack import REPO

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
PROMPT = {"prompt": "a cat"}


def _read(*args: Any, kwargs: dict[str, Any] | None = None, **options: Any) -> Submission:
    return call_options.read_submission("j1", args, kwargs or {}, options, LOCAL_IDENTITY)


def _refusal(*args: Any, **options: Any) -> InvalidJob:
    with pytest.raises(InvalidJob) as raised:
        _read(*args, **options)
    return raised.value


# -- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("zimg", PROMPT), {}),
        (("zimg",), {"payload": PROMPT}),
        ((), {"model": "zimg", "payload": PROMPT}),
        ((PROMPT,), {"model": "zimg"}),  # after an earlier result of a chain
    ],
)
def test_model_and_payload_are_given_by_position_or_by_name(args, kwargs):
    submission = _read(*args, kwargs=kwargs)
    assert (submission.request.model, submission.request.payload) == ("zimg", PROMPT)


def test_a_payload_may_be_left_out():
    assert _read("zimg").request.payload == {}


@pytest.mark.parametrize("name", ["callback_url", "constraints", "labels", "tenant", "idempotency_key"])
def test_a_field_of_a_job_may_be_given_as_an_argument_or_as_an_option(name):
    value = {"gpu": "A100"} if name in ("constraints", "labels") else "https://acme"
    for submission in (_read("zimg", kwargs={name: value}), _read("zimg", **{name: value})):
        assert getattr(submission.request if name in REQUEST_FIELDS else submission, name) == value


def test_a_value_that_is_given_twice_must_be_the_same():
    assert _read("zimg", kwargs={"tenant": "acme"}, tenant="acme").tenant == "acme"
    assert _refusal("zimg", kwargs={"tenant": "acme"}, tenant="other").field == "tenant"
    assert _refusal("zimg", PROMPT, kwargs={"payload": PROMPT}).field == "payload"


@pytest.mark.parametrize(
    ("args", "kwargs", "field", "detail"),
    [
        ((), {}, "model", "infer.delay(model, payload)"),
        ((7,), {}, "model", "infer.si"),
        (({"url": "x"}, "flux"), {}, "model", "infer.s(model="),
        (([{"url": "x"}], "flux"), {}, "model", "a task of your own"),
        (([{"url": "x"}],), {"model": "flux"}, "payload", "a list"),
        (("flux", "text"), {}, "payload", "a text"),
        (("flux", PROMPT, None, 1), {}, "args", "4 arguments"),
        (("flux",), {"contraints": {}}, "contraints", "did you mean constraints?"),
        (("flux",), {"zzz": 1}, "zzz", "no argument of infer"),
        (("flux",), {"tenant": 5}, "tenant", "a text"),
        (("flux",), {"tenant": "a\nb"}, "tenant", "printable"),
        (("flux",), {"callback_url": ["x"]}, "callback_url", "a text"),
    ],
)
def test_an_invalid_argument_is_refused_by_name(args, kwargs, field, detail):
    refusal = _refusal(*args, kwargs=kwargs)
    assert refusal.field == field
    assert detail in refusal.detail


# -- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("queue", "exchange", "exchange_type", "routing_key", "router", "route_name"),
        *("time_limit", "soft_time_limit", "rate_limit", "max_retries", "retries", "shadow"),
        *("retry", "retry_policy", "delivery_mode", "mandatory", "immediate", "headers", "serializer", "compression"),
    ],
)
def test_an_option_without_a_meaning_for_jobs_is_refused_by_name(name):
    refusal = _refusal("zimg", **{name: 7})
    assert refusal.field == name
    assert refusal.detail.startswith(f"{name} means nothing to a job: ")


@pytest.mark.parametrize(
    ("name", "nearest"), [("prio", "priority"), ("expire", "expires"), ("constraint", "constraints")]
)
def test_the_refusal_of_an_unknown_option_names_the_nearest_valid_one(name, nearest):
    assert f"did you mean {nearest}?" in _refusal("zimg", **{name: 1}).detail


def test_default_values_and_options_about_publishing_are_accepted():
    _read("zimg", queue="celery", serializer="json", retries=0, producer=object(), add_to_parent=False, shadow=None)


def test_times_are_numbers_of_seconds_or_points_in_time():

    def times(submission: Submission) -> tuple[Any, ...]:
        request = submission.request
        return request.ttl, request.not_before, submission.expires_ms, submission.not_before_ms

    assert times(_read("zimg", expires=60, countdown=5)) == (60, 5, None, None)
    soon = datetime.now(UTC) + timedelta(seconds=60)
    moment_ms = round(soon.timestamp() * 1000)
    for when in (soon, soon.replace(tzinfo=None), soon.isoformat()):
        assert times(_read("zimg", expires=when, eta=when)) == (None, None, moment_ms, moment_ms)


def test_a_repeated_call_that_names_a_moment_is_the_same_request() -> None:
    """The moments are compared as they were given, not the seconds that are left until then."""
    model, moment = Model("zimg", "zimg", {}, ModelConfig()), datetime.fromtimestamp((T0 + 60_000) / 1000, UTC)
    first, repeated = (
        prepare_job(
            _read("zimg", idempotency_key="k", expires=moment, eta=moment - timedelta(seconds=30)),
            model,
            lambda url: None,
            at_ms,
        )
        for at_ms in (T0, T0 + 5)
    )
    assert first.fingerprint == repeated.fingerprint
    other = _read(
        "zimg", idempotency_key="k", expires=moment + timedelta(seconds=1), eta=moment - timedelta(seconds=30)
    )
    assert prepare_job(other, model, lambda url: None, T0).fingerprint != first.fingerprint


def test_a_moment_is_compared_with_the_clock_of_the_database() -> None:
    """On a host whose clock is an hour behind the database's, no job expires an hour late."""
    model, moment_ms = Model("zimg", "zimg", {}, ModelConfig()), T0 + 100_000
    when = datetime.fromtimestamp(moment_ms / 1000, UTC)
    job = prepare_job(_read("zimg", expires=when), model, lambda url: None, T0)
    assert job.deadline_ms == moment_ms


@pytest.mark.parametrize("name", ["expires", "eta"])
@pytest.mark.parametrize("when", ["tomorrow", [], True, object()])
def test_an_invalid_time_is_refused_by_name(name, when):
    assert _refusal("zimg", **{name: when}).field == name


# -- signatures that run after the job -------------------------------------------------------------------------


def _signature(*args: Any, immutable: bool = False, task: str = "infer", **kwargs: Any) -> Signature:
    return signature(task, args=args, kwargs=kwargs, immutable=immutable)


@pytest.mark.parametrize("field", ["link", "chain"])
def test_an_infer_that_could_only_fail_after_this_job_is_refused_before_it(field):
    assert _refusal("zimg", **{field: [_signature("flux", PROMPT)]}).field == field
    assert _refusal("zimg", **{field: [_signature(payload=PROMPT)]}).field == field
    for valid in (_signature("flux", PROMPT, immutable=True), _signature(model="flux"), _signature("x", task="other")):
        _read("zimg", **{field: [valid]})


@pytest.mark.parametrize("field", ["link_error", "chord"])
def test_an_infer_whose_argument_would_be_no_payload_is_refused(field):
    for step in (_signature("flux", PROMPT), _signature(model="flux")):
        assert _refusal("zimg", **{field: step}).field == field
    _read("zimg", **{field: _signature("flux", PROMPT, immutable=True)})


def test_the_envelope_holds_signatures_group_parents_and_stamps():
    envelope = json.loads(
        _read(
            "zimg",
            link=_signature("x", task="a"),
            link_error=[_signature("x", task="b")],
            chain=[_signature("x", task="c")],
            chord=_signature("x", task="d"),
            group_id="g",
            group_index=3,
            parent_id="p",
            root_id="r",
            ignore_result=True,
            stamped_headers=["batch"],
            batch="b1",
        ).envelope
        or ""
    )
    assert [envelope[name][0]["task"] for name in ("callbacks", "errbacks", "chain")] == ["a", "b", "c"]
    assert (envelope["chord"]["task"], envelope["group_id"], envelope["group_index"]) == ("d", "g", 3)
    assert (envelope["parent_id"], envelope["root_id"], envelope["ignore_result"]) == ("p", "r", True)
    assert envelope["stamps"] == {"batch": "b1"}


def test_a_link_that_is_too_large_or_not_json_is_refused():
    assert _refusal("zimg", link=_signature(object(), task="a")).field == "link"
    assert _refusal("zimg", link=_signature("x" * (1 << 20), task="a")).field == "link"


# -- the task --------------------------------------------------------------------------------------------------


def test_signature_and_help_of_the_task_describe_a_submit():
    assert list(inspect.signature(infer).parameters)[:3] == ["model", "payload", "callback_url"]
    assert "Submit a job" in pydoc.render_doc(infer)


def test_a_direct_call_of_the_task_raises_an_error_with_a_hint():
    with pytest.raises(RuntimeError, match=r"infer\.delay"):
        infer("zimg", PROMPT)
    with pytest.raises(RuntimeError, match=r"infer\.delay"):
        infer.apply(("zimg", PROMPT)).get()


@pytest.fixture
def eager() -> Iterator[None]:
    """Set task_always_eager; Celery's settings cannot be deleted, as monkeypatch would do."""
    infer.app.conf.task_always_eager = True
    yield
    infer.app.conf.task_always_eager = False


@pytest.mark.parametrize(
    "call",
    [
        lambda: infer.delay("zimg", PROMPT),
        lambda: infer.apply_async(("zimg", PROMPT), task_id="j1", priority=2),
        lambda: infer.s("zimg", PROMPT).delay(),
    ],
)
def test_an_eager_call_submits_nothing_and_raises_an_error_with_a_hint(call, eager, monkeypatch):
    monkeypatch.setattr(inference, "_submit", lambda *_, **__: pytest.fail("a job was submitted"))
    with pytest.raises(RuntimeError, match="task_always_eager"):
        call().get()


def test_no_rate_limit_delays_a_wake_up():
    assert infer.app.conf.worker_disable_rate_limits


@pytest.fixture
def submitting(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Return a harness whose dispatcher gets the jobs that calls of `infer` submit."""
    harness.register()
    harness.set_clock(now_ms())
    monkeypatch.setattr(inference, "dispatcher", lambda: harness.dispatcher)
    return harness


@sqlite
def test_options_reach_the_job_by_apply_async_and_by_a_signature(submitting):
    options = {"priority": 2, "tenant": "acme", "constraints": {"gpu": "A100"}, "idempotency_key": "k"}
    first = infer.apply_async(("zimg", PROMPT), **options)
    second = infer.s("zimg", PROMPT).set(**options | {"idempotency_key": "other"}).delay()
    for result in (first, second):
        job = submitting.job(result.id)
        assert (job.priority, job.tenant, job.constraints) == (2, "acme", "gpu=A100")


@sqlite
def test_a_repeated_idempotency_key_returns_the_job_that_it_names(submitting):
    first, repeated = (infer.apply_async(("zimg", PROMPT), idempotency_key="k") for _ in range(2))
    assert repeated.id == first.id
    with pytest.raises(IdempotencyConflict, match=first.id):  # A canvas chooses the ids of its tasks.
        infer.apply_async(("zimg", PROMPT), idempotency_key="k", task_id="mine")


@sqlite
def test_a_task_id_with_another_payload_is_a_conflict(submitting):
    infer.apply_async(("zimg", PROMPT), task_id="mine")
    assert infer.apply_async(("zimg", PROMPT), task_id="mine").id == "mine"
    with pytest.raises(IdempotencyConflict):
        infer.apply_async(("zimg", {"prompt": "a dog"}), task_id="mine")


@sqlite
def test_a_chain_is_refused_before_its_first_job_is_stored(submitting):
    with pytest.raises(InvalidJob, match=r"infer\.s\(model="):
        chain(infer.s("zimg", PROMPT), infer.s("zimg"))()
    assert job_list.find_jobs(submitting.store.database) == []


def test_without_a_database_the_error_names_the_settings_and_none_is_created(tmp_path):
    script = "from tasks import infer; infer.delay('zimg', {})"
    env = {"PYTHONPATH": str(REPO), "PATH": os.environ["PATH"]}
    process = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    (line,) = [line for line in process.stderr.splitlines() if "SLOTKEEPER_HOME" in line]
    assert f"There is no Slotkeeper record at {tmp_path / 'var' / 'record.db'}: set SLOTKEEPER_HOME" in line
    assert list(tmp_path.iterdir()) == []
