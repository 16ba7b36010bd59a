"""The web page without a browser: log-in, the screens, and the effects of forms."""

import re
from collections.abc import Iterator
from html import escape
from typing import Any
from urllib.parse import quote

import pytest

from app.auth import session_cookie
from app.page.admin_pages import display_setting
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import END_SENTENCES, Reason, State
from slotkeeper.registry.api_keys import hash_key
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.sessions import RevokedSessions
from slotkeeper.registry.tenant_limits import NO_LIMITS
from slotkeeper.registry.tenants import Tenants
from tasks import services
from tests.support.api import Api
from tests.support.batch_lines import CAT, create, send
from tests.support.builders import an_ended_job
from tests.support.callbacks import claim, due_ids, failed
from tests.support.clock import set_clock
from tests.support.keys import add_key, identity_of
from tests.support.visitor import Visitor, key_of, visitor

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
EVIL = '"><script>alert(1)</script>'


@pytest.fixture
def operator(api: Api) -> Visitor:
    """Logged in where keys are asked for."""
    found = visitor(api)
    found.log_in(key_of(api, "root", admin=True))
    return found


def _screens(api: Api) -> Iterator[tuple[str, str]]:
    """(method, address) of all of the page, but for what everybody may see."""
    open_to_all = {"/page/log-in", "/page/log-out", "/page/theme", "/page/static/<name>"}
    for rule in api.client.application.url_map.iter_rules():
        if rule.endpoint.startswith("page.") and rule.rule not in open_to_all:
            path = rule.rule
            for name in rule.arguments:
                path = path.replace(f"<path:{name}>", "x").replace(f"<int:{name}>", "0").replace(f"<{name}>", "x")
            for method in (rule.methods or set()) & {"GET", "POST"}:
                yield method, path


def _ask(who: Visitor, method: str, path: str) -> Any:
    return who.get(path) if method == "GET" else who.post(path)


# -- log-in ----------------------------------------------------------------------------------------------------


@KEYED
def test_every_screen_redirects_a_visitor_without_a_session_to_the_log_in(api: Api, settings: dict[str, str]) -> None:
    stranger = visitor(api)
    for method, path in _screens(api):
        answer = _ask(stranger, method, path)
        place = f"/page/log-in?next={quote(path)}" if method == "GET" and path != "/" else "/page/log-in"
        assert (answer.status_code, answer.headers.get("Location")) == (303, place), path


@KEYED
@pytest.mark.parametrize(
    ("link", "place"),
    [("/page/jobs?state=dead&model=zimg", "/page/jobs?state=dead&model=zimg"), ("//evil.example/", "/"), ("x", "/")],
)
def test_a_log_in_redirects_to_the_requested_screen(api: Api, settings: dict[str, str], link: str, place: str) -> None:
    somebody, key = visitor(api), key_of(api, "root", admin=True)
    form = somebody.get(f"/page/log-in?next={quote(link)}").text
    assert f'name="next" value="{escape(place)}"' in form
    assert somebody.post("/page/log-in", key=key, next=link).headers["Location"] == place
    assert somebody.get(f"/page/log-in?next={quote(link)}").headers["Location"] == place


@KEYED
def test_a_link_is_kept_through_the_log_in(api: Api, settings: dict[str, str]) -> None:
    answer = visitor(api).get("/page/jobs?model=zimg")
    assert answer.headers["Location"] == f"/page/log-in?next={quote('/page/jobs?model=zimg')}"


@KEYED
def test_a_key_opens_a_visit_and_log_out_ends_it(api: Api, settings: dict[str, str], operator: Visitor) -> None:
    assert "Overview" in operator.get("/").text
    assert operator.post("/page/log-out").headers["Location"] == "/page/log-in"
    assert operator.get("/").status_code == 303


@KEYED
def test_a_wrong_key_opens_nothing(api: Api, settings: dict[str, str]) -> None:
    stranger = visitor(api)
    assert stranger.log_in("sk_wrong").status_code == 401
    assert stranger.get("/").status_code == 303


