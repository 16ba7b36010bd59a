"""Secrets that descriptions of servers name: set for certain models, encrypted in the database, never shown."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import select

from routing.dispatch.outcome import OutcomeKind
from slotkeeper.registry.tables import secrets as table
from tasks import maintenance, server_adapters
from tasks.security import keyring, vault
from tasks.server_adapters import adapter_for
from tasks.servers import RunDetails
from tasks.servers.responses import redact
from tasks.services import catalog, database
from tests.support.api import Api
from tests.support.blocking import Blocking
from tests.support.scripted import Scripted, answer

VALUE = 'the "very" \\secret/ !'
NAMES_IT = {"description": {"submit": {"body": {"in": "{{payload}}", "key": "{{secret/KEY}}"}}}}


def _set(api: Api, name: str = "KEY", value: str = VALUE, models: Any = ("zimg",)) -> Any:
    body = {"value": value, "models": models if models is None else list(models)}
    return api.client.put(f"/admin/secrets/{name}", json=body)


def _configure(api: Api, model: str = "zimg", **changed: Any) -> Any:
    return api.client.put(f"/admin/model-configs/{model}", json=NAMES_IT | changed)


def _opened(model: str = "zimg", name: str = "KEY") -> str | None:
    from tasks.services import dispatcher

    dispatcher().catalog.refresh()
    return server_adapters.secret_for(model, name)


def test_the_value_of_a_secret_is_never_returned(api):
    created, changed, listed = _set(api), _set(api), api.client.get("/admin/secrets")
    assert (created.status_code, changed.status_code) == (201, 200)
    for shown in (created.json, *listed.json["secrets"]):
        assert shown.keys() == {"secret", "models", "set_by", "set_at"}
        assert (shown["secret"], shown["models"]) == ("KEY", ["zimg"])
    assert listed.headers["Cache-Control"] == "no-store"


def test_the_database_holds_secrets_only_encrypted(api):
    _set(api)
    with database().read() as connection:
        (row,) = connection.execute(select(table)).all()
    assert VALUE not in str(row) and len(row.sealed) > len(VALUE)
    assert _opened() == VALUE


def test_encrypting_a_secret_twice_gives_different_ciphertexts():
    assert vault.seal("KEY", VALUE) != vault.seal("KEY", VALUE)


def test_an_encrypted_secret_cannot_be_decrypted_under_another_name():
    sealed = vault.seal("KEY", VALUE)
    assert (vault.unseal("KEY", sealed), vault.unseal("OTHER", sealed)) == (VALUE, None)


def test_a_secret_sealed_with_the_former_installation_secret_opens_while_that_is_configured(monkeypatch):
    now, before = b"n" * 32, b"b" * 32
    monkeypatch.setattr(keyring, "installation_secrets", lambda: (before,))
    sealed = vault.seal("KEY", VALUE)
    vault.unseal.cache_clear()
    monkeypatch.setattr(keyring, "installation_secrets", lambda: (now, before))
    assert vault.unseal("KEY", sealed) == VALUE
    vault.unseal.cache_clear()
    monkeypatch.setattr(keyring, "installation_secrets", lambda: (now,))
    assert vault.unseal("KEY", sealed) is None
    vault.unseal.cache_clear()


@pytest.mark.parametrize(
    "name, body, field",
    [
        ("KEY", {"value": "short", "models": None}, "value"),
        ("KEY", {"value": "x" * 5000, "models": None}, "value"),
        ("KEY", {"value": "two\nlines of it", "models": None}, "value"),
        ("KEY", {"value": "schlüssel", "models": None}, "value"),
        ("KEY", {"value": "a-long-value"}, "models"),
        ("KEY", {"value": "a-long-value", "models": []}, "models"),
        ("KEY", {"value": "a-long-value", "models": ["no model!"]}, "model"),
        ("KEY", {"value": 12345678, "models": None}, "value"),
        ("1KEY", {"value": "a-long-value", "models": None}, "name"),
        ("K-EY", {"value": "a-long-value", "models": None}, "name"),
        ("K" * 65, {"value": "a-long-value", "models": None}, "name"),
    ],
)
def test_an_invalid_secret_is_refused_and_its_value_is_not_repeated(api, name, body, field):
    refused = api.client.put(f"/admin/secrets/{name}", json=body)
    assert refused.status_code == 422 and refused.json["field"].startswith(field)
    assert str(body["value"]) not in refused.text
    assert api.client.get("/admin/secrets").json["secrets"] == []


def test_only_the_models_listed_in_a_secret_can_use_it(api):
    _set(api, models=["zimg"])
    assert _configure(api).status_code == 200
    refused = _configure(api, "flux")
    assert (refused.status_code, refused.json["errors"][0]["pointer"]) == (422, "/description/submit/body/key")
    assert (_opened("zimg"), _opened("flux")) == (VALUE, None)
    _set(api, models=None)
    assert _configure(api, "flux").status_code == 200 and _opened("flux") == VALUE


def test_a_secret_is_encrypted_again_after_a_change_of_the_installations_secret(api, monkeypatch):
    now, before = b"n" * 32, b"b" * 32

    @contextmanager
    def installed(*keys: bytes) -> Iterator[None]:
        vault.unseal.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(keyring, "installation_secrets", lambda: keys)
            yield
        vault.unseal.cache_clear()

    with installed(before):
        _set(api)
    with installed(now, before):
        assert maintenance.reseal_secrets() == 1
        api.dispatcher.catalog.refresh()
        assert maintenance.reseal_secrets() == 0
    with installed(now):
        assert _opened() == VALUE


def test_a_new_encryption_does_not_overwrite_a_secret_that_was_changed_meanwhile(api):
    _set(api)
    stale = api.dispatcher.catalog.refresh().secrets["KEY"]
    _set(api, value="another-value")
    assert not catalog().reseal_secret(stale, vault.seal("KEY", VALUE)) and _opened() == "another-value"


def test_a_secret_that_is_named_stays(api):
    _set(api)
    _configure(api)
    removed, narrowed = api.client.delete("/admin/secrets/KEY"), _set(api, models=["flux"])
    assert (removed.status_code, narrowed.status_code) == (409, 409)
    assert removed.json["models"] == narrowed.json["models"] == ["zimg"]
    assert _set(api, models=["flux", "zimg"]).status_code == 200
    api.client.delete("/admin/model-configs/zimg")
    assert api.client.delete("/admin/secrets/KEY").status_code == 204
    assert api.client.delete("/admin/secrets/KEY").status_code == 404


def test_a_secret_that_a_registration_uses_cannot_be_deleted(api):
    _set(api)
    body = {"model": "zimg", "server": "gpu1", "endpoint": "http://127.0.0.1:9/x", "slots": 1}
    assert api.client.post("/admin/register", json=body | NAMES_IT).status_code == 201
    assert api.client.delete("/admin/secrets/KEY").status_code == 409


def test_a_preset_may_name_a_secret(api, monkeypatch):
    monkeypatch.setattr(server_adapters.presets, "get", lambda _: NAMES_IT["description"])
    refused = api.client.put("/admin/model-configs/zimg", json={"preset": "any"})
    assert (refused.status_code, refused.json["errors"][0]["pointer"]) == (422, "/preset")


def test_a_changed_secret_is_sent_without_a_new_start(api):
    _set(api, value="first-value")
    _configure(api)
    model = api.dispatcher.catalog.refresh().models["zimg"]
    with Scripted(lambda _: answer({"status": "done"})) as there:
        server = Blocking(adapter_for(there.url, model, model.described_by))
        server.submit(RunDetails("j", 1, {}, deadline_s=5))
        _set(api, value="second-value")
        api.dispatcher.catalog.refresh()
        server.submit(RunDetails("j", 1, {}, deadline_s=5))
    assert [seen.json["key"] for seen in there.seen] == ["first-value", "second-value"]


def test_a_missing_secret_costs_a_retry_and_is_named_in_the_error(api):
    _set(api, models=None)
    _configure(api)
    model = api.dispatcher.catalog.refresh().models["zimg"]
    server = Blocking(adapter_for("http://127.0.0.1:9/", model, model.described_by))
    with database().engine.begin() as connection:
        connection.execute(table.delete())
    api.dispatcher.catalog._snapshot = None
    outcome = server.submit(RunDetails("j", 1, {}, deadline_s=5))
    assert (outcome.kind, outcome.code) == (OutcomeKind.RETRY, "misconfigured") and "secret/KEY" in outcome.message


@pytest.mark.parametrize("size", [2048, 64 * 1024])
def test_part_of_a_secret_at_the_end_of_a_long_text_is_redacted(size):
    for half in (5, 10, len(VALUE) - 1):
        redacted = redact(" " * (size - half) + VALUE[:half], [VALUE])
        assert redacted == "***", half


@pytest.mark.parametrize("error", [VALUE, {"deep": [VALUE]}, f"{VALUE} and {VALUE}"])
def test_a_secret_that_a_server_repeats_in_its_error_is_redacted(api, error):
    _set(api)
    _configure(api)
    model = api.dispatcher.catalog.refresh().models["zimg"]
    with Scripted(lambda _: answer({"error": error}, 500)) as there:
        message = (
            Blocking(adapter_for(there.url, model, model.described_by))
            .submit(RunDetails("j", 1, {}, deadline_s=5))
            .message
        )
    assert "***" in message and "very" not in message


def test_a_secret_of_the_submit_that_a_poll_repeats_is_redacted(api):
    _set(api)
    _configure(api)
    model = api.dispatcher.catalog.refresh().models["zimg"]
    response = {"status": "failed", "error": f"bad key {VALUE}"}
    with Scripted(lambda _: answer(response)) as there:
        message = (
            Blocking(adapter_for(there.url, model, model.described_by))
            .status(RunDetails("j", 1, None, deadline_s=5), "r")
            .message
        )
    assert message.endswith("bad key ***")
