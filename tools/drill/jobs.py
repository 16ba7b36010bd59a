"""The jobs that the drill submits: a pure function of the seed."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RUN_S = (0.02, 0.2)
_MASS_RUN_S = (0.5, 1.5)
_MEAN_S = sum(_RUN_S) / 2
_LONGEST_STRETCH = 20.0
_BUSY = 0.7  # of the slots' time until the faults end
_LONG_S = 16.0  # a lease that is not renewed has been taken away by then, and the server is still at work
_LONG_EVERY = 100
_FAILS_EVERY = 50
_GARBLES_EVERY = 20  # of the jobs for plain servers
_PLAIN_LONG_SHARE = 0.5  # of the time until the faults end
_HOOKED_EVERY = 4
_PRIORITIES = (5, 5, 5, 1, 9)
PLAIN = "plain"
"""The model whose server knows no keys, and answers some first attempts with JSON that has a fault."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job to submit, not before `at_s`."""

    number: int
    at_s: float
    model: str
    priority: int
    payload: Mapping[str, Any]
    hooked: bool = False
    """Its end shall be told to a receiver."""
    expires_s: float | None = None
    """When it does, seconds from the drill's start like `at_s`."""

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
    """`burst` of them (0 … 1) at once, the others evenly until four fifths of the time are over.

    Runs take 20 to 200 ms, or longer in proportion if all would be over before the faults are.  One in a hundred
    outlives a lease, if `long`; one in fifty fails at its first attempt; a quarter has a webhook, if `hooks`.  A model
    gets as many jobs as it stands in `models`.

    A plain server has such long runs for half of the time, if `long`: only a run that outlives its worker's grace time
    shows whether its request is sent a second time meanwhile.
    """
    chance = random.Random(f"{seed} orders")
    longs = set(range(_LONG_EVERY // 2, count, _LONG_EVERY)) if long else set()
    plain_every = max(round(count * models.count(PLAIN) / len(models) / (_PLAIN_LONG_SHARE * seconds / _LONG_S)), 1)
    plain = 0
    needed_s = _BUSY * seconds * slots - len(longs) * _LONG_S
    stretch = min(max(needed_s / (count * _MEAN_S), 1.0), _LONGEST_STRETCH)
    at_once = round(count * burst)
    found = []
    for number in range(count):
        model, priority = chance.choice(models), chance.choice(_PRIORITIES)
        run_s = chance.uniform(*_RUN_S) * stretch
        plain += model == PLAIN
        is_long = plain % plain_every == 0 and long if model == PLAIN else number in longs
        payload: dict[str, Any] = {"number": number, "seconds": _LONG_S if is_long else round(run_s, 3)}
        if chance.randrange(_FAILS_EVERY) == 0:
            payload["fails"] = 1
        if model == PLAIN and chance.randrange(_GARBLES_EVERY) == 0:
            payload["garbles"] = 1
        late = max(number - at_once, 0) / max(count - at_once, 1)
        hooked = hooks and number % _HOOKED_EVERY == 0
        found.append(PlannedJob(number, round(late * seconds * 0.8, 3), model, priority, payload, hooked))
    return found


def plan_deadline_bursts(
    seed: int, first: int, moments: Iterable[tuple[float, float]], size: int, models: Sequence[str], hooks: bool = False
) -> list[PlannedJob]:
    """For each moment (when, until when), seconds from the start, `size` jobs with the same deadline.

    `first`: the number of the first.  They are the most urgent, or they would be refused as hopeless, and take too long
    for all of them to have their turn in time.
    """
    chance = random.Random(f"{seed} masses")
    return [
        PlannedJob(
            number=first + mass * size + one,
            at_s=at_s,
            model=chance.choice(models),
            priority=min(_PRIORITIES),
            payload={"number": first + mass * size + one, "seconds": round(chance.uniform(*_MASS_RUN_S), 3)},
            hooked=hooks and one % _HOOKED_EVERY == 0,
            expires_s=until_s,
        )
        for mass, (at_s, until_s) in enumerate(moments)
        for one in range(size)
    ]
