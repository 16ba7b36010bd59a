"""Descriptions of a model's servers: sent with its configuration, validated as a whole, stored in versions."""

import re
from typing import Any

import jsonschema
import orjson
import pytest

from routing.dispatch.outcome import OutcomeKind
from slotkeeper.clock import now_ms
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.states import Reason
from slotkeeper.registry import server_descriptions
from tasks import server_adapters as plans
from tasks import server_push
from tasks.server_adapters import Misconfigured, adapter_for
from tasks.servers import Description, RunDetails, presets
from tasks.servers.validation import InvalidDescription, merge, validate_description
from tasks.services import catalog, database
from tests.support import passes
from tests.support.api import Api
from tests.support.blocking import Blocking
from tests.support.ends import hand_back, store_end
from tests.support.scripted import Scripted, answer
from tools.cluster.direct_starts import store_remote_id, store_start

CONFIG = "/admin/model-configs/zimg"
RULE = {"if": {"status": 200}, "then": "done"}


def _put(api: Api, body: Any) -> Any:
    return api.client.put(CONFIG, json=body)


def _version(api: Api, **described: Any) -> str:
    answered = _put(api, {"description": described})
    assert answered.status_code == 200, answered.json
    return answered.json["described_by"]


# -- validated by the API --------------------------------------------------------------------------------------

UNFIT: list[tuple[str, Any, str, str]] = [
    ("a pointer without a slash", {"submit": {"id": "job_id"}}, "/submit/id", "starts with '/'"),
    ("a wrong escape", {"submit": {"result": "/a~2"}}, "/submit/result", "'~' is followed by 0 or 1"),
    (
        "a pointer of a rule",
        {"status": [{"rules": [{"if": {"pointer": "x"}, "then": "done"}]}]},
        "/status/0/rules/0/if/pointer",
        "JSON pointer",
    ),
    (
        "of a single step",
        {"status": {"rules": [{"if": {"pointer": "x"}, "then": "done"}]}},
        "/status/rules/0/if/pointer",
        "JSON pointer",
    ),
    (
        "a pattern that takes long",
        {"submit": {"rules": [{"if": {"text": "(?:a{900}){2}"}, "then": "retry"}]}},
        "/submit/rules/0/if/text",
        "RE2",
    ),
    (
        "a pattern that is none",
        {"submit": {"rules": [{"if": {"text": "("}, "then": "retry"}]}},
        "/submit/rules/0/if/text",
        "regular expression",
    ),
    ("an absolute URL", {"submit": {"path": "http://evil.example/x"}}, "/submit/path", "a path starts with one '/'"),
    ("another host", {"cancel": {"path": "//evil.example/{{id}}"}}, "/cancel/path", "names no other server"),
    ("a way up", {"health": {"path": "/a/../b"}}, "/health/path", "'..'"),
    ("a hidden way up", {"status": {"path": "/%2e%2e/{{id}}"}}, "/status/path", "'..'"),
    ("a source that is none", {"submit": {"body": {"a": ["{{nope}}"]}}}, "/submit/body/a/0", "not known here"),
    ("a source that is not there yet", {"submit": {"body": "{{id}}"}}, "/submit/body", "not known here"),
    ("a job's field that is none", {"submit": {"body": "{{job/nope}}"}}, "/submit/body", "names nothing"),
    ("a run's field that is none", {"submit": {"body": {"s": "{{run/swop}}"}}}, "/submit/body/s", "run/swap"),
    ("what is told of a run elsewhere", {"cancel": {"path": "/{{run/swap}}"}}, "/cancel/path", "not known here"),
    (
        "an output size of which nothing is said",
        {"submit": {"headers": {"X-Size": "{{run/output_size}}"}}},
        "/submit/headers/X-Size",
        "add output_size",
    ),
    ("an output size without a default", {"output_size": {"pointer": "/n"}}, "/output_size", "'default' is missing"),
    (
        "an output size that stands nowhere",
        {"output_size": {"pointer": ["/n", "m"], "default": 1}},
        "/output_size/pointer/1",
        "a JSON pointer",
    ),
    ("a secret in an address", {"submit": {"path": "/{{secret/KEY}}"}}, "/submit/path", "not known here"),
    ("a header of ours", {"submit": {"headers": {"X-Job-Id": "1"}}}, "/submit/headers/X-Job-Id", "leave it out"),
    ("a header's template", {"submit": {"headers": {"X-A": "{{nope}}"}}}, "/submit/headers/X-A", "not known here"),
    ("a header's line break", {"submit": {"headers": {"X-A": "a\r\nX-B: c"}}}, "/submit/headers/X-A", "pattern"),
    ("a large body", {"submit": {"body": "x" * 70_000}}, "/submit/body", "65536 bytes"),
    ("a deep body", {"submit": {"body": orjson.loads("[" * 40 + "]" * 40)}}, "/submit/body", "32 levels"),
    ("a very deep one", {"submit": {"body": orjson.loads("[" * 200 + "]" * 200)}}, "", "64 levels"),
    ("a very large one", {"submit": {"rules": [{**RULE, "message": "x" * 10_000}] * 30}}, "", "262144 bytes"),
    ("a field that is none", {"submit": {"heders": {}}}, "/submit/heders", "remove it"),
    ("a word that is none", {"mode": "later"}, "/mode", "'sync', 'async', 'auto' or 'callback'"),
    (
        "a rule that means nothing there",
        {"status": {"rules": [{**RULE, "then": "busy"}]}},
        "/status/rules/0/then",
        "means nothing here",
    ),
    (
        "a next after the last",
        {"status": [{}, {"rules": [{**RULE, "then": "next"}]}]},
        "/status/1/rules/0/then",
        "no step after",
    ),
    (
        "a status that is none",
        {"submit": {"rules": [{"if": {"status": [200, 999]}, "then": "done"}]}},
        "/submit/rules/0/if/status/1",
        "100 to 599",
    ),
    (
        "a rule without a meaning",
        {"submit": {"rules": [{"if": {"status": 200}}]}},
        "/submit/rules/0",
        "'then' is missing",
    ),
    ("too many rules", {"submit": {"rules": [RULE] * 51}}, "/submit/rules", "50"),
    ("a step that is no object", {"cancel": 3}, "/cancel", "dictionary"),
    (
        "two places of one number",
        {"health": {"active": {"pointer": "/a", "count": "/b"}}},
        "/health/active",
        "a pointer, a count or a metric",
    ),
    (
        "a secret that is not set",
        {"submit": {"headers": {"Authorization": "Bearer {{secret/KEY}}"}}},
        "/submit/headers/Authorization",
        "secrets set KEY",
    ),
]


