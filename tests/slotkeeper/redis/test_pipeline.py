"""What an event loop asks of Redis leaves together, waits for nothing, and always has its answer."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis import Redis
from redis.exceptions import ConnectionError as Broken
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as Silent

from routing.config import RoutingSettings
from routing.queue.leases import Lease, Leases
from routing.scripts import make_scripts
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.pipeline import Pipeline, _Connection
from slotkeeper.redis.scripts import Command
from slotkeeper.redis.signatures import pack_words
from tests.support.room import Room, a
from tools.cluster.valkey_process import Valkey

KEYS = Keys("test")
SCRIPTS = make_scripts(Redis(), KEYS)  # Makes commands, and sends none.
_TIMEOUT_S = 0.3


def depths(fleet: str = "zimg") -> Command:
    """A script that works on an empty room."""
    return Command(SCRIPTS.target("queue_counts", fleet, lambda answer: ("read", int(answer[0]))), ())


def freeing(name: str, fleet: str = "zimg", failures: int = 9) -> Command:
    """A release of a lease that nobody has; with another fleet, or other settings, of another kind."""
    settings = RoutingSettings(breaker_failures=failures)
    return Leases(SCRIPTS, settings).release_command(Lease(fleet, name, name, "w1", "gpu-slot0"), return_to_lane=False)


def misused() -> Command:
    """It breaks off."""
    target = SCRIPTS.target("queue_counts", "zimg", list)
    return Command(target._replace(words=(words := (*target.words[:2], 0)), packed=pack_words(words)), ())


@pytest.fixture(params=["tcp", "unix", "password"])
def own_valkey(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Valkey]:
    with Valkey(tmp_path, unix=request.param == "unix") as server:
        if request.param == "password":
            server.client().config_set("requirepass", "s3cret")
            server.client = lambda: _client_with_password(server)  # type: ignore[method-assign]
        yield server


tcp = pytest.mark.parametrize("own_valkey", ["tcp"], indirect=True)


def _client_with_password(server: Valkey) -> Redis:
    return Redis.from_url(server.url, password="s3cret", socket_timeout=5)


def play(valkey: Valkey, act: Callable[[Pipeline], Awaitable[Any]], timeout_s: float = 10.0) -> Any:
    """Do `act` in a loop that has a pipeline."""

    async def life() -> Any:
        with valkey.client() as client:
            pipeline = Pipeline(asyncio.get_running_loop(), make_scripts(client, KEYS), timeout_s)
            try:
                async with asyncio.timeout(5):
                    return await act(pipeline)
            finally:
                await pipeline.close()

    return uvloop.run(life())  # as in a worker


async def outcomes(*asked: "asyncio.Future[Any]") -> list[Any]:
    """What each came to, its error too."""
    return await asyncio.gather(*asked, return_exceptions=True)


def silence(valkey: Valkey) -> None:
    """It answers nobody any more."""
    with valkey.client() as client:
        client.client_pause(60_000)


def count_of(valkey: Valkey, command: str) -> int:
    with valkey.client() as client:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


def test_all_that_is_asked_is_answered_on_one_connection_and_a_text_is_sent_once(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        first = await asyncio.gather(*(pipeline.execute(depths()) for _ in range(50)))
        return first + [await pipeline.execute(depths("flux")) for _ in range(3)]

    assert play(own_valkey, act) == [("read", 0)] * 53
    assert count_of(own_valkey, "function|load") == 1
    with own_valkey.client() as client:
        assert client.info("stats")["total_connections_received"] <= 5


@tcp
def test_a_command_does_not_wait_for_the_answer_to_the_one_before(own_valkey):
    async def act(pipeline: Pipeline) -> None:
        await pipeline.execute(depths())
        silence(own_valkey)
        first = pipeline.execute(depths())
        while not pipeline._sent:
            await asyncio.sleep(0.01)
        second = pipeline.execute(depths())
        while len(pipeline._sent) < 2:
            await asyncio.sleep(0.01)
        assert not first.done()
        await pipeline.close()
        await outcomes(first, second)

    play(own_valkey, act)


@tcp
def test_what_fails_is_its_own_error_and_no_neighbours(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        asked = [pipeline.execute(it) for it in (depths(), misused(), depths())]
        return await outcomes(*asked)

    one, wrong, other = play(own_valkey, act)
    assert one == other == ("read", 0) and isinstance(wrong, ResponseError)


# -- calls that are joined -------------------------------------------------------------------------------------


@tcp
def test_releases_of_one_turn_are_one_call_of_which_each_has_its_own_answer(own_valkey):
    with own_valkey.client() as client:
        room = Room(client, prefix="test")
        offers = room.with_slots(3).enqueue(*[a(f"j{n}", n) for n in range(3)])
        held = [Lease("zimg", it.job, it.lease, "", it.slot) for it in offers]
        held[1] = replace(held[1], owner="somebody")
        client.config_resetstat()

    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        leases = Leases(SCRIPTS, RoutingSettings())
        return await asyncio.gather(
            *(pipeline.execute(leases.release_command(it, return_to_lane=True, limit=1)) for it in held)
        )

    (one,), (refused,), (three,) = play(own_valkey, act)
    assert (one.released, refused.released, three.released) == (True, False, True)
    # What each frees the next free slot's job goes to; the refused one's offer finds nothing that waits.
    assert [[it.job_id for it in one.offers], [it.job_id for it in three.offers]] == [["j0"], ["j2"]]
    assert refused.offers == []
    with own_valkey.client() as client:
        calls = client.info("commandstats")["cmdstat_fcall"]
        assert calls["calls"] - calls["failed_calls"] == 2, "and one that asks how many wait"
        assert Room(client, prefix="test").lease_of("j1")["lease"] == offers[1].lease


@tcp
def test_what_is_joined_is_of_one_room_in_the_order_asked_and_not_too_much(own_valkey):
    """Nobody else is served while one call lasts."""
    sent: list[bytes] = []

    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        line = pipeline._connection
        assert line is not None
        send, line.send = line.send, lambda packed: (sent.extend(packed), send(packed))[1]  # type: ignore[method-assign]
        asked = [freeing(f"j{n:02}-", "flux" if n == 3 else "zimg", 8 if n == 5 else 9) for n in range(40)]
        return await asyncio.gather(*(pipeline.execute(it) for it in asked))

    assert all(len(answers) == 1 and not answers[0].released for answers in play(own_valkey, act))
    names = [re.findall(rb"j\d\d-", text)[::2] for text in sent if b"FCALL" in text][:4]
    others = [b"j%02d-" % n for n in range(40) if n not in (3, 5)]
    assert names == [others[:32], [b"j03-"], [b"j05-"], others[32:]]


@tcp
def test_what_a_joined_call_comes_to_is_every_askers_error(own_valkey):
    with own_valkey.client() as client:
        client.set(Keys("test").fleet_key("zimg", "meta"), "no hash")

    async def act(pipeline: Pipeline) -> Any:
        return await outcomes(*(pipeline.execute(freeing(f"j{n}")) for n in range(3)), pipeline.execute(depths("flux")))

    *wrong, right = play(own_valkey, act)
    assert all(isinstance(it, ResponseError) for it in wrong) and len(wrong) == 3 and right == ("read", 0)


@tcp
def test_an_answer_that_cannot_be_read_is_its_askers_error(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        wrong = Command(SCRIPTS.target("queue_counts", "zimg", lambda _: 1 // 0), ())
        return await outcomes(pipeline.execute(wrong), pipeline.execute(depths()))

    wrong, right = play(own_valkey, act)
    assert isinstance(wrong, ZeroDivisionError) and right == ("read", 0)


@tcp
def test_who_waits_no_more_takes_no_neighbours_answer(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        gone, here = pipeline.execute(depths()), pipeline.execute(depths())
        gone.cancel()
        return await here

    assert play(own_valkey, act) == ("read", 0)


@tcp
def test_a_redis_that_was_away_while_nothing_was_asked_is_not_noticed(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        before = await pipeline.execute(depths())
        own_valkey.kill()
        own_valkey.start()
        while pipeline._serving is not None:
            await asyncio.sleep(0.01)
        return [before, await pipeline.execute(depths())]

    assert play(own_valkey, act) == [("read", 0)] * 2


@tcp
def test_what_a_redis_that_dies_has_not_answered_ends_with_an_error(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        silence(own_valkey)
        asked = [pipeline.execute(depths()) for _ in range(3)]
        while not pipeline._sent:
            await asyncio.sleep(0.01)
        own_valkey.kill()
        found = await outcomes(*asked)
        again = await outcomes(pipeline.execute(depths()))
        return found + again

    found = play(own_valkey, act)
    assert len(found) == 4 and all(isinstance(it, Broken) for it in found)


@tcp
def test_a_redis_that_falls_silent_is_waited_for_no_longer_than_may_be_and_asked_anew(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        silence(own_valkey)
        found = await outcomes(*(pipeline.execute(depths()) for _ in range(3)))
        return found, await outcomes(pipeline.execute(depths()))

    found, (again,) = play(own_valkey, act, _TIMEOUT_S)
    assert len(found) == 3 and all(isinstance(it, Silent) for it in found)
    assert isinstance(again, RedisError)


@tcp
def test_what_is_asked_of_a_pipeline_that_closes_ends_with_an_error(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        asked = pipeline.execute(depths())
        await asyncio.sleep(0)
        await pipeline.close()
        return await outcomes(asked)

    (found,) = play(own_valkey, act)
    assert isinstance(found, RedisError)


@tcp
def test_what_is_asked_of_a_pipeline_that_closes_before_it_has_begun_ends_with_an_error(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        asked = pipeline.execute(depths())
        await pipeline.close()
        return await outcomes(asked)

    (found,) = play(own_valkey, act)
    assert isinstance(found, RedisError)


@tcp
def test_what_cannot_be_sent_ends_all_that_waits_and_the_next_is_asked_anew(own_valkey, monkeypatch):
    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        with monkeypatch.context() as broken:
            broken.setattr(Command, "packed", None)
            found = await outcomes(pipeline.execute(depths()), pipeline.execute(depths()))
        return [*found, await pipeline.execute(depths())]

    *lost, again = play(own_valkey, act)
    assert len(lost) == 2 and all(isinstance(it, Broken) and "NoneType" in str(it) for it in lost)
    assert again == ("read", 0)


@tcp
def test_what_is_asked_in_one_turn_of_the_loop_leaves_in_one_write(own_valkey, monkeypatch):
    async def act(pipeline: Pipeline) -> None:
        await pipeline.execute(depths())
        with monkeypatch.context() as watched:
            writes = list[int]()
            send = _Connection.send
            watched.setattr(_Connection, "send", lambda line, packed: (writes.append(len(packed)), send(line, packed)))
            await asyncio.gather(*(pipeline.execute(depths()) for _ in range(20)))
            assert writes == [20]

    play(own_valkey, act)


@tcp
def test_it_is_not_too_late_for_an_answer_when_it_is_for_one_that_was_asked_for_before(own_valkey):
    async def act(pipeline: Pipeline) -> None:
        loop = asyncio.get_running_loop()
        await pipeline.execute(depths())
        too_late, pipeline._timeout_s = loop.time() + pipeline._timeout_s, 60.0
        silence(own_valkey)
        asked = pipeline.execute(depths())
        while loop.time() < too_late + 0.05:
            await asyncio.sleep(0.01)
        assert not asked.done() and pipeline._is_watched
        await pipeline.close()
        await outcomes(asked)

    play(own_valkey, act, 0.2)


@tcp
def test_a_redis_that_falls_silent_while_nothing_was_asked_for_long_is_waited_for_no_longer(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        while pipeline._is_watched:
            await asyncio.sleep(0.01)
        silence(own_valkey)
        return await outcomes(pipeline.execute(depths()))

    (found,) = play(own_valkey, act, _TIMEOUT_S)
    assert isinstance(found, Silent)


@tcp
def test_why_a_text_was_not_taken_is_what_its_askers_hear(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        with own_valkey.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "-function|load")
        asked = [pipeline.execute(depths()) for _ in range(2)]
        return await outcomes(*asked)

    found = play(own_valkey, act)
    assert len(found) == 2 and all("permission" in str(it) for it in found)
