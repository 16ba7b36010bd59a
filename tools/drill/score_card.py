"""The score card: the result of a drill, as a table and as JSON."""

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
    """The result of a drill."""

    seed: int
    command: str
    """The command that repeats the drill."""
    findings: Findings
    conduct: ConductReport
    disordered: Sequence[Overtaken]
    """Overtaken jobs that no fault excuses."""
    faults: Sequence[Fault]
    """The injected faults."""
    stalled: bool
    """No job ended for a long time, although some were left."""
    answers: Mapping[str, int]
    refusals: Mapping[str, int]
    """Answers other than 2xx, or 429 and 503 with Retry-After."""
    gave_up: int
    """Number of jobs that a client could not submit within two minutes."""
    doubled_ids: Sequence[str]
    """Job ids that were returned for two different planned jobs."""
    unheard: int
    """Number of jobs in the database for which no client got an answer."""
    balanced: bool
    """Whether the ledger of the database balances (JOB-3)."""
    submits_per_s: float | None
    """For the jobs that were submitted at once."""
    recovery: Mapping[str, Stats]
    """Kind of fault -> the longest time that a slot was idle after it although jobs waited."""
    rerun: Stats | None
    """From the kill of a worker to the next start of its jobs."""
    agreed_s: float | None
    """Seconds from the last fault until leases and servers agreed; None: they did not."""
    left_over: Sequence[str]
    """Leases and runs that were left when every job had ended."""
    crashes: Sequence[str]
    """Processes that ended although the drill did not end them."""
    slow: Sequence[str]
    """Processes that did not stop in time at the end and were killed."""
    states: Mapping[str, State | None]
    """Lost job -> its state in the database; None: it is not there."""
    lost_commits: int = 0
    """Number of COMMITs, or answers to them, that the proxy dropped."""
    disturbed_messages: int = 0
    """Number of messages that the proxy doubled, delayed or dropped."""

    @property
    def passed(self) -> bool:
        findings = self.findings
        violations = (
            findings.lost,
            findings.unexpected,
            findings.overlaps,
            findings.reversals,
            self.disordered,
            self.doubled_ids,
        )
        others = (self.refusals, self.left_over)
        return self.balanced and not self.stalled and self.conduct.clean and not any(violations) and not any(others)

    @property
    def duplicates(self) -> int:
        """Number of completed runs of jobs that had completed before."""
        return sum(times - 1 for times in self.findings.duplicated.values())

    def data(self) -> dict[str, Any]:
        """Return the card as JSON data."""
        findings = self.findings
        return {
            "passed": self.passed,
            "seed": self.seed,
            "command": self.command,
            "faults": dict(Counter(str(fault.kind) for fault in self.faults)),
            "accepted": findings.accepted,
            "ended": {state.value: count for state, count in findings.ended.items()},
            "lost": len(findings.lost),
            "unexpected": len(findings.unexpected),
            "duplicates": self.duplicates,
            "duplicates_per_fault": round(self.duplicates / max(len(self.faults), 1), 3),
            "overlaps": len(findings.overlaps),
            "order_violations": len(self.disordered),
            "overtaken": len(findings.overtaken),
            "reversals": len(findings.reversals),
            "answers": dict(self.answers),
            "refusals": dict(self.refusals),
            "gave_up": self.gave_up,
            "doubled_ids": len(self.doubled_ids),
            "conduct": {name: len(lines) for name, lines in self.conduct.findings.items()},
            "lost_commits": self.lost_commits,
            "twisted_messages": self.disturbed_messages,
            "unheard": self.unheard,
            "balanced": self.balanced,
            "stalled": self.stalled,
            "submits_per_s": None if self.submits_per_s is None else round(self.submits_per_s, 1),
            "idle_after_fault": {kind: dict(stats) for kind, stats in self.recovery.items()},
            "rerun_after_worker_death": None if self.rerun is None else dict(self.rerun),
            "leases_agree_after_s": None if self.agreed_s is None else round(self.agreed_s, 1),
            "left_over": list(self.left_over),
            "crashes": list(self.crashes),
            "slow_to_stop": list(self.slow),
            "details": self.details(),
        }

    def details(self) -> list[str]:
        """Return the first few findings of each kind, one line each."""
        findings = self.findings
        lines = [
            f"lost: {job_id}, in the database: {self.states.get(job_id) or 'no'}" for job_id in findings.lost[:_SHOWN]
        ]
        lines += [f"unexpected: {job_id}" for job_id in findings.unexpected[:_SHOWN]]
        lines += [f"doubled: {job_id} was returned for two planned jobs" for job_id in self.doubled_ids[:_SHOWN]]
        lines += [f"reversed: {job_id}" for job_id in findings.reversals[:_SHOWN]]
        lines += [
            f"overlap in {pair.what}: {pair.first.job_id} attempt {pair.first.attempt} on {pair.first.server} and "
            f"{pair.second.job_id} attempt {pair.second.attempt} on {pair.second.server}, "
            f"{(pair.first.ended_ns - pair.second.started_ns) / 1e9:.3f} s"
            for pair in findings.overlaps[:_SHOWN]
        ]
        lines += [
            f"order: {job.job_id} was overtaken by {job.by}, which started "
            f"{(job.started_ns - job.by_started_ns) / 1e9:.3f} s before it"
            for job in self.disordered[:_SHOWN]
        ]
        lines += [f"{name}: {line}" for name, group in self.conduct.findings.items() for line in group[:_SHOWN]]
        lines += [f"ended by itself: {crash}" for crash in self.crashes[:_SHOWN]]
        return lines + [f"left over: {line}" for line in self.left_over[:_SHOWN]]

    def show(self, console: "Console") -> None:
        """Print the card."""
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, value, is_good in self._rows():
            style = {True: "green", False: "red", None: ""}[is_good]
            table.add_row(name, styled(value, style))
        console.print(table)
        for line in self.details():
            console.print(f"  {line}")
        console.print(styled("passed", "green") if self.passed else styled("not passed", "red"))
        if self.command:
            console.print(f"Repeat: {self.command}", soft_wrap=True)

    def _rows(self) -> list[tuple[str, str, bool | None]]:
        """Return rows of (name, value, whether the value is good; None: it is not judged)."""
        findings = self.findings
        ends = ", ".join(f"{count} {state}" for state, count in sorted(findings.ended.items()) if state != "completed")
        explained = len(findings.overtaken) - len(self.disordered)
        per_fault = f"{self.duplicates / max(len(self.faults), 1):.2f} per fault"
        kinds = Counter(str(fault.kind) for fault in self.faults)
        rows: list[tuple[str, str, bool | None]] = [
            ("faults", _list_counts(kinds), None),
            ("accepted", str(findings.accepted), None),
            ("completed", str(findings.completed), None),
            ("other ends", ends or "none", None),
            ("lost", str(len(findings.lost)), not findings.lost),
            ("unexpected", str(len(findings.unexpected)), not findings.unexpected),
            ("duplicates", f"{self.duplicates} ({per_fault})", None),
            ("overlaps", str(len(findings.overlaps)), not findings.overlaps),
            (
                "order violations",
                f"{len(self.disordered)} ({explained} more explained by a fault)",
                not self.disordered,
            ),
            ("reversals", str(len(findings.reversals)), not findings.reversals),
            ("doubled ids", str(len(self.doubled_ids)), not self.doubled_ids),
            ("ledger", "balanced" if self.balanced else "does not balance", self.balanced),
            *((name, str(len(lines)), not lines) for name, lines in self.conduct.findings.items()),
            ("answers", _list_counts(self.answers), not self.refusals),
            ("not submitted", str(self.gave_up), not self.gave_up),
            ("submits per s", "-" if self.submits_per_s is None else f"{self.submits_per_s:.0f}", None),
        ]
        rows += [(f"idle after {kind}", _format_times(stats), None) for kind, stats in self.recovery.items()]
        if self.rerun is not None:
            rows.append(("lost runs again after", _format_times(self.rerun), None))
        if self.lost_commits or self.disturbed_messages:
            rows.append(
                (
                    "by the proxy",
                    f"{self.lost_commits} COMMITs lost; {self.disturbed_messages} messages disturbed",
                    None,
                )
            )
        agreed = "not in time" if self.agreed_s is None else f"after {self.agreed_s:.1f} s"
        rows.append(("leases = servers", agreed, self.agreed_s is not None))
        rows.append(("left over", str(len(self.left_over)), not self.left_over))
        if self.stalled:
            rows.append(("stalled", "jobs were left, and none ended for a long time", False))
        return rows


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _format_times(stats: Stats) -> str:
    return f"p50 {stats['p50_s']:.1f} s, longest {stats['max_s']:.1f} s, of {stats['faults']:.0f}"
