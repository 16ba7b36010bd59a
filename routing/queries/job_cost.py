"""Explain what a job costs, and why one has cost nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slotkeeper.credit_amounts import format_credits
from slotkeeper.db import Database
from slotkeeper.jobs import credits
from slotkeeper.jobs.credits import CHARGED_ENDS
from slotkeeper.jobs.states import FINAL_STATES, Reason
from slotkeeper.jobs.values import Job


@dataclass(frozen=True, slots=True)
class JobCost:
    """Amounts in micro-credits.  held: until its end.  charged: without refunds.  price: of a second of its slot."""

    held: int
    charged: int
    price: int
    slot_ms: int
    sentence: str


def read_cost(database: Database, job: Job) -> JobCost:
    """Return the cost of a job that was accepted with a price.  Raises DatabaseUnavailable."""
    reserved, price = job.reserved or 0, job.price or 0
    rows = credits.list_of_job(database, job.seq)
    settled = [row for row in rows if row.kind == "settle"]
    refunded = sum(row.amount for row in rows if row.kind == "refund")
    charged, slot_ms = sum(row.amount for row in settled) - refunded, sum(row.slot_ms for row in settled)
    held = max(reserved, 0)
    if job.state not in FINAL_STATES or not settled:
        sentence = (
            f"{format_credits(held)} credits are held for it; at its end it costs {format_credits(price)} credits "
            "for each second of its slot, at most."
        )
    else:
        sentence = _explain(settled, refunded, price)
    return JobCost(held, charged, price, slot_ms, sentence)


def _explain(settled: Sequence[Any], refunded: int, price: int) -> str:
    last = settled[-1]
    if last.amount:
        seconds = f"{last.slot_ms / 1000:g} s of a slot at {format_credits(last.price)} credits a second"
        sentence = f"It cost {format_credits(last.amount)} credits: {seconds}."
    elif Reason(last.why) not in CHARGED_ENDS:
        sentence = "It cost nothing: runs that failed, or whose server or worker was lost, are not charged."
    elif last.slot_ms == 0:
        sentence = "It cost nothing: it ended without a run, or in one that its server did not end."
    elif price == 0:
        sentence = "It cost nothing: its server costs nothing."
    else:
        sentence = "It cost nothing: its run was too short."
    if refunded:
        sentence += f"  {format_credits(refunded)} credits were refunded."
    return sentence
