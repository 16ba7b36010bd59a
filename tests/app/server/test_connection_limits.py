import pytest

from app.config import AppSettings
from app.server.http_protocol import ConnectionLimits


class Holder:
    """A connection, as far as its place and its bytes are concerned."""

    has_complete_request = False

    def __init__(self):
        self.account, self.bytes_held, self.gone = "", 0, False

    def abort(self):
        self.gone = True


def capacity_of(places=8, room=1000):
    made = ConnectionLimits(AppSettings(), places, lambda: None)
    made.most_bytes = room
    return made


def entered(capacity, count=1):
    made = [Holder() for _ in range(count)]
    for holder in made:
        capacity.admit(holder)
    return made


def fill(capacity):
    return entered(capacity, capacity.most_connections)


def test_the_connection_that_was_silent_for_longest_gives_way():
    capacity = capacity_of()
    held = fill(capacity)
    capacity.mark_active(held[0])
    entered(capacity)
    assert [holder.gone for holder in held] == [False, True] + [False] * 6
    assert len(capacity.connections()) == capacity.most_connections


def test_a_connection_that_is_being_answered_stays():
    capacity = capacity_of()
    held = fill(capacity)
    held[0].has_complete_request = True
    entered(capacity)
    assert (held[0].gone, held[1].gone) == (False, True)


def test_where_all_are_being_answered_the_eldest_gives_way():
    capacity = capacity_of()
    held = fill(capacity)
    for holder in held:
        holder.has_complete_request = True
    entered(capacity)
    assert held[0].gone
    assert len(capacity.connections()) == capacity.most_connections


def test_strangers_do_not_send_those_away_who_have_shown_a_key():
    capacity = capacity_of()
    held = fill(capacity)
    for holder in held[:4]:
        capacity.mark_active(holder, trusted=True)
    entered(capacity, 20)
    assert not any(holder.gone for holder in held[:4])


def test_those_who_have_shown_a_key_do_not_keep_others_out():
    capacity = capacity_of()
    held = fill(capacity)
    for holder in held:
        capacity.mark_active(holder, trusted=True)
    new, newer = entered(capacity)[0], entered(capacity)[0]
    assert not new.gone
    assert not newer.gone
    assert [holder.gone for holder in held[:3]] == [True, True, False]


def test_an_owner_holds_a_fourth_of_all_bytes():
    capacity = capacity_of()
    one, two = entered(capacity, 2)
    assert capacity.reserve_bytes(one, "a", 200)
    assert not capacity.reserve_bytes(two, "a", 51)
    assert capacity.reserve_bytes(two, "b", 51)


def test_what_an_owner_has_let_go_it_may_hold_again():
    capacity = capacity_of()
    (one,) = entered(capacity)
    for _ in range(10):
        assert capacity.reserve_bytes(one, "a", 250)
        capacity.release_bytes(one)
    capacity.reserve_bytes(one, "a", 250)
    capacity.remove(one)
    assert capacity.reserve_bytes(entered(capacity)[0], "a", 250)


def test_where_there_is_no_room_whoever_holds_most_gives_way():
    capacity = capacity_of()
    small, large, mine = entered(capacity, 3)
    capacity.reserve_bytes(small, "a", 100, whole=True)
    capacity.reserve_bytes(large, "a", 800, whole=True)
    assert capacity.reserve_bytes(mine, "b", 200)
    assert (small.gone, large.gone) == (False, True)


@pytest.mark.parametrize("times", [1, 2])
def test_who_has_left_is_not_counted(times):
    capacity = capacity_of()
    (one,) = entered(capacity)
    for _ in range(times):
        capacity.remove(one)
    assert capacity.connections() == []
