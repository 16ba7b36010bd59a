"""The payload of a job: complete for its tenant, redacted and audited for operators."""

import pytest

from slotkeeper.registry.identity import Scope
from slotkeeper.registry.snapshot import CatalogSnapshot
from tests.support.api import Api

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
PAYLOAD = {"prompt": "a cat", "user": {"email": "a@b.c", "ids": ["1", "2"]}}


def _configure(api: Api, root: dict[str, str] | None, **config: object) -> None:
    assert api.client.put("/admin/model-configs/zimg", json=config, headers=root).status_code == 200


def _noted(api: Api, headers: dict[str, str]) -> list[tuple[str, str]]:
    acts = api.client.get("/admin/audit", headers=headers).json["acts"]
    return [(act["actor"], act["job_id"]) for act in acts if act["act"] == "job.read_payload"]


@KEYED
def test_a_tenant_reads_its_payload_and_an_operator_reads_it_redacted_and_audited(api: Api) -> None:
    root, acme = api.with_key("root", Scope.OPERATE), api.with_key("acme")
    _configure(api, root, redact=["/user/email", "/user/ids/1", "/not/there", "/prompt/x"])
    job_id = api.submitted(acme, payload=PAYLOAD)
    path = f"/queue/jobs/{job_id}"
    assert api.client.get(path, headers=acme).json["payload"] is None, "the payload is shown on request only"
    assert api.client.get(f"{path}?include=payload", headers=acme).json["payload"] == PAYLOAD
    assert _noted(api, root) == []
    shown = {"prompt": "a cat", "user": {"email": "(redacted)", "ids": ["1", "(redacted)"]}}
    assert api.client.get(f"{path}?include=payload", headers=root).json["payload"] == shown
    assert _noted(api, root) == [("root", job_id)]
    other = api.with_key("bravo")
    assert api.client.get(f"{path}?include=payload", headers=other).status_code == 404


@KEYED
def test_the_whole_payload_is_redacted_if_its_model_is_missing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    root, acme = api.with_key("root", Scope.OPERATE), api.with_key("acme")
    _configure(api, root, redact=[])
    path = f"/queue/jobs/{api.submitted(acme, payload=PAYLOAD)}?include=payload"
    monkeypatch.setattr(CatalogSnapshot, "model", lambda *_: None)
    assert api.client.get(path, headers=root).json["payload"] == "(redacted)"


def test_without_keys_all_clients_are_one(api: Api) -> None:
    _configure(api, None, redact=["/prompt"])
    job_id = api.submitted(payload=PAYLOAD)
    assert api.client.get(f"/queue/jobs/{job_id}?include=payload").json["payload"] == PAYLOAD
    assert "a@b.c" in api.client.get(f"/page/jobs/{job_id}").text


def test_each_entry_of_redact_is_a_json_pointer(api: Api) -> None:
    answer = api.client.put("/admin/model-configs/zimg", json={"redact": ["prompt"]})
    assert answer.status_code == 422 and "begin with /" in answer.json["detail"]
