"""Request and response bodies for credits and prices.  Amounts are micro-credits: 1,000,000 make a credit."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from app.schemas.base import MODEL_NAME, PROVIDED, BodySchema, From, ResponseSchema, Schema, Time
from app.schemas.cursors import bounded_int, match_cursor
from routing.admission.constraints import CONDITION_SCHEMA, NAME_PATTERN, decode_constraints
from routing.queries.job_cost import JobCost
from slotkeeper.jobs.tables import TRANSFER_KINDS
from slotkeeper.registry.credit_accounts import MAX_AMOUNT, Account
from slotkeeper.registry.prices import MAX_PER_SLOT_S, MAX_PRICES, MAX_RESERVE_S, Price

_CURSOR = "t[1-9][0-9]{0,18}"
_CONSTRAINTS: dict[str, Any] = {
    "propertyNames": {"pattern": f"^{NAME_PATTERN}$"},
    "additionalProperties": CONDITION_SCHEMA,
}


class CreditsQuery(Schema):
    limit: int = Field(50, ge=1, le=1000)
    cursor: str | None = Field(
        None, description="`next_cursor` of the page before.", json_schema_extra={"pattern": f"^{_CURSOR}$"}
    )

    @property
    def before(self) -> int | None:
        """The id before which the page begins; None: the first page.  Raises InvalidRequest."""
        match = match_cursor(re.compile(_CURSOR), self.cursor)
        return match and bounded_int(match[0][1:])


class TransferView(ResponseSchema):
    """A movement of credits, which is never changed."""

    id: int
    kind: Literal[TRANSFER_KINDS] = Field(  # type: ignore[valid-type]
        description="`reserve`: held for a job; `settle`: charged at its end, the rest of `reserved` is available "
        "again; `grant`, `withdraw`, `refund`: by an operator."
    )
    amount: int
    at: Time
    job_id: str | None
    model: str | None
    server: str | None
    reserved: int | None = Field(description="Of `settle`: what was held.")
    slot_ms: int | None = Field(description="Of `settle`: the slot time that is charged.")
    price: int | None = Field(description="A second of a slot.")
    why: str | None = Field(description="Of `settle`: why the job ended; of an operator's act: the reason.")
    actor: str | None = Field(description="The tenant of the operator's key.")
    carried: bool = Field(description="It stands for all older ones of its kind.")


class BalanceView(ResponseSchema, source=Account):
    """A tenant's account, in micro-credits."""

    tenant: str
    open: Annotated[bool, From(lambda account: account.closed_ms is None)] = Field(
        description="false: jobs that are accepted now cost nothing."
    )
    available: int = Field(description="May fall below 0: a job may cost more than was held for it.")
    held: int = Field(description="For jobs that have not ended.")
    spent: int
    overdraft: int = Field(description="How far below 0 a reservation may lead.")
    low_mark: int | None = Field(description="The event `credit.low` is sent when less is available.")
    opened_at: Time


class AccountList(ResponseSchema):
    accounts: list[BalanceView]


class CreditsView(BalanceView):
    """A tenant's account and its transfers, the newest first."""

    transfers: Annotated[list[TransferView], PROVIDED]
    next_cursor: Annotated[str | None, PROVIDED] = Field(description="null: this is the last page.")


class AccountBody(BodySchema):
    """A tenant's account.  Its jobs that are accepted from now on cost what the prices say."""

    overdraft: int = Field(0, ge=0, le=MAX_AMOUNT, description="How far below 0 a reservation may lead.")
    low_mark: int | None = Field(
        None, ge=0, le=MAX_AMOUNT, description="The event `credit.low` is sent when less is available; null: never."
    )


class ActBody(BodySchema):
    """An operator's act on an account."""

    kind: Literal["grant", "withdraw", "refund"]
    amount: int | None = Field(
        None, ge=1, le=MAX_AMOUNT, description="Micro-credits.  Only of a refund null: all that the job has cost."
    )
    reason: str = Field("", max_length=500, description="Shown with the transfer.", examples=["invoice 17"])
    job_id: str | None = Field(None, max_length=64, description="The job of a refund.")


class PriceBody(BodySchema):
    """What a second of a slot costs."""

    model: str | None = Field(None, max_length=128, json_schema_extra=MODEL_NAME, description="null: any model.")
    constraints: dict[str, Any] = Field(
        default_factory=dict,
        description="What the server must declare, as constraints of jobs; empty: any server.",
        examples=[{"gpu": "H100"}],
        json_schema_extra=_CONSTRAINTS,
    )
    per_slot_s: int = Field(ge=0, le=MAX_PER_SLOT_S, description="Micro-credits a second of a slot; 0: free.")
    reserve_s: int = Field(
        60, ge=1, le=MAX_RESERVE_S, description="For how many seconds credits are held when a job is accepted."
    )


class PricesBody(BodySchema):
    """The whole price list."""

    prices: list[PriceBody] = Field(max_length=MAX_PRICES)


class PriceView(ResponseSchema, source=Price):
    model: str | None = Field(description="null: any model.")
    constraints: Annotated[dict[str, Any], From(lambda price: decode_constraints(price.condition))]
    per_slot_s: int
    reserve_s: int


class PriceList(ResponseSchema):
    """The first row that fits a job and its server applies; without one the job costs nothing."""

    prices: list[PriceView]


class CostView(ResponseSchema, source=JobCost):
    """What a job costs, in micro-credits."""

    held: int = Field(description="0 when it has ended.")
    charged: int = Field(description="At its end, or its ends if it was revived, without refunds.")
    price: int = Field(description="A second of its slot, at most.")
    slot_ms: int = Field(description="The slot time that was charged.")
    sentence: str