@KEYED
def test_a_visit_ends_with_its_key(api: Api, settings: dict[str, str], operator: Visitor) -> None:
    assert operator.get("/").status_code == 200
    Tenants(api.database).remove("root")
    assert operator.get("/").status_code == 303


@KEYED
def test_a_session_expires_after_twelve_hours(
    api: Api, settings: dict[str, str], operator: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = now_ms() + 12 * 3_600_000
    set_clock(monkeypatch, lambda: later)
    assert operator.get("/").status_code == 303


@KEYED
def test_a_session_cookie_with_a_forged_signature_is_refused(api: Api, settings: dict[str, str]) -> None:
    key = key_of(api, "root", admin=True)
    hashed = hash_key(key)
    forged = session_cookie.encode_session(session_cookie.new_session(hashed, 3600), b"not our key")
    stranger = visitor(api)
    stranger.client.set_cookie("slotkeeper_8000", forged)
    assert stranger.get("/").status_code == 303
    assert stranger.log_in(key).status_code == 303
    assert stranger.get("/").status_code == 200


@KEYED
def test_a_login_starts_a_new_session(api: Api, settings: dict[str, str]) -> None:
    somebody = visitor(api)
    before = somebody.token()
    somebody.log_in(key_of(api, "root", admin=True))
    assert somebody.token() != before, "a token from before the login is not valid in the new session"


@KEYED
def test_the_cookie_is_for_this_page_alone(api: Api, settings: dict[str, str]) -> None:
    cookies = visitor(api).log_in("sk_wrong").headers.getlist("Set-Cookie") + visitor(api).get(
        "/page/log-in"
    ).headers.getlist("Set-Cookie")
    assert cookies
    assert all("HttpOnly" in cookie and "SameSite=Strict" in cookie for cookie in cookies)


def _copy_of(visit: Visitor, api: Api) -> Visitor:
    """Somebody who has got hold of its cookie."""
    thief, cookie = visitor(api), visit.client.get_cookie("slotkeeper_8000")
    assert cookie is not None
    thief.client.set_cookie(cookie.key, cookie.decoded_value)
    return thief


@KEYED
def test_a_copied_cookie_opens_nothing_after_log_out(api: Api, settings: dict[str, str], operator: Visitor) -> None:
    thief = _copy_of(operator, api)
    assert thief.get("/").status_code == 200
    operator.post("/page/log-out")
    assert thief.get("/").status_code == 303
    assert operator.log_in(key_of(api, "other", admin=True)).status_code == 303
    assert operator.get("/").status_code == 200, "only that visit has ended"


@KEYED
def test_a_log_out_gets_503_while_the_database_is_down_and_can_be_repeated(
    api: Api, settings: dict[str, str], operator: Visitor
) -> None:
    thief, token = _copy_of(operator, api), operator.token()
    api.take_database_away()
    failed, meanwhile = operator.post("/page/log-out", token), thief.get("/")
    api.bring_database_back()
    assert (failed.status_code, meanwhile.status_code) == (503, 503)
    assert operator.post("/page/log-out", token).status_code == 303
    assert thief.get("/").status_code == 303


@KEYED
def test_session_keys_finds_no_session_that_a_log_out_has_revoked(
    api: Api, settings: dict[str, str], operator: Visitor
) -> None:
    cookie = operator.client.get_cookie("slotkeeper_8000")
    assert cookie is not None
    visits = RevokedSessions(api.database)
    visited, header = session_cookie.SessionKeys(8000, visits), f"slotkeeper_8000={cookie.decoded_value}"
    assert visited(header)
    operator.post("/page/log-out")
    visited.read()
    assert not visited(header)


def test_expired_sessions_are_removed_from_the_revoked_sessions(api: Api) -> None:
    visits = RevokedSessions(api.database)
    visits.revoke("a", until_ms=100, now_ms=10)
    visits.revoke("a", until_ms=100, now_ms=10)
    visits.revoke("b", until_ms=300, now_ms=50)
    assert visits.list_revoked(now_ms=200) == {"b"}
    assert visits.is_revoked("a")
    visits.revoke("c", until_ms=300, now_ms=200)
    assert not visits.is_revoked("a")


def test_without_keys_this_machine_is_let_in_and_no_other(api: Api) -> None:
    assert visitor(api).get("/").status_code == 200
    assert visitor(api, REMOTE_ADDR="10.0.0.9").get("/").status_code == 403
    assert visitor(api).get("/", headers={"Host": "evil.test"}).status_code == 421


# -- rights ------------------------------------------------------------------------------------------------------


@KEYED
def test_screens_outside_the_scopes_of_a_key_are_neither_linked_nor_served(api: Api, settings: dict[str, str]) -> None:
    acme = visitor(api)
    acme.log_in(key_of(api, "acme"))
    shown = acme.get("/page/jobs").text
    of_tenants = {
        "/",
        "/page/jobs",
        "/page/jobs/x",
        "/page/jobs/x/cancel",
        "/page/jobs/x/files/0",
        "/page/jobs/x/retry",
        "/page/dead",
        "/page/dead/retry",
        "/page/dead/retry-all",
        "/page/stream",
        "/page/usage",
        "/page/credits",
        "/page/x",
        "/page/webhooks",
    }
    of_tenants |= {"/page/webhooks/callbacks/replay", "/page/batches", "/page/batches/x"}
    of_tenants |= {f"/page/batches/x/{word}" for word in ("cancel", "pause", "resume")}
    of_tenants |= {f"/page/webhooks/x{act}" for act in ("", "/test", "/enable", "/disable", "/replay")}
    for method, path in _screens(api):
        answer = _ask(acme, method, path)
        if path in of_tenants:
            assert answer.status_code in (200, 303, 404) or path == "/page/stream", path  # only `web` sends streams
            assert answer.status_code != 403, path
        else:
            assert answer.status_code == 403, path
            assert f'href="{path}"' not in shown


@KEYED
def test_limits_are_changed_one_by_one(api: Api, settings: dict[str, str], operator: Visitor) -> None:
    key_of(api, "acme")
    for name, value in {"max_slots": "3", "models": "zimg, flux", "rate_per_s": "2.5", "slot_s_per_day": "60"}.items():
        changed = operator.post("/page/tenants/limits", tenant="acme", limit=name, value=value)
        assert changed.status_code == 303, changed.text
    limits = api.dispatcher.catalog.refresh().limits_of("acme").model_dump(exclude_defaults=True)
    assert limits == {"max_slots": 3, "models": ["zimg", "flux"], "rate_per_s": 2.5, "slot_s_per_day": 60}
    for name in limits:
        operator.post("/page/tenants/limits", tenant="acme", limit=name, value="")
    assert api.dispatcher.catalog.refresh().limits_of("acme") == NO_LIMITS
    operator.post("/page/tenants/limits", limit="most_urgent", value="4")
    assert api.dispatcher.catalog.refresh().limits_of("any").most_urgent == 4
    for wrong in ({"limit": "max_slots", "value": "many"}, {"limit": "burst", "value": "3"}, {"limit": "none"}):
        refused = operator.post("/page/tenants/limits", tenant="acme", **wrong)
        assert refused.status_code == 422 and 'role="alert"' in refused.text, wrong


@KEYED
def test_an_account_is_opened_and_gets_credits_once_for_each_form(
    api: Api, settings: dict[str, str], operator: Visitor
) -> None:
    api.tenant("acme")
    path = "/page/credits?tenant=acme"
    assert "This tenant has no account" in operator.get(path).text
    opened = operator.post("/page/credits/account", tenant="acme", act="open", overdraft="1.5", low="")
    assert opened.status_code == 303
    grant = {"tenant": "acme", "kind": "grant", "amount": "1,250.5", "reason": "<b>paid</b>", "key": "k"}
    for _ in range(2):
        assert operator.post("/page/credits/act", **grant).location == f"{path}&done=credited"
    shown = operator.get(path).text
    assert "<dd>1,250.5</dd>" in shown and "&lt;b&gt;paid&lt;/b&gt;" in shown and shown.count("<td>grant</td>") == 1
    for wrong in (
        {"amount": "0,5"},
        {"amount": ""},
        {"kind": "withdraw", "amount": "2000"},
        {"kind": "refund"},
    ):
        refused = operator.post("/page/credits/act", **grant | {"key": "other"} | wrong)
        assert refused.status_code in (409, 422) and 'role="alert"' in refused.text, wrong
    assert "1,250.5" in operator.get("/page/prices").text
    assert "<dd>1,250.5</dd>" in operator.get(path, headers={"Accept": "text/csv"}).text, "a page is no table"
    operator.post("/page/credits/account", tenant="acme", act="close")
    assert "The account is closed" in operator.get(path).text


@KEYED
def test_the_audit_page_requires_the_audit_scope_and_lists_acts_of_the_page(
    api: Api, settings: dict[str, str], operator: Visitor
) -> None:
    operator.post("/page/tenants/state", tenant="acme", state="paused", reason="has not paid")
    auditor, acme = visitor(api), visitor(api)
    auditor.log_in(add_key(api.database, "auditor", Scope.READ, Scope.AUDIT))
    acme.log_in(key_of(api, "acme"))
    assert auditor.get("/page/audit", headers={"Accept": "application/x-ndjson"}).status_code == 200
    shown = auditor.get("/page/audit").text
    assert all(word in shown for word in ("tenant.pause", "has not paid", "root", "page"))
    assert "/page/audit" in auditor.get("/page/jobs").text and "/page/audit" not in acme.get("/page/jobs").text
    assert acme.get("/page/audit").status_code == 403


@KEYED
def test_a_tenant_sees_only_its_own_jobs(api: Api, settings: dict[str, str], operator: Visitor) -> None:
    key, other = key_of(api, "acme"), api.tenant("other")
    root = api.tenant("boss", admin=True)
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    foreign = api.submitted(headers=other)
    own = api.submitted(headers={"Authorization": f"Bearer {key}"})
    acme = visitor(api)
    acme.log_in(key)
    listed = acme.get("/page/jobs").text
    assert own in listed and foreign not in listed
    assert (acme.get(f"/page/jobs/{own}").status_code, acme.get(f"/page/jobs/{foreign}").status_code) == (200, 404)
    assert acme.post(f"/page/jobs/{foreign}/cancel").status_code == 404
    assert foreign in operator.get("/page/jobs").text


# -- forms -------------------------------------------------------------------------------------------------------


def test_a_form_without_the_visits_token_does_nothing(api: Api) -> None:
    api.model()
    job = api.submitted()
    somebody, other = visitor(api), visitor(api)
    somebody.get("/")
    for token in ("", "x", other.token()):
        assert somebody.post(f"/page/jobs/{job}/cancel", token=token).status_code == 403
    assert api.job(job).state == "queued"
    assert somebody.post(f"/page/jobs/{job}/cancel").status_code == 303
    assert api.job(job).state == "canceled"


def test_every_form_requires_the_csrf_token(api: Api) -> None:
    somebody = visitor(api)
    somebody.get("/")
    posts = [
        rule.rule
        for rule in api.client.application.url_map.iter_rules()
        if rule.endpoint.startswith("page.") and "POST" in (rule.methods or ())
    ]
    assert posts
    for path in posts:
        assert somebody.client.post(path.replace("<path:", "").replace("<", "").replace(">", "")).status_code == 403


def test_a_form_that_another_site_sends_is_refused(api: Api) -> None:
    somebody = visitor(api)
    headers = {"Origin": "http://evil.test"}
    answer = somebody.client.post("/page/theme", data={"token": somebody.token(), "theme": "dark"}, headers=headers)
    assert answer.status_code == 403


@pytest.mark.parametrize("back", ["//evil.test/", "https://evil.test/", "/\\evil.test", "javascript:alert(1)", "/\n/x"])
def test_a_form_leads_to_no_other_site(api: Api, back: str) -> None:
    assert visitor(api).post("/page/theme", theme="dark", back=back).headers["Location"] == "/"


def test_light_and_dark_are_chosen_without_script(api: Api) -> None:
    somebody = visitor(api)
    assert 'data-theme="auto"' in somebody.get("/").text
    answer = somebody.post("/page/theme", theme="dark", back="/page/jobs?status=dead")
    assert answer.headers["Location"] == "/page/jobs?status=dead"
    assert 'data-theme="dark"' in somebody.get("/").text


# -- what is shown -------------------------------------------------------------------------------------------------


def test_text_from_users_is_escaped_in_the_markup(api: Api) -> None:
    api.model()
    job = api.submitted(payload={EVIL: EVIL}, constraints={"gpu": "A100"})
    shown = visitor(api).get(f"/page/jobs/{job}").text
    assert "<script>alert" not in shown
    assert escape("<script>alert(1)</script>", quote=False) in shown


def test_the_content_security_policy_forbids_inline_and_foreign_scripts_and_styles(api: Api) -> None:
    answer = visitor(api).get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert 'style="' not in answer.text and "<script>" not in answer.text and "onclick" not in answer.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("secret", "hunter2"),
        ("metrics_key", "hunter2"),
        ("redis_url", "redis://:hunter2@room:6379/0"),
        ("broker_url", "amqp://me:hunter2@broker/;amqp://me:hunter2@other/"),
        ("database_url", "postgresql://me:hunter2@host/name?password=hunter2"),
        ("public_url", "https://me:hunter2@[broken"),
    ],
)
def test_settings_are_shown_without_what_is_secret_in_them(name: str, value: str) -> None:
    assert "hunter2" not in display_setting(name, value)
    assert display_setting(name, "") == "empty"


