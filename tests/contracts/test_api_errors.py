"""Whatever goes wrong leaves as a problem; health and figures never fail with what they report."""

import pytest

from jobs import ledger
from routing import pulse
from tasks import maintenance
from tasks.wiring import scripts
from tests.support.api import Api
from tests.support.builders import T0, an_ended_job

pytest_plugins = ("tests.support.api_fixtures",)


def test_an_unknown_address_is_a_problem(api: Api) -> None:
    answer = api.client.get("/queue/nothing?x=\0")
    assert (answer.status_code, answer.json["code"], answer.json["instance"]) == (404, "not_found", "/queue/nothing")


@pytest.mark.parametrize("method", ["put", "delete", "patch", "get"])
def test_a_wrong_method_says_which_are_right(api: Api, method: str) -> None:
    answer = getattr(api.client, method)("/queue/submit")
    assert (answer.status_code, answer.json["code"]) == (405, "method_not_allowed")
    assert "POST" in answer.headers["Allow"]


def test_a_fault_of_ours_shows_nothing_of_itself(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("the password is hunter2")

    monkeypatch.setattr(api.dispatcher.store, "find", fail)
    answer = api.client.get("/queue/jobs")
    assert (answer.status_code, answer.json["code"]) == (500, "internal_error")
    assert "hunter2" not in answer.text


def test_a_whole_process_is_ready(api: Api) -> None:
    pulse.leave(scripts())
    answer = api.client.get("/health/ready")
    assert (answer.status_code, answer.json["status"]) == (200, "ok")
    assert all(part == {"ok": True, "why": None} for part in answer.json["parts"].values())


def test_it_is_degraded_as_long_as_nobody_does_maintenance(api: Api) -> None:
    answer = api.client.get("/health/ready").json
    assert answer["status"] == "degraded" and "beat" in answer["parts"]["maintenance"]["why"]
    maintenance.sweep()
    assert api.client.get("/health/ready").json["status"] == "ok"


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


def test_the_figures_are_those_of_the_record_and_the_room(api: Api) -> None:
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


def test_a_room_that_cannot_be_read_hides_no_other(api: Api) -> None:
    api.register(slots=1)
    api.model("flux")
    with api.valkey.client() as redis:
        key = api.dispatcher.queues._scripts.keys.of("zimg", "meta")
        redis.delete(key)
        redis.set(key, "nonsense")
    found = _figures(api)
    assert found['slotkeeper_waiting_jobs{model="flux"}'] == 0
    assert 'slotkeeper_waiting_jobs{model="zimg"}' not in found
    models = {it["model"]: it for it in api.client.get("/admin/models").json["models"]}
    assert (models["flux"]["waiting"], models["zimg"]["waiting"]) == (0, None)


def test_what_the_audit_found_is_a_figure_until_it_finds_it_no_more(api: Api) -> None:
    ledger.note_findings(api.database, {"slot_differs": 2, "ledger_unbalanced": 0}, {"job-1": "slot_differs"}, T0)
    found = _figures(api)
    assert found['slotkeeper_invariant_findings{check="slot_differs"}'] == 2
    assert found['slotkeeper_invariant_findings{check="ledger_unbalanced"}'] == 0
    ledger.note_findings(api.database, {"slot_differs": 0}, {}, T0)
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


def test_the_page_with_the_documentation_needs_no_network(api: Api) -> None:
    page = api.client.get("/docs", follow_redirects=True)
    assert page.status_code == 200
    assert "https://" not in page.text and "http://" not in page.text
    for name in ("js/swagger-ui-bundle.js", "css/swagger-ui.css"):
        assert f"swagger/{name}" in page.text
        assert api.client.get(f"/docs/swagger/{name}").status_code == 200
    assert api.client.get("/docs/swagger/../../../../../etc/passwd").status_code == 404
