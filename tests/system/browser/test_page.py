"""The page in a real Chromium: its explanations of slow jobs, and its accessibility.

All tests share one installation, one Chromium and one walk through all screens.  Tests that act use a new context.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from axe_playwright_python.base import AxeResults
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from slotkeeper.config import StorageSettings
from slotkeeper.db import Database
from slotkeeper.registry.identity import Scope
from slotkeeper.serve.demo import zimg
from slotkeeper.serve.server import ReferenceServer, ServeConfig
from tests.support.keys import add_key
from tools.cluster.stack import Stack, eventually

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REPO = Path(__file__).resolve().parents[3]
IMAGES = REPO / "docs/images"
RENEW = "SLOTKEEPER_RENEW_IMAGES"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
EVIL = "<script>alert('got in')</script>"
WIDTHS = (360, 900, 1180)
"""A phone's, a tablet's, a small window's."""
ALL_RULES: dict[str, Any] = {"resultTypes": ["violations"], "preload": False}  # No rule in force asks what it loads.
OF_COLOUR = ALL_RULES | {"runOnly": ["color-contrast", "link-in-text-block"]}
"""What axe looks at once more in the dark: its other rules know no colours."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH (Debian: apt install chromium)"),
]


@dataclass
class Installation:
    """A Slotkeeper with keys, and what has happened in it."""

    url: str
    keys: dict[str, str]
    jobs: dict[str, str] = field(default_factory=dict)
    webhook: str = ""
    batch: str = ""
    lines: str = ""

    def call(self, method: str, path: str, who: str = "root", **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.keys[who]}"}
        answer = requests.request(
            method, self.url + path, json=body if method != "GET" else None, headers=headers, timeout=70
        )
        assert answer.ok, answer.text
        return answer.json()

    def submit(self, model: str, who: str = "acme", constraints: Any = None, **payload: Any) -> str:
        found = self.call("POST", "/queue/submit", who, model=model, payload=payload, constraints=constraints)
        return str(found["job_id"])

    def submit_batch(self, models: list[str]) -> str:
        body = [{"model": model, "payload": {"seconds": 0}} for model in models]
        headers = {"Authorization": f"Bearer {self.keys['acme']}"}
        answer = requests.post(f"{self.url}/queue/submit-batch", json=body, headers=headers, timeout=70)
        assert answer.ok, answer.text
        return str(answer.json()["batch"])

    def submit_lines(self) -> str:
        """Submit a batch with valid and invalid lines, pause it before it is complete, and return its id."""
        batch = str(self.call("POST", "/batches", "acme", model="idle", name=EVIL)["batch"])
        lines = [{"payload": {}}, {"payload": {}, "priority": 99, "custom_id": EVIL}, {"payload": {}, "model": "none"}]
        headers = {"Authorization": f"Bearer {self.keys['acme']}", "Content-Type": "application/x-ndjson"}
        body = "\n".join(map(json.dumps, lines))
        answer = requests.post(f"{self.url}/batches/{batch}/lines", data=body, headers=headers, timeout=70)
        assert answer.ok, answer.text
        self.call("POST", f"/batches/{batch}/pause", "acme")
        return batch

    def pay(self, tenant: str) -> None:
        """Let a tenant pay for its jobs."""
        self.call(
            "PUT", "/admin/prices", prices=[{"constraints": {"pool": "fast"}, "per_slot_s": 7}, {"per_slot_s": 9}]
        )
        self.call("PUT", f"/admin/tenants/{tenant}/credit-account", overdraft=1_500_000, low_mark=250_000)
        headers = {"Authorization": f"Bearer {self.keys['root']}", "Idempotency-Key": "first"}
        body = {"kind": "grant", "amount": 1_234_500_000, "reason": EVIL}
        url = f"{self.url}/admin/tenants/{tenant}/credits"
        assert requests.post(url, json=body, headers=headers, timeout=70).ok

    def model(self, name: str, endpoint: str, slots: int, server: str, attributes: Any = None, **config: Any) -> None:
        self.call("PUT", f"/admin/model-configs/{name}", **config)
        body = {"model": name, "server": server, "endpoint": endpoint, "slots": slots, "attributes": attributes or {}}
        self.call("POST", "/admin/register", **body)

    def ended(self, job: str) -> None:
        eventually(lambda: self.call("GET", f"/queue/jobs/{job}?wait=20")["completed_at"], f"{job} ends", 60)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Start the installation of all tests and run jobs of every kind in it."""
    settings = {"SLOTKEEPER_REQUIRE_KEYS": "true", "SLOTKEEPER_BREAKER_OPEN_MS": "1500"}
    settings["SLOTKEEPER_WEBHOOK_ALLOW"] = "127.0.0.1/32"
    with ExitStack() as stack:
        running = stack.enter_context(Stack(tmp_path_factory.mktemp("page"), settings))
        running.maintenance("maintenance", "--embedded-beat")
        running.worker()
        keys = _keys(running)
        running.web()
        made = Installation(running.url, keys)
        _live(made, lambda slots: stack.enter_context(ReferenceServer(zimg, ServeConfig(port=0, slots=slots))).url)
        yield made


