"""Every error is returned as a problem; health and metrics do not fail with the parts that they report on."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from app.factory import create_app
from app.readiness import Readiness
from routing.maintenance import task_runs
from routing.queries.process_list import DEAD_AFTER_MS, Process
from slotkeeper.db import Database
from slotkeeper.jobs import ledger
from tasks import maintenance
from tasks.liveness import workers_problem
from tasks.security.keyring import fingerprints
from tasks.services import processes, scripts
from tests.support.api import Api, clear_wiring
from tests.support.builders import T0, an_ended_job, at_once
from tests.support.visitor import visitor

A_WORKER: dict[str, Any] = {"role": "worker", "host": "a", "canary_age_ms": 1_000}


def test_an_unknown_address_is_a_problem(api: Api) -> None:
    answer = api.client.get("/queue/nothing?x=\0")
    assert (answer.status_code, answer.json["code"], answer.json["instance"]) == (404, "not_found", "/queue/nothing")


@pytest.mark.parametrize("method", ["put", "delete", "patch", "get"])
def test_a_wrong_method_is_answered_with_the_allowed_methods(api: Api, method: str) -> None:
    answer = getattr(api.client, method)("/queue/submit")
    assert (answer.status_code, answer.json["code"]) == (405, "method_not_allowed")
    assert "POST" in answer.headers["Allow"]


def test_an_internal_error_shows_no_details_of_the_exception(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("the password is hunter2")

    monkeypatch.setattr("routing.queries.job_list.find_jobs", fail)
    answer = api.client.get("/queue/jobs")
    assert (answer.status_code, answer.json["code"]) == (500, "internal_error")
    assert "hunter2" not in answer.text


def test_a_process_whose_parts_all_work_is_ready(api: Api) -> None:
    task_runs.mark_sweep(scripts())
    processes().report("worker@a/1", A_WORKER)
    answer = api.client.get("/health/ready")
    assert (answer.status_code, answer.json["status"]) == (200, "ok")
    assert all(part == {"ok": True, "why": None} for part in answer.json["parts"].values())


def test_readiness_is_degraded_while_no_maintenance_runs(api: Api) -> None:
    processes().report("worker@a/1", A_WORKER)
    answer = api.client.get("/health/ready").json
    assert answer["status"] == "degraded" and "beat" in answer["parts"]["maintenance"]["why"]
    maintenance.sweep()
    api.client.application.extensions["slotkeeper"].readiness._until = 0
    assert api.client.get("/health/ready").json["status"] == "ok"


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ({}, "No worker has reported lately"),
        ({"worker@a/1": {"canary_age_ms": None}}, "No worker can take jobs"),
        ({"worker@a/1": {"takes": False}, "worker@a/2": {"canary_age_ms": 30_000}}, "No worker can take jobs"),
        ({"worker@a/1": {"takes": False}, "worker@a/2": {}}, None),
    ],
)
def test_readiness_is_degraded_while_no_worker_can_take_jobs(
    api: Api, workers: dict[str, dict[str, Any]], why: str | None
) -> None:
    for name, facts in workers.items():
        processes().report(name, A_WORKER | facts)
    answer = api.client.get("/health/ready")
    assert answer.status_code == 200, "jobs are accepted"
    found_reason = answer.json["parts"]["workers"]["why"]
    assert found_reason is None if why is None else found_reason.startswith(why)
    assert "@a" not in answer.text, "clients without a key may read this response"


def test_readiness_is_degraded_when_one_of_two_workers_falls_silent(api: Api) -> None:
    processes().report("worker@a/1", A_WORKER)
    silent = Process("worker@b/1", "worker", "b", DEAD_AFTER_MS, A_WORKER)
    found = [*processes().read_all(), silent]
    assert workers_problem(found) == "1 of 2 workers are silent.  `slotkeeper processes` names them."


def test_readiness_is_degraded_while_a_process_has_another_secret(api: Api) -> None:
    for name, secret in {"worker@a/1": fingerprints()[0], "worker@b/1": "another"}.items():
        processes().report(name, A_WORKER | {"secret": secret})
    answer = api.client.get("/health/ready").json
    assert answer["status"] == "degraded" and answer["parts"]["secret"]["why"].startswith("1 of 2 processes")


def test_without_redis_it_is_ready_but_degraded(mortal_api: Api) -> None:
    mortal_api.valkey.kill()
    answer = mortal_api.client.get("/health/ready")
    parts = answer.json["parts"]
    assert (answer.status_code, answer.json["status"]) == (200, "degraded")
    assert (parts["database"]["ok"], parts["redis"]["ok"], parts["broker"]["ok"]) == (True, False, False)
    assert str(mortal_api.valkey.port) not in answer.text


def test_without_the_database_it_is_alive_but_not_ready(api: Api) -> None:
    api.take_database_away()
    ready, live = api.client.get("/health/ready"), api.client.get("/health/live")
    api.bring_database_back()
    assert (ready.status_code, ready.json["status"], ready.json["parts"]["database"]["ok"]) == (
        503,
        "unavailable",
        False,
    )
    assert live.status_code == 200


def test_without_its_tables_it_is_not_ready(api: Api) -> None:
    with api.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    answer = api.client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json["parts"]["database"]["why"]


def _figures(api: Api) -> dict[str, float]:
    lines = api.client.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_the_metrics_agree_with_the_database_and_the_queue(api: Api) -> None:
    api.register(slots=1)
    api.model("flux")
    api.started()
    for _ in range(2):
        api.submitted()
    api.submitted(model="flux")
    an_ended_job(api.dispatcher.store)
    found = _figures(api)
    assert found['slotkeeper_jobs{state="queued"}'] == 3
    assert found['slotkeeper_jobs{state="running"}'] == 1
    assert found['slotkeeper_jobs{state="completed"}'] == 1
    assert found['slotkeeper_waiting_jobs{model="zimg"}'] == 2
    assert found['slotkeeper_waiting_jobs{model="flux"}'] == 1
    assert found['slotkeeper_slots{fleet="zimg",state="taken"}'] == 1
    assert found['slotkeeper_slots{fleet="zimg",state="free"}'] == 0
    assert found['slotkeeper_up{part="redis"}'] == 1


def test_an_unreadable_queue_does_not_hide_the_figures_of_other_queues(api: Api) -> None:
    api.register(slots=1)
    api.model("flux")
    with api.valkey.client() as redis:
        key = api.dispatcher.queues.scripts.keys.fleet_key("zimg", "meta")
        redis.delete(key)
        redis.set(key, "nonsense")
    found = _figures(api)
    assert found['slotkeeper_waiting_jobs{model="flux"}'] == 0
    assert 'slotkeeper_waiting_jobs{model="zimg"}' not in found
    models = {model["model"]: model for model in api.client.get("/admin/models").json["models"]}
    assert (models["flux"]["waiting"], models["zimg"]["waiting"]) == (0, None)


def test_audit_findings_are_a_gauge_until_a_later_audit_finds_none(api: Api) -> None:
    ledger.store_findings(api.database, {"slot_differs": 2, "ledger_unbalanced": 0}, [("job-1", "slot_differs")], T0)
    found = _figures(api)
    assert found['slotkeeper_invariant_findings{check="slot_differs"}'] == 2
    assert found['slotkeeper_invariant_findings{check="ledger_unbalanced"}'] == 0
    ledger.store_findings(api.database, {"slot_differs": 0}, [], T0)
    assert _figures(api)['slotkeeper_invariant_findings{check="slot_differs"}'] == 0


def test_figures_do_not_need_redis(mortal_api: Api) -> None:
    mortal_api.model()
    mortal_api.submitted()
    mortal_api.valkey.kill()
    found = _figures(mortal_api)
    assert found['slotkeeper_jobs{state="queued"}'] == 1
    assert (found['slotkeeper_up{part="database"}'], found['slotkeeper_up{part="redis"}']) == (1, 0)


def test_figures_do_not_need_the_database(api: Api) -> None:
    api.take_database_away()
    found = _figures(api)
    api.bring_database_back()
    assert found['slotkeeper_up{part="database"}'] == 0


def test_the_api_documentation_page_loads_nothing_from_other_hosts(api: Api) -> None:
    page = api.client.get("/docs", follow_redirects=True)
    assert page.status_code == 200
    assert "https://" not in page.text and "http://" not in page.text
    for name in ("js/swagger-ui-bundle.js", "css/swagger-ui.css"):
        assert f"swagger/{name}" in page.text
        assert api.client.get(f"/docs/swagger/{name}").status_code == 200
    assert api.client.get("/docs/swagger/../../../../../etc/passwd").status_code == 404


# -- what no name holds --------------------------------------------------------------------------------------------


def _asked(api: Api) -> Iterator[tuple[str, str]]:
    """(method, address) of each view, with a NUL in each part of its address that is a name."""
    for rule in api.client.application.url_map.iter_rules():
        path = re.sub(r"<[^>]+>", "a%00b", rule.rule)
        if path != rule.rule:
            yield from (
                (method, path) for method in (rule.methods or set()) & {"GET", "POST", "PUT", "PATCH", "DELETE"}
            )


def test_a_nul_in_a_name_is_refused_before_the_database_is_read(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Database, "read", _asked_in_vain)
    for method, path in _asked(api):
        client = visitor(api).client if path.startswith("/page") else api.client
        answer = client.open(path, method=method, json={} if method != "GET" else None)
        assert answer.status_code == 422, (method, path)
        assert "NUL" in answer.text, (method, path)


@pytest.mark.parametrize("path", ["/webhooks", "/admin/audit", "/queue/jobs", "/health/ready", "/page/audit"])
def test_a_nul_in_a_query_is_refused_with_its_field_before_the_database_is_read(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(Database, "read", _asked_in_vain)
    client = visitor(api).client if path.startswith("/page") else api.client
    for field in ("tenant", "actor", "model", "cursor", "job_id", "what"):
        answer = client.get(f"{path}?{field}=a%00b")
        assert answer.status_code == 422 and f"{field} holds a NUL" in answer.text
    assert client.get(f"{path}?tenant%00=a").status_code == 422


def test_a_nul_in_a_form_is_refused(api: Api) -> None:
    somebody = visitor(api)
    for path in ("/page/theme", "/page/tenants/state", "/page/dead/retry"):
        answer = somebody.post(path, tenant="a\0", job="\0", back="/\0")
        assert answer.status_code == 422 and "NUL" in answer.text


def _asked_in_vain(*_: object) -> NoReturn:
    pytest.fail("PostgreSQL would refuse this as a fault of ours")


# -- readiness -----------------------------------------------------------------------------------------------------


def test_concurrent_readiness_requests_share_one_check() -> None:
    now, looked = [0.0], list[float]()

    def look() -> None:
        looked.append(now[0])

    readiness = Readiness({"broker": look}, lambda: now[0])
    assert at_once(*[readiness.parts] * 20) == [{"broker": None}] * 20
    assert looked == [0.0]
    now[0] = 0.9
    assert readiness.parts() and looked == [0.0]
    now[0] = 1.0
    assert readiness.parts() and looked == [0.0, 1.0]


def test_a_hanging_check_is_reported_with_the_others_in_time_and_not_started_twice() -> None:
    hangs, looked = threading.Event(), list[str]()

    def hang() -> None:
        looked.append("redis")
        hangs.wait(60)

    def answer() -> str:
        looked.append("broker")
        return "no route"

    now = [0.0]
    readiness = Readiness({"redis": hang, "broker": answer, "database": lambda: None}, lambda: now[0])
    began = time.monotonic()
    found = readiness.parts()
    assert time.monotonic() - began < 5, "the hanging check would have taken a minute"
    assert found["broker"] == "no route" and found["database"] is None
    assert "could not be checked" in (found["redis"] or "")
    now[0] = 2.0
    readiness.parts()
    assert looked.count("redis") == 1 and looked.count("broker") == 2
    hangs.set()
    now[0] = 4.0
    assert readiness.parts() == {"redis": None, "broker": "no route", "database": None}


@pytest.fixture
def silent() -> Iterator[str]:
    """A real address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "part, variable, url, status",
    [
        ("redis", "REDIS_URL", "redis://{}/0", 200),
        ("database", "DATABASE_URL", "postgresql://slotkeeper@{}/slotkeeper", 503),
    ],
)
def test_readiness_reports_a_silent_part_as_down_within_seconds(
    api: Api, silent: str, part: str, variable: str, url: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"SLOTKEEPER_{variable}", url.format(silent))
    clear_wiring()
    began = time.monotonic()
    answer = api.client.get("/health/ready")
    took_s = time.monotonic() - began
    parts = answer.json["parts"]
    assert (answer.status_code, parts[part]["ok"]) == (status, False)
    assert took_s < 3, "the parts' own time limits, one after another, are 6 s and more"
    assert parts["broker"]["ok"], "the check of a part that answers is reported unchanged"


