"""What a call of `infer` may ask for: each argument and option is honoured or refused by its name."""

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
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import Model
from tasks import inference
from tasks import options as call_options
from tasks.inference import infer
from tests.support.builders import T0
from tests.support.stage import Stage
from tools.cluster.stack import REPO

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
PROMPT = {"prompt": "a cat"}


def _read(*args: Any, kwargs: dict[str, Any] | None = None, **options: Any) -> Submission:
    return call_options.read_submission("j1", args, kwargs or {}, options)


def _refused(*args: Any, **asked: Any) -> InvalidJob:
    with pytest.raises(InvalidJob) as refused:
        _read(*args, **asked)
    return refused.value


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
    asked = _read(*args, kwargs=kwargs)
    assert (asked.request.model, asked.request.payload) == ("zimg", PROMPT)


def test_a_payload_may_be_left_out():
    assert _read("zimg").request.payload == {}


@pytest.mark.parametrize("name", ["callback_url", "constraints", "labels", "tenant", "idempotency_key"])
def test_what_is_ours_may_be_an_argument_or_an_option(name):
    value = {"gpu": "A100"} if name in ("constraints", "labels") else "https://acme"
    for asked in (_read("zimg", kwargs={name: value}), _read("zimg", **{name: value})):
        assert getattr(asked.request if name in REQUEST_FIELDS else asked, name) == value


def test_what_is_given_twice_must_be_the_same():
    assert _read("zimg", kwargs={"tenant": "acme"}, tenant="acme").tenant == "acme"
    assert _refused("zimg", kwargs={"tenant": "acme"}, tenant="other").field == "tenant"
    assert _refused("zimg", PROMPT, kwargs={"payload": PROMPT}).field == "payload"


@pytest.mark.parametrize(
    ("args", "kwargs", "field", "says"),
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
def test_a_call_that_cannot_be_a_job_is_refused_by_name(args, kwargs, field, says):
    refused = _refused(*args, kwargs=kwargs)
    assert refused.field == field
    assert says in refused.detail


# -- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("queue", "exchange", "exchange_type", "routing_key", "router", "route_name"),
        *("time_limit", "soft_time_limit", "rate_limit", "max_retries", "retries", "shadow"),
        *("retry", "retry_policy", "delivery_mode", "mandatory", "immediate", "headers", "serializer", "compression"),
    ],
)
def test_an_option_that_means_nothing_to_a_job_is_refused_by_name(name):
    refused = _refused("zimg", **{name: 7})
    assert refused.field == name
    assert refused.detail.startswith(f"{name} means nothing to a job: ")


@pytest.mark.parametrize(("name", "near"), [("prio", "priority"), ("expire", "expires"), ("constraint", "constraints")])
def test_an_unknown_option_is_refused_with_the_nearest_known(name, near):
    assert f"did you mean {near}?" in _refused("zimg", **{name: 1}).detail


def test_options_that_say_nothing_else_than_what_is_are_taken():
    _read("zimg", queue="celery", serializer="json", retries=0, producer=object(), add_to_parent=False, shadow=None)


def test_times_are_seconds_or_moments():
    asked = _read("zimg", expires=60, countdown=5)
    assert (asked.request.ttl, asked.request.not_before, asked.expires_ms, asked.not_before_ms) == (60, 5, None, None)
    soon = datetime.now(UTC) + timedelta(seconds=60)
    moment_ms = round(soon.timestamp() * 1000)
    for when in (soon, soon.replace(tzinfo=None), soon.isoformat()):
        asked = _read("zimg", expires=when, eta=when)
        assert (asked.request.ttl, asked.request.not_before, asked.expires_ms, asked.not_before_ms) == (
            None,
            None,
            moment_ms,
            moment_ms,
        )


def test_a_call_that_names_a_moment_is_the_same_request_when_it_is_sent_again() -> None:
    """What was sent is compared, not how far off it is by now."""
    model, moment = Model("zimg", "zimg", {}, ModelConfig()), datetime.fromtimestamp((T0 + 60_000) / 1000, UTC)
    asked = [_read("zimg", idempotency_key="k", expires=moment, eta=moment - timedelta(seconds=30)) for _ in range(2)]
    first, again = (prepare_job(it, model, lambda url: None, now) for it, now in zip(asked, (T0, T0 + 5), strict=True))
    assert first.fingerprint == again.fingerprint
    other = _read(
        "zimg", idempotency_key="k", expires=moment + timedelta(seconds=1), eta=moment - timedelta(seconds=30)
    )
    assert prepare_job(other, model, lambda url: None, T0).fingerprint != first.fingerprint


def test_celerys_times_go_by_the_common_clock() -> None:
    """A host whose clock is an hour behind that of the database expires nothing an hour late."""
    model, moment_ms = Model("zimg", "zimg", {}, ModelConfig()), T0 + 100_000
    when = datetime.fromtimestamp(moment_ms / 1000, UTC)
    job = prepare_job(_read("zimg", expires=when), model, lambda url: None, T0)
    assert job.deadline_ms == moment_ms


@pytest.mark.parametrize("name", ["expires", "eta"])
@pytest.mark.parametrize("when", ["tomorrow", [], True, object()])
def test_a_time_that_is_none_is_refused_by_name(name, when):
    assert _refused("zimg", **{name: when}).field == name