@pytest.mark.parametrize("given, pointer, remedy", [row[1:] for row in UNFIT], ids=[row[0] for row in UNFIT])
def test_an_invalid_description_is_refused_with_a_json_pointer_and_a_remedy(api, given, pointer, remedy):
    refused = _put(api, {"description": given})
    assert refused.status_code == 422 and refused.content_type == "application/problem+json"
    (error,) = refused.json["errors"]
    assert error["pointer"] == "/description" + pointer and remedy in error["message"]
    assert api.client.get(CONFIG).status_code == 404, "nothing was stored"


@pytest.mark.parametrize("given, pointer, remedy", [row[1:] for row in UNFIT], ids=[row[0] for row in UNFIT])
def test_the_description_of_a_registration_is_validated_in_the_same_way(given, pointer, remedy):
    with pytest.raises(InvalidDescription) as caught:
        validate_description({"preset": "slot-protocol", "description": given}, lambda _: False)
    (fault,) = caught.value.faults
    assert fault.pointer == "/description" + pointer and remedy in fault.message


def test_one_response_lists_all_errors_of_a_description(api):
    refused = _put(api, {"description": {"submit": {"id": "x"}, "cancel": {"path": "//x"}, "mode": "m"}})
    assert {error["pointer"] for error in refused.json["errors"]} == {
        "/description/submit/id",
        "/description/cancel/path",
        "/description/mode",
    }


def test_a_preset_that_is_none_is_refused_with_those_there_are(api):
    refused = _put(api, {"preset": "slot-protcol"})
    (error,) = refused.json["errors"]
    assert (refused.status_code, error["pointer"]) == (422, "/preset") and "slot-protocol" in error["message"]


@pytest.mark.parametrize("beside", [{"preset": "slot-protocol"}, {"description": {}}])
@pytest.mark.parametrize("short", [{"model_type": "async"}, {"poll_endpoint_template": "/s/{id}"}, {"id_field": "x"}])
def test_the_shorthand_and_a_description_are_not_mixed(api, beside, short):
    refused = _put(api, {**beside, **short})
    (error,) = refused.json["errors"]
    assert (refused.status_code, error["pointer"]) == (422, "/" + next(iter(short)))