def test_a_running_job_shows_what_it_waits_for(api: Api) -> None:
    api.register()
    job = api.started().run.job.id
    facts = {"role": "worker", "host": "a", "awaits": {"gpu1-slot0": [job, "Its request has no answer."]}}
    assert "Its request has no answer." not in visitor(api).get(f"/page/jobs/{job}").text
    services.processes().report("worker@a/1", facts)
    assert "Its request has no answer." in visitor(api).get(f"/page/jobs/{job}").text


def test_dead_jobs_are_retried_by_choice_or_all(api: Api) -> None:
    api.register()
    dead = [an_ended_job(api.dispatcher.store, State.DEAD, now_ms=now_ms()).id for _ in range(3)]
    somebody = visitor(api)
    assert all(job in somebody.get("/page/dead").text for job in dead)
    answer = somebody.post("/page/dead/retry", job=[dead[0], "nobody"])
    assert "1 job is back in the queue" in somebody.get(answer.headers["Location"]).text
    assert [api.job(job).state for job in dead] == ["queued", "dead", "dead"]
    somebody.post("/page/dead/retry-all")
    assert {api.job(job).state for job in dead} <= {"queued", "running"}


def test_the_page_of_an_ended_job_shows_the_reason_of_its_end(api: Api) -> None:
    api.register()
    job = an_ended_job(api.dispatcher.store, State.DEAD, now_ms=now_ms())
    page = visitor(api).get(f"/page/jobs/{job.id}").text
    assert END_SENTENCES[Reason(job.why)] in page and f'<p class="lead">{END_SENTENCES[Reason(job.why)]}' in page


