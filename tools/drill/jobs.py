"""The jobs that the drill submits: a pure function of the seed."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RUN_S = (0.02, 0.2)
_BURST_RUN_S = (0.5, 1.5)
_MEAN_RUN_S = sum(_RUN_S) / 2
_LONGEST_STRETCH = 20.0
_BUSY_SHARE = 0.7  # of the slots' time until the faults end
_LONG_S = 16.0  # a lease that is not renewed has expired by then, and the server still runs the job
_LONG_EVERY = 100
_FAILS_EVERY = 50
_GARBLES_EVERY = 20  # of the jobs for plain servers
_PLAIN_LONG_SHARE = 0.5  # of the time until the faults end
_HOOKED_EVERY = 4
_PRIORITIES = (5, 5, 5, 1, 9)
PLAIN = "plain"
"""The model whose server ignores idempotency keys, and answers some first attempts with faulty JSON."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job to submit, not before `at_s`."""

    number: int
    at_s: float
    model: str
    priority: int
    payload: Mapping[str, Any]
    hooked: bool = False
    """It has a `callback_url`."""
    expires_s: float | None = None
    """Its deadline, in seconds from the drill's start, as `at_s`; None: it has none."""

    @property
    def seconds(self) -> float:
        return float(self.payload["seconds"])


def plan_jobs(
    seed: int,
    count: int,
    models: Sequence[str],
    slots: int,
    seconds: float,
    burst: float,
    long: bool = True,
    hooks: bool = False,
) -> list[PlannedJob]:
    """Return `count` jobs, in the order of their times.

    The share `burst` (0 … 1) is submitted at once, the others evenly until four fifths of `seconds` are over.  Runs
    take 20 to 200 ms, or longer in proportion if all jobs would end before the faults do.  With `long`, one job in a
    hundred outlives a lease.  One in fifty fails at its first attempt.  With `hooks`, a quarter has a webhook.  A model
    gets jobs in proportion to how often `models` names it.

    With `long`, a plain server has such long runs for half of the time: only a run that outlives its worker's grace
    time shows whether its request is sent a second time meanwhile.
    """
    rng = random.Random(f"{seed} orders")
    long_numbers = set(range(_LONG_EVERY // 2, count, _LONG_EVERY)) if long else set()
    plain_every = max(round(count * models.count(PLAIN) / len(models) / (_PLAIN_LONG_SHARE * seconds / _LONG_S)), 1)
    plain_count = 0
    needed_s = _BUSY_SHARE * seconds * slots - len(long_numbers) * _LONG_S
    stretch = min(max(needed_s / (count * _MEAN_RUN_S), 1.0), _LONGEST_STRETCH)
    at_once = round(count * burst)
    jobs = []
    for number in range(count):
        model, priority = rng.choice(models), rng.choice(_PRIORITIES)
        run_s = rng.uniform(*_RUN_S) * stretch
        plain_count += model == PLAIN
        is_long = plain_count % plain_every == 0 and long if model == PLAIN else number in long_numbers
        payload: dict[str, Any] = {"number": number, "seconds": _LONG_S if is_long else round(run_s, 3)}
        if rng.randrange(_FAILS_EVERY) == 0:
            payload["fails"] = 1
        if model == PLAIN and rng.randrange(_GARBLES_EVERY) == 0:
            payload["garbles"] = 1
        late = max(number - at_once, 0) / max(count - at_once, 1)
        hooked = hooks and number % _HOOKED_EVERY == 0
        jobs.append(PlannedJob(number, round(late * seconds * 0.8, 3), model, priority, payload, hooked))
    return jobs


def plan_deadline_bursts(
    seed: int, first: int, moments: Iterable[tuple[float, float]], size: int, models: Sequence[str], hooks: bool = False
) -> list[PlannedJob]:
    """Return, for each moment (submitted at, deadline; in seconds from the start), `size` jobs with the same deadline.

    first: the number of the first job.  The jobs are the most urgent ones, or they would be refused as hopeless.  Their
    runs take so long that not all of them can start in time.
    """
    rng = random.Random(f"{seed} masses")
    return [
        PlannedJob(
            number=first + burst * size + position,
            at_s=at_s,
            model=rng.choice(models),
            priority=min(_PRIORITIES),
            payload={"number": first + burst * size + position, "seconds": round(rng.uniform(*_BURST_RUN_S), 3)},
            hooked=hooks and position % _HOOKED_EVERY == 0,
            expires_s=until_s,
        )
        for burst, (at_s, until_s) in enumerate(moments)
        for position in range(size)
    ]
