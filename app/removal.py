"""What is read and written when models and servers are removed; see app.schemas.job_schemas."""

from typing import Annotated, Literal

from pydantic import Field

from app.api.openapi import Schema
from app.schemas.base import From, ResponseSchema
from slotkeeper.registry.catalog_removal import Removal


class RemovalQuery(Schema):
    """What is done about jobs that have not ended."""

    drain: bool = Field(False, description="Take nothing new, and go when they have ended.")


class ServerRemovalQuery(RemovalQuery):
    force: bool = Field(
        False, description="Remove it at once: its runs end at no cost, and their jobs run on other servers."
    )


class RemovalView(ResponseSchema, source=Removal):
    """How far a removal has come."""

    name: str
    state: Annotated[Literal["done", "leaving"], From(lambda it: "done" if it.is_over else "leaving")] = Field(
        description="leaving: it goes when what is left has ended."
    )
    remaining: dict[str, int] = Field(description="Jobs that have not ended, by state.")
    quarantined: int = Field(description="Slots of which the server has not let go.")
    lost: list[str] = Field(description="Jobs whose runs are lost by it.")
    idle: list[str] = Field(description="Servers that serve no model any more.")
