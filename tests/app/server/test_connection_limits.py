import pytest

from app.config import AppSettings
from app.server.http_protocol import ConnectionLimits


class FakeConnection:
    """A connection, with the attributes that ConnectionLimits uses."""

    has_complete_request = False

    def __init__(self):
        self.account, self.bytes_held, self.is_closed = "", 0, False

    def abort(self):
        self.is_closed = True


def a_capacity(most_connections=8, most_bytes=1000):
    capacity = ConnectionLimits(AppSettings(), most_connections, lambda: None)
    capacity.most_bytes = most_bytes
    return capacity


def admit(capacity, count=1):
    connections = [FakeConnection() for _ in range(count)]
    for connection in connections:
        capacity.admit(connection)
    return connections


def fill(capacity):
    return admit(capacity, capacity.most_connections)


def test_the_longest_idle_connection_is_closed_first():
    capacity = a_capacity()
    connections = fill(capacity)
    capacity.mark_active(connections[0])
    admit(capacity)
    assert [connection.is_closed for connection in connections] == [False, True] + [False] * 6
    assert len(capacity.connections()) == capacity.most_connections


def test_a_connection_with_a_complete_request_is_kept():
    capacity = a_capacity()
    connections = fill(capacity)
    connections[0].has_complete_request = True
    admit(capacity)
    assert (connections[0].is_closed, connections[1].is_closed) == (False, True)


def test_if_all_connections_have_requests_the_longest_idle_is_closed():
    capacity = a_capacity()
    connections = fill(capacity)
    for connection in connections:
        connection.has_complete_request = True
    admit(capacity)
    assert connections[0].is_closed
    assert len(capacity.connections()) == capacity.most_connections


def test_anonymous_connections_do_not_evict_those_with_a_key():
    capacity = a_capacity()
    connections = fill(capacity)
    for connection in connections[:4]:
        capacity.mark_active(connection, trusted=True)
    admit(capacity, 20)
    assert not any(connection.is_closed for connection in connections[:4])


def test_connections_with_a_key_do_not_block_new_ones():
    capacity = a_capacity()
    connections = fill(capacity)
    for connection in connections:
        capacity.mark_active(connection, trusted=True)
    new, newer = admit(capacity)[0], admit(capacity)[0]
    assert not new.is_closed
    assert not newer.is_closed
    assert [connection.is_closed for connection in connections[:3]] == [True, True, False]


def test_an_owner_holds_a_fourth_of_all_bytes():
    capacity = a_capacity()
    one, two = admit(capacity, 2)
    assert capacity.reserve_bytes(one, "a", 200)
    assert not capacity.reserve_bytes(two, "a", 51)
    assert capacity.reserve_bytes(two, "b", 51)


def test_an_owner_can_reserve_released_bytes_again():
    capacity = a_capacity()
    (one,) = admit(capacity)
    for _ in range(10):
        assert capacity.reserve_bytes(one, "a", 250)
        capacity.release_bytes(one)
    capacity.reserve_bytes(one, "a", 250)
    capacity.remove(one)
    assert capacity.reserve_bytes(admit(capacity)[0], "a", 250)


def test_a_full_buffer_closes_the_connection_that_holds_most_bytes():
    capacity = a_capacity()
    small, large, other = admit(capacity, 3)
    capacity.reserve_bytes(small, "a", 100, unlimited=True)
    capacity.reserve_bytes(large, "a", 800, unlimited=True)
    assert capacity.reserve_bytes(other, "b", 200)
    assert (small.is_closed, large.is_closed) == (False, True)


@pytest.mark.parametrize("times", [1, 2])
def test_a_removed_connection_is_not_counted(times):
    capacity = a_capacity()
    (one,) = admit(capacity)
    for _ in range(times):
        capacity.remove(one)
    assert capacity.connections() == []
