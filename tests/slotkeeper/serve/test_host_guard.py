"""No web page can make a browser on this machine use the server, nor read its responses."""

import pytest

from slotkeeper.serve.guard import HostGuard
from slotkeeper.serve.http_server import Request
from slotkeeper.serve.server import ReferenceServer, ServeConfig

JSON = "application/json"
# Host, Origin, Sec-Fetch-Site, Content-Type -> status; None: let in
CASES = {
    "the dispatcher": ("127.0.0.1:9001", None, None, JSON, None),
    "curl with a charset": ("localhost:9001", None, None, "application/json; charset=utf-8", None),
    "bytes without a type": ("[::1]:9001", None, None, None, None),
    "a page as text": ("127.0.0.1:9001", "http://evil.test", "cross-site", "text/plain", 403),
    "a page as a form": ("127.0.0.1:9001", "http://evil.test", None, "application/x-www-form-urlencoded", 403),
    "a page without a type": ("127.0.0.1:9001", "http://evil.test", None, None, 403),
    "a sandboxed page": ("127.0.0.1:9001", "null", None, JSON, 403),
    "another port's page": ("127.0.0.1:9001", "http://127.0.0.1:8399", "same-site", JSON, 403),
    "an old browser": ("127.0.0.1:9001", None, "cross-site", JSON, 403),
    "text": ("127.0.0.1:9001", None, None, "text/plain", 415),
    "a form": ("127.0.0.1:9001", None, None, "multipart/form-data; boundary=x", 415),
    "a rebound name": ("evil.test:9001", "http://evil.test:9001", "same-origin", JSON, 421),
    "a rebound name that reads": ("evil.test", None, None, JSON, 421),
    "a name with a user": ("127.0.0.1@evil.test", None, None, JSON, 421),
    "our address with a user": ("evil@127.0.0.1", None, None, JSON, 421),
    "no host at all": ("", None, None, JSON, None),
}


def _request(host: str, origin: str | None, site: str | None, kind: str | None) -> Request:
    given = {"host": host, "origin": origin, "sec-fetch-site": site, "content-type": kind}
    return Request("POST", "/generate", {name: value for name, value in given.items() if value}, b"{}")


@pytest.mark.parametrize("case", CASES)
def test_the_host_guard_accepts_or_refuses_each_request_by_its_headers(case: str) -> None:
    *given, status = CASES[case]
    refused = HostGuard("127.0.0.1", ()).refusal(_request(*given))  # type: ignore[arg-type]
    assert (refused and refused.status) == status


@pytest.mark.parametrize(
    "bound, names, host, let_in",
    [
        ("127.0.0.1", ("gpu1.lan",), "gpu1.lan:9001", True),
        ("0.0.0.0", (), "gpu1.lan:9001", True),
        ("0.0.0.0", ("gpu1.lan",), "GPU1.lan.", True),
        ("0.0.0.0", ("gpu1.lan",), "evil.test", False),
        ("0.0.0.0", ("gpu1.lan",), "10.0.0.4:9001", True),
    ],
)
def test_names_of_the_network_can_be_configured(bound: str, names: tuple[str, ...], host: str, let_in: bool) -> None:
    assert (HostGuard(bound, names).refusal(_request(host, None, None, JSON)) is None) is let_in


def test_the_host_guard_checks_every_request() -> None:
    import requests

    with ReferenceServer(lambda payload: payload, ServeConfig(port=0)) as server:
        assert requests.post(f"{server.url}/generate", json={}, timeout=10).ok
        rebound = {"Host": "evil.test"}
        assert requests.get(f"{server.url}/health", headers=rebound, timeout=10).status_code == 421
        page = {"Origin": "http://evil.test", "Content-Type": "text/plain"}
        assert requests.post(f"{server.url}/generate", data="{}", headers=page, timeout=10).status_code == 403
