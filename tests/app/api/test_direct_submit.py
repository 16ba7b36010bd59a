"""A submit that bypasses Flask's request handling gets the same response as one through Flask."""

from collections.abc import Iterator
from typing import Any

import pytest
from flask import request_started

from slotkeeper import audit, logs
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.store import JobStore
from slotkeeper.registry.identity import Scope
from tests.support.api import NOTHING, Api

BY_FLASK = "application/json; charset=utf-8"
VARYING = ("Content-Length", "Location")
KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])


@pytest.fixture
def through_flask(api: Api) -> Iterator[list[str]]:
    """The paths of the requests that Flask has handled."""
    paths: list[str] = []
    app = api.client.application

    def note(*_: Any, **__: Any) -> None:
        paths.append("/queue/submit")

    with request_started.connected_to(note, app):
        yield paths


def both(api: Api, body: Any, **environ: Any) -> list[Any]:
    """The answers to one request, directly and by Flask."""
    given = {"data": body} if isinstance(body, bytes) else {"json": body}
    return [
        api.client.post("/queue/submit", **given, content_type=kind, environ_overrides=environ)
        for kind in ("application/json", BY_FLASK)
    ]


def shown(answer: Any) -> tuple[Any, ...]:
    """What must not differ: all but ids, places and what follows from them."""
    body = {name: value for name, value in answer.json.items() if name not in ("job_id", "position", "links")}
    headers = sorted((name, value) for name, value in answer.headers if name not in VARYING)
    return answer.status_code, headers, body, sorted(answer.json)


def test_an_accepted_job_makes_no_flask_request(api: Api, through_flask: list[str]) -> None:
    api.model()
    through_flask.clear()
    direct = api.submit()
    assert (direct.status_code, through_flask) == (202, [])
    assert direct.headers["Location"] == direct.json["links"]["self"]
    assert api.job(direct.json["job_id"]).source == "rest"


def test_an_accepted_job_is_answered_as_flask_would(api: Api, through_flask: list[str]) -> None:
    api.model()
    through_flask.clear()
    direct, by_flask = both(api, {"model": "zimg", "payload": {"prompt": "a cat"}, "priority": 2})
    assert shown(direct) == shown(by_flask)
    assert len(through_flask) == 1


@KEYED
def test_the_rate_limit_headers_show_the_remaining_requests(api: Api, settings: dict[str, str]) -> None:
    operator, tenant = api.tenant("root", admin=True), api.tenant("acme")
    api.client.put("/admin/model-configs/zimg", json={}, headers=operator)
    api.client.patch("/admin/tenants/acme", json={"limits": {"rate_per_s": 1, "burst": 9}}, headers=operator)
    direct = api.submit(tenant)
    assert direct.headers["RateLimit-Policy"] == '"tenant";q=9;w=9'
    assert direct.headers["RateLimit"].startswith('"tenant";r=8')


@pytest.mark.parametrize(
    "body",
    [
        {"model": "nobody", "payload": {}},
        {"model": "zimg", "payload": {}, "priority": 77},
        {"model": "zimg", "payload": {}, "callback_url": "http://127.0.0.1/"},
        {"model": "zimg"},
        {"model": "zimg", "payload": {}, "color": "red"},
        [],
        b"{",
        b"",
        b'{"model": "zimg", "model": "zimg", "payload": {}}',
        b'{"model": "zimg", "payload": {"at": NaN}}',
    ],
)
def test_a_refused_job_is_refused_as_flask_would(api: Api, body: Any) -> None:
    api.model()
    direct, by_flask = both(api, body)
    assert direct.status_code >= 400
    assert (shown(direct), direct.data) == (shown(by_flask), by_flask.data)
    assert api.stored() == NOTHING


@pytest.mark.parametrize(
    "environ",
    [
        {"REMOTE_ADDR": "192.0.2.7"},
        {"HTTP_HOST": "evil.example"},
        {"HTTP_X_FORWARDED_FOR": "192.0.2.7"},
        {"HTTP_ORIGIN": "https://evil.example"},
        {"HTTP_SEC_FETCH_SITE": "cross-site"},
    ],
)
def test_a_forbidden_submit_without_keys_gets_the_same_refusal_as_through_flask(
    api: Api, environ: dict[str, str]
) -> None:
    api.model()
    direct, by_flask = both(api, {"model": "zimg", "payload": {}}, **environ)
    assert direct.status_code in (403, 421)
    assert direct.data == by_flask.data
    assert api.stored() == NOTHING


@KEYED
@pytest.mark.parametrize("key, status", [("", 401), ("Bearer sk_wrong", 401), ("of a reader", 403)])
def test_a_submit_without_a_sufficient_key_gets_the_same_refusal_as_through_flask(
    api: Api, settings: dict[str, str], key: str, status: int
) -> None:
    key = api.with_key("acme", Scope.READ)["Authorization"] if key == "of a reader" else key
    direct, by_flask = both(api, {"model": "zimg", "payload": {}}, HTTP_AUTHORIZATION=key)
    assert direct.status_code == status
    assert direct.data == by_flask.data
    assert api.stored() == NOTHING


def test_a_refused_direct_submit_is_not_submitted_again_through_flask(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.model()
    asked: list[int] = []

    def submit(*_: Any) -> Any:
        asked.append(1)
        raise DatabaseUnavailable("the disk is full")

    monkeypatch.setattr(JobStore, "submit", submit)
    assert api.submit().status_code == 503
    assert asked == [1]


def test_an_unexpected_error_is_answered_as_a_problem(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model()
    monkeypatch.setattr(JobStore, "submit", lambda *_: 1 / 0)
    answer = api.submit()
    assert (answer.status_code, answer.json["code"]) == (500, "internal_error")


@pytest.mark.parametrize("length", ["", "9", "-1", "1e3"])
def test_a_body_with_an_invalid_length_is_passed_to_flask(api: Api, through_flask: list[str], length: str) -> None:
    api.model()
    through_flask.clear()
    body = {"json": {"model": "zimg", "payload": {"prompt": "a cat"}}}
    api.client.post("/queue/submit", **body, environ_overrides={"CONTENT_LENGTH": length})
    assert len(through_flask) == 1


def test_a_body_that_breaks_off_where_it_could_end_is_refused(api: Api) -> None:
    api.model()
    whole = b'{"model": "zimg", "payload": {}}'
    answer = api.client.post(
        "/queue/submit",
        data=whole,
        content_type="application/json",
        environ_overrides={"CONTENT_LENGTH": str(len(whole) + 2)},
    )
    assert answer.status_code == 400
    assert api.stored() == NOTHING


def test_a_query_is_flasks(api: Api, through_flask: list[str]) -> None:
    api.model()
    through_flask.clear()
    api.client.post("/queue/submit?a=%00", json={"model": "zimg", "payload": {}})
    assert len(through_flask) == 1


@KEYED
def test_a_direct_submit_leaves_no_identity_behind_in_its_thread(api: Api, settings: dict[str, str]) -> None:
    operator, tenant = api.tenant("root", admin=True), api.tenant("acme")
    api.client.put("/admin/model-configs/zimg", json={}, headers=operator)
    for fields in ({}, {"priority": 77}):
        api.submit(tenant, **fields)
        assert audit.get_actor() == audit.SYSTEM
        assert "tenant" not in logs._about.get()
