import pytest

from routing.dispatch.outcome import OutcomeKind
from tasks.servers.description import JOB_SOURCES, SUBMIT_SOURCES
from tasks.servers.templates import (
    BodyTemplate,
    CompiledOutputSize,
    HeaderTemplates,
    PathTemplate,
    TemplateError,
    TemplateValues,
    check_path,
    to_json,
)
from tasks.servers.values import RunDetails

PAYLOAD = {"prompt": "a cat", "n": 3, "on": True, "none": None, "list": [1, {"x": 2}], "evil": "{{secret/KEY}}"}
SECRETS = {"KEY": "s3cret"}


def make_values(payload=PAYLOAD, **more):
    more = {"deadline_s": 2.5, "model_version": "2.1", "swap": False, **more}
    call = RunDetails("job-1", 2, payload, callback_url="http://me/cb", callback_token="tok", **more)
    return TemplateValues(call, "srv/7", SECRETS.get, output_size=CompiledOutputSize((("max",), ("n",)), 256))


def fill_body(template, payload=PAYLOAD):
    return BodyTemplate(template, SUBMIT_SOURCES | {"id"}).fill(make_values(payload))


def fill_path(template, payload=PAYLOAD, sources=JOB_SOURCES):
    return PathTemplate(template, sources).fill(make_values(payload))


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{{payload}}", PAYLOAD),
        ("{{ payload/n }}", 3),
        ("{{payload/on}}", True),
        ("{{payload/none}}", None),
        ("{{payload/list/1/x}}", 2),
        ("{{payload/list}}", [1, {"x": 2}]),
        ("{{job/id}}", "job-1"),
        ("{{job/attempt}}", 2),
        ("{{job/attempt_id}}", "job-1-2"),
        ("{{run/deadline_ms}}", 2_500),
        ("{{run/deadline_s}}", 2),
        ("{{run/model_version}}", "2.1"),
        ("{{run/swap}}", False),
        ("{{run/output_size}}", 3),
        ("{{id}}", "srv/7"),
        ("{{callback_url}}", "http://me/cb"),
        ("{{callback_token}}", "tok"),
        ("{{secret/KEY}}", "s3cret"),
    ],
)
def test_a_string_that_is_one_template_keeps_the_type_of_the_value(template, filled):
    assert fill_body(template) == filled and type(fill_body(template)) is type(filled)


@pytest.mark.parametrize(
    ("payload", "size"),
    [
        ({"max": 7, "n": 9}, 7),
        ({"max": 0, "n": 9}, 0),
        ({"n": 9}, 9),
        *[({"max": invalid, "n": 9}, 9) for invalid in (None, "7", True, -1, 7.5, [7])],
        ({}, 256),
        ("a text", 256),
        (None, 256),
    ],
)
def test_the_output_size_is_the_first_one_in_the_payload_or_the_default(payload, size):
    assert fill_body("{{run/output_size}}", payload) == size


@pytest.mark.parametrize(
    ("deadline_s", "ms", "s"), [(0.0001, 1, 1), (0.9, 900, 1), (1.999, 1999, 1), (1e9, 604_800_000, 604_800)]
)
def test_the_deadline_of_a_run_is_at_least_one_and_rounded_down(deadline_s, ms, s):
    template = BodyTemplate(["{{run/deadline_ms}}", "{{run/deadline_s}}"], SUBMIT_SOURCES)
    assert template.fill(make_values(deadline_s=deadline_s)) == [ms, s]


def test_the_values_of_a_run_are_allowed_in_paths_and_headers():
    text = "{{run/swap}}-{{run/deadline_s}}-{{run/output_size}}"
    assert fill_path(f"/x?as={text}", sources=SUBMIT_SOURCES) == "/x?as=false-2-3"
    assert HeaderTemplates({"X-Run": text}, SUBMIT_SOURCES).fill(make_values()) == {"X-Run": "false-2-3"}


def test_the_error_of_an_unknown_name_lists_the_allowed_names():
    with pytest.raises(ValueError, match=r"job/attempt_id, .*payload, payload/.*run/output_size, run/swap"):
        fill_body("{{run/swop}}")
    with pytest.raises(ValueError, match="there is: id, job/attempt") as raised:
        BodyTemplate("{{run/swap}}", JOB_SOURCES)
    assert "run/swap," not in str(raised.value) and "secret/NAME" in str(raised.value)