def _accepted(listener: socket.socket) -> int:
    """Accept the connections that wait, and return how many they are."""
    listener.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


@pytest.mark.parametrize(
    "path", ["/", "/page/servers", "/page/models/zimg", "/page/servers/gpu1", "/admin/servers", "/admin/models/zimg"]
)
def test_a_redis_that_never_answers_is_waited_for_once_by_each_page(
    api: Api, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.register(slots=2)
    api.submitted()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        monkeypatch.setenv("SLOTKEEPER_REDIS_URL", f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        monkeypatch.setenv("SLOTKEEPER_REDIS_TIMEOUT_S", "0.2")
        clear_wiring()
        client = create_app().test_client()
        _accepted(listener)  # A process looks at its Redis when it starts.
        assert client.get(path).status_code == 200
        waits = _accepted(listener)
    assert waits == 1, "each wait for an answer has a connection of its own"


def test_the_error_of_a_failed_check_is_not_returned_to_later_callers() -> None:
    results = iter([ValueError("once"), None])

    def look() -> None:
        if (error := next(results)) is not None:
            raise error

    readiness = Readiness({"broker": look})
    with pytest.raises(ValueError, match="once"):
        readiness.parts()
    assert readiness.parts() == {"broker": None}


def test_an_unknown_name_with_a_lone_surrogate_gets_404_with_a_replacement_character(api: Api) -> None:
    body = b'{"message": "a\\ud800"}'
    answer = api.client.post("/webhooks/callbacks/replay", data=body, content_type="application/json")
    assert answer.status_code == 404 and answer.json["message"] == "a?"


def test_a_stream_that_this_server_cannot_send_is_refused(api: Api) -> None:
    """Only the process `web` sends streams; any other server would answer with an empty one."""
    answer = api.client.get("/stream")
    assert (answer.status_code, answer.json["code"]) == (501, "no_streams")