def _keys(running: Stack) -> dict[str, str]:
    """Write the keys to the database directly: a process for each would cost a second."""
    database = Database(StorageSettings(home=running.home).sqlalchemy_url)
    found = {
        name: add_key(database, name, *([Scope.OPERATE] if name == "root" else []))
        for name in ("root", "acme", "globex", EVIL)
    }
    database.close()
    return found


def _live(installation: Installation, server: Any) -> None:
    """Submit all jobs at once, so that the total time is that of the slowest job."""
    quick = {"retry_backoff": 0.2, "retry_backoff_max": 0.2}
    installation.model("limited", f"{server(2)}/generate", 2, "limited-api1", tenant_slots=1)
    installation.model("flaky", f"{server(2)}/generate", 2, "flaky-api1", {"gpu": "A100"}, **quick)
    installation.model("zimg", f"{server(2)}/generate", 2, "zimg-fast", {"pool": "fast"})
    installation.model("zimg", f"{server(1)}/generate", 1, "zimg-slow", {"pool": "slow"})
    installation.model("broken", f"{server(1)}/generate", 1, "broken-api1", max_retries=0, breaker_failures=2)
    installation.model("idle", f"{server(1)}/generate", 1, "idle-api1")
    installation.call("PATCH", "/admin/models/idle", state="paused", reason=EVIL)
    url = "http://127.0.0.1:9/hook"
    installation.pay("globex")
    installation.webhook = installation.call("POST", "/webhooks", EVIL, url=url, description=EVIL)["webhook"]
    installation.jobs["waiting"] = installation.submit("idle", EVIL, **{EVIL: EVIL})
    installation.jobs["dead1"], installation.jobs["dead2"] = (
        installation.submit("broken", fail="error", seconds=0) for _ in range(2)
    )
    limited = [installation.submit("limited", seconds=0.8) for _ in range(3)]
    installation.jobs["limited"] = limited[-1]
    installation.jobs["retried"] = installation.submit("flaky", seconds=0.1, fail="error", fail_attempts=2)
    installation.jobs["evil"] = installation.submit("flaky", EVIL, prompt=EVIL, seconds=0)
    for _ in range(4):
        installation.submit("zimg", "globex", {"pool": "fast"}, seconds=0.05)
    installation.jobs["slow"] = installation.submit("zimg", "globex", {"pool": "slow"}, seconds=1.2)
    installation.batch = installation.submit_batch(["flaky", "flaky", "idle", "idle"])
    installation.lines = installation.submit_lines()
    installation.ended(installation.jobs["dead2"])
    installation.jobs["broken"] = installation.submit("broken", seconds=0)
    for name in ("limited", "retried", "evil", "slow", "broken"):
        installation.ended(installation.jobs[name])


# -- visitors --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@pytest.fixture(scope="module")
def logged_in(chromium: Browser, installation: Installation) -> Any:
    """The cookies of an operator."""
    context = chromium.new_context(base_url=installation.url)
    _log_in(context.new_page(), installation.keys["root"])
    kept = context.storage_state()
    context.close()
    return kept


def _log_in(page: Page, key: str) -> None:
    page.goto("/")
    page.get_by_label("Your key").fill(key)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", level=1)).not_to_have_text("Log in")


@pytest.fixture
def operator(chromium: Browser, installation: Installation, logged_in: Any) -> Iterator[Page]:
    context = chromium.new_context(base_url=installation.url, storage_state=logged_in)
    yield context.new_page()
    context.close()