def test_retry_all_is_of_those_that_are_shown(api: Api) -> None:
    api.register()
    shown, other = (
        an_ended_job(api.dispatcher.store, State.DEAD, now_ms=now_ms(), model=model).id for model in ("zimg", "flux")
    )
    somebody = visitor(api)
    assert "Retry all<" in somebody.get("/page/dead").text
    page = somebody.get("/page/dead?model=zimg").text
    assert "Retry all of zimg<" in page and 'href="/page/dead/retry-all?model=zimg"' in page
    page = somebody.get("/page/dead/retry-all?model=zimg").text
    assert "Retry all dead jobs of zimg?" in page and 'name="model" value="zimg"' in page
    assert api.job(shown).state == "dead", "it asks first"
    somebody.post("/page/dead/retry-all", model="zimg")
    assert [api.job(job).state for job in (shown, other)] == ["queued", "dead"]


def test_given_up_callbacks_are_shown_and_can_be_sent_again(api: Api) -> None:
    job = an_ended_job(api.dispatcher.store, now_ms=now_ms(), callback_url="http://receiver/hook")
    (message_id,) = due_ids(api.database, now_ms())
    message = claim(api.database, message_id, now_ms(), now_ms() + 1000)
    assert message is not None
    failed(api.database, message, now_ms(), None, 503, "the receiver answered 503")
    somebody = visitor(api)
    page = somebody.get("/page/webhooks").text
    assert job.id in page and "the receiver answered 503" in page
    somebody.post("/page/webhooks/callbacks/replay", message=message.id)
    assert job.id not in somebody.get("/page/webhooks").text


