"""Estimates of when waiting jobs start, and the memory of how earlier ones turned out, in Redis.

Only a sample of the promises is remembered: those of jobs whose id, hashed, ends in `level` zero bits.  Whenever
more than a bound are outstanding the level rises and half of them are forgotten, so that the sample stays even
and small however long the queue is; and who starts a job sees from its id alone that there is nothing to learn.

It is a help and no promise to anybody: all of it may be lost, and is learned anew.
"""

import hashlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from redis.exceptions import RedisError

from routing.queries import interval
from routing.queries.interval import HEAVIEST, KEPT, MOST, PARTS, SIZES, Estimate, Memory, Promise, Seen
from slotkeeper.redis.scripts import Command, Scripts

REMEMBERED = 512
"""Promises that may be outstanding for each model."""
_FRESH_S = 1.0  # how long a process uses what it has read
_STALE_MS = 24 * 3_600_000  # a promise this old is the first to be forgotten
_IDLE_S = 14 * 86_400  # a model without submits for so long starts anew
_DIGITS = 8  # of one ratio, as lua/learn.lua writes them
_JOB = "job:"
_MOST_NOTED = 10_000  # promises that wait to be remembered; Redis may be away
_FIELDS = (
    "level",
    "balance:low",
    "balance:high",
    *(f"{name}:{size}" for size in SIZES for name in ("ratios", "at", "balance:low", "balance:high")),
)


@dataclass(frozen=True, slots=True)
class _Known:
    """What this process has read of a model, and until when it may use it."""

    until: float
    memory: Memory


@dataclass(frozen=True, slots=True)
class _Level:
    """Of the sample.  Who only starts jobs knows nothing else."""

    until: float
    bits: int


class _Start(NamedTuple):
    job_id: str
    at_ms: int


class Learned(NamedTuple):
    """Whether each job was in the sample, and the level of that."""

    learned: list[bool]
    level: int


class ForecastScripts(Protocol):
    """Of one model's forecast."""

    def learn(
        self, key: str, *, kept: int, most: int, parts: int, heaviest: int, starts: Sequence[_Start]
    ) -> Command[Learned]: ...


