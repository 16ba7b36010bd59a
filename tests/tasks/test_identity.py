"""The identity of a client that submits a job through Celery."""

from collections.abc import Iterator

import pytest

from slotkeeper.db import Database
from slotkeeper.errors import InvalidJob, ScopeMissing, Unauthorized
from slotkeeper.registry.api_keys import ApiKeys
from slotkeeper.registry.identity import FIRST_SCOPES, LOCAL_IDENTITY, Identity, Scope, Tenant
from tasks import identity, step_tokens
from tasks.celery_app import celery
from tasks.identity import KeyLookups, identify_caller, identify_message
from tasks.security.celery_tokens import TokenSubject, make_token, read_token
from tasks.step_tokens import acting_for
from tests.support.builders import T0
from tests.support.clock import set_clock
from tests.support.keys import add_key

ACME = Identity(Tenant("acme"), "k1", FIRST_SCOPES)
FAR = T0 + 3_600_000


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[object, Identity | None]]:
    """Keys are required; the dictionary has those that are valid."""
    valid: dict[object, Identity | None] = {"sk_acme": ACME, TokenSubject("acme", "k1"): ACME}
    monkeypatch.setattr(step_tokens, "requires_keys", lambda: True)
    monkeypatch.setattr(identity, "requires_keys", lambda: True)
    monkeypatch.setattr(identity, "_lookups", lambda: type("Keys", (), {"find": staticmethod(valid.get)}))
    yield valid


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    at_ms = [T0]
    set_clock(monkeypatch, lambda: at_ms[0])
    return at_ms


def _headers(tenant: str = "acme", key_id: str | None = "k1", expires_ms: int = FAR) -> dict[str, str]:
    return {"slotkeeper_token": make_token(TokenSubject(tenant, key_id), expires_ms)}


def test_without_keys_each_message_and_call_is_the_local_identitys() -> None:
    assert identify_message({}) is identify_caller({}) is LOCAL_IDENTITY
    assert LOCAL_IDENTITY.tenant_of_job("any") == "any"


def test_a_token_is_valid_while_its_key_is(keyed: dict[object, Identity | None], clock: list[int]) -> None:
    assert identify_message(_headers()) == ACME
    keyed.clear()
    with pytest.raises(Unauthorized, match="not valid any more"):
        identify_message(_headers())


def test_a_token_ends(keyed: dict[object, Identity | None], clock: list[int]) -> None:
    token = make_token(TokenSubject("acme", "k1"), T0 + 1000)
    clock[0] = T0 + 999
    assert read_token(token) == TokenSubject("acme", "k1")
    clock[0] = T0 + 1000
    with pytest.raises(Unauthorized, match="expired"):
        read_token(token)


@pytest.mark.parametrize("end", ["", "A", "."])
def test_a_changed_token_is_refused(clock: list[int], end: str) -> None:
    token = make_token(TokenSubject("acme", "k1"), FAR)
    changed = token[: len(token) - 1 - len(end)] + end
    with pytest.raises(Unauthorized):
        read_token(changed)


def test_a_key_without_the_scope_submit_submits_nothing(keyed: dict[object, Identity | None]) -> None:
    keyed["sk_acme"] = keyed[TokenSubject("acme", "k1")] = Identity(Tenant("acme"), "k1", frozenset({Scope.READ}))
    with pytest.raises(ScopeMissing, match="submit"):
        identify_message(_headers())


