import pytest
from pydantic import ValidationError

from tasks.servers.description import DEFAULT, RESERVED_HEADERS, Description, from_shorthand


def described(**parts):
    return Description.model_validate(parts)


def rule(then="done", **when):
    return {"if": when or {"status": 200}, "then": then}


def test_the_default_description_is_the_slot_protocol():
    assert described() == DEFAULT
    assert DEFAULT.submit.path is None and DEFAULT.submit.body is None
    assert [step.path for step in DEFAULT.status] == ["/status/{{id}}"]
    assert (DEFAULT.mode, DEFAULT.cancel[0].path, DEFAULT.health.path) == ("auto", "/cancel/{{id}}", "/health")


def test_a_description_survives_being_stored():
    full = described(
        mode="async",
        submit={"headers": {"Authorization": "Bearer {{secret/KEY}}"}, "body": {"in": "{{payload}}"}, "id": "/id"},
        status=[{"rules": [rule("next", status=["2xx", 404])]}, {"path": "/q?id={{id}}"}],
        cancel=None,
        health={"active": {"metric": "running"}, "running": False, "rules": [rule("busy", pointer="/s", value=None)]},
        given_id="{{job/attempt_id}}",
    )
    assert Description.model_validate_json(full.model_dump_json()) == full
    assert Description.model_validate_json(full.model_dump_json(exclude_defaults=True)) == full


def test_a_single_status_step_needs_no_list():
    assert described(status={"path": "/s/{{id}}"}).status == described(status=[{"path": "/s/{{id}}"}]).status


def test_a_description_is_frozen():
    with pytest.raises(ValidationError):
        DEFAULT.submit.path = "/x"


@pytest.mark.parametrize(
    "parts",
    [
        {"sumbit": {}},
        {"mode": "push"},
        {"submit": {"method": "TRACE"}},
        {"submit": {"id": "job_id"}},
        {"submit": {"result": "/a~"}},
        {"submit": {"connect_s": 0}},
        {"submit": {"connect_s": 61}},
        {"submit": {"read_s": -1}},
        {"submit": {"read_s": float("inf")}},
        {"submit": {"body": "{{id}}"}},
        {"submit": {"body": ["x" * 70_000]}},
        {"submit": {"path": "/{{secret/KEY}}"}},
        {"submit": {"path": "/{{callback_token}}"}},
        {"submit": {"rules": [rule("next")]}},
        {"submit": {"rules": [rule("next")]}},
        {"submit": {"rules": [rule()] * 51}},
        {"submit": {"rules": [rule(status=99)]}},
        {"submit": {"rules": [rule(status="9xx")]}},
        {"submit": {"rules": [rule(status="503-500")]}},
        {"submit": {"rules": [rule(value=1)]}},
        {"submit": {"rules": [rule(status=200, value=1)]}},
        {"submit": {"rules": [rule(text=".{0,1000}x")]}},
        {"submit": {"rules": [rule("done", connection="timeout")]}},
        {"submit": {"rules": [rule("retry", connection="timeout", status=200)]}},
        {"submit": {"rules": [rule("retry", connection="late")]}},
        {"submit": {"rules": [{"if": {}, "then": "done"}]}},
        {"submit": {"rules": [{**rule(), "code": "Not A Word"}]}},
        {"status": []},
        {"status": [{}] * 6},
        {"status": {"path": "/s/{{callback_url}}"}},
        {"status": [{"rules": [rule("next")]}]},
        {"status": {"rules": [rule("busy")]}},
        {"cancel": {"rules": [rule("done")]}},
        {"cancel": {"frees_slot": "maybe"}},
        {"health": {"path": "/h/{{job/id}}"}},
        {"health": {"active": {}}},
        {"health": {"active": {"pointer": "/a", "metric": "b"}}},
        {"health": {"rules": [rule("done")]}},
        {"given_id": "{{payload/id}}"},
    ],
)
def test_a_description_that_cannot_work_is_refused_when_stored(parts):
    with pytest.raises(ValidationError):
        described(**parts)


@pytest.mark.parametrize("step", ["submit", "status", "result", "cancel", "health"])
@pytest.mark.parametrize(
    "path", ["http://evil/x", "//evil", "status", "/../x", "/%2e%2e/x", "/a\\b", "/a\r\nb", "/a//b", "/a#b", "{{id}}"]
)
def test_every_path_stays_on_its_server(step, path):
    with pytest.raises(ValidationError):
        described(**{step: {"path": path}})


@pytest.mark.parametrize("name", [*sorted(RESERVED_HEADERS), "X-Job-ID", "X-SOURCE", "Idempotency-key"])
def test_a_header_of_ours_cannot_be_set(name):
    with pytest.raises(ValidationError, match="cannot be set"):
        described(submit={"headers": {name: "x"}})


@pytest.mark.parametrize(
    ("name", "value"),
    [("X A", "x"), ("X:A", "x"), ("", "x"), ("X", "a\r\nY: b"), ("X", "a\n"), ("X", ""), ("X\n", "a")],
)
def test_a_header_cannot_break_the_request(name, value):
    with pytest.raises(ValidationError):
        described(submit={"headers": {name: value}})


def test_a_model_without_fields_of_its_own_speaks_the_slot_protocol():
    model = from_shorthand()
    assert (model.mode, model.status[0].path, model.submit.id) == ("sync", "/status/{{id}}", "/job_id")


def test_a_models_own_fields_are_used():
    model = from_shorthand("async", "/v1/poll/{id}/state?full=1", "request/id")
    assert (model.mode, model.status[0].path) == ("async", "/v1/poll/{{id}}/state?full=1")
    assert model.submit.id == "/request~1id"
    assert from_shorthand("async", None, "/data/id").submit.id == "/data/id"


@pytest.mark.parametrize("template", ["/status", "/status/{job}", "/{id}/{id}", "/{{id}}", "http://x/{id}", "/../{id}"])
def test_a_poll_template_that_cannot_work_is_refused(template):
    with pytest.raises(ValueError):
        from_shorthand("async", template)


def test_an_unknown_model_type_is_refused():
    with pytest.raises(ValueError):
        from_shorthand("batch")


@pytest.mark.parametrize(
    ("submit", "alone"),
    [
        ({}, True),
        ({"path": "/{{job/model}}", "headers": {"X-Run": "{{job/id}}"}}, True),
        ({"stream": {}}, True),
        ({"stream": {"ask": {"stream": True}}}, False),
        ({"body": {"input": "{{payload}}"}}, False),
        ({"path": "/{{payload/size}}"}, False),
        ({"headers": {"X-Size": "{{payload/size}}"}}, False),
    ],
)
def test_a_payload_is_looked_into_where_something_of_it_is_put_elsewhere(submit, alone):
    assert described(submit=submit).sends_payload_alone is alone


def test_a_payload_is_looked_into_where_it_says_what_output_is_expected():
    size = {"pointer": "/n", "default": 1}
    assert not described(submit={"headers": {"X-N": "{{run/output_size}}"}}, output_size=size).sends_payload_alone


@pytest.mark.parametrize(
    ("frees", "means"),
    [
        ([], "no"),
        (["immediate"], "immediate"),
        (["immediate", "eventual"], "eventual"),
        (["immediate", "no", "eventual"], "no"),
    ],
)
def test_a_cancel_of_several_requests_promises_what_each_of_them_does(frees, means):
    cancel = [{"path": "/c", "frees_slot": one} for one in frees] or None
    assert Description.model_validate({"cancel": cancel}).cancel_frees_slot == means
