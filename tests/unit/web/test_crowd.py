import pytest

from app.web.crowd import Crowd


class Guest:
    def __init__(self, crowd, address="10.0.0.1", served=False):
        self.crowd, self.address, self.is_served = crowd, address, served
        self.bytes_owner, self.bytes_held, self.gone = "", 0, False

    def give_way(self):
        self.gone = True


def crowd_of(places=8, room=1000):
    return Crowd(places, room)


def entered(crowd, count=1, **how):
    made = [Guest(crowd, **how) for _ in range(count)]
    for guest in made:
        crowd.enter(guest)
    return made


def other_addresses(count):
    return [f"10.0.1.{n}" for n in range(count)]


def fill(crowd):
    return [entered(crowd, address=address)[0] for address in other_addresses(crowd.most)]


def test_the_connection_that_was_silent_for_longest_gives_way():
    crowd = crowd_of()
    held = fill(crowd)
    crowd.heard(held[0])
    entered(crowd, address="10.0.2.1")
    assert [guest.gone for guest in held] == [False, True] + [False] * 6
    assert len(crowd) == crowd.most


def test_a_connection_that_is_being_answered_stays():
    crowd = crowd_of()
    held = fill(crowd)
    held[0].is_served = True
    entered(crowd, address="10.0.2.1")
    assert (held[0].gone, held[1].gone) == (False, True)


def test_where_all_are_being_answered_the_eldest_gives_way():
    crowd = crowd_of()
    held = fill(crowd)
    for guest in held:
        guest.is_served = True
    entered(crowd, address="10.0.2.1")
    assert held[0].gone
    assert len(crowd) == crowd.most


def test_an_address_makes_room_for_itself():
    crowd = crowd_of()
    other = entered(crowd, address="10.0.9.9")[0]
    held = entered(crowd, 7)
    assert [guest.gone for guest in held] == [True] + [False] * 6
    assert not other.gone


def test_strangers_do_not_send_those_away_who_have_shown_a_key():
    crowd = crowd_of()
    held = fill(crowd)
    for guest in held[:4]:
        crowd.trust(guest)
    for address in other_addresses(20):
        entered(crowd, address=address)
    assert not any(guest.gone for guest in held[:4])


def test_those_who_have_shown_a_key_do_not_keep_others_out():
    crowd = crowd_of()
    held = fill(crowd)
    for guest in held:
        crowd.trust(guest)
    new = entered(crowd, address="10.0.2.1")[0]
    newer = entered(crowd, address="10.0.2.2")[0]
    assert not new.gone
    assert not newer.gone
    assert [guest.gone for guest in held[:3]] == [True, True, False]


def test_an_owner_holds_a_fourth_of_all_bytes():
    crowd = crowd_of()
    one, two = entered(crowd, 2)
    assert crowd.hold(one, "a", 200)
    assert not crowd.hold(two, "a", 51)
    assert crowd.hold(two, "b", 51)


def test_what_an_owner_has_let_go_it_may_hold_again():
    crowd = crowd_of()
    (one,) = entered(crowd)
    for _ in range(10):
        assert crowd.hold(one, "a", 250)
        crowd.release(one)
    crowd.hold(one, "a", 250)
    crowd.leave(one)
    assert crowd.hold(entered(crowd)[0], "a", 250)


def test_where_there_is_no_room_whoever_holds_most_gives_way():
    crowd = crowd_of()
    small, large, mine = entered(crowd, 3)
    crowd.hold(small, "a", 100, whole=True)
    crowd.hold(large, "a", 800, whole=True)
    assert crowd.hold(mine, "b", 200)
    assert (small.gone, large.gone) == (False, True)


@pytest.mark.parametrize("times", [1, 2])
def test_who_has_left_is_not_counted(times):
    crowd = crowd_of()
    (one,) = entered(crowd)
    for _ in range(times):
        crowd.leave(one)
    assert len(crowd) == 0
    assert crowd.guests() == []
