"""Promises in Redis: a bounded, even sample, shared by all processes, and the same learning as in the policy."""

import random
from itertools import count

import pytest
from redis import Redis
from redis.exceptions import RedisError

from routing.queries import forecasts
from routing.queries.forecasts import Forecasts
from routing.queries.interval import KEPT, MOST, Estimate, Memory, Promise, Seen
from routing.scripts import make_scripts
from slotkeeper.redis.keys import Keys
from tests.support.learning import learn
from tests.support.queueing import DAY, Load, lognormal, simulate, swing
from tests.support.room import START_MS
from tests.support.valkey import Valkey

FLEET, MODEL = "zimg", "org/zimg:v2"
KEY = "test:{zimg}:forecast:org/zimg:v2"


class Process:
    """One process's Forecasts, with a clock that the test sets."""

    def __init__(self, client: Redis, remembered: int = forecasts.REMEMBERED) -> None:
        self.client, self.now_s = client, 0.0
        self.scripts = make_scripts(client, Keys("test"))
        self.forecasts = Forecasts(self.scripts, remembered, lambda: self.now_s)

    def promise(self, job_id: str, ahead: int = 0, slots: int = 1, run_ms: float | None = 1000.0, now_ms: int = 0):
        return self.forecasts.promise(FLEET, MODEL, job_id, ahead, slots, run_ms, START_MS + now_ms)

    def estimate(self, ahead: int = 0) -> Estimate | None:
        return self.forecasts.estimate(FLEET, MODEL, ahead, 1, 1000.0, START_MS)

    def started(self, job_id: str, now_ms: int) -> bool:
        return self.forecasts.started([(FLEET, MODEL, job_id, START_MS + now_ms)]) == [True]

    def later(self) -> None:
        self.now_s += 1.0

    def outstanding(self) -> int:
        return sum(name.startswith(b"job:") for name in self.client.hkeys(KEY))

    sent = 0

    def counting(self) -> "Process":
        """From now on `sent` counts round trips."""
        connection = self.client.connection_pool.get_connection()
        kind = type(connection)
        self.client.connection_pool.release(connection)
        process = self

        class Counting(kind):  # type: ignore[misc, valid-type]
            def send_packed_command(self, *args, **kwargs):
                process.sent += 1
                return super().send_packed_command(*args, **kwargs)

        connection.__class__ = Counting
        return self


@pytest.fixture
def process(client: Redis) -> Process:
    return Process(client)


# -- a promise and its outcome -----------------------------------------------------------------------------------


def test_a_promise_is_remembered_until_its_job_starts_and_is_learned_from_once(process):
    told = process.promise("a", ahead=3)
    assert told.low_ms < 4000 < told.high_ms and process.outstanding() == 1
    assert process.started("a", 5000) is True
    assert process.started("a", 9000) is False and process.outstanding() == 0


def test_what_one_process_learns_others_know_a_second_later(client):
    api, worker = Process(client), Process(client)
    before = api.promise("a")
    for number in range(200):
        api.promise(f"j{number}", now_ms=number * 5000)
        worker.started(f"j{number}", number * 5000 + 3000)
    assert api.estimate() == before
    api.later()
    assert 2900 <= api.estimate().mid_ms <= 3100


def test_who_is_promised_something_waits_for_no_redis_where_another_remembers_it(process):
    told, asked = process.promise("a"), []
    process.counting().forecasts.remember_by(lambda: asked.append("remember"))
    assert (process.promise("b"), process.promise("c")) == (told, told)
    assert process.sent == 0 and asked and process.outstanding() == 1
    process.forecasts.remember()
    assert process.sent == 2 and process.outstanding() == 3  # one to remember both, one to look
    assert process.started("b", 5000) is True
    process.forecasts.remember()
    assert process.outstanding() == 2, "what was remembered once is not remembered again"


def test_a_redis_that_is_away_is_not_remembered_in(valkey: Valkey):
    with valkey.client() as client:
        process = Process(client)
        process.promise("a")
        process.forecasts.remember_by(lambda: None)
        process.promise("b")
        client.connection_pool.connection_kwargs["port"] = 1
        client.connection_pool.disconnect()
        process.forecasts.remember()


