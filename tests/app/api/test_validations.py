"""Validations by the API: for operators, and refused where their jobs would be."""

import pytest

from slotkeeper.registry.identity import Scope
from tests.support.api import Api

_BODY = {"model": "zimg", "payload": {"prompt": "2 + 2"}, "expected": {"answer": 4, "took": "*"}, "every_s": 60}


def test_a_validation_is_set_listed_and_removed(api: Api) -> None:
    api.model()
    path = "/admin/validations/sum"
    assert api.client.put(path, json=_BODY).status_code == 201
    changed = api.client.put(path, json=_BODY | {"compare": "close", "tolerance": 0.5, "enabled": False})
    assert changed.status_code == 200
    (listed,) = api.client.get("/admin/validations").json["validations"]
    assert listed == changed.json and {name: listed[name] for name in _BODY} == _BODY
    assert (listed["compare"], listed["tolerance"], listed["enabled"]) == ("close", 0.5, False)
    assert api.client.get("/admin/validations/report").json == {"servers": []}
    assert api.client.delete(path).status_code == 204
    assert api.client.delete(path).status_code == 404
    acts = [act["act"] for act in api.client.get("/admin/audit").json["acts"]]
    assert acts[:3] == ["validation.remove", "validation.set", "validation.set"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "none"}, "model"),
        ({"every_s": 9}, "every_s"),
        ({"compare": "regex"}, "compare"),
        ({"payload": {"a": "\x00"}}, None),
        ({"payload": []}, "payload"),
    ],
)
def test_a_validation_that_cannot_be_submitted_is_refused(api: Api, change: dict[str, object], field: str) -> None:
    api.model()
    refused = api.client.put("/admin/validations/sum", json=_BODY | change)
    assert refused.status_code in (400, 422), refused.text
    assert field is None or refused.json["field"] == field


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true"}])
def test_validations_are_for_operators(api: Api) -> None:
    acme = api.with_key("acme", Scope.MANAGE, Scope.READ)
    assert api.client.get("/admin/validations", headers=acme).status_code == 403
    assert api.client.get("/admin/validations/report", headers=acme).status_code == 403
