"""Request and response bodies for removing models and servers; see app.schemas.job_schemas."""

from typing import Annotated, Literal

from pydantic import Field

from app.api.openapi import Schema
from app.schemas.base import From, ResponseSchema
from slotkeeper.registry.catalog_removal import Removal


class RemovalQuery(Schema):
    """What to do with jobs that have not ended."""

    drain: bool = Field(False, description="Take no new jobs, and remove it when all its jobs have ended.")


class ServerRemovalQuery(RemovalQuery):
    force: bool = Field(
        False,
        description="Remove it at once: its runs end, and their jobs run on other servers without using up a retry.",
    )


class RemovalView(ResponseSchema, source=Removal):
    """The progress of a removal."""

    name: str
    state: Annotated[Literal["done", "leaving"], From(lambda removal: "done" if removal.is_over else "leaving")] = (
        Field(description="leaving: it is removed when its remaining jobs have ended.")
    )
    remaining: dict[str, int] = Field(description="Jobs that have not ended, by state.")
    quarantined: int = Field(description="Quarantined slots of the server.")
    lost: list[str] = Field(description="Jobs whose runs were ended by the removal.")
    idle: list[str] = Field(description="Servers that have no model any more.")
