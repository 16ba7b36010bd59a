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
from tests.support import passes
from tests.support import stage as stages
from tests.support.ends import end_run_with
from tests.support.room import CLOCK, FRAGMENTS
from tests.support.stage import LEASE_MS, Stage
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
def stage(database: Database, kept: Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with kept.client() as client:
        yield Stage(database, client, monkeypatch)


def _is_in_a_script(valkey: Valkey) -> bool:
    with valkey.client() as client:
        try:
            client.ping()
        except ResponseError as error:
            return "BUSY" in str(error)
    return False


# Each prepares a stage, and answers the act that Redis dies in.
Act = Callable[[Dispatcher], object]


def _submit(stage: Stage) -> Act:
    return lambda stuck: stuck.submit([stage.a()], LOCAL_IDENTITY)


def _start(stage: Stage) -> Act:
    offer = stage.told.offers.pop()

    def act(stuck: Dispatcher) -> None:
        with pytest.raises(RedisError):
            begin_run(stuck, offer, "w1")

    return act


def _settle(stage: Stage) -> Act:
    task = stage.start()
    return lambda stuck: end_run_with(stuck, task, Reason.FINISHED, result="{}")


@pytest.mark.parametrize(
    ("prepared", "writes"),
    [(_submit, 1), (_submit, 3), (_submit, 6), (_start, 1), (_settle, 1), (_settle, 3), (_settle, 6)],
)
def test_a_redis_that_dies_in_the_middle_of_a_script_applies_none_of_its_writes(
    stage: Stage, kept: Valkey, monkeypatch: pytest.MonkeyPatch, prepared: Callable[[Stage], Act], writes: int
) -> None:
    stage.register(2 if prepared is _submit else 1)
    ids = [stage.submit() for _ in range(1 if prepared is _submit else 2)]
    with monkeypatch.context() as patch:
        patch.setattr(stages, "FRAGMENTS", FRAGMENTS | {"lib/now_ms": _STUCK % writes + CLOCK})
        stuck = stage.a_dispatcher(connect(kept.url, _GIVES_UP_S))
    stuck.catalog.resolve("zimg")
    act, before = prepared(stage), stage.room.dump()

    act(stuck)
    eventually(lambda: _is_in_a_script(kept), "a script has begun and does not end", every_s=0.01)
    kept.kill()
    kept.start()
    with suppress(RedisError):
        stage.redis.ping()  # over the closed connection

    assert stage.room.dump() == before
    stage.told.offers.clear()  # the killed Redis was the broker, too
    for _ in range(2):  # first the old offers and leases expire, then the offers that replaced them
        stage.later(LEASE_MS)
        passes.reap(stage.dispatcher)
        passes.reconcile(stage.dispatcher)
        stage.run_all()
    jobs = job_list.find_jobs(stage.store.database)
    assert len(jobs) == max(len(ids), 2)
    assert {(job.state, job.attempt, job.crashes) for job in jobs} == {(State.COMPLETED, 1, 0)}
    assert stage.room.taken() == {} and stage.room.waiting() == []
