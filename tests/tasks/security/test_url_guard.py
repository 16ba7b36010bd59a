"""URLs and DNS responses of attackers, as tables: no webhook may reach an internal address by them.

There are two kinds of attack: a URL that contains an internal address, and a name that resolves to one.  The tests use
no network: DNS responses are fake, and attempts to connect are only recorded.
"""

import socket
from datetime import UTC, datetime
from ipaddress import ip_network

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.security.url_guard import REFUSED_PORTS, check_url, parse_networks
from tasks.webhooks.sender import WebhookSender
from tests.support.hostile_hosts import METADATA, THIS_MACHINE

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NOW = datetime(2026, 1, 1, tzinfo=UTC)

URLS = [  # the attacker's URL, and what it is
    *((f"http://{host}/", f"metadata, {why}") for host, why in METADATA),
    *((f"http://{host}/", f"this machine, {why}") for host, why in THIS_MACHINE),
    ("http://127.255.255.254/", "the far end of loopback"),
    ("http://10.1.2.3/", "private"),
    ("http://172.31.255.1/", "private"),
    ("http://192.168.0.1/", "private"),
    ("http://100.64.0.1/", "carrier-grade NAT"),
    ("http://100.127.255.254/", "the far end of carrier-grade NAT"),
    ("http://169.254.169.254/latest/meta-data/", "cloud metadata"),
    ("http://192.0.0.9/", "port control of the nearest NAT, which IANA lists as reachable"),
    ("http://239.255.255.250/", "multicast, SSDP"),
    ("http://255.255.255.255/", "broadcast"),
    ("http://240.0.0.1/", "reserved"),
    ("http://0.1.2.3/", "this network"),
    ("http://192.0.2.1/", "documentation"),
    ("http://198.51.100.1/", "documentation"),
    ("http://203.0.113.1/", "documentation"),
    ("http://198.18.0.1/", "benchmarking"),
    ("http://192.88.99.1/", "6to4 relay"),
    ("http://[fe80::1%25eth0]/", "link-local with a zone"),
    ("http://[fc00::1]/", "unique local"),
    ("http://[fec0::1]/", "site-local"),
    ("http://[2001:db8::1]/", "documentation"),
    ("http://[3fff::1]/", "documentation"),
    ("http://[100::1]/", "discard"),
    ("http://[::ffff:8.8.8.8]/", "IPv4-mapped, which no receiver uses"),
    ("http://[::127.0.0.1]/", "loopback, IPv4-compatible"),
    ("http://[64:ff9b::168.63.129.16]/", "WireServer behind NAT64"),
    ("http://[64:ff9b:1::7f00:1]/", "NAT64 for local use"),
    ("http://[::ffff:0:7f00:1]/", "loopback behind a stateless translator"),
    ("http://[200::1]/", "not global unicast"),
    ("http://[4000::1]/", "not global unicast"),
    ("http://[e000::1]/", "not global unicast"),
    ("http://[2002:808:808::]/", "6to4 with a public address"),
    ("http://[2001:0:7f00:1::]/", "Teredo with loopback as server"),
    ("http://[2001:0:808:808::f7f7:f7f7]/", "Teredo with public addresses"),
    ("http://0x7f.1/", "loopback in hex, short"),
    ("http://127.0.0.0x1/", "loopback with the last part in hex"),
    ("http://0x7f.1./", "loopback in hex with a trailing dot"),
    ("http://LOCALHOST/", "this machine in capitals"),
    ("http://localhost./", "this machine with a trailing dot"),
    ("http://１２７.0.0.1/", "full-width digits"),
    ("http://①②⑦.0.0.1/", "circled digits"),
    ("http://127。0。0。1/", "ideographic full stops"),
    ("http://ⓛocalhost/", "a circled letter"),
    ("http://example.com:８０/", "full-width port"),
    ("http://exa­mple.com/", "a soft hyphen that parsers drop"),
    ("http://%31%32%37.0.0.1/", "percent-encoded host"),
    ("http://user:secret@example.com/", "user and password"),
    ("http://example.com@127.0.0.1/", "a user name that looks like the host"),
    ("http://@example.com/", "empty user"),
    ("http://example.com\\@127.0.0.1/", "backslash: browsers end the host there"),
    ("http:\\\\127.0.0.1/", "backslashes for slashes"),
    ("http://example.com/\\..\\x", "backslashes in the path"),
    ("http://example.com/\r\nHost: 127.0.0.1", "header injection"),
    ("http://exam\tple.com/", "a tab that parsers drop"),
    (" http://example.com/", "leading space"),
    ("http://example.com/\x00", "a zero byte"),
    ("http://example.com/a b", "a space in the path"),
    ("http://example.com/\x7f", "delete"),
    ("http://example.com/\u2028", "a line separator"),
    ("http://[127.0.0.1]/", "IPv4 in brackets"),
    ("http://[::1]example.com/", "a name after the bracket"),
    ("http://[2606:4700::1]example.com/", "a name after a public address"),
    ("http://[v1.localhost]/", "the address of a future protocol"),
    ("http://[::1/", "open bracket"),
    ("http://a..b/", "empty label"),
    ("http://" + "a" * 64 + ".com/", "a label longer than DNS allows"),
    ("http://" + "a." * 200 + "com/", "a name longer than DNS allows"),
    ("http://example.com:0/", "not a port"),
    ("http://example.com:65536/", "not a port"),
    ("http://example.com:-1/", "not a port"),
    ("http://example.com:80:90/", "two ports"),
    ("http://example.com:25/", "mail"),
    ("http://example.com:6379/", "Redis"),
    ("file:///etc/passwd", "a file"),
    ("gopher://example.com/_x", "raw bytes by gopher"),
    ("ftp://example.com/", "another protocol"),
    ("dict://example.com:11211/stat", "another protocol"),
    ("ws://example.com/", "another protocol"),
    ("javascript:alert(1)", "not an address"),
    ("data:text/plain,x", "not an address"),
    ("//example.com/", "no scheme"),
    ("example.com", "no scheme"),
    ("http:example.com", "no host"),
    ("http:///path", "no host"),
    ("http://:80/", "no host"),
    ("http://#@example.com/", "no host"),
    ("", "nothing"),
    ("https://example.com/" + "a" * 2048, "too long"),
]