def test_a_model_and_a_tenant_are_paused_with_a_reason(api: Api) -> None:
    api.model()
    somebody = visitor(api)
    somebody.post("/page/models/zimg/state", state="paused", reason="new weights")
    assert "new weights" in somebody.get("/page/models/zimg").text
    somebody.post("/page/tenants/state", tenant="acme", state="frozen", reason="has not paid")
    assert "has not paid" in somebody.get("/page/tenants").text
    assert somebody.post("/page/models/zimg/state", state="gone").status_code == 422


def test_an_empty_installation_shows_the_three_commands_to_start_with(api: Api) -> None:
    shown = visitor(api).get("/").text
    assert [
        command in shown for command in ("slotkeeper serve ", "slotkeeper servers register ", "slotkeeper submit ")
    ] == [True] * 3


def test_errors_are_shown_as_html_pages(api: Api) -> None:
    answer = visitor(api).get("/page/jobs/nobody")
    assert (answer.status_code, answer.mimetype) == (404, "text/html")
    assert "There is no such job" in answer.text
    assert visitor(api).get("/page/nothing/here").status_code == 404
    assert visitor(api).get("/page/static/..%2Frender.py").status_code == 404


def test_the_page_works_while_redis_is_down(mortal_api: Api) -> None:
    mortal_api.model()
    job = mortal_api.submitted()
    mortal_api.valkey.stop()
    assert "does not answer" in visitor(mortal_api).get("/").text
    assert "Redis does not answer" in visitor(mortal_api).get(f"/page/jobs/{job}").text


