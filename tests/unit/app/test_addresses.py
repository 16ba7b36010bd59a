"""Where a request's address leads, which is remembered of those that hold no names."""

from typing import Any

import pytest
from flask import Flask, request

from app.openapi import new_app


@pytest.fixture
def app() -> Flask:
    made: Any = new_app("0")
    made.add_url_rule("/jobs", "list", lambda: {"seen": dict(request.view_args or {})})
    made.add_url_rule("/jobs", "add", lambda: {"added": True}, methods=["POST"])
    made.add_url_rule("/jobs/<name>", "one", lambda name: {"name": name})
    return made


@pytest.mark.parametrize("turn", range(2))
def test_an_address_leads_where_it_led_before(app, turn):
    client = app.test_client()
    for _ in range(turn + 1):
        assert client.get("/jobs").json == {"seen": {}}
        assert client.post("/jobs").json == {"added": True}
        assert client.put("/jobs").status_code == 405
        assert [client.get(f"/jobs/{name}").json for name in "ab"] == [{"name": "a"}, {"name": "b"}]
        assert client.get("/job").status_code == 404


def test_only_addresses_as_they_are_written_are_remembered_of_which_there_are_few(app):
    client = app.test_client()
    for path in ("/jobs", "//jobs", "/jobs/a", "/jobs/b", "/nothing"):
        client.get(path)
    assert list(app.url_map.plain) == [("GET", "/jobs")]


def test_what_a_view_does_to_the_names_that_it_is_given_is_gone_with_the_request(app):
    app.before_request(lambda: request.view_args.update(more=1) if "more" in request.args else None)
    app.view_functions["list"] = lambda **names: {"names": names}
    client = app.test_client()
    client.get("/jobs")
    assert client.get("/jobs?more=1").json == {"names": {"more": 1}}
    assert client.get("/jobs").json == {"names": {}}