ANSWERS = [  # the response of the attacker's DNS server, and what it is
    (["127.0.0.1"], "loopback"),
    (["10.0.0.1"], "private"),
    (["100.64.0.1"], "carrier-grade NAT"),
    (["169.254.169.254"], "metadata"),
    (["168.63.129.16"], "Azure WireServer"),
    (["0.0.0.0"], "unspecified"),
    (["224.0.0.1"], "multicast"),
    (["255.255.255.255"], "broadcast"),
    (["192.0.2.1"], "documentation"),
    (["::1"], "loopback"),
    (["::"], "unspecified"),
    (["fe80::1%lo"], "link-local with a zone"),
    (["fd00:ec2::254"], "metadata"),
    (["fec0::1"], "site-local"),
    (["ff02::1"], "multicast"),
    (["::ffff:127.0.0.1"], "IPv4-mapped loopback"),
    (["::ffff:8.8.8.8"], "IPv4-mapped"),
    (["64:ff9b::7f00:1"], "loopback behind NAT64"),
    (["2002:7f00:1::"], "6to4"),
    (["2001:0:808:808::f7f7:f7f7"], "Teredo"),
    (["8.8.8.8", "127.0.0.1"], "mixed: public first"),
    (["127.0.0.1", "8.8.8.8"], "mixed: public last"),
    (["2606:4700::1", "10.0.0.1"], "mixed: public IPv6, private IPv4"),
    (["8.8.8.8", "fd00::1"], "mixed: public IPv4, private IPv6"),
]

