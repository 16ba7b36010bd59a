"""Endpoints of servers: none leads to a cloud's metadata or back to this API, and none shows the keys that it holds."""

import pytest

from app.context import context
from slotkeeper.registry.tables import endpoints
from tests.support.api import Api
from tests.support.hostile_hosts import METADATA, METADATA_NAMES, THIS_MACHINE

HIDDEN = "SECRET-OF-THE-QUERY"
URL = f"http://gpu1:9001/generate?version=2&token={HIDDEN}"


def taken(api: Api, hosts: list[tuple[str, str]], port: int) -> list[str]:
    """The hosts at which a server may be registered."""
    answers = [(host, api.register(endpoint=f"http://{host}:{port}/generate")) for host, _ in hosts]
    assert all(answer.json["field"] == "endpoint" for _, answer in answers if answer.status_code == 422)
    return [host for host, answer in answers if answer.status_code != 422]


def test_an_endpoint_at_a_metadata_address_is_refused_in_every_notation_of_the_host(api: Api) -> None:
    assert taken(api, METADATA + METADATA_NAMES, 9001) == []


def test_an_endpoint_at_this_api_is_refused_in_every_notation_of_the_host(api: Api) -> None:
    assert taken(api, THIS_MACHINE, context_port(api)) == []


def test_servers_on_this_machine_are_registered_at_other_ports(api: Api) -> None:
    assert taken(api, [("127.0.0.1", ""), ("localhost", ""), ("127.1", ""), ("[::1]", "")], 9001) != []


@pytest.mark.parametrize("settings", [{"HOST": "0.0.0.0", "REQUIRE_KEYS": "true"}])
def test_an_api_that_listens_on_all_addresses_refuses_endpoints_at_each_of_them(
    api: Api, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.catalog_changes.is_local_address", lambda address: str(address) == "10.1.2.3")
    key = api.tenant("root", admin=True)
    body = {"model": "m1", "server": "s1", "slots": 1}
    for host, status in (("10.1.2.3", 422), ("0x0a010203", 422), ("10.1.2.4", 201)):
        asked = body | {"endpoint": f"http://{host}:{context_port(api)}/generate"}
        assert api.client.post("/admin/register", json=asked, headers=key).status_code == status


def context_port(api: Api) -> int:
    with api.client.application.app_context():
        return context().settings.port


def test_the_keys_of_an_endpoint_are_kept_where_the_server_is_called_from_and_nowhere_else(api: Api) -> None:
    assert api.register(endpoint=URL).status_code == 201
    with api.database.read() as connection:
        assert [row.url for row in connection.execute(endpoints.select())] == [URL]
        tables = [row[0] for row in connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: str(connection.exec_driver_sql(f"SELECT * FROM {name}").all()) for name in tables}
    assert [name for name, text in rows.items() if HIDDEN in text] == ["endpoints"]
    for path in ("/admin/servers", "/admin/models/zimg", "/admin/audit", "/page/audit", "/page/servers/gpu1"):
        answer = api.client.get(path)
        assert answer.status_code == 200, path
        assert HIDDEN not in answer.text, path


def test_the_keys_of_a_webhooks_url_are_not_shown(api: Api) -> None:
    url = f"https://hooks.example.com/in?key={HIDDEN}"
    assert HIDDEN not in api.client.post("/webhooks", json={"url": url}).text
    assert HIDDEN not in api.client.get("/webhooks").text
    api.register()
    job = api.submitted(callback_url=url)
    assert "key=***" in api.client.get(f"/queue/jobs/{job}").json["callback_url"]