def test_a_state_that_there_is_none_of_is_answered_as_by_the_api(api: Api) -> None:
    assert visitor(api).get("/page/jobs?status=lost").status_code == 422


# -- batches -------------------------------------------------------------------------------------------------------


def _batch(api: Api, jobs: int = 3, headers: dict[str, str] | None = None) -> Any:
    body = [{"model": "zimg", "payload": {}}] * jobs
    return api.client.post("/queue/submit-batch", json=body, headers=headers).json


def test_a_batch_is_listed_shown_and_canceled_after_a_confirmation(api: Api) -> None:
    api.model()
    sent, somebody = _batch(api), visitor(api)
    path = f"/page/batches/{sent['batch']}"
    assert path in somebody.get("/page/batches").text
    assert path in somebody.get(f"/page/jobs/{sent['jobs'][0]['job_id']}").text
    shown = somebody.get(path).text
    assert all(f"/page/jobs/{job['job_id']}" in shown for job in sent["jobs"]) and "0 of 3" in shown
    assert "3 jobs of 3 have not ended" in somebody.get(f"{path}/cancel").text
    assert api.job(sent["jobs"][0]["job_id"]).state is State.QUEUED, "the question itself cancels nothing"
    answer = somebody.post(f"{path}/cancel")
    assert "Its waiting jobs are canceled" in somebody.get(answer.headers["Location"]).text
    assert "3 of 3" in somebody.get("/page/batches").text
    assert somebody.post(f"{path}/cancel").status_code == 409
    assert "No job of it" in somebody.get(f"{path}?status=queued").text