def test_nested_objects_are_merged_and_all_else_is_replaced():
    base = {"submit": {"id": "/id", "rules": [1, 2]}, "cancel": {"path": "/c"}, "health": {"path": "/h"}}
    over = {"submit": {"rules": [3]}, "cancel": None, "health": {"read_s": 1}, "mode": "async"}
    assert merge(base, over) == {
        "submit": {"id": "/id", "rules": [3]},
        "cancel": None,
        "health": {"path": "/h", "read_s": 1},
        "mode": "async",
    }


def test_a_fault_of_what_was_merged_is_shown_where_it_was_given(api, monkeypatch):
    monkeypatch.setattr(presets, "get", lambda _: {"status": [{"rules": [{**RULE, "then": "next"}]}, {}]})
    refused = _put(api, {"preset": "two steps", "description": {"status": [{"rules": [{**RULE, "then": "next"}]}]}})
    assert refused.json["errors"][0]["pointer"] == "/description/status/0/rules/0/then"


# -- shown, and in versions ------------------------------------------------------------------------------------


def test_a_model_configuration_shows_the_given_and_the_effective_description(api):
    given = {"preset": "slot-protocol", "description": {"status": {"path": "/v1/{{id}}"}}}
    for shown in (_put(api, given).json, api.client.get(CONFIG).json):
        assert shown["overrides"] == given
        assert shown["description"]["status"][0]["path"] == "/v1/{{id}}"
        assert shown["description"]["cancel"][0]["path"] == "/cancel/{{id}}"
        assert re.fullmatch("[0-9a-f]{32}", shown["described_by"])


def test_without_a_description_the_slot_protocol_is_in_force(api):
    shown = _put(api, {"max_retries": 3}).json
    assert shown["described_by"] is None and shown["description"]["submit"]["id"] == "/job_id"


def test_the_shorthand_fields_also_create_a_version_of_the_description(api):
    shown = _put(api, {"model_type": "async", "poll_endpoint_template": "/s/{id}", "id_field": "rid"}).json
    assert (shown["description"]["submit"]["id"], shown["description"]["mode"]) == ("/rid", "async")
    assert shown["described_by"] is not None
    assert shown["overrides"] == {"model_type": "async", "poll_endpoint_template": "/s/{id}", "id_field": "rid"}


def test_the_same_description_is_the_same_version(api):
    first = _version(api, mode="async")
    assert _version(api, mode="callback") != first
    assert _version(api, mode="async") == first
    assert api.client.delete(CONFIG).json["described_by"] is None


def test_a_registration_may_override_the_description_of_the_model(api):
    of_model = _version(api, mode="async")
    body = {"model": "zimg", "server": "gpu1", "endpoint": "http://127.0.0.1:9/x", "slots": 1}
    own = {"description": {"mode": "sync", "status": {"path": "/own/{{id}}"}}}

    def now() -> str | None:
        return api.dispatcher.catalog.refresh().find_description("gpu1", "zimg")

    assert api.client.post("/admin/register", json=body).status_code == 201 and now() == of_model
    answered = api.client.post("/admin/register", json=body | own)
    assert now() not in (None, of_model) and answered.json["described"]["zimg"]["description"] == own["description"]
    kept = now()
    api.client.post("/admin/register", json=body)
    assert now() == kept, "an omitted field keeps its value"
    assert api.client.post("/admin/register", json=body | {"preset": None}).json["described"] == {}
    assert now() == of_model


def test_the_description_in_a_registration_is_validated(api):
    body = {"model": "zimg", "server": "gpu1", "endpoint": "http://127.0.0.1:9/x", "slots": 1}
    refused = api.client.post("/admin/register", json=body | {"description": {"submit": {"id": "x"}}})
    assert (refused.status_code, refused.json["errors"][0]["pointer"]) == (422, "/description/submit/id")
    assert "gpu1" not in api.dispatcher.catalog.refresh().servers


def test_a_run_stores_the_description_version_with_which_it_started(api):
    version = _version(api, mode="async")
    api.register("zimg", "gpu0")
    task = api.started()
    assert task.run.described_by == api.job(task.run.job.id).described_by == version