def screens(installation: Installation) -> dict[str, str]:
    return {
        "overview": "/",
        "jobs": "/page/jobs",
        "job": f"/page/jobs/{installation.jobs['retried']}",
        "waiting": f"/page/jobs/{installation.jobs['waiting']}",
        "dead-job": f"/page/jobs/{installation.jobs['dead1']}",
        "model": "/page/models/zimg",
        "paused-model": "/page/models/idle",
        "remove-model": "/page/remove/models/idle",
        "batches": "/page/batches",
        "batch": f"/page/batches/{installation.batch}",
        "batch-of-lines": f"/page/batches/{installation.lines}",
        "cancel-batch": f"/page/batches/{installation.batch}/cancel",
        "servers": "/page/servers",
        "server": "/page/servers/zimg-fast",
        "remove-server": "/page/remove/servers/zimg-fast",
        "dead": "/page/dead",
        "tenants": "/page/tenants",
        "usage": "/page/usage?tenant=acme",
        "credits": "/page/credits?tenant=globex",
        "no-credits": "/page/credits?tenant=acme",
        "prices": "/page/prices",
        "paid-job": f"/page/jobs/{installation.jobs['slow']}",
        "keys": "/page/keys?tenant=acme",
        "webhooks": "/page/webhooks",
        "webhook": f"/page/webhooks/{installation.webhook}",
        "audit": "/page/audit",
        "settings": "/page/settings",
        "nothing": "/page/nothing",
    }


@dataclass
class Look:
    """One screen.  `violations`: axe's, by theme; `too_wide`: pixels beyond a window's width, by that width."""

    asked: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)
    violations: dict[str, str] = field(default_factory=dict)
    too_wide: dict[int, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def walk(chromium: Browser, installation: Installation, logged_in: Any) -> dict[str, Look]:
    """Each screen, opened once by an operator."""
    context = chromium.new_context(base_url=installation.url, storage_state=logged_in, reduced_motion="reduce")
    context.add_init_script(Axe().axe_script)
    page, looks = context.new_page(), {name: Look() for name in screens(installation)}
    at = [Look()]
    page.on("request", lambda request: at[0].asked.append(request.url))
    page.on("console", lambda message: at[0].console.append(message.text))
    for name, path in screens(installation).items():
        at[0] = looks[name]
        page.goto(path)
        looks[name].violations["light"] = _violations(page, ALL_RULES)
        page.emulate_media(color_scheme="dark")
        looks[name].violations["dark"] = _violations(page, OF_COLOUR)
        page.emulate_media(color_scheme="light")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 760})
            looks[name].too_wide[width] = page.evaluate("() => document.scrollingElement.scrollWidth - innerWidth")
    context.close()
    return looks


def _violations(page: Page, rules: dict[str, Any]) -> str:
    found = AxeResults(page.evaluate("rules => axe.run(rules)", rules))
    return found.generate_report() if found.violations_count else ""


# -- why was this job slow? --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("limited", r"it waited for [\d.]+ s, because its tenant 'acme' held the one slot that it may hold at once"),
        ("retried", r"it was retried twice, which cost [\d.]+ s \(\w+ on flaky-api1\)"),
        ("slow", r"it ran for [\d.]+ s on zimg-slow, which was slow: such a run took [\d.]+ s on other servers"),
        ("broken", r"it waited for [\d.]+ s, though not all slots were taken: something was paused, in cooldown"),
    ],
    ids=["a tenant's limit", "retried twice", "a slow server", "a breaker"],
)
def test_the_page_of_a_job_explains_why_the_job_was_slow(
    operator: Page, installation: Installation, what: str, says: str
) -> None:
    operator.goto("/")
    operator.get_by_role("link", name="Jobs", exact=True).click()
    operator.locator(f'a[href="/page/jobs/{installation.jobs[what]}"]').click()
    expect(operator.locator(".story")).to_contain_text(re.compile(says))


def test_the_page_of_a_waiting_job_explains_what_the_job_waits_for(operator: Page, installation: Installation) -> None:
    operator.goto(f"/page/jobs/{installation.jobs['waiting']}")
    expect(operator.locator(".story .lead")).to_contain_text("model 'idle' is paused by tenant 'root'")


# -- everybody ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_violation_on_any_screen(walk: dict[str, Look], theme: str) -> None:
    assert {name: look.violations[theme] for name, look in walk.items() if look.violations[theme]} == {}


@pytest.mark.parametrize("name", ["overview", "waiting", "dead", "paused-model", "webhook", "batch", "remove-model"])
def test_the_keyboard_reaches_every_action(operator: Page, installation: Installation, name: str) -> None:
    operator.goto(screens(installation)[name])
    every = "a[href], button:not([disabled]), input:not([type=hidden]), select, summary"
    operator.evaluate(
        "() => { globalThis.reached = new Set(); addEventListener('focusin', it => reached.add(it.target.outerHTML)) }"
    )
    # Two rounds, and elements are compared by their text: an update of the page may replace what was reached.
    for _ in range(2 * operator.locator(f":is({every}):visible").count() + 20):
        operator.keyboard.press("Tab")
    left = operator.evaluate(
        "(every) => [...document.querySelectorAll(every)]"
        ".filter(it => it.checkVisibility() && !reached.has(it.outerHTML))"
        ".map(it => it.outerHTML)",
        every,
    )
    assert left == []


