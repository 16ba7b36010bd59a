"""Redis is killed in the middle of a script, and comes back with its file: nothing of the script has happened."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import RedisError, ResponseError

from routing.dispatch.dispatcher import Dispatcher
from routing.queries import job_list
from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason, State
from slotkeeper.redis.connections import connect
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tests.support import harness as harness_module
from tests.support import passes
from tests.support.ends import end_run_with
from tests.support.fleet_queue import CLOCK, FRAGMENTS
from tests.support.harness import LEASE_MS, Harness
from tools.cluster.direct_starts import begin_run
from tools.cluster.stack import eventually
from tools.cluster.valkey_process import Valkey

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

# Stands before everything else in a script: after so many writes it goes on for ever.
_STUCK = """
local writes = 0
local function real() return redis end -- when it runs: there is another one while it is loaded
local changes = { DEL = 1, HDEL = 1, HINCRBY = 1, HSET = 1, HSETNX = 1, ZADD = 1, ZREM = 1 }
local redis = { register_function = redis.register_function, pcall = function(...) return real().pcall(...) end,
  sha1hex = function(...) return real().sha1hex(...) end,
  call = function(command, ...)
    local answer = real().call(command, ...)
    writes = writes + (changes[command] or 0)
    while writes == %d do end
    return answer
  end }
"""
_GIVES_UP_S = 0.2


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Valkey]:
    """Writes each change to its file before it answers."""
    with Valkey(tmp_path / "valkey", appendonly=True) as valkey:
        with valkey.client() as client:
            client.config_set("busy-reply-threshold", 10)
        yield valkey


@pytest.fixture
def harness(database: Database, kept: Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    with kept.client() as client:
        yield Harness(database, client, monkeypatch)


def _is_in_a_script(valkey: Valkey) -> bool:
    with valkey.client() as client:
        try:
            client.ping()
        except ResponseError as error:
            return "BUSY" in str(error)
    return False


# Each prepares a harness, and returns the call in which Redis dies.
Act = Callable[[Dispatcher], object]


def _submit(harness: Harness) -> Act:
    return lambda stuck: stuck.submit([harness.a()], LOCAL_IDENTITY)


def _start(harness: Harness) -> Act:
    offer = harness.notifications.offers.pop()

    def act(stuck: Dispatcher) -> None:
        with pytest.raises(RedisError):
            begin_run(stuck, offer, "w1")

    return act


def _settle(harness: Harness) -> Act:
    task = harness.start()
    return lambda stuck: end_run_with(stuck, task, Reason.FINISHED, result="{}")


@pytest.mark.parametrize(
    ("prepared", "writes"),
    [(_submit, 1), (_submit, 3), (_submit, 6), (_start, 1), (_settle, 1), (_settle, 3), (_settle, 6)],
)
def test_a_redis_that_dies_in_the_middle_of_a_script_applies_none_of_its_writes(
    harness: Harness, kept: Valkey, monkeypatch: pytest.MonkeyPatch, prepared: Callable[[Harness], Act], writes: int
) -> None:
    harness.register(2 if prepared is _submit else 1)
    ids = [harness.submit() for _ in range(1 if prepared is _submit else 2)]
    with monkeypatch.context() as patch:
        patch.setattr(harness_module, "FRAGMENTS", FRAGMENTS | {"lib/now_ms": _STUCK % writes + CLOCK})
        stuck = harness.a_dispatcher(connect(kept.url, _GIVES_UP_S))
    stuck.catalog.resolve("zimg")
    act, before = prepared(harness), harness.queue.dump()

    act(stuck)
    eventually(lambda: _is_in_a_script(kept), "a script has begun and does not end", every_s=0.01)
    kept.kill()
    kept.start()
    with suppress(RedisError):
        harness.redis.ping()  # over the closed connection

    assert harness.queue.dump() == before
    harness.notifications.offers.clear()  # the killed Redis was the broker, too
    for _ in range(2):  # first the old offers and leases expire, then the offers that replaced them
        harness.later(LEASE_MS)
        passes.reap(harness.dispatcher)
        passes.reconcile(harness.dispatcher)
        harness.run_all()
    jobs = job_list.find_jobs(harness.store.database)
    assert len(jobs) == max(len(ids), 2)
    assert {(job.state, job.attempt, job.crashes) for job in jobs} == {(State.COMPLETED, 1, 0)}
    assert harness.queue.taken() == {} and harness.queue.waiting() == []
