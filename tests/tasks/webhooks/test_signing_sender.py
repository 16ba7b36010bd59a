"""The secrets that sign a message: those of a webhook, or for a `callback_url` those of the job's tenant."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from slotkeeper.clock import now_ms
from slotkeeper.outbox.subscriptions import END_EVENT_TYPES, Subscription
from slotkeeper.outbox.webhook_messages import Message
from slotkeeper.registry.webhook_rotations import SecretRotation
from tasks.security import keyring, vault
from tasks.webhooks.sender import SendResult, SigningSender

HOUR_MS = 3_600_000
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


class RecordingSender:
    """Takes the place of a WebhookSender: records the arguments of each message, and accepts it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, bytes, list[str], str | None]] = []

    def send(
        self, url: str, message_id: str, body: bytes, now: datetime, secrets: Sequence[str], trace: str | None
    ) -> SendResult:
        assert now.tzinfo is not None
        self.sent.append((url, message_id, body, list(secrets), trace))
        return SendResult(True, 200, "", permanent=False)


class Rotations:
    """Takes the place of SecretRotations: no tenant has rotated its secret."""

    def get(self, tenant: str) -> SecretRotation:
        return SecretRotation()


@pytest.fixture(autouse=True)
def _installation_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "installation_secrets", lambda: (bytes(range(32)),))


@pytest.fixture
def recorder() -> RecordingSender:
    return RecordingSender()


@pytest.fixture
def send(recorder: RecordingSender) -> SigningSender:
    return SigningSender(recorder, Rotations())  # type: ignore[arg-type]


def _subscription(id_: str, **fields: Any) -> Subscription:
    return Subscription(
        id_, "acme", "https://hooks.example/", END_EVENT_TYPES, **{"sealed": "", "created_ms": 0} | fields
    )


def _message(receiver: str) -> Message:
    return Message(receiver, 10, "j1", "job.completed", 1_800_000_000_123, "pending", 1, 0, 0, None, None, None)


def test_a_webhook_signs_with_its_own_secrets_the_current_one_first(
    send: SigningSender, recorder: RecordingSender
) -> None:
    (secret, sealed), (former, former_sealed) = (vault.new_signing_secret("we_1") for _ in range(2))
    former_until_ms = now_ms() + HOUR_MS
    webhook = _subscription("we_1", sealed=sealed, former_sealed=former_sealed, former_until_ms=former_until_ms)
    message = _message("we_1")
    assert send(webhook, message, b"{}", TRACE).ok
    assert recorder.sent == [("https://hooks.example/", message.id, b"{}", [secret, former], TRACE)]


def test_a_callback_url_signs_with_the_secrets_of_the_jobs_tenant(
    send: SigningSender, recorder: RecordingSender
) -> None:
    message = _message("j1")
    assert send(_subscription("j1"), message, b"{}", None).ok
    secrets = keyring.webhook_secrets("acme", SecretRotation(), now_ms())
    assert recorder.sent == [("https://hooks.example/", message.id, b"{}", secrets, None)]


def test_a_message_whose_secret_cannot_be_decrypted_is_not_sent_and_may_be_retried(
    send: SigningSender, recorder: RecordingSender
) -> None:
    _, sealed_for_another = vault.new_signing_secret("we_2")
    result = send(_subscription("we_1", sealed=sealed_for_another), _message("we_1"), b"{}", None)
    assert (result.ok, result.status, result.permanent) == (False, None, False)
    assert "rotate it" in result.error
    assert recorder.sent == []