def test_a_call_is_that_of_its_header_before_the_key_of_its_process(
    keyed: dict[object, Identity | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bravo = Identity(Tenant("bravo"), "k2", FIRST_SCOPES)
    keyed[TokenSubject("bravo", "k2")] = bravo
    with pytest.raises(Unauthorized, match="SLOTKEEPER_KEY"):
        identify_caller({})
    monkeypatch.setattr(identity, "_own_key", lambda: "sk_acme")
    assert identify_caller({}) is ACME
    assert identify_caller(_headers("bravo", "k2")) == bravo


def test_a_message_that_is_sent_for_a_job_has_a_token_of_its_tenant(keyed: dict[object, Identity | None]) -> None:
    """This holds for calls in this process and for messages to any task, because a further step may follow."""
    sent: dict[str, str] = {}
    with acting_for(TokenSubject("acme", "k1")):
        assert identify_caller({}) == ACME
        _publish(sent)
    assert read_token(sent["slotkeeper_token"]) == TokenSubject("acme", "k1")
    with acting_for(TokenSubject("acme", None)):
        before_keys = identify_caller({})
    assert (before_keys.tenant.name, before_keys.scopes) == ("acme", {Scope.SUBMIT})
    _publish(after := {})
    assert after == {}


def test_steps_after_a_job_that_an_operator_submitted_for_a_tenant_are_that_tenants(
    keyed: dict[object, Identity | None],
) -> None:
    subject = TokenSubject("bravo", "k3", "ops")
    keyed[subject] = Identity(Tenant("ops"), "k3", frozenset({Scope.OPERATE}))
    with acting_for(subject):
        assert identify_caller({}).tenant.name == "bravo"
        _publish(sent := {})
    assert identify_message(sent).tenant.name == "bravo"
    keyed[subject] = Identity(Tenant("ops"), "k3", FIRST_SCOPES)  # It may not operate any more.
    with pytest.raises(InvalidJob, match="may not submit for 'bravo'"):
        identify_message(sent)


def test_without_keys_nothing_is_added_to_messages() -> None:
    with acting_for(TokenSubject("acme", None)):
        _publish(sent := {})
    assert sent == {}


def _publish(headers: dict[str, str]) -> None:
    from celery.signals import before_task_publish

    before_task_publish.send(sender="any.task", headers=headers)


def test_a_key_submits_only_for_its_tenant_and_an_operator_key_for_all_tenants() -> None:
    assert ACME.tenant_of_job(None) == ACME.tenant_of_job("acme") == "acme"
    with pytest.raises(InvalidJob, match="may not submit for 'bravo'"):
        ACME.tenant_of_job("bravo")
    assert Identity(Tenant("ops"), "k3", frozenset({Scope.OPERATE})).tenant_of_job("bravo") == "bravo"


def test_a_key_is_read_from_the_database_once_a_second(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(identity.time, "monotonic", lambda: now[0])
    key, keys = add_key(database, "acme"), ApiKeys(database)
    lookups = KeyLookups(keys, refresh_s=1.0)
    found = lookups.find(key)
    assert found is not None and found.tenant.name == "acme"
    assert lookups.find(TokenSubject("acme", found.key_id)) == found
    assert lookups.find(TokenSubject("bravo", found.key_id)) is None
    assert lookups.find(TokenSubject("bravo", found.key_id, "acme")) == found
    keys.revoke("acme", found.key_id or "", T0)
    now[0] = 0.9
    assert lookups.find(key) == found
    now[0] = 1.0
    assert lookups.find(key) is None


def test_the_key_of_a_call_is_stored_with_its_job_and_cannot_be_set_by_a_client() -> None:
    from tasks import options

    submission = options.read_submission("j1", ("zimg",), {}, {}, ACME)
    assert (submission.tenant, '"key_id": "k1"' in (submission.envelope or "")) == ("acme", True)
    assert "key_owner" not in (submission.envelope or "")
    ops = Identity(Tenant("ops"), "k3", frozenset({Scope.OPERATE}))
    of_other = options.read_submission("j2", ("zimg",), {"tenant": "bravo"}, {}, ops)
    assert (of_other.tenant, '"key_owner": "ops"' in (of_other.envelope or "")) == ("bravo", True)
    with pytest.raises(InvalidJob, match="key_id is no option"):
        options.read_submission("j1", ("zimg",), {}, {"key_id": "k9"}, ACME)
    assert celery.main == "slotkeeper"
