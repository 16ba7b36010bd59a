"""Short ids: a tenant finds its jobs by a part of their ids, and never the jobs of another tenant."""

from typing import Any

import pytest

from routing.queries import short_ids
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import new_job_id
from tests.support.api import Api
from tests.support.builders import T0, a_job
from tests.support.sql_plans import plans_of

_JOB: dict[str, Any] = {"model": "zimg", "payload": {}}
_ONE, _TWIN, _OTHER = (
    "01a205c4-b6d1-7190-8b8b-b3fbb4ae3540",
    "01a205c4-b6d1-7190-8b8c-b3fb00000001",
    "01a205c5-0000-7190-8b8b-000000000002",
)


@pytest.mark.parametrize("short", [_ONE[-8:], _ONE[:23], _ONE[-8:].upper(), _OTHER[:8], _OTHER[:9]])
def test_a_job_is_found_by_the_beginning_and_by_the_end_of_its_id(store: JobStore, short: str) -> None:
    store.submit([a_job(id=job_id) for job_id in (_ONE, _TWIN, _OTHER)], T0)
    assert short_ids.find(store.database, short, None).ids == (_OTHER if "5-" in short or short[-1] == "5" else _ONE,)


@pytest.mark.parametrize("short", [_ONE[:7], _ONE[-7:], "%%%%%%%%", "________", "x" * 8, "", "-" * 8, "b" * 8])
def test_a_text_that_is_no_part_of_an_id_finds_no_job(store: JobStore, short: str) -> None:
    store.submit([a_job(id=job_id) for job_id in (_ONE, _TWIN, _OTHER)], T0)
    assert short_ids.find(store.database, short, None).ids == ()


def test_an_ambiguous_id_returns_five_of_its_jobs_and_that_there_are_more(store: JobStore) -> None:
    store.submit([a_job(id=f"{_ONE[:-2]}{n:02}") for n in range(7)], T0)
    found = short_ids.find(store.database, _ONE[:8], None)
    assert (len(found.ids), found.more) == (5, True)


def test_the_search_for_a_short_id_uses_an_index(store: JobStore) -> None:
    store.submit([a_job(id=new_job_id()) for _ in range(4000)], T0)
    store.database.write(lambda tx: tx.connection.exec_driver_sql("ANALYZE"))
    with plans_of(store) as plans:
        short_ids.find(store.database, new_job_id()[-8:], "acme")
        short_ids.find(store.database, new_job_id()[:18], "acme")
    assert len(plans) == 3
    assert "ix_jobs_id_end" in plans[1], plans
    for plan in plans:
        assert "SCAN jobs\n" not in plan and "Seq Scan on jobs" not in plan, plan


def test_every_path_with_a_job_takes_its_short_id(api: Api) -> None:
    api.model()
    whole = api.client.post("/queue/submit", json=_JOB).json["job_id"]
    for path in ("", "/explain", "/attempts"):
        answer = api.client.get(f"/queue/jobs/{whole[-8:]}{path}")
        assert (answer.status_code, answer.json["job_id"]) == (200, whole)
    assert api.client.post(f"/queue/jobs/{whole[-8:]}/cancel").json == {"job_id": whole, "status": "canceled"}
    assert api.client.get(f"/queue/jobs/{whole[-8:]}/stream?after=999999").status_code == 204
    assert api.client.delete(f"/admin/dlq/{whole[-8:]}").status_code == 409, "it is found, and not dead"
    assert api.client.post(f"/admin/dlq/{whole[-8:]}/retry").json["code"] != "job_not_found"
    sent = api.client.get(f"/page/jobs/{whole[-8:]}")
    assert (sent.status_code, sent.headers["Location"]) == (303, f"/page/jobs/{whole}")


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
def test_an_ambiguous_id_names_only_the_tenants_own_jobs(api: Api, settings: dict[str, str]) -> None:
    acme, other, root = api.tenant("acme"), api.tenant("other"), api.tenant("root", admin=True)
    api.dispatcher.store.submit([a_job(id=_ONE, tenant="acme"), a_job(id=_TWIN, tenant="other")], T0)
    short = f"/queue/jobs/{_ONE[:23]}", f"/queue/jobs/{_ONE[:18]}"
    assert api.client.get(short[0], headers=other).status_code == 404
    assert api.client.get(f"/queue/jobs/{_ONE[-8:]}", headers=other).status_code == 404
    found = [api.client.get(f"{short[1]}/attempts", headers=who).json for who in (acme, other)]
    assert [one.get("job_id", one) for one in found] == [_ONE, _TWIN]
    refused = api.client.get(short[1], headers=root)
    assert (refused.status_code, refused.json["candidates"]) == (409, [_ONE, _TWIN])
    assert _ONE in refused.json["detail"] and "give more of the id" in refused.json["detail"]