def test_nothing_is_promised_or_remembered_without_a_slot_or_a_measured_run(process, client):
    assert process.promise("a", slots=0) is None and process.promise("b", run_ms=None) is None
    assert not client.exists(KEY)


def test_a_canceled_job_is_forgotten(process):
    process.promise("a")
    process.forecasts.forget(FLEET, MODEL, "a")
    assert process.outstanding() == 0 and process.started("a", 1000) is False


def test_an_emptied_redis_starts_over(process, client):
    first = process.promise("a")
    process.started("a", 9000)
    client.flushall()
    process.later()
    assert process.started("a", 9000) is False
    assert process.promise("a") == first


def test_models_do_not_learn_from_each_other(process, client):
    process.promise("a")
    process.forecasts.promise(FLEET, "other", "a", 0, 1, 1000.0, START_MS)
    assert process.started("a", 1000) is True
    assert client.hexists("test:{zimg}:forecast:other", "job:a")


def test_a_model_that_is_not_used_any_more_is_forgotten_after_a_while(process, client):
    process.promise("a")
    assert 0 < client.ttl(KEY) <= 14 * 86_400


def test_redis_errors_pass_through(valkey: Valkey):
    with valkey.client() as away:
        away.connection_pool.connection_kwargs["port"] = 1
        broken = Process(away)
        for act in (lambda: broken.promise("a"), lambda: broken.started("a", 1), lambda: broken.estimate()):
            with pytest.raises(RedisError):
                act()


# -- the same as the policy --------------------------------------------------------------------------------------


def _stored(process: Process) -> Memory:
    process.later()
    process.estimate()
    return process.forecasts._known[KEY].memory


def test_the_script_learns_exactly_what_the_policy_learns(process, client):
    draw, memory, now = random.Random(7), Memory(), START_MS
    for number in range(1500):
        now += draw.randrange(3000)
        low = draw.randrange(4000)
        given = Promise(
            draw.randrange(3), draw.randrange(1, 9000), low, low + draw.randrange(9000), now, draw.randrange(9)
        )
        level = draw.randrange(9)
        client.hset(KEY, mapping={"job:x": forecasts._text(given), "level": level})
        process.later()
        waited = draw.choice([0, 1, low, given.high_ms, draw.randrange(20_000)])
        assert process.started("x", now + waited - START_MS) is True
        memory = learn(memory, given, now + waited, level)
        if number % 100 == 99:
            assert _stored(process) == memory
    assert {len(it.ratios) for it in memory.sizes} == {KEPT}, "the sample never became full"


def test_balances_stay_within_their_bounds(process, client):
    client.hset(KEY, mapping={"balance:low": -MOST, "balance:high:0": MOST})
    client.hset(KEY, "job:x", forecasts._text(Promise(0, 1, 0, 1, START_MS)))
    process.started("x", 1000)
    memory = _stored(process)
    assert (memory.low, memory.sizes[0].high) == (-MOST, MOST)


def test_a_memory_survives_the_way_to_redis_and_back(process, client):
    ratios = (-138_155, 0, 5, 138_155)
    client.hset(KEY, mapping={"ratios:1": "".join(f"{it:+08d}" for it in ratios), "at:1": 5, "balance:low:1": -3})
    assert _stored(process).sizes[1] == Seen(ratios, 5, -3, 0)


# -- bounded -----------------------------------------------------------------------------------------------------


