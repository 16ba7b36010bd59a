"""An attack, and how it is played: its checks before it, again and again while it lasts, and after it."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from typing import Any

_PAUSE_S = 0.05
_BEGINS_WITHIN_S, _ENDS_WITHIN_S = 60, 5


@dataclass(frozen=True)
class Check:
    """Something that must hold.  `look` raises AssertionError, or OSError, where it does not."""

    name: str
    look: Callable[[Any], object]
    within_s: float = 1.0
    """How long looking may take; an answer that comes later is none."""
    tries: int = 1
    """How many looks in a row have to be late before that is wrong."""


@dataclass(frozen=True)
class Attack:
    """`wage` begins it, and what it gives ends it.  `lasts_s`: how long the checks are repeated meanwhile."""

    name: str
    wage: Callable[[Any], AbstractContextManager[object]]
    checks: Sequence[Check]
    lasts_s: float = 2.0
    quick: bool = True
    """Whether `make test` plays it."""


@dataclass
class Seen:
    """The observations of one check in one phase."""

    longest_s: float = 0.0
    looks: int = 0
    wrong: list[str] = field(default_factory=list)

    def look(self, check: Check, harness: Any, patience: float = 1.0) -> None:
        took_s, within_s = [self._look(check, harness)], check.within_s * patience
        while took_s[-1] > within_s and len(took_s) < check.tries:
            took_s.append(self._look(check, harness))
        if min(took_s) > within_s:
            self.wrong.append(f"took {min(took_s):.1f} s")

    def _look(self, check: Check, harness: Any) -> float:
        """Return how long it took, in seconds."""
        began = time.monotonic()
        try:
            check.look(harness)
        except (AssertionError, OSError) as error:
            self.wrong.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
        took_s = time.monotonic() - began
        self.longest_s, self.looks = max(self.longest_s, took_s), self.looks + 1
        return took_s


@contextmanager
def _elsewhere(attack: Attack, harness: Any) -> Iterator[None]:
    """Wage the attack from a separate process, so that its load does not slow down the checks.

    Raises AssertionError if the attack itself fails.
    """
    ours, theirs = Pipe()

    def wage() -> None:
        os.nice(5)
        try:
            with attack.wage(harness):
                theirs.send("")
                theirs.recv()
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}")
        os._exit(0)  # Without a word about sockets that are left.

    attacker = get_context("fork").Process(target=wage)
    attacker.start()
    try:
        assert ours.poll(_BEGINS_WITHIN_S), "the attack does not begin"
        wrong = ours.recv()
        assert not wrong, wrong
        yield
        ours.send("end")
        attacker.join(_ENDS_WITHIN_S)
    finally:
        attacker.kill()
        attacker.join()


PHASES = ("before", "during", "after")


@dataclass
class Played:
    """The result of an attack: by check, the observations of each phase."""

    attack: Attack
    seen: dict[str, dict[str, Seen]]

    @property
    def wrong(self) -> list[str]:
        return [
            f"{check}, {phase}: {words}"
            for check, phases in self.seen.items()
            for phase, seen in phases.items()
            for words in seen.wrong[:3]
        ]


def play(attack: Attack, harness: Any, patience: float = 1.0) -> Played:
    """Play it once.  `patience`: how many times later answers may be than their checks say."""
    played = Played(attack, {check.name: {phase: Seen() for phase in PHASES} for check in attack.checks})

    def look(phase: str) -> None:
        for check in attack.checks:
            played.seen[check.name][phase].look(check, harness, patience)

    look("before")
    with _elsewhere(attack, harness):
        until = time.monotonic() + attack.lasts_s
        look("during")
        while time.monotonic() < until:
            time.sleep(_PAUSE_S)
            look("during")
    look("after")
    return played
