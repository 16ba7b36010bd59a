import pytest
from pydantic import ValidationError

from tasks.servers.description import DEFAULT, RESERVED_HEADERS, Description, from_shorthand


def describe(**fields):
    return Description.model_validate(fields)


def rule(then="done", **when):
    return {"if": when or {"status": 200}, "then": then}


def test_the_default_description_is_the_slot_protocol():
    assert describe() == DEFAULT
    assert DEFAULT.submit.path is None and DEFAULT.submit.body is None
    assert [step.path for step in DEFAULT.status] == ["/status/{{id}}"]
    assert (DEFAULT.mode, DEFAULT.cancel[0].path, DEFAULT.health.path) == ("auto", "/cancel/{{id}}", "/health")


def test_a_stored_description_is_read_back_unchanged():
    complete = describe(
        mode="async",
        submit={"headers": {"Authorization": "Bearer {{secret/KEY}}"}, "body": {"in": "{{payload}}"}, "id": "/id"},
        status=[{"rules": [rule("next", status=["2xx", 404])]}, {"path": "/q?id={{id}}"}],
        cancel=None,
        health={"active": {"metric": "running"}, "running": False, "rules": [rule("busy", pointer="/s", value=None)]},
        given_id="{{job/attempt_id}}",
    )
    assert Description.model_validate_json(complete.model_dump_json()) == complete
    assert Description.model_validate_json(complete.model_dump_json(exclude_defaults=True)) == complete


def test_a_single_status_step_needs_no_list():
    assert describe(status={"path": "/s/{{id}}"}).status == describe(status=[{"path": "/s/{{id}}"}]).status


def test_a_description_is_frozen():
    with pytest.raises(ValidationError):
        DEFAULT.submit.path = "/x"


@pytest.mark.parametrize(
    "fields",
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
def test_an_invalid_description_is_refused(fields):
    with pytest.raises(ValidationError):
        describe(**fields)


@pytest.mark.parametrize("step", ["submit", "status", "result", "cancel", "health"])
@pytest.mark.parametrize(
    "path", ["http://evil/x", "//evil", "status", "/../x", "/%2e%2e/x", "/a\\b", "/a\r\nb", "/a//b", "/a#b", "{{id}}"]
)
def test_a_path_that_leaves_its_server_is_refused(step, path):
    with pytest.raises(ValidationError):
        describe(**{step: {"path": path}})


@pytest.mark.parametrize("name", [*sorted(RESERVED_HEADERS), "X-Job-ID", "X-SOURCE", "Idempotency-key"])
def test_a_reserved_header_cannot_be_set(name):
    with pytest.raises(ValidationError, match="cannot be set"):
        describe(submit={"headers": {name: "x"}})


@pytest.mark.parametrize(
    ("name", "value"),
    [("X A", "x"), ("X:A", "x"), ("", "x"), ("X", "a\r\nY: b"), ("X", "a\n"), ("X", ""), ("X\n", "a")],
)
def test_a_malformed_header_is_refused(name, value):
    with pytest.raises(ValidationError):
        describe(submit={"headers": {name: value}})


def test_a_model_without_own_fields_uses_the_slot_protocol():
    model = from_shorthand()
    assert (model.mode, model.status[0].path, model.submit.id) == ("sync", "/status/{{id}}", "/job_id")


def test_the_own_fields_of_a_model_are_used():
    model = from_shorthand("async", "/v1/poll/{id}/state?full=1", "request/id")
    assert (model.mode, model.status[0].path) == ("async", "/v1/poll/{{id}}/state?full=1")
    assert model.submit.id == "/request~1id"
    assert from_shorthand("async", None, "/data/id").submit.id == "/data/id"


@pytest.mark.parametrize("template", ["/status", "/status/{job}", "/{id}/{id}", "/{{id}}", "http://x/{id}", "/../{id}"])
def test_an_invalid_poll_template_is_refused(template):
    with pytest.raises(ValueError):
        from_shorthand("async", template)


def test_an_unknown_model_type_is_refused():
    with pytest.raises(ValueError):
        from_shorthand("batch")


@pytest.mark.parametrize(
    ("submit", "sends_payload_alone"),
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
def test_the_payload_is_sent_alone_if_no_other_part_of_the_submit_uses_it(submit, sends_payload_alone):
    assert describe(submit=submit).sends_payload_alone is sends_payload_alone


def test_the_payload_is_not_sent_alone_if_the_submit_contains_its_output_size():
    size = {"pointer": "/n", "default": 1}
    assert not describe(submit={"headers": {"X-N": "{{run/output_size}}"}}, output_size=size).sends_payload_alone


@pytest.mark.parametrize(
    ("of_requests", "expected"),
    [
        ([], "no"),
        (["immediate"], "immediate"),
        (["immediate", "eventual"], "eventual"),
        (["immediate", "no", "eventual"], "no"),
    ],
)
def test_a_cancel_of_several_requests_frees_the_slot_as_its_weakest_request(of_requests, expected):
    cancel = [{"path": "/c", "frees_slot": value} for value in of_requests] or None
    assert Description.model_validate({"cancel": cancel}).cancel_frees_slot == expected
