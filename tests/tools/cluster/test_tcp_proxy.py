import socket
import time

import pytest

from tests.tools.cluster.sockets import Listener, receives_nothing
from tools.cluster.tcp_proxy import Cut, Direction, Later, Proxy, ProxyPort


@pytest.fixture
def proxy_port(proxy: Proxy, listener: Listener) -> ProxyPort:
    return proxy.open("a port", listener.address)


def test_a_port_forwards_both_directions(proxy_port: ProxyPort, listener: Listener) -> None:
    connection = listener.connect_through(proxy_port.port)
    assert connection.send_request(b"how are you") == b"how are you"
    assert connection.send_response(b"fine") == b"fine"


def test_the_end_of_one_side_reaches_the_other(proxy_port: ProxyPort, listener: Listener) -> None:
    connection = listener.connect_through(proxy_port.port)
    connection.client.shutdown(socket.SHUT_WR)
    assert connection.server.recv(1) == b""
    assert connection.send_response(b"still here") == b"still here"


def test_a_reset_closes_both_ends_and_the_next_connection_is_accepted(
    proxy_port: ProxyPort, listener: Listener
) -> None:
    connection = listener.connect_through(proxy_port.port)
    assert connection.send_request(b"a") == b"a"
    assert proxy_port.reset() == 1
    for end in (connection.client, connection.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    assert listener.connect_through(proxy_port.port).send_request(b"b") == b"b"


@pytest.mark.parametrize("direction", Direction)
def test_a_blackhole_in_one_direction_forwards_the_data_of_the_other(
    proxy_port: ProxyPort, listener: Listener, direction: Direction
) -> None:
    connection = listener.connect_through(proxy_port.port)
    proxy_port.blackhole(direction)
    connection.client.sendall(b"request")
    connection.server.sendall(b"answer")
    silent, receiving = (
        (connection.server, connection.client)
        if direction is Direction.REQUESTS
        else (connection.client, connection.server)
    )
    assert receiving.recv(4096)
    assert receives_nothing(silent)


def test_bytes_that_a_blackhole_held_back_arrive_in_order_after_it(proxy_port: ProxyPort, listener: Listener) -> None:
    connection = listener.connect_through(proxy_port.port)
    proxy_port.blackhole()
    connection.client.sendall(b"first ")
    assert receives_nothing(connection.server)
    connection.client.sendall(b"second")
    proxy_port.restore()
    received = b""
    while len(received) < 12:
        received += connection.server.recv(4096)
    assert received == b"first second"


def test_a_port_accepts_connections_during_a_blackhole(proxy_port: ProxyPort) -> None:
    proxy_port.blackhole()
    with socket.create_connection(("127.0.0.1", proxy_port.port), 5) as client:
        client.sendall(b"hello")
        assert receives_nothing(client)


def test_a_delay_delays_all_data_and_loses_none(proxy_port: ProxyPort, listener: Listener) -> None:
    connection = listener.connect_through(proxy_port.port)
    proxy_port.delay(0.05)
    began = time.monotonic()
    for number in range(20):
        assert connection.send_request(b"%d" % number) == b"%d" % number
    assert time.monotonic() - began > 0.25
    proxy_port.restore()
    assert connection.send_response(b"at once") == b"at once"


def test_a_port_can_be_redirected(proxy: Proxy, proxy_port: ProxyPort, listener: Listener) -> None:
    other = Listener()
    connection = listener.connect_through(proxy_port.port)
    proxy_port.redirect(other.address)
    with pytest.raises(ConnectionResetError):
        connection.client.recv(1)
    assert other.connect_through(proxy_port.port).send_request(b"hello") == b"hello"
    other.close()


def test_a_redirect_may_keep_existing_connections(proxy_port: ProxyPort, listener: Listener) -> None:
    other = Listener()
    connection = listener.connect_through(proxy_port.port)
    proxy_port.redirect(other.address, keeps_connections=True)
    assert connection.send_request(b"still") == b"still"
    assert other.connect_through(proxy_port.port).send_request(b"hello") == b"hello"
    other.close()


def test_a_port_without_a_server_resets_new_connections(proxy: Proxy, listener: Listener) -> None:
    proxy_port = proxy.open("nowhere", listener.address)
    listener.close()
    with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", proxy_port.port), 5) as client:
        client.recv(1)


class CaseFilter:
    """Changes case, resets the connection at "no", and sends each request a second time."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def requests(self, piece: bytes) -> bytes:
        if piece == b"no":
            raise Cut
        self._later(piece, 0.0)
        return piece.upper()

    def answers(self, piece: bytes) -> bytes:
        return piece.lower()


def test_a_stream_filter_changes_the_bytes(proxy_port: ProxyPort, listener: Listener) -> None:
    connection = listener.connect_through(proxy_port.filter_streams(CaseFilter).port)
    assert connection.send_request(b"Hello") == b"HELLO"
    assert connection.send_response(b"Hello") == b"hello"


def test_bytes_that_a_stream_filter_sends_later_use_a_separate_connection(
    proxy_port: ProxyPort, listener: Listener
) -> None:
    listener.connect_through(proxy_port.filter_streams(CaseFilter).port).send_request(b"Hello")
    assert listener.accept().recv(4096) == b"Hello"


def test_a_stream_filter_can_reset_before_a_piece_has_passed(proxy_port: ProxyPort, listener: Listener) -> None:
    connection = listener.connect_through(proxy_port.filter_streams(CaseFilter).port)
    connection.client.sendall(b"no")
    for end in (connection.client, connection.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
