"""The examples and limits on the page docs/how-to/webhooks.md are correct."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.up.ports import free_port, is_open
from slotkeeper.outbox import retention, subscriptions
from tasks.config import TaskSettings
from tasks.webhooks import bodies, delivery_loop, sender
from tests.house.tree import REPO
from tests.support.api import Api
from tools.cluster.stack import eventually

PAGE = (REPO / "docs/how-to/webhooks.md").read_text("utf-8")
TEMPLATE = json.loads(shlex.split(re.search(r"--template ('.*?')\n", PAGE)[1])[0])  # type: ignore[index]


@pytest.mark.parametrize("settings", [{"WEBHOOK_ALLOW": "127.0.0.1/32"}])
def test_the_documented_receiver_accepts_only_messages_signed_with_its_secret(
    api: Api, tmp_path: Path, settings: dict[str, str]
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    own, other = (api.client.post("/webhooks", json={"url": url}).json for _ in range(2))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = code.replace("whsec_...", own["secret"]).replace("9000", str(port))
    with (tmp_path / "out").open("w") as out, subprocess.Popen([sys.executable, "-c", code], stdout=out) as receiver:
        try:
            eventually(lambda: is_open("127.0.0.1", port), "the receiver listens")
            deliveries = [_send_test(api, webhook["webhook"]) for webhook in (own, other)]
        finally:
            receiver.terminate()
    assert [delivery["status"] for delivery in deliveries] == [204, 401]
    assert (tmp_path / "out").read_text().split()[:2] == [deliveries[0]["message"], "webhook.test"]


def _send_test(api: Api, webhook: str) -> Any:
    """Send a test message to a webhook, and return the delivery as the API shows it."""
    loop = delivery_loop.make_delivery_loop(api.database)
    api.client.post(f"/webhooks/{webhook}/test")

    def deliveries() -> Any:
        loop._find_at = 0.0
        loop.run_once()
        return api.client.get(f"/webhooks/{webhook}/deliveries").json["deliveries"]

    eventually(deliveries, "the test message is delivered")
    return deliveries()[0]


def test_the_documented_template_is_valid() -> None:
    assert bodies.validate_template(TEMPLATE)
    for name in bodies.TEMPLATE_FIELDS:
        assert f"`{name}`" in PAGE, name


@pytest.mark.parametrize(
    "limit",
    [
        f"up to {TaskSettings().webhook_most_receivers} ",
        f"{bodies.MAX_TEMPLATE_BYTES:,} bytes and {bodies.MAX_TEMPLATE_NAMES} names",
        f"cut to {bodies.MAX_VALUE_CHARS:,} characters",
        f"last {retention.MOST_LOGGED:,} tries",
        f"first {sender.MAX_QUOTED_BYTES} bytes",
        f"the last {retention.MOST_GIVEN_UP:,} messages",
        f"every {subscriptions.LONGEST_COOLDOWN_MS // 60_000} minutes at last",
        f"after {subscriptions.SHORTEST_COOLDOWN_MS // 1000} s at first",
    ],
)
def test_the_documented_limits_are_the_configured_ones(limit: str) -> None:
    assert limit in " ".join(PAGE.split())
