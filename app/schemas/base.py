"""Base classes of request and response bodies, and what several subjects share.

A response class declares the fields, their descriptions, and where each value is read from.

    class BatchView(ResponseSchema, source=Batch):
        jobs: int                                    # the attribute `jobs` of the batch
        created_at: Time                             # the attribute `created_ms`; `until` would be read from `until_ms`
        batch: Annotated[str, From("id")]            # the attribute `id` of the batch
        status: Annotated[str, From(_status)]        # what the function _status returns for the batch
        notice: Annotated[str | None, PROVIDED]      # passed to `build` by the view

`BatchView.build(batch, notice=None)` returns the response body as a dict.  /openapi.json describes the same class.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from routing.admission.job_request import MODEL_PATTERN
from slotkeeper import clock

_fields: dict[str, tuple[str, ...]] = {}
Reader: TypeAlias = Callable[[Any], Any]
_TIME = WithJsonSchema({"type": "string", "format": "date-time"})
Time = Annotated[str, _TIME]
AdminStateName = Literal["online", "paused", "draining", "frozen"]
_REASON: Any = Field(
    None, max_length=500, description="The reason for the state; shown with it.", examples=["new driver"]
)
MODEL_NAME: Any = {"pattern": f"^{MODEL_PATTERN}$"}
_MAX_UNKNOWN_FIELDS = 20


class Schema(BaseModel):
    """Base of request bodies, paths and queries.  Caches its schema, which flask-openapi reads at each request."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _schema(cls, args, tuple(sorted(kwargs.items())))

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        remember_fields(cls)


def remember_fields(model: type[BaseModel]) -> None:
    """Remember the fields of a request, so that the error for an unknown field suggests the closest one."""
    _fields[model.__name__] = tuple(model.model_fields)


def known_fields(title: str) -> tuple[str, ...]:
    """Return the fields of the request body, path or query of this name; pydantic's errors have the name."""
    return _fields.get(title, ())