class Forecasts:
    """Gives estimates and learns from starts.  Safe between threads and processes; redis errors pass through."""

    def __init__(
        self, scripts: Scripts, remembered: int = REMEMBERED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scripts = scripts
        self._acts: ForecastScripts = scripts.bind(ForecastScripts)
        self._remembered = remembered
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._levels: dict[str, _Level] = {}
        self._noted: deque[tuple[str, str, Promise]] = deque(maxlen=_MOST_NOTED)  # key, job
        self._ask: Callable[[], object] | None = None

    def remember_by(self, ask: Callable[[], object]) -> None:
        """From now on whom a promise is given waits for no Redis: `ask` has somebody else, always one, `remember`."""
        self._ask = ask

    def estimate(
        self, fleet: str, model: str, ahead: int, slots: int, run_ms: float | None, now_ms: int
    ) -> Estimate | None:
        """When a job with `ahead` others before it starts; None: no usable slot, or no run was measured yet.

        A call to Redis at most once a second.
        """
        memory = self._read(self._scripts.keys.forecast(fleet, model)).memory
        given = interval.promise(memory, ahead, slots, run_ms, now_ms)
        return None if given is None else interval.estimate(memory, given)

    def promise(
        self, fleet: str, model: str, job_id: str, ahead: int, slots: int, run_ms: float | None, now_ms: int
    ) -> Estimate | None:
        """The same for a job that has come just now; its start will be learned from if it is in the sample."""
        return self.promise_all(fleet, model, [(job_id, ahead)], slots, run_ms, now_ms)[0]

    def promise_all(
        self, fleet: str, model: str, jobs: Sequence[tuple[str, int]], slots: int, run_ms: float | None, now_ms: int
    ) -> list[Estimate | None]:
        """The same for many (job, jobs ahead of it) in one call."""
        key = self._scripts.keys.forecast(fleet, model)
        known = self._read(key)
        given = [interval.promise(known.memory, ahead, slots, run_ms, now_ms) for _, ahead in jobs]
        level, chosen = self._levels[key].bits, dict[str, Promise]()
        for (job_id, _), it in zip(jobs, given, strict=True):
            if it is not None and _in_sample(job_id, level):
                chosen[job_id] = it
            while len(chosen) > self._remembered:
                level += 1
                chosen = {name: one for name, one in chosen.items() if _in_sample(name, level)}
        chosen = {name: replace(one, level=level) for name, one in chosen.items()}
        if chosen:
            self._note(key, chosen)
        return [None if it is None else interval.estimate(known.memory, it) for it in given]

    def memory(self, fleet: str, model: str) -> Memory:
        """What was learned of a model's estimates."""
        return self._read(self._scripts.keys.forecast(fleet, model)).memory

    def started(self, starts: Sequence[tuple[str, str, str, int]]) -> list[bool]:
        """Learn from the first starts of jobs: (fleet, model, job, ms).  Answers for each whether it was in the sample.

        One call for each model, and none where the ids show that none of them is.  Raises redis errors.
        """
        chosen = defaultdict[str, dict[int, _Start]](dict)  # key -> number of the start, and what is asked
        for n, (fleet, model, job_id, at_ms) in enumerate(starts):
            key = self._scripts.keys.forecast(fleet, model)
            if self._may_be_known(key, job_id):
                chosen[key][n] = _Start(job_id, at_ms)
        answers = self._scripts.run_all([self._learning(key, list(its.values())) for key, its in chosen.items()])
        found = dict[int, bool]()
        for (key, its), answer in zip(chosen.items(), answers, strict=True):
            self._note_level(key, answer.level)
            found |= zip(its, answer.learned, strict=True)
        return [found.get(n, False) for n in range(len(starts))]

    def _learning(self, key: str, starts: Sequence[_Start]) -> Command[Learned]:
        return self._acts.learn(key, kept=KEPT, most=MOST, parts=PARTS, heaviest=HEAVIEST, starts=starts)

    def _may_be_known(self, key: str, job_id: str) -> bool:
        level = self._levels.get(key)
        return level is None or self._clock() >= level.until or _in_sample(job_id, level.bits)

    def forget(self, fleet: str, model: str, *job_ids: str) -> None:
        """These jobs will not start: they were canceled, or their deadline passed."""
        self._scripts.redis.hdel(self._scripts.keys.forecast(fleet, model), *(_JOB + job_id for job_id in job_ids))

    def remove(self, fleet: str, model: str) -> None:
        """Delete all that is known of a removed model."""
        key = self._scripts.keys.forecast(fleet, model)
        self._scripts.redis.unlink(key)
        self._known.pop(key, None)

    # -- reading -----------------------------------------------------------------------------------------------

    def _read(self, key: str) -> _Known:
        """At most a second old, but while another thread reads."""
        known = self._known.get(key)
        if known is not None and (self._clock() < known.until or not self._lock.acquire(blocking=False)):
            return known
        try:
            return self._read_now(key)
        finally:
            if known is not None:
                self._lock.release()

    def _read_now(self, key: str) -> _Known:
        with self._scripts.redis.pipeline(transaction=False) as pipe:
            pipe.hmget(key, _FIELDS)
            pipe.hlen(key)
            values, size = pipe.execute()
        fields = {name: value for name, value in zip(_FIELDS, values, strict=True) if value is not None}
        level = int(fields.get("level", 0))
        if level > 0 and size - len(_FIELDS) < self._remembered // 4:
            level -= 1
            self._scripts.redis.hset(key, "level", level)
        self._note_level(key, level)
        known = _Known(self._clock() + _FRESH_S, _memory(fields))
        self._known[key] = known
        return known

    def _note_level(self, key: str, bits: int) -> None:
        self._levels[key] = _Level(self._clock() + _FRESH_S, bits)

    # -- remembering -------------------------------------------------------------------------------------------

    def _note(self, key: str, chosen: Mapping[str, Promise]) -> None:
        if self._ask is None:
            self._remember(key, chosen)
            return
        self._noted.extend((key, name, one) for name, one in chosen.items())
        self._ask()

    def remember(self) -> None:
        """All that was promised since.  From what Redis does not take now nothing is learned."""
        by_key = defaultdict[str, dict[str, Promise]](dict)
        while self._noted:
            key, job_id, given = self._noted.popleft()
            by_key[key][job_id] = given
        with suppress(RedisError):
            for key, chosen in by_key.items():
                self._remember(key, chosen)

    def _remember(self, key: str, chosen: Mapping[str, Promise]) -> None:
        with self._scripts.redis.pipeline(transaction=False) as pipe:
            pipe.hset(key, mapping={_JOB + job_id: _text(it) for job_id, it in chosen.items()})
            pipe.hlen(key)
            pipe.hget(key, "level")
            pipe.expire(key, _IDLE_S)
            _, size, text, _ = pipe.execute()
        level = int(text or 0)
        late = [_JOB + job_id for job_id in chosen if not _in_sample(job_id, level)]
        if late:  # The level had risen since it was read; nobody would ask for these.
            self._scripts.redis.hdel(key, *late)
        self._note_level(key, level)
        if size - len(late) > self._remembered + len(_FIELDS):
            self._thin(key, level, max(it.at_ms for it in chosen.values()))

    def _thin(self, key: str, level: int, now_ms: int) -> None:
        """Forget promises that are too old, then every other job's until a quarter of the bound is free."""
        stored: Mapping[Any, Any] = self._scripts.redis.hgetall(key)
        promises = {name.decode(): text for name, text in stored.items() if name.startswith(_JOB.encode())}
        kept = [name for name, text in promises.items() if now_ms - int(text.split()[-2]) < _STALE_MS]
        while len(kept) > self._remembered * 3 // 4:
            level += 1
            kept = [name for name in kept if _in_sample(name.removeprefix(_JOB), level)]
        dropped = promises.keys() - set(kept)
        with self._scripts.redis.pipeline(transaction=False) as pipe:
            pipe.hset(key, "level", level)
            if dropped:  # Another process may have been faster.
                pipe.hdel(key, *dropped)
            pipe.execute()
        self._note_level(key, level)


def _in_sample(job_id: str, level: int) -> bool:
    if level == 0:
        return True
    digest = hashlib.blake2b(job_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest) & ((1 << level) - 1) == 0


def _text(given: Promise) -> str:
    return f"{given.size} {given.predicted_ms} {given.low_ms} {given.high_ms} {given.at_ms} {given.level}"


def _memory(fields: Mapping[str, bytes]) -> Memory:
    def number(name: str) -> int:
        return int(fields.get(name, 0))

    def ratios(size: int) -> tuple[int, ...]:
        text = fields.get(f"ratios:{size}", b"")
        return tuple(int(text[start : start + _DIGITS]) for start in range(0, len(text), _DIGITS))

    sizes = tuple(
        Seen(ratios(it), number(f"at:{it}"), number(f"balance:low:{it}"), number(f"balance:high:{it}")) for it in SIZES
    )
    return Memory(sizes, number("balance:low"), number("balance:high"))