# -- what follows ----------------------------------------------------------------------------------------------


def _step(*args: Any, immutable: bool = False, task: str = "infer", **kwargs: Any) -> Signature:
    return signature(task, args=args, kwargs=kwargs, immutable=immutable)


@pytest.mark.parametrize("field", ["link", "chain"])
def test_an_infer_that_could_only_be_refused_after_this_job_is_refused_before_it(field):
    assert _refused("zimg", **{field: [_step("flux", PROMPT)]}).field == field
    assert _refused("zimg", **{field: [_step(payload=PROMPT)]}).field == field
    for fine in (_step("flux", PROMPT, immutable=True), _step(model="flux"), _step("flux", task="other")):
        _read("zimg", **{field: [fine]})


@pytest.mark.parametrize("field", ["link_error", "chord"])
def test_an_infer_that_gets_what_is_no_payload_is_refused(field):
    for step in (_step("flux", PROMPT), _step(model="flux")):
        assert _refused("zimg", **{field: step}).field == field
    _read("zimg", **{field: _step("flux", PROMPT, immutable=True)})


def test_what_concerns_those_who_wait_is_kept():
    kept = json.loads(
        _read(
            "zimg",
            link=_step("x", task="a"),
            link_error=[_step("x", task="b")],
            chain=[_step("x", task="c")],
            chord=_step("x", task="d"),
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
    assert [kept[name][0]["task"] for name in ("callbacks", "errbacks", "chain")] == ["a", "b", "c"]
    assert (kept["chord"]["task"], kept["group_id"], kept["group_index"]) == ("d", "g", 3)
    assert (kept["parent_id"], kept["root_id"], kept["ignore_result"]) == ("p", "r", True)
    assert kept["stamps"] == {"batch": "b1"}


def test_what_follows_must_be_kept_as_json():
    assert _refused("zimg", link=_step(object(), task="a")).field == "link"
    assert _refused("zimg", link=_step("x" * (1 << 20), task="a")).field == "link"


# -- the task --------------------------------------------------------------------------------------------------


def test_its_signature_and_help_are_those_of_a_submit():
    assert list(inspect.signature(infer).parameters)[:3] == ["model", "payload", "callback_url"]
    assert "Submit a job" in pydoc.render_doc(infer)


def test_called_directly_it_says_what_to_do():
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
def test_an_eager_call_submits_nothing_and_says_what_to_do(call, eager, monkeypatch):
    monkeypatch.setattr(inference, "_submit", lambda *_, **__: pytest.fail("a job was submitted"))
    with pytest.raises(RuntimeError, match="task_always_eager"):
        call().get()


def test_no_remote_rate_limit_holds_a_wake_up_back():
    assert infer.app.conf.worker_disable_rate_limits


@pytest.fixture
def called(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage.register()
    stage.set_clock(now_ms())
    monkeypatch.setattr(inference, "dispatcher", lambda: stage.dispatcher)
    return stage


@sqlite
def test_options_reach_the_job_by_apply_async_and_by_a_signature(called):
    options = {"priority": 2, "tenant": "acme", "constraints": {"gpu": "A100"}, "idempotency_key": "k"}
    first = infer.apply_async(("zimg", PROMPT), **options)
    second = infer.s("zimg", PROMPT).set(**options | {"idempotency_key": "other"}).delay()
    for sent in (first, second):
        job = called.job(sent.id)
        assert (job.priority, job.tenant, job.constraints) == (2, "acme", "gpu=A100")


@sqlite
def test_a_key_that_came_before_answers_with_the_job_that_it_names(called):
    first, again = (infer.apply_async(("zimg", PROMPT), idempotency_key="k") for _ in range(2))
    assert again.id == first.id
    with pytest.raises(IdempotencyConflict, match=first.id):  # As in a canvas, whose result is known by its id.
        infer.apply_async(("zimg", PROMPT), idempotency_key="k", task_id="mine")


@sqlite
def test_a_task_id_with_another_payload_is_a_conflict(called):
    infer.apply_async(("zimg", PROMPT), task_id="mine")
    assert infer.apply_async(("zimg", PROMPT), task_id="mine").id == "mine"
    with pytest.raises(IdempotencyConflict):
        infer.apply_async(("zimg", {"prompt": "a dog"}), task_id="mine")


@sqlite
def test_a_chain_is_refused_before_its_first_step_is_recorded(called):
    with pytest.raises(InvalidJob, match=r"infer\.s\(model="):
        chain(infer.s("zimg", PROMPT), infer.s("zimg"))()
    assert job_list.find_jobs(called.store.database) == []


def test_a_process_that_does_not_find_the_record_is_told_what_to_set_and_makes_none(tmp_path):
    script = "from tasks import infer; infer.delay('zimg', {})"
    env = {"PYTHONPATH": str(REPO), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    (said,) = [line for line in done.stderr.splitlines() if "SLOTKEEPER_HOME" in line]
    assert f"There is no Slotkeeper record at {tmp_path / 'var' / 'record.db'}: set SLOTKEEPER_HOME" in said
    assert list(tmp_path.iterdir()) == []
