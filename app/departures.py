"""What is read and written when models and servers are removed or renamed; see app.schemas."""

from typing import Annotated, Literal

from pydantic import Field

from app.answers import Answer, Read
from app.openapi import Model
from app.schemas import MODEL_NAME, Asked
from registry.departures import Departure


class DepartQuery(Model):
    """What is done about jobs that have not ended."""

    drain: bool = Field(False, description="Take nothing new, and go when they have ended.")


class DepartServerQuery(DepartQuery):
    force: bool = Field(False, description="Go at once: what runs there ends at no cost, and runs again elsewhere.")


class DepartureView(Answer, shows=Departure):
    """How far a removal or a renaming has come."""

    name: str
    state: Annotated[Literal["done", "leaving"], Read(lambda it: "done" if it.is_over else "leaving")] = Field(
        description="leaving: it goes when what is left has ended."
    )
    left: dict[str, int] = Field(description="Jobs that have not ended, by state.")
    withheld: int = Field(description="Slots of which the server has not let go.")
    lost: list[str] = Field(description="Jobs whose runs are lost by it.")
    idle: list[str] = Field(description="Servers that serve no model any more.")


class RenameBody(Asked):
    to: str = Field(max_length=128, json_schema_extra=MODEL_NAME)


class RenameModelBody(RenameBody):
    former_name_s: float | None = Field(
        86_400,
        ge=0,
        le=366 * 86_400,
        description="Seconds for which submits under the old name are taken; null: for good, 0: not at all.",
    )


class FormerNamePath(Model):
    model: str = Field(json_schema_extra=MODEL_NAME)
    former: str = Field(json_schema_extra=MODEL_NAME)
