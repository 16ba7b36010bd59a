"""Defaults of kinds of models, and of all models, over the REST API."""

from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.support.api import Api


def test_a_model_shows_the_source_of_each_configuration_field(api: Api) -> None:
    assert api.client.get("/admin/defaults").json["overrides"] == {}
    assert api.client.put("/admin/defaults", json={"policy": "fifo", "max_retries": 1}).status_code == 200
    assert api.client.put("/admin/kinds/training", json={"max_retries": 2}).json["kind"] == "training"
    api.model(kind="training", max_crashes=9)
    shown = api.client.get("/admin/model-configs/zimg").json
    names = ("policy", "max_retries", "max_crashes", "poll_interval")
    assert [shown["sources"][name] for name in names] == ["installation", "kind", "model", "built-in"]
    assert [shown["config"][name] for name in names] == ["fifo", 2, 9, 2.0]
    assert [shown["defaults"][name] for name in names] == ["fifo", 2, 3, 2.0], (
        "the values without the model's own overrides"
    )
    (kind,) = api.client.get("/admin/kinds").json["kinds"]
    assert (kind["kind"], kind["models"], kind["changed_by"]) == ("training", ["zimg"], "default")
    assert api.client.get("/admin/kinds/training").json["overrides"] == {"max_retries": 2}


def test_changed_defaults_apply_to_later_submits(api: Api) -> None:
    api.register()
    api.client.put("/admin/defaults", json={"max_payload_bytes": 10})
    assert api.submit().status_code == 422
    api.client.put("/admin/defaults", json={})
    assert api.submit().status_code == 202


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/admin/defaults", {"max_retries": -1}, "max_retries"),
        ("/admin/defaults", {"kind": "training"}, "kind"),
        ("/admin/defaults", {"nonsense": 1}, "nonsense"),
        ("/admin/kinds/training", {"policy": "lottery"}, "policy"),
        ("/admin/kinds/-x", {}, "kind"),
        ("/admin/defaults", {"preset": "nobody"}, "preset"),
        ("/admin/model-configs/zimg", {"kind": "nobody"}, "kind"),
    ],
)
def test_an_invalid_default_is_refused_with_its_field_and_changes_nothing(
    api: Api, path: str, body: dict[str, Any], field: str
) -> None:
    before = api.client.get("/admin/defaults").json
    answer = api.client.put(path, json=body)
    assert (answer.status_code, answer.json["field"]) == (422, field)
    assert api.client.get("/admin/defaults").json == before


NAMES_A_SECRET = {"description": {"submit": {"body": {"in": "{{payload}}", "key": "{{secret/KEY}}"}}}}


def test_defaults_name_only_secrets_that_are_for_all_models(api: Api) -> None:
    _set_secret(api, models=["zimg"])
    refused = api.client.put("/admin/defaults", json=NAMES_A_SECRET)
    assert refused.status_code == 422 and "secrets set KEY --all-models" in refused.json["detail"]
    _set_secret(api, models=None)
    assert api.client.put("/admin/defaults", json=NAMES_A_SECRET).status_code == 200


@pytest.mark.parametrize("path", ["/admin/defaults", "/admin/kinds/training"])
def test_a_secret_that_defaults_name_stays_and_stays_for_all_models(api: Api, path: str) -> None:
    _set_secret(api, models=None)
    assert api.client.put(path, json=NAMES_A_SECRET).status_code == 200
    removed, narrowed = api.client.delete("/admin/secrets/KEY"), _set_secret(api, models=["zimg"])
    assert (removed.status_code, narrowed.status_code, _set_secret(api, models=None).status_code) == (409, 409, 200)
    api.client.put(path, json={})
    assert api.client.delete("/admin/secrets/KEY").status_code == 204


def test_the_audit_entry_of_a_change_of_defaults_omits_the_description(api: Api) -> None:
    api.client.put("/admin/defaults", json={"max_retries": 1, "description": {"submit": {"path": "/hidden"}}})
    (act,) = [act for act in api.client.get("/admin/audit").json["acts"] if act["act"] == "defaults.set"]
    assert (act["data"]["overrides"], act["data"]["described"]) == ({"max_retries": 1}, True)


def _set_secret(api: Api, models: list[str] | None) -> TestResponse:
    return api.client.put("/admin/secrets/KEY", json={"value": "a-long-value", "models": models})


def test_a_kind_is_removed_when_no_model_is_of_it(api: Api) -> None:
    api.client.put("/admin/kinds/training", json={})
    api.model(kind="training")
    assert api.client.delete("/admin/kinds/training").status_code == 409
    api.model()
    assert api.client.delete("/admin/kinds/training").status_code == 204
    assert api.client.delete("/admin/kinds/training").status_code == 404
    assert api.client.get("/admin/kinds/training").status_code == 404