@pytest.mark.parametrize("width", WIDTHS)
def test_no_screen_is_wider_than_its_window(walk: dict[str, Look], width: int) -> None:
    assert {name: look.too_wide[width] for name, look in walk.items() if look.too_wide[width] > 0} == {}


@pytest.mark.parametrize(
    ("chosen", "system", "seen"),
    [
        ("auto", "light", "light"),
        ("auto", "dark", "dark"),
        ("light", "dark", "light"),
        ("dark", "light", "dark"),
    ],
)
def test_the_colours_follow_the_chosen_theme_or_else_the_theme_of_the_system(
    operator: Page, installation: Installation, chosen: str, system: Any, seen: str
) -> None:
    operator.context.add_cookies([{"name": "slotkeeper_theme", "value": chosen, "url": installation.url}])
    operator.emulate_media(color_scheme=system)
    operator.goto("/page/settings")
    shown = operator.evaluate(
        """() => {
            const probe = document.body.appendChild(document.createElement("i"));
            const names = [...document.styleSheets].flatMap(sheet => [...sheet.cssRules])
                .flatMap(rule => [...(rule.style ?? [])]).filter(name => name.startsWith("--"));
            const rgb = name => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
            return Object.fromEntries(names.map(name => [name, rgb(name)]));
        }"""
    )
    assert shown == {name: colours[seen] for name, colours in _palette().items()}
    assert operator.evaluate("() => getComputedStyle(document.body).backgroundColor") == shown["--ground"]


def _palette() -> dict[str, dict[str, str]]:
    """Each colour of the style sheet: its name, and how it is in the light and in the dark."""
    sheet = (REPO / "app/page/static/page.css").read_text("utf-8")
    found = re.findall(r"(--[\w-]+): light-dark\(#(\w{6}), #(\w{6})\);", sheet)
    assert len(found) == len(re.findall(r"^ *--", sheet, re.MULTILINE)), "each stands once"
    return {name: {"light": _rgb(light), "dark": _rgb(dark)} for name, light, dark in found}


def _rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*bytes.fromhex(colour))


def test_the_page_works_without_javascript(chromium: Browser, installation: Installation) -> None:
    context = chromium.new_context(base_url=installation.url, java_script_enabled=False)
    page = context.new_page()
    _log_in(page, installation.keys["root"])
    for path in screens(installation).values():
        answer = page.request.get(path)
        assert answer.status in (200, 404) and "<h1" in answer.text(), path
    job = installation.submit("idle", seconds=0)
    page.goto(f"/page/jobs/{job}")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_contain_text("The job is canceled.")
    page.goto("/page/dead")
    page.get_by_label(f"Job {installation.jobs['dead2'][-8:]}").check()
    page.get_by_role("button", name="Retry selected").click()
    expect(page.get_by_role("status")).to_contain_text("1 job is back")
    page.goto(f"/page/batches/{installation.submit_batch(['idle', 'idle'])}")
    page.get_by_role("link", name="Cancel…").click()
    page.get_by_role("button", name="Cancel 2 jobs").click()
    expect(page.get_by_role("status")).to_contain_text("Its waiting jobs are canceled")
    installation.call("PUT", "/admin/model-configs/short-lived")
    page.goto("/page/models/short-lived")
    page.get_by_role("link", name="Remove…").click()
    page.get_by_role("button", name="Remove it").click()
    expect(page.get_by_role("status")).to_contain_text("Removed.")
    page.get_by_role("button", name="Colours: auto").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
    context.close()


def test_the_overview_follows_what_happens(operator: Page, installation: Installation) -> None:
    operator.goto("/")
    expect(operator.get_by_text("Live", exact=True)).to_be_visible()
    job = installation.submit("zimg", seconds=3)
    expect(operator.locator(f'a.slot[href="/page/jobs/{job}"]')).to_be_visible(timeout=10_000)


def test_the_time_of_a_run_passes_on_its_page_while_nothing_happens(operator: Page, installation: Installation) -> None:
    job = installation.submit("zimg", seconds=8)
    operator.goto(f"/page/jobs/{job}")
    expect(operator.locator(".story")).to_contain_text(re.compile(r"it ran for [234]\.\d s"), timeout=10_000)
    expect(operator.locator(".story")).to_contain_text(re.compile(r"it ran for [567]\.\d s"), timeout=10_000)
    installation.call("POST", f"/queue/jobs/{job}/cancel")


