"""The page's forms that remove models and servers, and its display of breakers."""

from typing import Any

import pytest

from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import Reason, State
from tests.support.api import Api, TimedApi
from tests.support.builders import an_ended_job
from tests.support.visitor import Visitor, visitor


@pytest.fixture
def operator(api: Api) -> Visitor:
    return visitor(api)


def _follow(who: Visitor, answer: Any) -> str:
    assert answer.status_code == 303, answer.text
    return who.get(answer.headers["Location"]).text


def _models(api: Api) -> set[str]:
    return set(api.dispatcher.catalog.refresh().models)


def _servers(api: Api) -> set[str]:
    return set(api.dispatcher.catalog.refresh().servers)


# -- models ----------------------------------------------------------------------------------------------------


def test_the_form_that_removes_a_model_lists_its_jobs_and_servers(api: Api, operator: Visitor) -> None:
    api.register(server="gpu1")
    api.register(server="gpu2")
    api.register(model="flux", server="gpu2")
    api.submitted()
    shown = operator.get("/page/remove/models/zimg").text
    assert "1 queued" in shown and "Drain it, then remove it" in shown
    assert "gpu1</a> (serves no other model)" in shown and "gpu2</a> (" not in shown
    assert _models(api) == {"flux", "zimg"}, "the question itself removes nothing"


def test_a_model_without_jobs_is_removed_at_once(api: Api, operator: Visitor) -> None:
    api.model()
    an_ended_job(api.dispatcher.store, State.COMPLETED, now_ms=now_ms())
    assert "Drain" not in operator.get("/page/remove/models/zimg").text
    assert "Removed." in _follow(operator, operator.post("/page/remove/models/zimg"))
    assert _models(api) == set()
    assert operator.get("/page/remove/models/zimg").status_code == 404


def test_a_model_with_jobs_is_drained_which_can_be_called_off(api: Api, operator: Visitor) -> None:
    api.model()
    api.submitted()
    shown = _follow(operator, operator.post("/page/remove/models/zimg", drain="yes"))
    assert "being removed" in shown and "Cancel removal" in shown and "1 queued" in shown
    assert api.submit().status_code == 409
    assert "The removal is canceled." in _follow(operator, operator.post("/page/keep/models/zimg"))
    assert api.submit().status_code == 202


def test_a_refusal_of_the_api_is_shown_beside_the_form(api: Api, operator: Visitor) -> None:
    api.model()
    api.model("flux")
    api.submitted()
    refused = operator.post("/page/remove/models/zimg")
    assert refused.status_code == 409
    assert "has jobs that have not ended: 1 queued" in refused.text and "Remove this model?" in refused.text
    assert _models(api) == {"flux", "zimg"}


# -- servers ---------------------------------------------------------------------------------------------------


def test_the_form_that_removes_a_server_lists_its_runs_and_models(api: Api, operator: Visitor) -> None:
    api.register(server="gpu1")
    api.register(model="flux", server="gpu1")
    api.register(model="flux", server="gpu2")
    job = api.started().run.job.id
    shown = operator.get("/page/remove/servers/gpu1").text
    assert f"/page/jobs/{job}" in shown and "Remove it at once" in shown
    assert "zimg</a> (no other server serves it)" in shown and "flux</a> (" not in shown
    assert operator.get("/page/remove/servers/gone").status_code == 404


def test_a_server_on_which_nothing_runs_is_removed_at_once(api: Api, operator: Visitor) -> None:
    api.register()
    assert "at once" not in operator.get("/page/remove/servers/gpu1").text
    assert "Removed." in _follow(operator, operator.post("/page/remove/servers/gpu1"))
    assert _servers(api) == set()


def test_a_server_with_a_run_is_drained_which_can_be_called_off(api: Api, operator: Visitor) -> None:
    api.register()
    api.started()
    assert operator.post("/page/remove/servers/gpu1").status_code == 409
    shown = _follow(operator, operator.post("/page/remove/servers/gpu1", drain="yes"))
    assert "being removed" in shown and _servers(api) == {"gpu1"}
    assert "The removal is canceled." in _follow(operator, operator.post("/page/keep/servers/gpu1"))
    assert "being removed" not in operator.get("/page/servers/gpu1").text


def test_a_server_with_a_running_job_is_removed_if_forced(api: Api, operator: Visitor) -> None:
    api.register()
    job = api.started().run.job.id
    _follow(operator, operator.post("/page/remove/servers/gpu1", force="yes"))
    assert _servers(api) == set()
    assert api.job(job).state is State.QUEUED


# -- breakers --------------------------------------------------------------------------------------------------


def test_the_page_shows_a_models_breaker_with_its_end_and_reason_and_can_close_it(timed_api: TimedApi) -> None:
    api, who = timed_api, visitor(timed_api)
    api.register()
    api.model(breaker_failures=1)
    api.submitted()
    api.run(1_000, Reason.SERVER_ERROR)
    for path in ("/", "/page/models/zimg"):
        shown = who.get(path).text
        assert "breaker open" in shown, path
        assert "until 2027-01-15 08:00:06 UTC: failed several runs in a row" in shown, path
    who.post("/page/models/zimg/state", state="online")
    assert "breaker open" not in who.get("/page/models/zimg").text
