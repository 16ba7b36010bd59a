"""The audit log over the REST API: the acts that it records, and the keys that may read them."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from app.cli.operation_commands import audit
from slotkeeper.registry.identity import Scope
from tests.support.api import Api
from tests.support.builders import a_queued_job
from tests.support.keys import add_key

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])


def _acts(api: Api, **query: Any) -> list[dict[str, Any]]:
    headers = query.pop("headers", {})
    answer = api.client.get("/admin/audit", query_string=query, headers=headers)
    assert answer.status_code == 200, answer.json
    return list(answer.json["acts"])


@KEYED
def test_an_audit_entry_holds_the_name_of_the_key_the_interface_and_the_address(
    api: Api, settings: dict[str, str]
) -> None:
    boss = api.tenant("boss", admin=True)
    come = {"environ_base": {"REMOTE_ADDR": "203.0.113.7"}}
    api.client.put("/admin/model-configs/zimg", json={"max_retries": 5}, headers=boss, **come)
    by_command = boss | {"User-Agent": "slotkeeper-cli"}
    api.client.patch("/admin/models/zimg", json={"state": "paused", "reason": "new weights"}, headers=by_command)
    paused, configured = _acts(api, headers=boss, model="zimg")
    assert (configured["act"], configured["actor"], configured["interface"], configured["origin"]) == (
        "model.configure",
        "boss",
        "REST",
        "203.0.113.7",
    )
    assert (paused["act"], paused["interface"], paused["reason"]) == ("model.pause", "command line", "new weights")
    assert "sk_" not in json.dumps([paused, configured])


@KEYED
def test_a_tenant_that_cancels_its_job_is_noted(api: Api, settings: dict[str, str]) -> None:
    boss, acme = api.tenant("boss", admin=True), api.tenant("acme")
    api.client.put("/admin/model-configs/zimg", json={}, headers=boss)
    job_id = api.submitted(acme)
    api.client.post(f"/queue/jobs/{job_id}/cancel", headers=acme)
    (done,) = _acts(api, headers=boss, job_id=job_id)
    assert (done["act"], done["actor"], done["tenant"], done["model"]) == ("job.cancel", "acme", "acme", "zimg")


@KEYED
def test_only_keys_with_the_audit_scope_and_administrators_read_the_audit_log(
    api: Api, settings: dict[str, str]
) -> None:
    key = add_key(api.database, "auditor", Scope.AUDIT)
    auditor = {"Authorization": f"Bearer {key}"}
    assert api.client.get("/admin/audit", headers=api.tenant("acme")).status_code == 403
    assert api.client.get("/admin/audit").status_code == 401
    assert api.client.get("/admin/audit", headers=auditor).status_code == 200
    assert api.client.get("/admin/servers", headers=auditor).status_code == 403
    assert api.client.get("/admin/audit", headers=api.tenant("boss", admin=True)).status_code == 200


def test_a_cursor_continues_the_previous_page_also_from_the_header_of_a_line_response(api: Api) -> None:
    for retries in range(5):
        api.client.put("/admin/model-configs/zimg", json={"max_retries": retries})
    found, cursor = [], None
    while True:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = api.client.get("/admin/audit", query_string=query).json
        found += [act["data"]["overrides"]["max_retries"] for act in page["acts"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert found == [4, 3, 2, 1, 0]
    lines = api.client.get("/admin/audit?limit=2", headers={"Accept": "application/x-ndjson"})
    assert lines.content_type == "application/x-ndjson"
    assert len([json.loads(line) for line in lines.data.splitlines()]) == 2
    rest = api.client.get("/admin/audit", query_string={"cursor": lines.headers["Next-Cursor"]}).json["acts"]
    assert len(rest) == 3


def test_acts_are_found_by_time(api: Api) -> None:
    api.client.put("/admin/model-configs/zimg", json={})
    (done,) = _acts(api)
    assert _acts(api, since=done["at"]) == [done]
    assert _acts(api, until=done["at"]) == []
    answer = api.client.get("/admin/audit?since=yesterday")
    assert (answer.status_code, answer.json["field"]) == (422, "since")


def test_the_reset_of_a_server_is_recorded_in_the_audit_log(api: Api) -> None:
    api.register()
    api.client.post("/admin/servers/gpu1/reset")
    assert [act["act"] for act in _acts(api, server="gpu1")] == ["server.reset", "server.register"]


def test_an_act_of_a_process_outside_a_request_is_not_attributed_to_the_last_request(api: Api) -> None:
    api.client.put("/admin/model-configs/zimg", json={})
    job = a_queued_job(api.dispatcher.store)
    api.dispatcher.cancel(job.id)
    (done,) = _acts(api, job_id=job.id)
    assert (done["actor"], done["interface"]) == ("slotkeeper", "process")


def test_the_command_line_exports_all_of_them(api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for retries in range(3):
        api.client.put("/admin/model-configs/zimg", json={"max_retries": retries})

    class Asked:
        def iter_pages(self, path: str, items: str, limit: int, **params: Any) -> Any:
            return iter(api.client.get(path).json[items][:limit])

    monkeypatch.setattr("app.cli.operation_commands.api_client", Asked)
    file = tmp_path / "acts.jsonl"
    done = CliRunner().invoke(audit, ["--export", str(file)])
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["act"] for line in file.read_text().splitlines()] == ["model.configure"] * 3
    assert "model.configure" in CliRunner().invoke(audit, ["--limit", "2"]).output