def test_a_server_is_drained_with_a_reason_and_resumed(operator: Page, installation: Installation) -> None:
    operator.goto("/page/servers/flaky-api1")
    operator.get_by_label("Reason").fill("new driver")
    operator.get_by_role("button", name="Drain").click()
    expect(operator.locator(".acts")).to_contain_text("draining by tenant 'root': new driver")
    operator.get_by_role("button", name="Resume").click()
    expect(operator.locator(".acts")).not_to_contain_text("draining")


# -- other hosts -------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_other_hosts(walk: dict[str, Look], installation: Installation) -> None:
    asked = {url for look in walk.values() for url in look.asked}
    assert asked and {url for url in asked if not url.startswith(installation.url + "/")} == set()
    messages = [message for look in walk.values() for message in look.console]
    assert [message for message in messages if "404" not in message] == [], "no page violates the content policy"


def test_injected_scripts_and_styles_have_no_effect(operator: Page) -> None:
    operator.goto("/")
    operator.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "globalThis.gotIn = true";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", '<p id="styled" style="color: rgb(1, 2, 3)">x</p>');
            document.body.insertAdjacentHTML("beforeend", '<img src="x" onerror="globalThis.gotIn = true">');
        }"""
    )
    assert operator.evaluate("() => globalThis.gotIn") is None
    assert operator.evaluate("() => getComputedStyle(document.getElementById('styled')).color") != "rgb(1, 2, 3)"


def test_text_from_users_is_shown_as_text(operator: Page, installation: Installation) -> None:
    """The text is in the tenant's name, the payload, the result and the reason of a pause."""
    dialogs: list[str] = []
    operator.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    for name, times in {"waiting": 2, "evil": 2}.items():
        operator.goto(f"/page/jobs/{installation.jobs[name]}")
        assert (operator.locator("main").inner_text()).count("<script>alert('got in')") >= times, name
        operator.get_by_role("link", name="show it").click()
        assert (operator.locator("body").inner_text()).count("<script>alert('got in')") >= 1, "the payload alone"
    for path in (
        "/page/jobs",
        "/page/tenants",
        "/page/models/idle",
        "/",
        "/page/audit",
        f"/page/webhooks/{installation.webhook}",
    ):
        operator.goto(path)
        assert "<script>alert('got in')" in operator.locator("main").inner_text(), path
        assert operator.locator("main script").count() == 0
    assert dialogs == []


def test_a_tenant_sees_only_its_own_screens_and_jobs(chromium: Browser, installation: Installation) -> None:
    context = chromium.new_context(base_url=installation.url)
    page = context.new_page()
    _log_in(page, installation.keys["globex"])
    expect(page.get_by_role("navigation")).to_have_text(
        re.compile(r"^\s*Overview\s+Jobs\s+Batches\s+Dead\s+Usage\s+Credits\s+Webhooks\s*$")
    )
    assert page.locator(f'a[href="/page/jobs/{installation.jobs["slow"]}"]').count() == 1
    assert page.locator(f'a[href="/page/jobs/{installation.jobs["limited"]}"]').count() == 0
    context.close()


# -- pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(RENEW not in os.environ, reason=f"{RENEW}=1 writes docs/images anew")
def test_pictures_of_the_documents_are_made_here(chromium: Browser, installation: Installation, logged_in: Any) -> None:
    IMAGES.mkdir(exist_ok=True)
    installation.call("PATCH", "/admin/models/idle", state="paused", reason="new weights are being tried")
    for job in range(6):
        installation.submit("zimg", "globex", seconds=8 + job)
    for name, path, theme, width in (
        ("overview", "/", "light", 1180),
        ("overview-dark", "/", "dark", 1180),
        ("job", screens(installation)["job"], "light", 1180),
        ("phone", screens(installation)["job"], "light", 390),
    ):
        context = _dressed(chromium, installation, logged_in, theme, width)
        page = context.new_page()
        page.goto(path)
        page.screenshot(path=IMAGES / f"page-{name}.png")
        context.close()


def _dressed(chromium: Browser, installation: Installation, state: Any, theme: Any, width: int) -> BrowserContext:
    size: Any = {"width": width, "height": 760}
    return chromium.new_context(base_url=installation.url, storage_state=state, color_scheme=theme, viewport=size)