def test_a_batch_of_lines_is_paused_and_resumed_and_shows_what_was_refused(api: Api) -> None:
    api.model()
    batch = create(api, name="night run")
    send(api, batch, [CAT, CAT | {"priority": 99, "custom_id": "<b>"}])
    somebody, path = visitor(api), f"/page/batches/{batch}"
    shown = somebody.get(path).text
    assert "night run" in shown and "1 were received" not in shown and "2 were received" in shown
    assert "&lt;b&gt;" in shown and "priority must be true" in shown
    assert somebody.post(f"{path}/pause").status_code == 303
    assert "It is paused" in somebody.get(path).text
    assert somebody.post(f"{path}/resume").status_code == 303
    assert "It is paused" not in somebody.get(path).text


@KEYED
def test_a_tenant_sees_and_cancels_only_its_own_batches(api: Api, settings: dict[str, str], operator: Visitor) -> None:
    key, root = key_of(api, "acme"), api.tenant("boss", admin=True)
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    foreign = _batch(api, headers=api.tenant("other"))["batch"]
    own = _batch(api, headers={"Authorization": f"Bearer {key}"})["batch"]
    acme = visitor(api)
    acme.log_in(key)
    listed = acme.get("/page/batches").text
    assert own in listed and foreign not in listed
    for answer in (acme.get(f"/page/batches/{foreign}"), acme.post(f"/page/batches/{foreign}/cancel")):
        assert answer.status_code == 404
    assert acme.post(f"/page/batches/{own}/cancel").status_code == 303
    assert foreign in operator.get("/page/batches").text


def test_the_longest_numbers_of_a_job_are_shown_as_they_were_written(api: Api) -> None:
    api.model()
    digits = "1234567890" * 430
    body = b'{"model": "zimg", "payload": {"seed": %s, "scale": 1.5, "text": "\xc3\xbc"}}' % digits.encode()
    job_id = api.client.post("/queue/submit", data=body, content_type="application/json").json["job_id"]
    shown = visitor(api).get(f"/page/jobs/{job_id}")
    assert shown.status_code == 200
    assert digits in shown.text and "1.5" in shown.text and "ü" in shown.text


# -- keys ------------------------------------------------------------------------------------------------------


@KEYED
def test_a_key_is_made_shown_once_replaced_and_revoked_on_the_page(api: Api, settings: dict[str, str]) -> None:
    somebody = visitor(api)
    somebody.log_in(add_key(api.database, "acme", Scope.KEYS, Scope.READ))
    made = somebody.post("/page/keys/add", name="board", scope="read", days="90").text
    key = re.search("sk_[0-9A-Za-z]{61}", made)[0]
    assert identity_of(api.database, key).scopes == {Scope.READ}
    listed = somebody.get("/page/keys").text
    assert "board" in listed and key[3:15] in listed and key not in listed
    new = re.search("sk_[0-9A-Za-z]{61}", somebody.post("/page/keys/rotate", key=key[3:15]).text)[0]
    assert identity_of(api.database, key) and identity_of(api.database, new), "for a day"
    assert somebody.post("/page/keys/revoke", key=new[3:15]).status_code == 303
    assert identity_of(api.database, new) is None
    assert "revoked" in somebody.get("/page/keys").text


@KEYED
def test_the_keys_screen_shows_the_refusals_of_the_api_on_the_same_screen(api: Api, settings: dict[str, str]) -> None:
    somebody = visitor(api)
    somebody.log_in(add_key(api.database, "acme", Scope.KEYS, Scope.READ))
    for fields in ({"scope": "operate"}, {"scope": "read", "days": "soon"}, {}):
        refused = somebody.post("/page/keys/add", **fields)
        assert refused.status_code in (403, 422) and "Keys of acme" in refused.text, fields
    assert somebody.get("/page/keys?tenant=zeta").status_code == 404
    stranger = visitor(api)
    stranger.log_in(add_key(api.database, "zeta", Scope.READ))
    assert stranger.get("/page/keys").status_code == 403 and "/page/keys" not in stranger.get("/page/jobs").text