def test_a_value_in_a_longer_string_is_inserted_as_text():
    assert fill_body("{{payload/n}} times {{payload/prompt}}, {{payload/on}} {{payload/list}}") == (
        '3 times a cat, true [1,{"x":2}]'
    )


def test_a_body_keeps_its_structure():
    template = {"input": {"p": "{{payload/prompt}}", "k": [1, "{{payload/n}}", None, "", "}{"]}}
    assert fill_body(template) == {"input": {"p": "a cat", "k": [1, 3, None, "", "}{"]}}


def test_an_inserted_value_is_not_expanded_again():
    assert fill_body("{{payload/evil}}") == "{{secret/KEY}}"
    assert fill_body("x {{payload/evil}}") == "x {{secret/KEY}}"


@pytest.mark.parametrize(
    "template",
    [
        "{{nope}}",
        "{{}}",
        "{{job}}",
        "{{job/secret}}",
        "{{id/x}}",
        "{{secret}}",
        "{{secret/a b}}",
        "{{payload/~9}}",
        "{{payload",
        "a }} b",
        "{{payload{{id}}}}",
        "{{raw:id}}",
        {"{{id}}": 1},
        "{{payloads}}",
    ],
)
def test_an_invalid_template_is_refused(template):
    with pytest.raises(ValueError, match=r"template|known|names nothing|pointer"):
        BodyTemplate(template, SUBMIT_SOURCES | {"id"})


def test_a_body_template_with_too_many_levels_is_refused():
    deep: object = "x"
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValueError, match="levels"):
        BodyTemplate(deep, SUBMIT_SOURCES)


def test_a_payload_without_a_required_value_fails_the_job():
    with pytest.raises(TemplateError) as raised:
        fill_body("{{payload/seed}}")
    assert (raised.value.kind, raised.value.code) == (OutcomeKind.FAILED, "bad_payload")


def test_a_missing_secret_costs_a_retry_and_is_named():
    with pytest.raises(TemplateError, match="secret/GONE") as raised:
        fill_body("{{secret/GONE}}")
    assert (raised.value.kind, raised.value.code) == (OutcomeKind.RETRY, "misconfigured")


def test_a_value_in_a_path_is_percent_encoded():
    assert fill_path("/status/{{id}}") == "/status/srv%2F7"
    assert fill_path("/s/{{payload/prompt}}?q={{payload/prompt}}") == "/s/a%20cat?q=a%20cat"
    assert fill_path("/s/{{payload/a}}", {"a": "x?y#z&ü"}) == "/s/x%3Fy%23z%26%C3%BC"


def test_a_raw_value_keeps_its_slashes():
    assert fill_path("/models/{{raw:payload/m}}/run", {"m": "org/model"}) == "/models/org/model/run"


@pytest.mark.parametrize(
    "value", ["..", ".", "../x", "a/../b", "%2e%2e", "..%2fadmin", "a\\b", "a\nb", "", "\x00", "%00"]
)
@pytest.mark.parametrize("template", ["/s/{{payload/v}}", "/s/{{raw:payload/v}}"])
def test_a_value_cannot_leave_its_path(template, value):
    with pytest.raises(TemplateError):
        fill_path(template, {"v": value})


@pytest.mark.parametrize("value", ["/x", "a//b", "x/", "a?b=1", "a#b", "a&b"])
def test_a_raw_value_cannot_add_a_host_or_a_query(value):
    with pytest.raises(TemplateError):
        fill_path("/s/{{raw:payload/v}}/t", {"v": value})


@pytest.mark.parametrize("value", [None, True, 1.5, [], {}])
def test_only_strings_and_integers_are_allowed_in_paths(value):
    with pytest.raises(TemplateError):
        fill_path("/s/{{payload/v}}", {"v": value})


def test_a_raw_value_is_refused_in_a_query():
    with pytest.raises(ValueError, match="raw"):
        PathTemplate("/s?q={{raw:payload}}", JOB_SOURCES)


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "ü", "", " a", "\x00"])
def test_a_value_cannot_break_a_header(value):
    with pytest.raises(TemplateError):
        HeaderTemplates({"X-A": "{{payload/v}}"}, JOB_SOURCES).fill(make_values({"v": value}))


