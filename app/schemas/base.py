"""Answers of the API, each written once: a class names the fields, says what they mean, and where each is read.

    class BatchView(ResponseSchema, source=Batch):
        jobs: int                                    # read from the batch's attribute `jobs`
        created_at: Time                             # from `created_ms`; `until` would be from `until_ms`
        batch: Annotated[str, From("id")]            # from its attribute `id`
        status: Annotated[str, From(_status)]        # what the function _status says of it
        notice: Annotated[str | None, PROVIDED]         # the view says it

`BatchView.build(found, notice=None)` is the answer, as a dict.  The document at /openapi.json describes the same class.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeAlias, Union, get_args, get_origin, get_type_hints

from pydantic import WithJsonSchema

from app.api.openapi import Schema
from slotkeeper import clock

Reader: TypeAlias = Callable[[Any], Any]

_TIME = WithJsonSchema({"type": "string", "format": "date-time"})
Time = Annotated[str, _TIME]


@dataclass(frozen=True, slots=True)
class From:
    """Where a field's value is read: from an attribute, shown as the field's type says; or by a function, as it is."""

    source: str | Reader


@dataclass(frozen=True, slots=True)
class _Provided:
    """A field whose value the view gives."""


PROVIDED = _Provided()


class ResponseSchema(Schema):
    """Base of what is answered."""

    _shows: ClassVar[type | None] = None
    _readers: ClassVar[Mapping[str, Reader]] = {}

    def __init_subclass__(cls, source: type | None = None, **options: Any) -> None:
        """`source`: what the fields are read from; left out: as the base says."""
        super().__init_subclass__(**options)
        cls._shows = source or cls._shows

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Raises TypeError for a field that is nowhere read."""
        hints = get_type_hints(cls, include_extras=True)
        cls._readers = {name: _make_reader(cls, name, hints[name]) for name in cls.model_fields}

    @classmethod
    def build(cls, it: Any = None, **given: Any) -> dict[str, Any]:
        """What shows `it`.  What the view gives comes first, and stands as it is given."""
        if not given.keys() <= cls._readers.keys():
            raise TypeError(f"{cls.__name__} has no {', '.join(sorted(given.keys() - cls._readers.keys()))}")
        return {name: given[name] if name in given else read(it) for name, read in cls._readers.items()}


def iso_time(at_ms: int | None) -> str | None:
    """ISO 8601 in UTC with milliseconds."""
    return None if at_ms is None else clock.iso_time(at_ms)


def _make_reader(answer: type[ResponseSchema], name: str, hint: Any) -> Reader:
    """How the field `name` comes out of what `answer` shows."""
    marks = getattr(hint, "__metadata__", ())
    source = next((it.source for it in marks if isinstance(it, From)), None)
    if PROVIDED in marks or (source is None and answer._shows is None):
        return _raise_missing(f"{answer.__name__}.build must be given {name}")
    show = _converter_of(hint)
    if source is None:
        source = f"{name.removesuffix('_at')}_ms" if show in (iso_time, _time_or_none) else name
    if isinstance(source, str):
        _check_attribute(answer, source)
        return attrgetter(source) if show is None else _compose(attrgetter(source), show)
    if not callable(source):  # In a class's body its own fields hide functions of their names.
        raise TypeError(f"{answer.__name__}: {name} is read by something that is no function")
    return source


def _check_attribute(answer: type[ResponseSchema], path: str) -> None:
    known, name = answer._shows, path.partition(".")[0]
    if known is not None and not hasattr(known, name) and name not in getattr(known, "model_fields", ()):
        raise TypeError(f"{answer.__name__}: {known.__name__} has no attribute {name}")


def _raise_missing(message: str) -> Reader:
    def read(_: Any) -> Any:
        raise TypeError(message)

    return read


def _compose(source: Reader, show: Reader) -> Reader:
    return lambda it: show(source(it))


def _converter_of(hint: Any) -> Reader | None:
    """How a value of this type is shown; None: as it is."""
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


def _convert_unless_none(show: Reader | None) -> Reader | None:
    if show is None:
        return None
    return _time_or_none if show is iso_time else lambda value: None if value is None else show(value)


def _time_or_none(at_ms: int | None) -> str | None:
    """0: at no time, too."""
    return iso_time(at_ms) if at_ms else None


def _convert_each(show: Reader | None) -> Reader | None:
    return None if show is None else lambda values: [show(value) for value in values]


def _convert_values(show: Reader | None) -> Reader:
    """Names are texts, also those that are states."""
    if show is None:
        return lambda values: {str(name): value for name, value in values.items()}
    return lambda values: {str(name): show(value) for name, value in values.items()}
