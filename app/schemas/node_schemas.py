"""Request and response bodies for nodes."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.schemas.base import PROVIDED, BodySchema, From, ResponseSchema, Schema, Time
from slotkeeper.registry.nodes import MAX_SLOTS, NAME_PATTERN, EnrolmentToken, Grant, Node
from slotkeeper.registry.values import VALUE_PATTERN

_NAME: Any = {"pattern": f"^{NAME_PATTERN}$"}
_TOKEN_DAYS = 30


class NodePath(Schema):
    name: str = Field(max_length=64, json_schema_extra=_NAME)


class TokenPath(Schema):
    token_id: str = Field(max_length=16, json_schema_extra={"pattern": "^[0-9a-f]{1,16}$"})


class GrantView(ResponseSchema, source=Grant):
    """What a node may do."""

    owner: str = Field(description="The tenant to which it belongs.")
    pool: str
    environments: list[str] = Field(description="It may be of one of these; of the first, if it names none.")
    models: list[str] = Field(description="Names or patterns.")
    max_slots: int
    trusted: bool = Field(description="Its refusals of a request need no second node.")


class NodeView(ResponseSchema, source=Node):
    """A node."""

    name: str = Field(description="Also the name of its server.")
    id: str
    grant: Annotated[dict[str, Any], From(lambda node: GrantView.build(node.grant))]
    state: Annotated[Literal["connected", "paused", "absent", "revoked", "unknown"], PROVIDED] = Field(
        description="`paused`: by its owner; `unknown`: Redis does not answer."
    )
    since: Annotated[Time | None, PROVIDED] = Field(description="Since when; null: it has not connected yet.")
    reason: Annotated[str | None, PROVIDED] = Field(description="Why it is paused or absent.")
    gateway: Annotated[str | None, PROVIDED] = Field(description="Where it is connected.")
    models: Annotated[list[str], PROVIDED] = Field(description="What it serves now.")
    fault: str | None = Field(description="Why it does not serve everything that it declares and may serve.")
    declaration: Annotated[Any, PROVIDED] = Field(description="What it says of itself; null: it has not connected yet.")
    created_at: Time
    seen_at: Time | None = Field(description="When it connected last, an hour late at most.")
    revoked_at: Time | None


class NodeList(ResponseSchema):
    nodes: list[NodeView]


class TokenBody(BodySchema):
    """With which a node enrols, and what it may do then."""

    owner: str | None = Field(None, max_length=200, description="A tenant; null: that of this key.")
    pool: str = Field(max_length=128, json_schema_extra={"pattern": f"^{VALUE_PATTERN}$"}, examples=["homes"])
    environments: list[str] = Field(["production"], min_length=1, max_length=20)
    models: list[str] = Field(["*"], min_length=1, max_length=50, description="Names or patterns, such as `flux-*`.")
    max_slots: int = Field(8, ge=1, le=MAX_SLOTS)
    trusted: bool = Field(False, description="A machine of the installation: its refusals need no second node.")
    uses: int = Field(1, ge=1, le=1000, description="How many nodes may enrol with it.")
    valid_s: int = Field(3600, ge=60, le=_TOKEN_DAYS * 86_400)


class TokenView(ResponseSchema, source=EnrolmentToken):
    """A token that can be used."""

    id: str
    grant: Annotated[dict[str, Any], From(lambda token: GrantView.build(token.grant))]
    made_by: str | None
    created_at: Time
    expires_at: Time
    uses_left: int


class NewToken(ResponseSchema):
    """A new token, which cannot be read again."""

    id: str
    token: str
    expires_at: Time


class TokenList(ResponseSchema):
    tokens: list[TokenView]


class EnrolmentBody(BodySchema):
    """A node that enrols."""

    token: str = Field(max_length=100)
    name: str = Field(max_length=64, json_schema_extra=_NAME)
    public_key: str = Field(max_length=64, description="Ed25519, as base64.")
    proof: str = Field(max_length=128, description="The signature of the key over the token and the key, as base64.")


class EnrolledNode(ResponseSchema, source=Node):
    """What the agent keeps."""

    id: str
    name: str
    grant: Annotated[dict[str, Any], From(lambda node: GrantView.build(node.grant))]


class RevokeBody(BodySchema):
    reason: str = Field("", max_length=500)
