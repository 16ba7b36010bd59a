"""The score card: what came of a drill, for people and for programs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.terminal import styled
from slotkeeper.jobs.states import State
from tools.drill.conduct_checks import ConductReport
from tools.drill.fault_schedule import Fault
from tools.drill.history_checks import Findings, Overtaken

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 5

Stats = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScoreCard:
    """Everything that is worth knowing afterwards."""

    seed: int
    command: str
    """Repeats the drill."""
    findings: Findings
    conduct: ConductReport
    disordered: Sequence[Overtaken]
    """Overtaken jobs that no fault excuses."""
    faults: Sequence[Fault]
    """Those that happened."""
    stalled: bool
    """Jobs were left and none ended any more."""
    answers: Mapping[str, int]
    refusals: Mapping[str, int]
    """Answers other than 2xx, or 429 and 503 with Retry-After."""
    gave_up: int
    """Jobs that a client could not submit in two minutes."""
    doubled: Sequence[str]
    """Ids that were given for two different jobs."""
    unheard: int
    """Jobs that the record has and no client knows of."""
    balanced: bool
    """The record's own ledger (JOB-3)."""
    submits_per_s: float | None
    """Of those that were submitted at once."""
    recovery: Mapping[str, Stats]
    """By kind of fault: the longest that any slot stood idle after it although jobs waited."""
    rerun: Stats | None
    """From a worker's death to the next start of the jobs that were taken from it."""
    agreed_s: float | None
    """How long after the last fault leases and servers agreed; None: they did not."""
    left: Sequence[str]
    """Leases and runs that were there when every job had ended."""
    crashes: Sequence[str]
    """Processes that ended although nobody killed them."""
    slow: Sequence[str]
    """Processes that had to be killed in the end."""
    states: Mapping[str, State | None]
    """Of lost jobs."""
    lost_commits: int = 0
    """COMMITs, or answers to them, that were lost on purpose."""
    twisted: int = 0
    """Messages that were doubled, delayed or lost."""

    @property
    def passed(self) -> bool:
        found = self.findings
        broken = (found.lost, found.unexpected, found.overlaps, found.reversals, self.disordered, self.doubled)
        beside = (self.refusals, self.left)
        return self.balanced and not self.stalled and self.conduct.clean and not any(broken) and not any(beside)

    @property
    def duplicates(self) -> int:
        """Runs that were done once more than needed."""
        return sum(times - 1 for times in self.findings.duplicated.values())

    def data(self) -> dict[str, Any]:
        """For JSON."""
        found = self.findings
        return {
            "passed": self.passed,
            "seed": self.seed,
            "command": self.command,
            "faults": dict(Counter(str(fault.kind) for fault in self.faults)),
            "accepted": found.accepted,
            "ended": {state.value: count for state, count in found.ended.items()},
            "lost": len(found.lost),
            "unexpected": len(found.unexpected),
            "duplicates": self.duplicates,
            "duplicates_per_fault": round(self.duplicates / max(len(self.faults), 1), 3),
            "overlaps": len(found.overlaps),
            "order_violations": len(self.disordered),
            "overtaken": len(found.overtaken),
            "reversals": len(found.reversals),
            "answers": dict(self.answers),
            "refusals": dict(self.refusals),
            "gave_up": self.gave_up,
            "doubled_ids": len(self.doubled),
            "conduct": {name: len(those) for name, those in self.conduct.found.items()},
            "lost_commits": self.lost_commits,
            "twisted_messages": self.twisted,
            "unheard": self.unheard,
            "balanced": self.balanced,
            "stalled": self.stalled,
            "submits_per_s": None if self.submits_per_s is None else round(self.submits_per_s, 1),
            "idle_after_fault": {kind: dict(stats) for kind, stats in self.recovery.items()},
            "rerun_after_worker_death": None if self.rerun is None else dict(self.rerun),
            "leases_agree_after_s": None if self.agreed_s is None else round(self.agreed_s, 1),
            "left_over": list(self.left),
            "crashes": list(self.crashes),
            "slow_to_stop": list(self.slow),
            "details": self.details(),
        }

    def details(self) -> list[str]:
        """The first few findings of each kind, one line each."""
        found = self.findings
        lines = [f"lost: {job_id}, in the record: {self.states.get(job_id) or 'no'}" for job_id in found.lost[:_SHOWN]]
        lines += [f"unexpected: {job_id}" for job_id in found.unexpected[:_SHOWN]]
        lines += [f"doubled: {job_id} was given for two orders" for job_id in self.doubled[:_SHOWN]]
        lines += [f"reversed: {job_id}" for job_id in found.reversals[:_SHOWN]]
        lines += [
            f"overlap in {it.what}: {it.first.job_id} attempt {it.first.attempt} on {it.first.server} and "
            f"{it.second.job_id} attempt {it.second.attempt} on {it.second.server}, "
            f"{(it.first.ended_ns - it.second.started_ns) / 1e9:.3f} s"
            for it in found.overlaps[:_SHOWN]
        ]
        lines += [
            f"order: {it.job_id} was overtaken by {it.by}, which started "
            f"{(it.started_ns - it.by_started_ns) / 1e9:.3f} s before it"
            for it in self.disordered[:_SHOWN]
        ]
        lines += [f"{name}: {it}" for name, those in self.conduct.found.items() for it in those[:_SHOWN]]
        lines += [f"ended by itself: {crash}" for crash in self.crashes[:_SHOWN]]
        return lines + [f"left over: {it}" for it in self.left[:_SHOWN]]

    def show(self, console: "Console") -> None:
        """Print it."""
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, value, fine in self._rows():
            style = {True: "green", False: "red", None: ""}[fine]
            table.add_row(name, styled(value, style))
        console.print(table)
        for line in self.details():
            console.print(f"  {line}")
        console.print(styled("passed", "green") if self.passed else styled("not passed", "red"))
        if self.command:
            console.print(f"Again: {self.command}", soft_wrap=True)

    def _rows(self) -> list[tuple[str, str, bool | None]]:
        """Name, value, whether it is as it should be (None: neither)."""
        found = self.findings
        ends = ", ".join(f"{count} {state}" for state, count in sorted(found.ended.items()) if state != "completed")
        explained = len(found.overtaken) - len(self.disordered)
        per_fault = f"{self.duplicates / max(len(self.faults), 1):.2f} per fault"
        kinds = Counter(str(fault.kind) for fault in self.faults)
        rows: list[tuple[str, str, bool | None]] = [
            ("faults", _listed(kinds), None),
            ("accepted", str(found.accepted), None),
            ("completed", str(found.completed), None),
            ("other ends", ends or "none", None),
            ("lost", str(len(found.lost)), not found.lost),
            ("unexpected", str(len(found.unexpected)), not found.unexpected),
            ("duplicates", f"{self.duplicates} ({per_fault})", None),
            ("overlaps", str(len(found.overlaps)), not found.overlaps),
            ("order violations", f"{len(self.disordered)} ({explained} more by a fault)", not self.disordered),
            ("reversals", str(len(found.reversals)), not found.reversals),
            ("doubled ids", str(len(self.doubled)), not self.doubled),
            ("ledger", "balanced" if self.balanced else "does not balance", self.balanced),
            *((name, str(len(those)), not those) for name, those in self.conduct.found.items()),
            ("answers", _listed(self.answers), not self.refusals),
            ("not submitted", str(self.gave_up), not self.gave_up),
            ("submits per s", "-" if self.submits_per_s is None else f"{self.submits_per_s:.0f}", None),
        ]
        rows += [(f"idle after {kind}", _spread(stats), None) for kind, stats in self.recovery.items()]
        if self.rerun is not None:
            rows.append(("lost run again after", _spread(self.rerun), None))
        if self.lost_commits or self.twisted:
            rows.append(("lost on purpose", f"{self.lost_commits} COMMITs; {self.twisted} messages twisted", None))
        agreed = "not in time" if self.agreed_s is None else f"after {self.agreed_s:.1f} s"
        rows.append(("leases = servers", agreed, self.agreed_s is not None))
        rows.append(("left over", str(len(self.left)), not self.left))
        if self.stalled:
            rows.append(("stalled", "jobs were left and none ended any more", False))
        return rows


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _spread(stats: Stats) -> str:
    return f"p50 {stats['p50_s']:.1f} s, longest {stats['max_s']:.1f} s, of {stats['faults']:.0f}"