@cache
def _schema(model: type[BaseModel], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    schema: dict[str, Any] = BaseModel.model_json_schema.__func__(model, *args, **dict(kwargs))  # type: ignore[attr-defined]
    return schema


class Problem(Schema):
    """An error, in the format of RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    field: str | None = None
    errors: list[dict[str, str]] | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class From:
    """The source of a field's value: an attribute, converted to the field's type, or a function, whose result is used
    unchanged.
    """

    source: str | Reader


@dataclass(frozen=True, slots=True)
class _Provided:
    """Marks a field whose value the view passes to `build`."""


PROVIDED = _Provided()


class ResponseSchema(Schema):
    """Base class of response bodies."""

    _source: ClassVar[type | None] = None
    _readers: ClassVar[Mapping[str, Reader]] = {}

    def __init_subclass__(cls, source: type | None = None, **options: Any) -> None:
        """Set the class that the fields are read from.  `source` None: the one of the base class."""
        super().__init_subclass__(**options)
        cls._source = source or cls._source

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Build the readers of the fields.  Raises TypeError for a field without a source."""
        hints = get_type_hints(cls, include_extras=True)
        cls._readers = {name: _make_reader(cls, name, hints[name]) for name in cls.model_fields}

    @classmethod
    def build(cls, source: Any = None, /, **provided: Any) -> dict[str, Any]:
        """Return the response body for `source`.

        `provided`: values that replace those read from `source`; they are used unchanged.  Raises TypeError for a name
        that is no field, and for a PROVIDED field without a value.
        """
        if not provided.keys() <= cls._readers.keys():
            raise TypeError(f"{cls.__name__} has no {', '.join(sorted(provided.keys() - cls._readers.keys()))}")
        return {name: provided[name] if name in provided else read(source) for name, read in cls._readers.items()}


def iso_time(at_ms: int | None) -> str | None:
    """Return the time as ISO 8601, in UTC, with milliseconds; None for None."""
    return None if at_ms is None else clock.iso_time(at_ms)


def _make_reader(schema: type[ResponseSchema], name: str, hint: Any) -> Reader:
    """Return a function that reads the value of the field `name` from the source of `schema`."""
    marks = getattr(hint, "__metadata__", ())
    source = next((mark.source for mark in marks if isinstance(mark, From)), None)
    if PROVIDED in marks or (source is None and schema._source is None):
        return _raise_missing(f"{schema.__name__}.build must be given {name}")
    convert = _converter_of(hint)
    if source is None:
        source = f"{name.removesuffix('_at')}_ms" if convert in (iso_time, _time_or_none) else name
    if isinstance(source, str):
        _check_attribute(schema, source)
        return attrgetter(source) if convert is None else _compose(attrgetter(source), convert)
    if not callable(source):  # In a class body a field hides a function of the same name.
        raise TypeError(f"{schema.__name__}: {name} is read by something that is no function")
    return source


def _check_attribute(schema: type[ResponseSchema], path: str) -> None:
    """Raise TypeError if the source class of `schema` does not have the first attribute of `path`."""
    source, name = schema._source, path.partition(".")[0]
    if source is not None and not hasattr(source, name) and name not in getattr(source, "model_fields", ()):
        raise TypeError(f"{schema.__name__}: {source.__name__} has no attribute {name}")


def _raise_missing(message: str) -> Reader:
    """Return a reader that raises TypeError."""

    def read(_: Any) -> Any:
        raise TypeError(message)

    return read


def _compose(source: Reader, convert: Reader) -> Reader:
    return lambda value: convert(source(value))


def _converter_of(hint: Any) -> Reader | None:
    """Return the function that converts values of this type for a response; None: no conversion."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return iso_time if _TIME in hint.__metadata__ else _converter_of(parts[0])
    if kind in (Union, UnionType):
        return _convert_unless_none(next(filter(None, map(_converter_of, parts)), None))
    if kind is list:
        return _convert_each(_converter_of(parts[0]))
    if kind is dict:
        return _convert_values(_converter_of(parts[1]))
    return hint.build if isinstance(hint, type) and issubclass(hint, ResponseSchema) else None


def _convert_unless_none(convert: Reader | None) -> Reader | None:
    if convert is None:
        return None
    return _time_or_none if convert is iso_time else lambda value: None if value is None else convert(value)


def _time_or_none(at_ms: int | None) -> str | None:
    """Return the time as `iso_time` does; None for 0 as well."""
    return iso_time(at_ms) if at_ms else None


def _convert_each(convert: Reader | None) -> Reader | None:
    return None if convert is None else lambda values: [convert(value) for value in values]


def _convert_values(convert: Reader | None) -> Reader:
    """Return a function that converts the values of a dict, and its keys, which may be enum members, to str."""
    if convert is None:
        return lambda values: {str(name): value for name, value in values.items()}
    return lambda values: {str(name): convert(value) for name, value in values.items()}


class BodySchema(Schema):
    """Base class of request bodies: unknown fields are refused, and values are not converted to another type."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _normalize_input(cls, body: Any) -> Any:
        return integral_floats_to_int(drop_excess_unknown(body, cls.model_fields))


def integral_floats_to_int(body: Any) -> Any:
    """Convert floats without a fraction to int: JSON does not distinguish 7 from 7.0."""
    if not isinstance(body, dict):
        return body
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in body.items()
    }


def drop_excess_unknown(body: Any, known: Collection[str]) -> Any:
    """Keep only the first unknown fields: a few are enough to refuse the body, and each lengthens the error."""
    if not isinstance(body, dict) or len(body) <= len(known) + _MAX_UNKNOWN_FIELDS:
        return body
    unknown = islice((name for name in body if name not in known), _MAX_UNKNOWN_FIELDS)
    return {name: body[name] for name in (*unknown, *known) if name in body}


class StateBody(BodySchema):
    """The new state of a server or a model."""

    state: AdminStateName
    reason: str | None = _REASON


class StateView(ResponseSchema):
    """The state of a server, a model or a tenant."""

    state: AdminStateName = Field(
        description="Model or tenant: `paused`: jobs are accepted and none is started.  `draining`: no job is "
        "accepted, and accepted jobs are started.  `frozen`: no job is accepted and none is started.  Server: only "
        "`online` starts new runs; in every state its current runs continue to their end."
    )
    reason: str | None
    changed_by: str | None = Field(description="The tenant that set this state.")
    changed_at: Time | None


class RemovalProgress(ResponseSchema):
    """The removal of a server or model: it gets no new jobs, and is deleted when its jobs have ended."""

    since: Time
    by: str | None
    remaining: dict[str, int] | None = Field(description="Jobs that have not ended, by state; null: not counted here.")


def seconds(ms: int) -> float:
    """Convert milliseconds to seconds, rounded to 0.1 s."""
    return round(ms / 1000, 1)