GOOD_URLS = [
    "https://example.com",
    "https://hooks.slack.com/services/T0/B0/x",
    "http://example.com:8080/a/b?c=d&e=%20#f",
    "https://xn--mller-kva.example./",
    "http://8.8.8.8:65535/",
    "https://[2606:4700:4700::1111]:8443/x",
    "http://[64:ff9b::808:808]/",
    "http://127.0.0.1.nip.io/",
    "http://0x7f.example.com/",
    "https://example.com/?to=user@example.com",
]


def _address_row(address: str, port: int) -> tuple:
    """Return one row of a result of getaddrinfo."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    socket_address = (address, port, 0, 0) if ":" in address else (address, port)
    return family, socket.SOCK_STREAM, 6, "", socket_address


class FakeNetwork:
    """A fake of DNS and connections, which records both.  It returns `answers` in turn, the last one repeatedly."""

    def __init__(self) -> None:
        self.answers: list[list[str]] = []
        self.lookups: list[str] = []
        self.connections: list[str] = []

    def look_up(self, host, port, *_args):
        self.lookups.append(host)
        if not self.answers:
            return [_address_row(host, port)]  # An IP address resolves to itself.
        addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [_address_row(address, port) for address in addresses]

    def connect(self, _sock, address):
        self.connections.append(address[0])
        raise ConnectionRefusedError(111, "Connection refused")


@pytest.fixture
def network(monkeypatch):
    network = FakeNetwork()
    monkeypatch.setattr(socket, "getaddrinfo", network.look_up)
    monkeypatch.setattr(socket.socket, "connect", lambda sock, address: network.connect(sock, address))
    return network


@pytest.fixture(scope="module")
def sender():
    return WebhookSender()


def send(sender: WebhookSender, url: str):
    return sender.send(url, "msg_1", b"{}", NOW, [SECRET])


@pytest.mark.parametrize(("url", "reason"), URLS, ids=[f"{why} {i}" for i, (_, why) in enumerate(URLS)])
def test_a_url_with_an_internal_address_is_refused_before_any_dns_lookup(network, sender, url, reason):
    problem = check_url(url)
    assert problem, reason
    assert "\n" not in problem and problem.endswith("."), "the error is one sentence"
    sent = send(sender, url)
    assert (sent.ok, sent.status, sent.error, sent.permanent) == (False, None, problem, True)
    assert (network.lookups, network.connections) == ([], [])


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("https://example.com/" + "a" * 2048, "shorten"),
        ("http://exämple.com/", "xn--"),
        ("file:///etc/passwd", "https://"),
        ("http://user:secret@example.com/", "leave it out"),
        ("http:///path", "https://host/path"),
        ("http://example.com:0/", "such as 443"),
        ("http://example.com:25/", "such as 443"),
        ("http://example.com:99999/", "https://host:port/path"),
        ("http://127.1/", "plain form"),
        ("http://0x7f.1/", "plain form"),
        ("http://a_b.example/", "DNS name"),
        ("http://10.1.2.3/", "SLOTKEEPER_WEBHOOK_ALLOW"),
        ("http://localhost/", "SLOTKEEPER_WEBHOOK_ALLOW"),
    ],
)
def test_a_refusal_names_the_remedy_and_quotes_only_the_host_of_the_url(url, remedy):
    problem = check_url(url + ("?" if "?" not in url else "&") + "token=t0ken")
    assert remedy in problem
    assert "t0ken" not in problem and "secret" not in problem


@pytest.mark.parametrize("port", sorted(REFUSED_PORTS))
def test_ports_of_servers_that_could_execute_a_post_are_refused(port):
    assert check_url(f"http://example.com:{port}/")


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_public_url_is_accepted_without_a_dns_lookup(network, url):
    assert check_url(url) is None
    assert network.lookups == []


@pytest.mark.parametrize(("answers", "reason"), ANSWERS, ids=[why for _, why in ANSWERS])
def test_a_name_that_leads_inside_is_refused_before_a_connection(network, sender, answers, reason):
    network.answers = [answers]
    sent = send(sender, "http://hooks.attacker.test/?token=t0ken")
    assert (sent.ok, sent.permanent) == (False, True), reason
    assert network.connections == []


@pytest.mark.parametrize("answers", [["8.8.8.8"], ["2606:4700::1"], ["64:ff9b::808:808"]])
def test_a_name_with_a_public_address_is_connected_to(network, sender, answers):
    network.answers = [answers]
    sent = send(sender, "http://hooks.example.test/")
    assert (sent.ok, sent.permanent) == (False, False)
    assert network.connections == answers


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_is_resolved_once_so_that_a_second_response_cannot_rebind_it(network, sender, scheme):
    network.answers = [["8.8.8.8"], ["127.0.0.1"]]
    send(sender, f"{scheme}://rebind.attacker.test/")
    assert network.lookups == ["rebind.attacker.test"]
    assert network.connections == ["8.8.8.8"]


def test_a_name_whose_address_becomes_private_is_refused(network, sender):
    network.answers = [["8.8.8.8"], ["127.0.0.1"]]
    assert not send(sender, "http://rebind.attacker.test/").permanent
    assert send(sender, "http://rebind.attacker.test/").permanent
    assert network.connections == ["8.8.8.8"]


def test_only_the_log_contains_the_private_address_of_a_name(network, sender, caplog):
    network.answers = [["10.77.88.99"]]
    sent = send(sender, "http://db.inside.test/?token=t0ken")
    assert "http://db.inside.test" in sent.error and "SLOTKEEPER_WEBHOOK_ALLOW" in sent.error
    assert "10.77.88.99" not in sent.error and "Private" not in sent.error
    assert "10.77.88.99" in caplog.text
    assert "t0ken" not in sent.error + caplog.text


def test_a_connection_with_an_internal_peer_address_is_dropped(network, sender, monkeypatch):
    network.answers = [["8.8.8.8"]]
    monkeypatch.setattr(socket.socket, "connect", lambda sock, address: network.connections.append(address[0]))
    monkeypatch.setattr(socket.socket, "getpeername", lambda sock: ("127.0.0.1", 80))
    monkeypatch.setattr(socket.socket, "send", lambda *_: pytest.fail("something was sent"))
    assert send(sender, "http://hooks.example.test/").permanent


@pytest.mark.parametrize("location", ["http://169.254.169.254/latest/", "//127.0.0.1:1/", "file:///etc/passwd"])
def test_a_redirect_inside_is_not_followed(httpserver, monkeypatch, location):
    connections, real = [], socket.socket.connect

    def connect(sock, address):
        connections.append(address)
        real(sock, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    httpserver.expect_request("/").respond_with_data("", 307, {"location": location})
    sent = send(WebhookSender(parse_networks("127.0.0.1")), f"http://127.0.0.1:{httpserver.port}/")
    assert (sent.ok, sent.status) == (False, 307)
    assert connections == [("127.0.0.1", httpserver.port)]


PRIVATE = [ip_network(text) for text in ("10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.168.0.0/16")]
SPELLINGS = [
    lambda n: str(n),
    lambda n: hex(n),
    lambda n: f"0{n:o}",
    lambda n: ".".join(hex(part) for part in n.to_bytes(4, "big")),
    lambda n: ".".join(f"0{part:o}" for part in n.to_bytes(4, "big")),
    lambda n: f"{n >> 24}.{n & 0xFFFFFF}",
    lambda n: f"{n >> 24}.{(n >> 16) & 255}.{hex(n & 0xFFFF)}.",
    lambda n: f"[::ffff:{n >> 16:x}:{n & 0xFFFF:x}]",
    lambda n: f"[::{n >> 16:x}:{n & 0xFFFF:x}]",
    lambda n: f"[64:ff9b::{n >> 16:x}:{n & 0xFFFF:x}]",
    lambda n: f"[2002:{n >> 16:x}:{n & 0xFFFF:x}::]",
]


@given(st.sampled_from(PRIVATE), st.integers(0, 2**24 - 1), st.sampled_from(SPELLINGS))
def test_no_spelling_of_any_private_address_is_accepted(private, offset, spell):
    number = int(private[offset % private.num_addresses])
    assert check_url(f"http://{spell(number)}/")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.one_of(st.text(), st.from_regex(r"https?://[!-~]{1,40}", fullmatch=True)))
def test_no_url_makes_the_sender_raise_or_connect_to_an_internal_address(network, sender, url):
    network.answers = [["127.0.0.1"]]
    sent = send(sender, url)
    assert not sent.ok
    assert "127.0.0.1" not in network.connections


# -- networks that the operator allows -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "networks"),
    [
        ("", []),
        (" , ", []),
        ("127.0.0.1/32,10.0.0.0/8", ["127.0.0.1/32", "10.0.0.0/8"]),
        ("127.0.0.1 ::1", ["127.0.0.1/32", "::1/128"]),
        ("fd00::/8\n", ["fd00::/8"]),
    ],
)
def test_the_list_of_allowed_networks_is_parsed(text, networks):
    assert parse_networks(text) == tuple(map(ip_network, networks))


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("10.0.0.1/8", "10.0.0.1/8"),
        ("127.0.0.1/32, internal", "internal"),
        ("10.0.0.0/33", "10.0.0.0/33"),
        ("::/0", "::/0"),
        ("64:ff9b::/96", "64:ff9b::/96"),
        ("64:ff9b::7f00:1", "64:ff9b::7f00:1"),
        ("::ffff:127.0.0.1", "::ffff:"),
        ("2002:7f00:1::/48", "2002:7f00:1::/48"),
    ],
)
def test_the_error_for_a_wrong_entry_names_the_entry_and_the_variable(text, entry):
    with pytest.raises(ValueError, match="SLOTKEEPER_WEBHOOK_ALLOW") as caught:
        parse_networks(text)
    assert entry in str(caught.value)


def test_a_sender_refuses_a_network_that_embeds_ipv4_addresses():
    with pytest.raises(ValueError, match="SLOTKEEPER_WEBHOOK_ALLOW"):
        WebhookSender([ip_network("64:ff9b::/96")])


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("127.0.0.1", "http://localhost:8000/"),
        ("::1", "http://localhost:8000/"),
        ("10.0.0.0/8", "http://10.255.0.1/"),
        ("fd00::/8", "http://[fd12::1]/"),
        ("100.64.0.0/10", "http://100.64.0.1/"),
        ("169.254.169.254", "http://169.254.169.254/"),
    ],
)
def test_an_address_in_an_allowed_network_is_accepted(allow, url):
    assert check_url(url, parse_networks(allow)) is None


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ("127.0.0.1", "http://127.0.0.2/"),
        ("10.0.0.0/8", "http://localhost/"),
        ("127.0.0.1", "http://[::ffff:127.0.0.1]/"),
        ("127.0.0.1", "http://[64:ff9b::7f00:1]/"),
        ("127.0.0.1", "http://2130706433/"),
        ("127.0.0.1", "http://127.0.0.1:6379/"),
        ("169.254.0.0/16", "http://169.254.169.254/"),
        ("169.254.169.254/31", "http://169.254.169.254/"),
        ("100.64.0.0/10", "http://100.100.100.200/"),
        ("fd00::/8", "http://[fd00:ec2::254]/"),
        ("0.0.0.0/0", "http://168.63.129.16/"),
        ("0.0.0.0/0", "http://169.254.170.2/"),
    ],
)
def test_an_allowed_network_allows_no_other_network_and_no_metadata(network, allow, url):
    networks = parse_networks(allow)
    assert check_url(url, networks)
    assert send(WebhookSender(networks), url).permanent
    assert network.connections == []


def test_a_name_with_one_allowed_and_one_refused_address_is_refused(network):
    network.answers = [["10.0.0.1", "127.0.0.1"]]
    assert send(WebhookSender(parse_networks("10.0.0.0/8")), "http://two.inside.test/").permanent
    assert network.connections == []
