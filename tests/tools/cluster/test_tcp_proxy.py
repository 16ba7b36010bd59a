import socket
import time

import pytest

from tests.tools.cluster.sockets import Listener, hears_nothing
from tools.cluster.tcp_proxy import Cut, Direction, Later, Proxy, ProxyPort


@pytest.fixture
def door(proxy: Proxy, listener: Listener) -> ProxyPort:
    return proxy.open("a door", listener.address)


def test_a_door_carries_both_ways(door: ProxyPort, listener: Listener) -> None:
    talk = listener.reached_by(door.port)
    assert talk.says(b"how are you") == b"how are you"
    assert talk.hears(b"fine") == b"fine"


def test_the_end_of_one_side_reaches_the_other(door: ProxyPort, listener: Listener) -> None:
    talk = listener.reached_by(door.port)
    talk.client.shutdown(socket.SHUT_WR)
    assert talk.server.recv(1) == b""
    assert talk.hears(b"still here") == b"still here"


def test_a_cut_resets_both_ends_and_the_next_connection_is_welcome(door: ProxyPort, listener: Listener) -> None:
    talk = listener.reached_by(door.port)
    assert talk.says(b"a") == b"a"
    assert door.reset() == 1
    for end in (talk.client, talk.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
    assert listener.reached_by(door.port).says(b"b") == b"b"


@pytest.mark.parametrize("way", Direction)
def test_silence_of_one_way_lets_the_other_pass(door: ProxyPort, listener: Listener, way: Direction) -> None:
    talk = listener.reached_by(door.port)
    door.blackhole(way)
    talk.client.sendall(b"request")
    talk.server.sendall(b"answer")
    silent, heard = (talk.server, talk.client) if way is Direction.REQUESTS else (talk.client, talk.server)
    assert heard.recv(4096)
    assert hears_nothing(silent)


def test_what_silence_held_back_arrives_in_order_when_it_ends(door: ProxyPort, listener: Listener) -> None:
    talk = listener.reached_by(door.port)
    door.blackhole()
    talk.client.sendall(b"first ")
    assert hears_nothing(talk.server)
    talk.client.sendall(b"second")
    door.restore()
    heard = b""
    while len(heard) < 12:
        heard += talk.server.recv(4096)
    assert heard == b"first second"


def test_a_silent_door_still_accepts(door: ProxyPort) -> None:
    door.blackhole()
    with socket.create_connection(("127.0.0.1", door.port), 5) as client:
        client.sendall(b"hello")
        assert hears_nothing(client)


def test_a_delay_makes_everything_late_and_loses_nothing(door: ProxyPort, listener: Listener) -> None:
    talk = listener.reached_by(door.port)
    door.delay(0.05)
    began = time.monotonic()
    for number in range(20):
        assert talk.says(b"%d" % number) == b"%d" % number
    assert time.monotonic() - began > 0.25
    door.restore()
    assert talk.hears(b"at once") == b"at once"


def test_a_door_can_lead_elsewhere(proxy: Proxy, door: ProxyPort, listener: Listener) -> None:
    other = Listener()
    talk = listener.reached_by(door.port)
    door.redirect(other.address)
    with pytest.raises(ConnectionResetError):
        talk.client.recv(1)
    assert other.reached_by(door.port).says(b"hello") == b"hello"
    other.close()


def test_who_is_connected_may_stay_with_the_old_server(door: ProxyPort, listener: Listener) -> None:
    other = Listener()
    talk = listener.reached_by(door.port)
    door.redirect(other.address, keeps_connections=True)
    assert talk.says(b"still") == b"still"
    assert other.reached_by(door.port).says(b"hello") == b"hello"
    other.close()


def test_a_door_to_nowhere_resets_who_comes(proxy: Proxy, listener: Listener) -> None:
    door = proxy.open("nowhere", listener.address)
    listener.close()
    with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", door.port), 5) as client:
        client.recv(1)


class Censor:
    """Passes everything but "no", at which it cuts, and repeats what is sent."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def requests(self, piece: bytes) -> bytes:
        if piece == b"no":
            raise Cut
        self._later(piece, 0.0)
        return piece.upper()

    def answers(self, piece: bytes) -> bytes:
        return piece.lower()


def test_a_sieve_changes_what_passes(door: ProxyPort, listener: Listener) -> None:
    talk = listener.reached_by(door.filter_streams(Censor).port)
    assert talk.says(b"Hello") == b"HELLO"
    assert talk.hears(b"Hello") == b"hello"


def test_what_a_sieve_sends_later_comes_on_a_connection_of_its_own(door: ProxyPort, listener: Listener) -> None:
    listener.reached_by(door.filter_streams(Censor).port).says(b"Hello")
    assert listener.accept().recv(4096) == b"Hello"


def test_a_sieve_can_cut_before_a_piece_has_passed(door: ProxyPort, listener: Listener) -> None:
    talk = listener.reached_by(door.filter_streams(Censor).port)
    talk.client.sendall(b"no")
    for end in (talk.client, talk.server):
        with pytest.raises(ConnectionResetError):
            end.recv(1)
