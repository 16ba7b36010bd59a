"""The pipeline sends the commands of an event loop together and at once, and each command gets its response."""

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
from tests.support.fleet_queue import FleetQueue, a
from tools.cluster.valkey_process import Valkey

KEYS = Keys("test")
SCRIPTS = make_scripts(Redis(), KEYS)  # Makes commands, and sends none.
_TIMEOUT_S = 0.3


def depths(fleet: str = "zimg") -> Command:
    """Return a script for an empty queue."""
    return Command(SCRIPTS.target("queue_counts", fleet, lambda answer: ("read", int(answer[0]))), ())


def freeing(name: str, fleet: str = "zimg", failures: int = 9) -> Command:
    """Release a lease that does not exist; another fleet or other settings make a command of another kind."""
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
    """Stop Valkey from answering its clients."""
    with valkey.client() as client:
        client.client_pause(60_000)


def count_of(valkey: Valkey, command: str) -> int:
    with valkey.client() as client:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


def test_all_requests_use_one_connection_and_the_script_is_loaded_once(own_valkey):
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
def test_a_command_that_fails_does_not_fail_its_neighbours(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        asked = [pipeline.execute(command) for command in (depths(), misused(), depths())]
        return await outcomes(*asked)

    one, wrong, other = play(own_valkey, act)
    assert one == other == ("read", 0) and isinstance(wrong, ResponseError)


# -- calls that are joined -------------------------------------------------------------------------------------


@tcp
def test_releases_of_one_loop_turn_are_one_call_and_each_gets_its_response(own_valkey):
    with own_valkey.client() as client:
        queue = FleetQueue(client, prefix="test")
        offers = queue.with_slots(3).enqueue(*[a(f"j{n}", n) for n in range(3)])
        held = [Lease("zimg", offer.job, offer.lease, "", offer.slot) for offer in offers]
        held[1] = replace(held[1], owner="somebody")
        client.config_resetstat()

    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        leases = Leases(SCRIPTS, RoutingSettings())
        return await asyncio.gather(
            *(pipeline.execute(leases.release_command(lease, return_to_lane=True, limit=1)) for lease in held)
        )

    (one,), (refused,), (three,) = play(own_valkey, act)
    assert (one.released, refused.released, three.released) == (True, False, True)
    # Each release offers the slot that it frees; the refused release finds no waiting job.
    assert [[offer.job_id for offer in one.offers], [offer.job_id for offer in three.offers]] == [["j0"], ["j2"]]
    assert refused.offers == []
    with own_valkey.client() as client:
        calls = client.info("commandstats")["cmdstat_fcall"]
        assert calls["calls"] - calls["failed_calls"] == 2, "one more call reads the queue counts"
        assert FleetQueue(client, prefix="test").lease_of("j1")["lease"] == offers[1].lease


@tcp
def test_one_call_joins_a_bounded_number_of_releases_of_one_fleet_in_their_order(own_valkey):
    """Redis serves no other client during one call."""
    sent: list[bytes] = []

    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        line = pipeline._connection
        assert line is not None
        send, line.send = line.send, lambda packed: (sent.extend(packed), send(packed))[1]  # type: ignore[method-assign]
        asked = [freeing(f"j{n:02}-", "flux" if n == 3 else "zimg", 8 if n == 5 else 9) for n in range(40)]
        return await asyncio.gather(*(pipeline.execute(command) for command in asked))

    assert all(len(released) == 1 and not released[0].released for released in play(own_valkey, act))
    names = [re.findall(rb"j\d\d-", text)[::2] for text in sent if b"FCALL" in text][:4]
    others = [b"j%02d-" % n for n in range(40) if n not in (3, 5)]
    assert names == [others[:32], [b"j03-"], [b"j05-"], others[32:]]


@tcp
def test_an_error_of_a_joined_call_is_returned_to_each_of_its_requests(own_valkey):
    with own_valkey.client() as client:
        client.set(Keys("test").fleet_key("zimg", "meta"), "no hash")

    async def act(pipeline: Pipeline) -> Any:
        return await outcomes(*(pipeline.execute(freeing(f"j{n}")) for n in range(3)), pipeline.execute(depths("flux")))

    *wrong, right = play(own_valkey, act)
    assert all(isinstance(error, ResponseError) for error in wrong) and len(wrong) == 3 and right == ("read", 0)


@tcp
def test_an_answer_that_cannot_be_read_is_its_askers_error(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        wrong = Command(SCRIPTS.target("queue_counts", "zimg", lambda _: 1 // 0), ())
        return await outcomes(pipeline.execute(wrong), pipeline.execute(depths()))

    wrong, right = play(own_valkey, act)
    assert isinstance(wrong, ZeroDivisionError) and right == ("read", 0)


@tcp
def test_a_canceled_request_does_not_take_the_response_of_another_request(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        gone, here = pipeline.execute(depths()), pipeline.execute(depths())
        gone.cancel()
        return await here

    assert play(own_valkey, act) == ("read", 0)


@tcp
def test_a_restart_of_redis_between_two_requests_causes_no_error(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        before = await pipeline.execute(depths())
        own_valkey.kill()
        own_valkey.start()
        while pipeline._serving is not None:
            await asyncio.sleep(0.01)
        return [before, await pipeline.execute(depths())]

    assert play(own_valkey, act) == [("read", 0)] * 2


@tcp
def test_requests_that_a_dying_redis_has_not_answered_fail(own_valkey):
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
    assert len(found) == 4 and all(isinstance(error, Broken) for error in found)


@tcp
def test_requests_to_a_silent_redis_time_out_and_the_next_request_reconnects(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        silence(own_valkey)
        found = await outcomes(*(pipeline.execute(depths()) for _ in range(3)))
        return found, await outcomes(pipeline.execute(depths()))

    found, (again,) = play(own_valkey, act, _TIMEOUT_S)
    assert len(found) == 3 and all(isinstance(error, Silent) for error in found)
    assert isinstance(again, RedisError)


@tcp
def test_an_open_request_fails_when_the_pipeline_closes(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        asked = pipeline.execute(depths())
        await asyncio.sleep(0)
        await pipeline.close()
        return await outcomes(asked)

    (found,) = play(own_valkey, act)
    assert isinstance(found, RedisError)


@tcp
def test_an_open_request_fails_when_the_pipeline_closes_before_it_has_started(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        asked = pipeline.execute(depths())
        await pipeline.close()
        return await outcomes(asked)

    (found,) = play(own_valkey, act)
    assert isinstance(found, RedisError)


@tcp
def test_a_command_that_cannot_be_sent_fails_all_pending_requests_and_the_next_one_succeeds(own_valkey, monkeypatch):
    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        with monkeypatch.context() as broken:
            broken.setattr(Command, "packed", None)
            found = await outcomes(pipeline.execute(depths()), pipeline.execute(depths()))
        return [*found, await pipeline.execute(depths())]

    *lost, again = play(own_valkey, act)
    assert len(lost) == 2 and all(isinstance(error, Broken) and "NoneType" in str(error) for error in lost)
    assert again == ("read", 0)


@tcp
def test_the_requests_of_one_loop_iteration_are_sent_in_one_write(own_valkey, monkeypatch):
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
def test_the_timeout_of_an_earlier_request_does_not_end_a_later_request(own_valkey):
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
def test_the_first_request_to_a_redis_that_fell_silent_during_an_idle_time_times_out(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        await pipeline.execute(depths())
        while pipeline._is_watched:
            await asyncio.sleep(0.01)
        silence(own_valkey)
        return await outcomes(pipeline.execute(depths()))

    (found,) = play(own_valkey, act, _TIMEOUT_S)
    assert isinstance(found, Silent)


@tcp
def test_each_request_gets_the_reason_why_redis_rejected_the_function_library(own_valkey):
    async def act(pipeline: Pipeline) -> Any:
        with own_valkey.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "-function|load")
        asked = [pipeline.execute(depths()) for _ in range(2)]
        return await outcomes(*asked)

    found = play(own_valkey, act)
    assert len(found) == 2 and all("permission" in str(error) for error in found)
