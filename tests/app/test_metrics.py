"""Metrics: exact with one or many counters, shown only with the right key, and limited in number with many models."""

from typing import Any

import pytest

from app import metrics
from app.config import AppSettings
from routing.maintenance import task_runs
from routing.queries.job_counters import EventCounter
from routing.queries.process_counters import HANDED_ON, HANDOFF_BUCKETS_S, ProcessCounters
from slotkeeper.errors import InvalidSetting
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import Reason, State
from tasks import services
from tests.support.api import Api, TimedApi
from tests.support.batch_lines import CAT, close, create, send
from tests.support.builders import an_ended_job

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "METRICS_KEY": "mk_only_figures"}])
METRICS_KEY = {"Authorization": "Bearer mk_only_figures"}


def _figures(api: Api, **more: Any) -> dict[str, float]:
    lines = api.client.get("/metrics", **more).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def _count(api: Api) -> None:
    historian = EventCounter(api.database)
    while historian.count_new_events():
        pass


# -- who may see them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["m", "mk_guessed"])
def test_a_metrics_key_that_could_be_guessed_is_refused(key: str) -> None:
    with pytest.raises(InvalidSetting, match="SLOTKEEPER_METRICS_KEY"):
        AppSettings(require_keys=True, metrics_key=key).check_exposure()


@KEYED
@pytest.mark.parametrize("path", ["/metrics", "/models/zimg/stats"])
def test_figures_are_for_the_metrics_key_and_for_administrators(api: Api, settings: dict[str, str], path: str) -> None:
    boss = api.tenant("boss", admin=True)
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=boss).status_code == 200
    assert api.client.get(path, headers=METRICS_KEY).status_code == 200
    assert api.client.get(path, headers=boss).status_code == 200
    assert api.client.get(path, headers=api.tenant("acme")).status_code == 403
    assert api.client.get(path, headers={"Authorization": "Bearer mk_only_figure"}).status_code == 401
    assert api.client.get(path).status_code == 401


@KEYED
@pytest.mark.parametrize("path", ["/queue/jobs", "/admin/servers", "/admin/ledger"])
def test_the_metrics_key_opens_nothing_else(api: Api, settings: dict[str, str], path: str) -> None:
    assert api.client.get(path, headers=METRICS_KEY).status_code == 401


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true"}])
@pytest.mark.parametrize("shown", ["Bearer ", "Bearer", ""])
def test_an_empty_metrics_key_is_refused_if_no_key_is_configured(
    api: Api, settings: dict[str, str], shown: str
) -> None:
    assert api.client.get("/metrics", headers={"Authorization": shown}).status_code == 401


@KEYED
def test_the_scheme_of_the_metrics_key_may_be_in_small_letters(api: Api) -> None:
    assert api.client.get("/metrics", headers={"Authorization": "bearer mk_only_figures"}).status_code == 200
    assert api.client.get("/metrics", headers={"Authorization": "mk_only_figures"}).status_code == 401


@pytest.mark.parametrize("settings", [{"METRICS_KEY": "mk_only_figures"}])
def test_without_required_keys_the_metrics_key_admits_no_remote_client(api: Api, settings: dict[str, str]) -> None:
    stranger = {"REMOTE_ADDR": "192.0.2.7"}
    assert api.client.get("/metrics", headers=METRICS_KEY, environ_base=stranger).status_code == 403


# -- what they say ---------------------------------------------------------------------------------------------


def test_metrics_report_waiting_jobs_and_the_oldest_age_by_model_and_priority(api: Api) -> None:
    api.model("flux")
    api.submitted(model="flux", priority=2)
    api.submitted(model="flux", priority=2)
    api.submitted(model="flux", priority=7)
    found = _figures(api)
    assert found['slotkeeper_queue_jobs{model="flux",priority="2"}'] == 2
    assert found['slotkeeper_queue_jobs{model="flux",priority="7"}'] == 1
    assert 0 <= found['slotkeeper_oldest_job_age_seconds{model="flux",priority="2"}'] < 60


def test_batches_that_have_not_ended_are_counted_by_state(api: Api) -> None:
    api.model()
    create(api)
    close(api, create(api), 0)  # without lines, so that it has ended
    paused, closed = create(api), create(api)
    send(api, closed, [CAT])
    close(api, closed, 1)
    api.client.post(f"/batches/{paused}/pause")
    found = _figures(api)
    assert {state: found[f'slotkeeper_batches{{state="{state}"}}'] for state in ("open", "active", "paused")} == {
        "open": 1,
        "active": 1,
        "paused": 1,
    }


def test_metrics_report_job_events_as_counters_and_histograms(api: Api) -> None:
    an_ended_job(api.dispatcher.store)
    an_ended_job(api.dispatcher.store, State.DEAD)
    _count(api)
    found = _figures(api)
    assert found['slotkeeper_jobs_accepted_total{model="zimg"}'] == 2
    assert found['slotkeeper_jobs_ended_total{model="zimg",state="completed"}'] == 1
    assert found['slotkeeper_attempts_ended_total{model="zimg",reason="retries_exhausted"}'] == 1
    assert found['slotkeeper_wait_seconds_count{model="zimg",priority="5"}'] == 2
    assert found['slotkeeper_run_seconds_bucket{le="+Inf",model="zimg"}'] == 2
    assert found["slotkeeper_figures_lag_seconds"] == 0


