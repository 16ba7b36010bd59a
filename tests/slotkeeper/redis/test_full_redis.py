"""A Redis that has reached its maxmemory: which commands it refuses, and which still run."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection
from redis import Redis
from redis.exceptions import OutOfMemoryError

from routing.maintenance import task_runs
from routing.queries.process_counters import ProcessCounters
from routing.scripts import LIBRARY, make_scripts
from slotkeeper.redis.connections import connect
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.pipeline import Pipeline
from slotkeeper.redis.scripts import Command, Scripts
from tasks.extensions.transport import Transport
from tests.house.rule import for_each
from tools.cluster.valkey_process import Valkey

BRING_IN_NEW_WORK = {"rate_limit", "enqueue"}
ADD_TO_STREAMS = {
    "relay",
    "publish_progress",
}  # The database keeps the events, and no job needs the progress entries to continue.


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A Redis that takes no more memory, and has never run a script."""
    with Valkey(tmp_path_factory.mktemp("full"), settings={"maxmemory": "1"}) as valkey:
        yield valkey


@pytest.fixture
def redis(full: Valkey) -> Iterator[Redis]:
    with connect(full.url, 5) as client:
        client.function_flush()
        yield client


@for_each(LIBRARY.script_names())
def test_a_full_redis_refuses_only_the_scripts_that_add_new_work_or_stream_entries(name: str) -> None:
    flags = re.findall(r'"([\w-]+)"', LIBRARY.build_function(name).text.rsplit("flags =", 1)[1])
    if name in BRING_IN_NEW_WORK | ADD_TO_STREAMS:
        assert flags == []
    else:
        assert flags == (
            ["no-writes"] if re.search(r"Writes nothing$", LIBRARY.read_source(name), re.MULTILINE) else ["allow-oom"]
        )
    assert LIBRARY.build_function(name).eval_text.startswith(f"#!lua flags={','.join(flags)}\n")


def _workers(scripts: Scripts) -> Command[int]:
    target = scripts.target("report_capacity", "test:workers", int)
    return Command(target, ("w1", 3, 1000))


def test_a_full_redis_that_loads_no_function_runs_the_scripts_that_free_memory(redis: Redis) -> None:
    scripts = make_scripts(redis, Keys("test"))
    assert scripts.run(_workers(scripts)) == 3
    assert scripts.run_all([_workers(scripts), _workers(scripts)]) == [3, 3]
    assert redis.function_list() == []


def test_a_full_redis_that_loads_no_function_still_runs_the_scripts_of_an_event_loop(redis: Redis) -> None:
    scripts = make_scripts(redis, Keys("test"))

    async def ask() -> Any:
        pipeline = Pipeline(asyncio.get_running_loop(), scripts, 5)
        try:
            return await asyncio.gather(*(pipeline.execute(_workers(scripts)) for _ in range(2)))
        finally:
            await pipeline.close()

    assert asyncio.run(ask()) == [3, 3]


def test_a_full_redis_refuses_new_work_also_where_it_loads_no_function(redis: Redis) -> None:
    scripts = make_scripts(redis, Keys("test"))
    target = scripts.target("rate_limit", "test:rate", int)
    with pytest.raises(OutOfMemoryError):
        scripts.run(Command(target, (1, 1000, 1)))


def test_a_full_redis_stores_the_marks_and_the_counters_of_maintenance(redis: Redis) -> None:
    scripts = make_scripts(redis, Keys("test"))
    task_runs.mark_sweep(scripts)
    task_runs.TaskRunRecorder(scripts).note("sweep", 0.1)
    assert not task_runs.has_sweep_stopped(scripts) and set(task_runs.read_task_runs(scripts)) == {"sweep"}
    counters = ProcessCounters(scripts)
    counters.count_refusal("rate", 2)
    counters.flush()
    assert counters.counts("refused") == {"rate": 2}
    with redis.pipeline(transaction=False) as pipe:
        assert pipe.set("some", "text").exists("other").execute() == [b"OK", 0]
    assert redis.get("some") == b"text"


def test_a_full_redis_runs_a_whole_transaction_of_celery(redis: Redis) -> None:
    with redis.pipeline() as pipe:
        pipe.hset("a", "x", "1")
        pipe.zadd("b", {"y": 2})
        pipe.hdel("a", "z")
        assert pipe.execute() == [1, 1, 0]
    assert redis.hgetall("a") == {b"x": b"1"}


@pytest.mark.parametrize("raises", [True, False])
def test_a_full_redis_runs_nothing_of_a_transaction_with_a_command_that_it_refuses(redis: Redis, raises: bool) -> None:
    redis.delete("a", "b")
    with redis.pipeline() as pipe:
        pipe.hset("a", "x", "1")
        pipe.append("b", "1")
        with pytest.raises(OutOfMemoryError):
            pipe.execute(raise_on_error=raises)
    assert redis.exists("a", "b") == 0


@pytest.mark.parametrize("expires", [None, 10.0])
def test_celerys_messages_go_through_a_full_redis(full: Valkey, expires: float | None) -> None:
    with Connection(full.url, transport=Transport) as connection:
        queue = connection.SimpleQueue(f"work-{expires}", queue_opts={"expires": expires})
        queue.put("now")
        queue.put("never")
        message = queue.get(timeout=5)
        assert message.payload == "now"
        message.ack()
        assert queue.get(timeout=5).payload == "never"
        queue.clear()