def test_a_resumed_run_keeps_its_description_version_and_a_new_run_uses_the_current_one(api):
    first = _version(api, mode="async")
    api.register("zimg", "gpu0")
    task = api.started()
    store, job_id = api.dispatcher.store, task.run.job.id
    store_remote_id(store, job_id, 1, "r1", now_ms())
    second = _version(api, mode="callback")
    hand_back(api.dispatcher, task)
    again = store_start(store, job_id, "gpu0", "gpu0-slot0", "l w", now_ms(), 0, second)
    assert (again.remote_id, again.described_by) == ("r1", first)
    store_end(store, job_id, again.attempt, Reason.SERVER_LOST, now_ms())
    anew = store_start(store, job_id, "gpu0", "gpu0-slot0", "l w", now_ms(), 0, second)
    assert (anew.remote_id, anew.described_by) == (None, second)


def test_a_run_whose_request_was_never_sent_restarts_with_the_new_description(api):
    first = _version(api, mode="async")
    api.register("zimg", "gpu0")
    task = api.started()
    assert task.run.described_by == first
    hand_back(api.dispatcher, task)
    again = store_start(api.dispatcher.store, task.run.job.id, "gpu0", "gpu0-slot0", "l w", now_ms(), 0, "another")
    assert (again.remote_id, again.described_by) == (None, "another")


def test_a_version_that_nothing_names_is_removed_after_a_while(api):
    old = _version(api, mode="async")
    new = _version(api, mode="callback")
    later = now_ms() + server_descriptions.KEEP_UNUSED_MS
    assert server_descriptions.delete_unused(database(), now_ms()) == 0, "it is only noted"
    assert server_descriptions.delete_unused(database(), later - 60_000) == 0, (
        "a worker may not have heard of the change"
    )
    assert server_descriptions.delete_unused(database(), later + 1) == 1
    assert (
        server_descriptions.read_description(database(), old) is None
        and server_descriptions.read_description(database(), new) is not None
    )


def test_a_version_that_a_run_names_stays(api):
    old = _version(api, mode="async")
    api.register("zimg", "gpu0")
    task = api.started()
    _version(api, mode="callback")
    later = now_ms() + 2 * server_descriptions.KEEP_UNUSED_MS
    assert [server_descriptions.delete_unused(database(), at) for at in (now_ms(), later, later)] == [0, 0, 0]
    assert server_descriptions.read_description(database(), old) is not None
    assert adapter_for("http://127.0.0.1:9/", api.dispatcher.catalog.resolve("zimg"), task.run.described_by)


def test_an_unused_version_that_is_used_again_is_not_deleted(api):
    old = _version(api, mode="async")
    _version(api, mode="callback")
    server_descriptions.delete_unused(database(), now_ms())
    assert _version(api, mode="async") == old
    assert server_descriptions.delete_unused(database(), now_ms() + 2 * server_descriptions.KEEP_UNUSED_MS) == 0
    assert server_descriptions.read_description(database(), old) is not None


def test_a_missing_description_version_raises_misconfigured(api):
    api.register("zimg", "gpu0")
    with pytest.raises(Misconfigured, match="not in the record"):
        adapter_for("http://127.0.0.1:9/", api.dispatcher.catalog.resolve("zimg"), "0" * 32)


def test_a_version_is_read_and_compiled_once(api, monkeypatch):
    version = _version(api, mode="async", status={"path": "/once/{{id}}"})
    api.register("zimg", "gpu0")
    model = api.dispatcher.catalog.resolve("zimg")
    adapter_for("http://127.0.0.1:9/", model, version)

    def nobody(*_: Any) -> None:
        raise DatabaseUnavailable("not to be asked")

    monkeypatch.setattr(server_descriptions, "read_description", nobody)
    assert plans.is_loaded(version)
    assert adapter_for("http://127.0.0.1:9/", model, version) is adapter_for("http://127.0.0.1:9/", model, version)
    adapter_for("http://127.0.0.2:9/", model, version)


def test_the_release_before_takes_a_description_away_with_the_rest(api):
    """It replaces all overrides, and knows of no versions."""
    _version(api, mode="async")
    catalog().configure("zimg", {"max_retries": 5}, now_ms())
    assert api.dispatcher.catalog.refresh().models["zimg"].described_by is None


# -- used ------------------------------------------------------------------------------------------------------


def test_a_health_check_follows_the_description(api):
    with Scripted(lambda seen: answer({"q": [1, 2]}) if seen.path == "/queue" else answer(b"", 404)) as there:
        described = {"health": {"path": "/queue", "active": {"count": "/q"}, "job_ids": None}}
        assert _put(api, {"description": described}).status_code == 200
        body = {"model": "zimg", "server": "gpu0", "endpoint": there.url + "/x", "slots": 2}
        assert api.client.post("/admin/register", json=body).status_code == 201
        report = passes.read_report(api.dispatcher.catalog.get().servers["gpu0"])
    assert (report.up, report.active_jobs, report.job_ids) == (True, 2, None)