def test_refusals_are_counted_by_the_limit_that_refuses(api: Api) -> None:
    api.register(slots=1)
    assert api.client.put("/admin/model-configs/zimg", json={"capacity": 1}).status_code == 200
    body = {"model": "zimg", "payload": {}}
    answers = [api.client.post("/queue/submit", json=body).status_code for _ in range(4)]
    batch = api.client.post("/queue/submit-batch", json=[body, body]).status_code
    assert (answers[-1], batch) == (429, 422)
    assert api.client.patch("/admin/models/zimg", json={"state": "draining"}).status_code == 200
    assert api.client.post("/queue/submit", json=body).status_code == 409
    services.process_counters().flush()
    found = _figures(api)
    assert found['slotkeeper_jobs_refused_total{limit="capacity"}'] == answers.count(429) + 2
    assert found['slotkeeper_jobs_refused_total{limit="state"}'] == 1


def test_counts_of_several_processes_add_up_and_outlive_them(api: Api) -> None:
    for _ in range(2):
        one = ProcessCounters(services.scripts())
        one.observe_handoff(0.0015)
        one.flush()
    found = _figures(api)
    assert found["slotkeeper_handoff_seconds_count"] == 2
    assert found["slotkeeper_handoff_seconds_sum"] == pytest.approx(0.003)
    assert found['slotkeeper_handoff_seconds_bucket{le="0.001"}'] == 0
    assert found['slotkeeper_handoff_seconds_bucket{le="0.002"}'] == 2


def test_counts_that_redis_did_not_accept_are_flushed_later(mortal_api: Api) -> None:
    counted = ProcessCounters(services.scripts())
    counted.observe_handoff(1000)
    mortal_api.valkey.kill()
    counted.flush()
    mortal_api.valkey.start()
    counted.flush()
    counted.flush()
    parts, sum_s = counted.histogram(HANDED_ON)
    assert (sum(parts), parts[len(HANDOFF_BUCKETS_S)], sum_s) == (1, 1, 1000)


def test_metrics_report_offers_slots_and_breakers_by_fleet(api: Api) -> None:
    api.register(slots=2)
    api.started()
    found = _figures(api)
    assert found['slotkeeper_offers_total{fleet="zimg"}'] >= 1
    assert found['slotkeeper_slots{fleet="zimg",state="taken"}'] == 1
    assert found['slotkeeper_server_breakers{fleet="zimg",state="closed"}'] == 1
    assert found['slotkeeper_server_breakers{fleet="zimg",state="open"}'] == 0


def test_a_models_open_breaker_is_a_figure(timed_api: TimedApi) -> None:
    api = timed_api
    api.register()
    api.model(breaker_failures=1)
    assert _figures(api)['slotkeeper_model_breaker_open{model="zimg"}'] == 0
    api.submitted()
    api.run(1000, Reason.SERVER_ERROR)
    assert _figures(api)['slotkeeper_model_breaker_open{model="zimg"}'] == 1


def test_metrics_report_the_last_run_of_each_task(api: Api) -> None:
    task_runs.TaskRunRecorder(services.scripts()).note("sweep", 0.25)
    found = _figures(api)
    assert found['slotkeeper_task_last_run_timestamp_seconds{task="sweep"}'] > 1_700_000_000
    assert found['slotkeeper_task_last_run_seconds{task="sweep"}'] == 0.25


def test_task_runs_within_a_second_are_written_together(api: Api) -> None:
    now = 100.0
    runs = task_runs.TaskRunRecorder(services.scripts(), lambda: now)
    for task in ("sweep", "reap", "count"):
        runs.note(task, 0.1)
    assert set(task_runs.read_task_runs(services.scripts())) == {"sweep"}
    now = 101.0
    runs.note("reap", 0.2)
    assert {task: run.took_s for task, run in task_runs.read_task_runs(services.scripts()).items()} == {
        "sweep": 0.1,
        "reap": 0.2,
        "count": 0.1,
    }


def test_the_difference_in_the_ledger_is_a_gauge(api: Api) -> None:
    ledger.store_findings(api.database, {ledger.DIFFERENCE: 3}, [], 0)
    found = _figures(api)
    assert found["slotkeeper_ledger_difference"] == 3
    assert not [name for name in found if ledger.DIFFERENCE in name and name != "slotkeeper_ledger_difference"]


def test_models_above_the_limit_share_the_label_other(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_MODEL_LABELS", 2)
    for name in ("a", "b", "c", "d"):
        api.model(name)
        api.submitted(model=name)
    found = _figures(api)
    assert found['slotkeeper_waiting_jobs{model="a"}'] == 1
    assert found['slotkeeper_waiting_jobs{model="other"}'] == 2
    assert found['slotkeeper_queue_jobs{model="other",priority="5"}'] == 2
    assert not [name for name in found if 'model="c"' in name]


# -- a model's load --------------------------------------------------------------------------------------------


def test_a_models_load_is_what_waits_and_what_runs(api: Api) -> None:
    api.register(slots=1)
    api.started()
    api.submitted()
    api.submitted()
    found = api.client.get("/models/zimg/stats").json
    assert found == {"model": "zimg", "queued": 2, "running": 1, "active": 3, "slots": 1}
    assert api.client.get("/models/unknown/stats").status_code == 404


def test_a_models_load_comes_from_the_database_while_redis_is_down(mortal_api: Api) -> None:
    mortal_api.model()
    mortal_api.submitted()
    mortal_api.valkey.kill()
    assert mortal_api.client.get("/models/zimg/stats").json["active"] == 1
