"""Each field that a client may give for a job, declared once.

The REST body, Celery's arguments and the options of the command line follow from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from routing.admission.constraints import CONDITION_SCHEMA
from routing.admission.labels import LABEL_PATTERN, MAX_LABEL_LENGTH, MAX_LABELS
from slotkeeper.jobs.terms import MAX_GONE_S, MAX_OUTPUT, MIN_GONE_S, OnFailure

MODEL_PATTERN = "[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}"


@dataclass(frozen=True, slots=True)
class Given:
    """How a field of a JobRequest is given elsewhere than in a REST body.

    celery: "argument": by position or by name; "option": by name, also in apply_async; None: Celery has an option of
    its own for it.  option, metavar, help: of the command line; option "": the command has an argument for it, or none.
    """

    celery: Literal["argument", "option"] | None = None
    option: str = ""
    metavar: str | None = None
    help: str = ""


def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """Return what the JSON Schema of an object says of its members."""
    schema = model.model_json_schema()
    return {name: schema[name] for name in ("properties", "additionalProperties")}


_Priority = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "boolean"}, {"type": "null"}]}),
]
_Seconds = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]})]
_Moment = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number", "minimum": 0}, {"type": "null"}]}
    ),
]
_Object = Annotated[Any, WithJsonSchema({"type": "object"})]
_Constraints = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": 20,
                    "additionalProperties": CONDITION_SCHEMA,
                },
                {"type": "null"},
            ]
        }
    ),
]
_Labels = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": MAX_LABELS,
                    "propertyNames": {"pattern": f"^{LABEL_PATTERN}$"},
                    "additionalProperties": {"type": "string", "maxLength": MAX_LABEL_LENGTH},
                },
                {"type": "null"},
            ]
        }
    ),
]


_OnFailure = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "object", **_properties(OnFailure)}, {"type": "null"}]}),
]
_Size = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_OUTPUT}, {"type": "null"}]})
]


_Gone = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": MIN_GONE_S, "maximum": MAX_GONE_S}, {"type": "null"}]}),
]


class JobRequest(BaseModel):
    """What a client may ask for: the body of a submit, the arguments of Celery's `infer`, the options of the commands.

    `prepare_job` checks the values.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: Annotated[str, Given("argument")] = Field(
        max_length=128, examples=["zimg"], json_schema_extra={"pattern": f"^{MODEL_PATTERN}$"}
    )
    payload: Annotated[_Object, Given("argument")] = Field(
        description="What the inference server gets, as it is.", examples=[{"prompt": "a sunset"}]
    )
    callback_url: Annotated[
        str | None,
        Given("argument", "--callback-url", "URL", "URL that receives a signed POST when the job ends."),
    ] = Field(None, description="The address that receives a signed POST when the job has ended.")
    priority: Annotated[_Priority, Given(None, "--priority", help="1 is the most urgent.  [default: 5]")] = Field(
        None, description="1 (most urgent) to 9; true is 1; 5 if not given."
    )
    constraints: Annotated[
        _Constraints,
        Given("option", "--constraint", "CONDITION", "Condition on the server's attributes; repeat it."),
    ] = Field(
        None,
        description="What its server must declare: a value, a list of alternatives, or a range.  "
        "`model_version` and `runtime` are those of the model's own registration.",
        examples=[{"gpu": ["A100", "H100"], "memory": {"min": 40}, "region": "eu"}],
    )
    labels: Annotated[
        _Labels, Given("option", "--label", "NAME=VALUE", "Label of the job, for lists of jobs; repeat it.")
    ] = Field(
        None,
        description="Names and texts that lists of jobs can be limited to; they have no other effect.",
        examples=[{"team": "search", "run": "7"}],
    )
    environment: Annotated[
        str | None, Given("option", "--environment", "NAME", "Environment in which it runs.  [default: its tenant's]")
    ] = Field(
        None,
        max_length=128,
        description="Its server must declare it; not given: the first of its tenant's `environments`, or `production`.",
        examples=["testnet"],
    )
    on_failure: Annotated[
        _OnFailure,
        Given("option", "--on-failure", "NAME=VALUE", "Its own retry policy, such as max_retries=3; repeat it."),
    ] = Field(
        None,
        description="How it is retried, in place of its model's configuration, which is the most that it may ask for.",
    )
    expected_output: Annotated[
        _Size,
        Given("option", "--expected-output", "SIZE", "Expected size of the result, such as a number of tokens."),
    ] = Field(
        None,
        description="Expected size of the result, in a unit of the model, such as tokens.  It is shown, and a "
        "description may send it to the server.",
    )
    cancel_when_gone: Annotated[
        _Gone, Given(None, "--cancel-when-gone", "SECONDS", "Cancel it when no client has waited for it for so long.")
    ] = Field(
        None,
        description="Seconds: it is canceled when no client has waited for it for so long, by `wait` or its stream.",
    )
    ttl: Annotated[_Seconds, Given(None, "--ttl", help="Seconds after which the job expires.")] = Field(
        None, description="Seconds from now after which the job expires."
    )
    not_before: Annotated[_Moment, Given(None)] = Field(
        None, description="ISO 8601 with its zone, or seconds from now."
    )


REQUEST_FIELDS: Mapping[str, Given] = {
    name: next(mark for mark in info.metadata if isinstance(mark, Given))
    for name, info in JobRequest.model_fields.items()
}