def test_a_server_without_a_health_check_is_neither_up_nor_down(api):
    assert _put(api, {"description": {"health": None}}).status_code == 200
    body = {"model": "zimg", "server": "gpu0", "endpoint": "http://127.0.0.1:9/x", "slots": 2}
    assert api.client.post("/admin/register", json=body).status_code == 201
    assert passes.read_report(api.dispatcher.catalog.get().servers["gpu0"]).up is None


def test_a_health_check_follows_the_description_that_defines_one_among_the_servers_models(api):
    with Scripted(lambda seen: answer({"active_jobs": 1})) as there:
        for model, health in (("a", None), ("b", {"path": "/h"})):
            config = api.client.put(f"/admin/model-configs/{model}", json={"description": {"health": health}})
            assert config.status_code == 200
            body = {"model": model, "server": "gpu0", "endpoint": there.url + "/x", "slots": 2}
            assert api.client.post("/admin/register", json=body).status_code == 201
        report = passes.read_report(api.dispatcher.catalog.get().servers["gpu0"])
        assert [seen.path for seen in there.seen] == ["/h"] and report.active_jobs == 1


def test_a_health_count_of_waiting_jobs_is_not_taken_as_a_count_of_runs(api):
    with Scripted(lambda _: answer({"active_jobs": 0})) as there:
        _put(api, {"description": {"health": {"running": False}}})
        body = {"model": "zimg", "server": "gpu0", "endpoint": there.url + "/x", "slots": 2}
        api.client.post("/admin/register", json=body)
        report = passes.read_report(api.dispatcher.catalog.get().servers["gpu0"])
    assert not report.shows_runs


def test_a_stored_description_builds_the_requests_that_were_validated(api):
    _put(api, {"description": {"submit": {"path": "/v2/run", "body": {"input": "{{payload}}"}, "result": "/out"}}})
    model = api.dispatcher.catalog.refresh().models["zimg"]
    with Scripted(lambda _: answer({"status": "done", "out": 7})) as there:
        outcome = Blocking(adapter_for(there.url, model, model.described_by)).submit(
            RunDetails("j", 1, {"n": 1}, deadline_s=5)
        )
        assert (there.seen[0].path, there.seen[0].json) == ("/v2/run", {"input": {"n": 1}})
    assert (outcome.kind, outcome.result) == (OutcomeKind.DONE, 7)


@pytest.mark.parametrize("keeps, read", [(True, OutcomeKind.DONE), (False, None)])
def test_a_push_for_a_server_that_returns_each_result_once_is_left_to_the_worker(api, keeps, read):
    _version(api, mode="async", keeps_results=keeps)
    api.register("zimg", "gpu0")
    task = api.started()
    outcome = server_push.read_push(api.job(task.run.job.id), b'{"status": "done", "result": 1}')
    assert (outcome and outcome.kind) == read


def test_the_result_of_a_run_that_a_push_ends_is_fetched_where_it_stands(api):
    result = {"path": "/result/{{id}}", "result": "/out"}
    _version(api, mode="callback", given_id="{{job/id}}", result=result)
    with Scripted(lambda _: answer({"out": 7})) as there:
        api.register("zimg", "gpu0", endpoint=there.url + "/generate")
        job = api.job(api.started().run.job.id)
        outcome = server_push.read_push(job, b'{"status": "done"}')
    assert (outcome and outcome.result, [seen.path for seen in there.seen]) == (7, [f"/result/{job.id}"])


def test_an_editor_has_a_schema_that_takes_what_can_be_stored(api):
    schema = api.client.get("/admin/description-schema").json
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for given in [*map(presets.get, presets.names()), {"status": {"rules": [RULE]}}, {"status": [{"rules": [RULE]}]}]:
        assert [error.message for error in validator.iter_errors(given)] == []
    assert not validator.is_valid({"sumbit": {}}) and not validator.is_valid({"mode": "later"})


def test_every_preset_can_be_given(api):
    for name in presets.names():
        secrets = Description.model_validate(presets.get(name)).secrets
        for secret in secrets:
            put = api.client.put(f"/admin/secrets/{secret}", json={"value": "a-long-value", "models": None})
            assert put.status_code in (200, 201)
        assert _put(api, {"preset": name}).status_code == 200, name