def test_however_many_jobs_wait_a_bounded_sample_is_remembered(client):
    process = Process(client, remembered=64)
    for number in range(5000):
        process.promise(f"j{number}", ahead=number)
        assert client.hlen(KEY) <= 64 + len(forecasts._FIELDS)
    assert process.outstanding() >= 20
    numbers = sorted(int(name[5:]) for name in client.hkeys(KEY) if name.startswith(b"job:"))
    assert numbers[0] < 1000 and 1500 < numbers[len(numbers) // 2] < 3500 and numbers[-1] > 4000, "not even"


def test_a_batch_is_sampled_too(client):
    process = Process(client, remembered=64)
    jobs = [(f"j{number}", number) for number in range(10_000)]
    told = process.forecasts.promise_all(FLEET, MODEL, jobs, 4, 1000.0, START_MS)
    assert len(told) == 10_000 and None not in told
    assert 20 <= process.outstanding() <= 64


def test_who_starts_a_job_outside_the_sample_does_not_ask_redis(client):
    api, worker = Process(client, remembered=16), Process(client, remembered=16)
    for number in range(2000):
        api.promise(f"j{number}", ahead=number)
    worker.started("j0", 1)
    worker.counting()
    learned = sum(worker.started(f"j{number}", 5000) for number in range(2000))
    assert learned >= 4 and worker.sent <= 40


def test_jobs_that_start_together_are_learned_from_in_one_call(client):
    api, worker = Process(client), Process(client)
    for number in range(50):
        api.promise(f"j{number}")
    worker.counting()
    starts = [(FLEET, MODEL, f"j{number}", START_MS + 5000) for number in (*range(50), 99)]
    assert worker.forecasts.started(starts) == [True] * 50 + [False]
    assert worker.sent <= 4, "its script had to be told"


def test_every_sampled_promise_is_found_however_the_level_moved_meanwhile(client):
    one, two = Process(client, remembered=32), Process(client, remembered=32)
    numbers = count()
    for _ in range(20):
        for _ in range(100):
            number = next(numbers)
            (one if number % 2 else two).promise(f"j{number}")
    level = int(client.hget(KEY, "level"))
    names = [name[4:].decode() for name in client.hkeys(KEY) if name.startswith(b"job:")]
    assert level > 2 and all(forecasts._in_sample(name, level) for name in names)
    assert all(one.started(name, 1000) for name in names)


def test_as_the_queue_shrinks_more_are_remembered_again(client):
    process = Process(client, remembered=16)
    for number in range(500):
        process.promise(f"j{number}")
    for number in range(500):
        process.started(f"j{number}", 1000)
    for _ in range(20):
        process.later()
        process.estimate()
    assert client.hget(KEY, "level") == b"0"
    process.promise("again")
    assert process.outstanding() == 1


def test_promises_that_nobody_took_back_are_the_first_to_go(client):
    process = Process(client, remembered=16)
    for number in range(16):
        process.promise(f"old{number}")
    for number in range(16):
        process.promise(f"new{number}", now_ms=DAY + 1000)
    names = {name[4:7] for name in client.hkeys(KEY) if name.startswith(b"job:")}
    assert names == {b"new"}


# -- whole days --------------------------------------------------------------------------------------------------


class Remote:
    """Simulated jobs, real storage: a process that submits and one that starts, whose clocks are the simulation's."""

    def __init__(self, client: Redis, remembered: int) -> None:
        self.api, self.worker = Process(client, remembered), Process(client, remembered)

    def promise(self, job_id: str, ahead: int, slots: int, run_ms: float | None, now_ms: int) -> Estimate | None:
        self.api.now_s = self.worker.now_s = now_ms / 1000
        return self.api.promise(job_id, ahead, slots, run_ms, now_ms)

    def started(self, job_id: str, now_ms: int) -> None:
        self.api.now_s = self.worker.now_s = now_ms / 1000
        self.worker.started(job_id, now_ms)


def test_over_a_day_the_interval_holds_for_88_to_92_percent_although_only_some_are_remembered(client):
    """At noon five times as many jobs wait as are remembered."""
    full = 8 / 20_000
    load = Load(swing(0.4 * full, 1.3 * full), 1.3 * full, lognormal(20_000, 0.3))
    outcomes = [it for it in simulate(load, 2, Remote(client, 256)) if it.promised]
    held = sum(it.promised.low_ms <= it.waited_ms <= it.promised.high_ms for it in outcomes)
    assert 0.88 <= held / len(outcomes) <= 0.92