def test_an_integer_beyond_64_bits_is_written_exactly():
    assert to_json({"seed": 2**70}) == b'{"seed":1180591620717411303424}'


@pytest.mark.parametrize("value", [{1, 2}, object(), {"big": 2**70, "odd": float("nan")}])
def test_a_value_that_json_cannot_represent_fails_the_job(value):
    with pytest.raises(TemplateError) as raised:
        to_json(value)
    assert (raised.value.kind, raised.value.code) == (OutcomeKind.FAILED, "bad_payload")


@pytest.mark.parametrize(
    ("endpoint", "template", "filled"),
    [
        ("", "{{endpoint}}/run", "/run"),
        ("/v2/models/a%20b", "{{endpoint}}/infer", "/v2/models/a%20b/infer"),
        ("/v1/models/cat", "{{endpoint}}:predict", "/v1/models/cat:predict"),
        ("/gpu7", "{{endpoint}}/status/{{id}}", "/gpu7/status/srv%2F7"),
    ],
)
def test_a_path_template_can_extend_the_registered_endpoint(endpoint, template, filled):
    values = make_values()
    values.endpoint = endpoint
    assert PathTemplate(template, JOB_SOURCES).fill(values) == filled


@pytest.mark.parametrize("template", ["{{endpoint}}@evil/x", "{{endpoint}}.evil/x", "{{endpoint}}:80/x"])
def test_a_template_after_an_endpoint_without_a_path_never_extends_the_host(template):
    with pytest.raises(TemplateError) as raised:
        fill_path(template)
    assert (raised.value.kind, raised.value.code) == (OutcomeKind.RETRY, "misconfigured")


@pytest.mark.parametrize("template", ["/x/{{endpoint}}", "/x?at={{endpoint}}", "{{id}}{{endpoint}}"])
def test_the_endpoint_is_allowed_only_at_the_beginning_of_a_path(template):
    with pytest.raises(ValueError, match="beginning"):
        PathTemplate(template, JOB_SOURCES)


def test_the_endpoint_is_allowed_only_in_paths():
    with pytest.raises(ValueError, match="not known here"):
        BodyTemplate("{{endpoint}}", SUBMIT_SOURCES)


@pytest.mark.parametrize("value", ["a" * 2_000, "ä" * 400])
def test_a_value_that_makes_a_path_too_long_fails_the_job(value):
    assert fill_path("/x?q={{payload/q}}", {"q": "a" * 1_995}) == "/x?q=" + "a" * 1_995
    with pytest.raises(TemplateError, match="at most 2000 characters") as raised:
        fill_path("/x?q={{payload/q}}", {"q": value})
    assert raised.value.kind is OutcomeKind.FAILED


def test_a_value_that_is_too_long_for_a_header_fails_the_job():
    headers = HeaderTemplates({"X-Prompt": "{{payload/prompt}}"}, SUBMIT_SOURCES)
    assert len(headers.fill(make_values({"prompt": "a" * 8_000}))["X-Prompt"]) == 8_000
    with pytest.raises(TemplateError, match="at most 8000 characters") as raised:
        headers.fill(make_values({"prompt": "a" * 8_001}))
    assert raised.value.kind is OutcomeKind.FAILED


# -- check_path ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/status/1", "/v1/models/a%2Fb:predict", "/a?id=1&x=..", "/a..b/.c", "/a?u=http://x"]
)
def test_a_plain_path_is_accepted(path):
    check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("status", "", "http://evil/x", "//evil/x", "/a//b", "/../x", "/a/..", "/a/../b", "/./a", "/a/..;x/b"),
        *("/%2e%2e/x", "/%2E./x", "/a/..%2fb", "/%252e%252e/x", "/%25252e%25252e/x", "/x%3f/../y"),
        *("/a\\b", "/a%5cb", "/a\r\nX: 1", "/a%0d%0aX", "/a%00", "/a\x7f", "/a?x=%0a", "/a#b", "/" + "a" * 2000),
        "/%" + "25" * 10 + "2e",
    ],
)
def test_an_unsafe_path_is_refused(path):
    with pytest.raises(ValueError, match="a path"):
        check_path(path)
