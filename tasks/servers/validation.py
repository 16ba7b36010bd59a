"""Validate the description in a model's configuration, and name each error by a JSON pointer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from slotkeeper import json_text
from tasks.servers import Description, from_shorthand, presets
from tasks.servers.pointers import format_pointer, iter_texts
from tasks.servers.templates import secrets_in

SHORTHAND = ("model_type", "poll_endpoint_template", "id_field")
MAX_BYTES = 256 * 1024  # of a whole description
MAX_DEPTH = 64  # levels

_MAX_FAULTS = 20


@dataclass(frozen=True, slots=True)
class DescriptionFault:
    """One error, and a JSON pointer to its place in the configuration."""

    pointer: str
    message: str


class InvalidDescription(Exception):
    """The configuration contains no valid description."""

    def __init__(self, faults: Sequence[DescriptionFault]) -> None:
        super().__init__("; ".join(f"{fault.pointer or 'body'}: {fault.message}" for fault in faults))
        self.faults = tuple(faults)


def validate_description(given: Mapping[str, Any], may_use: Callable[[str], bool], for_all: bool = False) -> str | None:
    """Return the complete description in these fields of a configuration, as JSON; None: they contain none.

    may_use: whether the model, or with `for_all` every model, has a secret of this name.
    Raises InvalidDescription.
    """
    preset, own = given.get("preset"), given.get("description")
    if preset is None and own is None:
        return _describe_shorthand(given)
    if conflicting := [name for name in SHORTHAND if given.get(name) is not None]:
        message = "{} is said by the description itself: mode, submit.id and status.path; leave it out"
        raise InvalidDescription(
            [DescriptionFault(format_pointer([name]), message.format(name)) for name in conflicting]
        )
    _check_size(own)
    base = {} if preset is None else _get_preset(preset)
    try:
        description = Description.model_validate(merge(base, own or {}))
    except ValidationError as error:
        raise InvalidDescription(_faults_of(error, own)) from None
    _check_secrets(description, own, may_use, for_all)
    return description.model_dump_json()


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the changes of `over`: objects are merged recursively, all other values are replaced."""
    merged = dict(base)
    for name, value in over.items():
        before = merged.get(name)
        both_are_objects = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(before, value) if both_are_objects else value  # type: ignore[arg-type]
    return merged


def _describe_shorthand(given: Mapping[str, Any]) -> str | None:
    if not any(given.get(name) is not None for name in SHORTHAND):
        return None
    description = from_shorthand(
        *(given.get(name) or default for name, default in zip(SHORTHAND, _DEFAULTS, strict=True))
    )
    return description.model_dump_json()


_DEFAULTS: tuple[Any, ...] = ("sync", None, None)


def _get_preset(name: str) -> dict[str, Any]:
    try:
        return presets.get(name)
    except KeyError:
        known = ", ".join(presets.names())
        raise InvalidDescription(
            [DescriptionFault("/preset", f"there is no preset {name!r}; there is: {known}")]
        ) from None


def _check_size(own: Any) -> None:
    if not _is_shallow(own):
        raise InvalidDescription(
            [DescriptionFault("/description", f"a description is at most {MAX_DEPTH} levels deep")]
        )
    if own is not None and len(json_text.dumps(own)) > MAX_BYTES:
        raise InvalidDescription([DescriptionFault("/description", f"a description has at most {MAX_BYTES} bytes")])


def _is_shallow(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        parts = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [node for part in parts for node in part]
        if not level:
            return True
    return False


def _check_secrets(description: Description, own: Any, may_use: Callable[[str], bool], for_all: bool) -> None:
    faults = []
    for name in sorted(description.secrets):
        if not may_use(name):
            message = f"there is no secret {name} for this model; first: slotkeeper secrets set {name} --model MODEL"
            if for_all:
                message = f"there is no secret {name} for all models; first: slotkeeper secrets set {name} --all-models"
            faults.append(DescriptionFault(_secret_pointer(name, own), message))
    if faults:
        raise InvalidDescription(faults)


def _secret_pointer(secret: str, own: Any) -> str:
    places = (at for at, text in iter_texts(own) if secret in secrets_in(text))
    return next((format_pointer(("description", *at)) for at in places), "/preset")


def _faults_of(error: ValidationError, own: Any) -> list[DescriptionFault]:
    found: dict[str, DescriptionFault] = {}
    for detail in error.errors(include_url=False)[:_MAX_FAULTS]:
        within = detail.get("ctx", {}).get("at", "") if detail["type"] == "placed" else ""
        pointer = "/description" + _pointer_in_given(detail["loc"], own) + within
        found.setdefault(pointer, DescriptionFault(pointer, _message(detail)))
    # Only the innermost place is named: pydantic also reports a list with invalid items as too short.
    return [fault for at, fault in found.items() if not any(other.startswith(f"{at}/") for other in found)]


def _pointer_in_given(loc: Sequence[str | int], document: Any) -> str:
    """Return the pointer to a place of the validated data, as far as it exists in the given document."""
    at: list[str | int] = []
    for part in loc:
        if isinstance(document, dict) and part in document:
            document = document[str(part)]
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            continue  # The index of a single element in place of a list, or a label of pydantic.
        at.append(part)
    return format_pointer(at)


def _message(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            return "there is no such field; remove it"
        case "missing":
            return f"{error['loc'][-1]!r} is missing; add it"
    return message[:1].lower() + message[1:] if error["type"] not in ("value_error", "placed") else message
