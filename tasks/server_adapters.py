"""What a model's configuration says of how its servers are spoken to: made whole and checked when it is stored,
compiled once by whoever speaks to them.

A version of a description never changes (slotkeeper/registry/server_descriptions.py), so what was compiled of it is
right for good.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Literal

import structlog
from pydantic import ValidationError

from slotkeeper import json_text
from slotkeeper.registry import server_descriptions
from slotkeeper.registry import values as registered
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.urls import parse_location
from tasks.security import vault
from tasks.servers import CompiledDescription, Description, ServerAdapter, compile_description, from_shorthand, presets
from tasks.servers.pointers import format_pointer, iter_texts
from tasks.servers.templates import secrets_in
from tasks.services import database

log = structlog.get_logger(__name__)

SHORTHAND = ("model_type", "poll_endpoint_template", "id_field")
MAX_BYTES = 256 * 1024  # of a whole description
MAX_DEPTH = 64  # levels

_MAX_FAULTS = 20
_MAX_CACHED = 4096


# -- checked when it is stored ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DescriptionFault:
    """What is wrong, and where in what was given, as a JSON pointer."""

    pointer: str
    message: str


class InvalidDescription(Exception):
    """What was given describes no server."""

    def __init__(self, faults: Sequence[DescriptionFault]) -> None:
        super().__init__("; ".join(f"{fault.pointer or 'body'}: {fault.message}" for fault in faults))
        self.faults = tuple(faults)


def validate_description(given: Mapping[str, Any], may_use: Callable[[str], bool], for_all: bool = False) -> str | None:
    """The description that these fields of a configuration make, as JSON; None: they say nothing of it.

    `may_use`: whether there is a secret of this name for the model, or, where it is `for_all`, for all of them.
    Raises Unfit.
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
    base = {} if preset is None else _preset(preset)
    try:
        description = Description.model_validate(merge(base, own or {}))
    except ValidationError as error:
        raise InvalidDescription(_faults(error, own)) from None
    _check_secrets(description, own, may_use, for_all)
    return description.model_dump_json()


def effective_description(config: ModelConfig, described_by: str | None) -> dict[str, Any] | None:
    """The description that is in force, with all its defaults; None: it cannot be read, or makes no sense."""
    try:
        compiled = _compiled_description(described_by) if described_by else _compiled_shorthand(*_shorthand(config))
    except (ValueError, Misconfigured):
        return None
    return compiled.description.model_dump(mode="json")


def is_preset_outdated(config: ModelConfig, described_by: str | None) -> bool:
    """Whether its preset says something else by now than when this configuration was stored."""
    if config.preset not in presets.names() or described_by is None:
        return False
    try:
        now = Description.model_validate(merge(presets.get(config.preset), config.description or {}))
        return _compiled_description(described_by).description != now
    except (ValueError, Misconfigured):
        return False


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: objects are merged deeply, anything else, lists too, takes the place of what was."""
    found = dict(base)
    for name, value in over.items():
        before = found.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[name] = merge(before, value) if both else value  # type: ignore[arg-type]
    return found


def _describe_shorthand(given: Mapping[str, Any]) -> str | None:
    if not any(given.get(name) is not None for name in SHORTHAND):
        return None
    described = from_shorthand(
        *(given.get(name) or default for name, default in zip(SHORTHAND, _DEFAULTS, strict=True))
    )
    return described.model_dump_json()


_DEFAULTS: tuple[Any, ...] = ("sync", None, None)


def _preset(name: str) -> dict[str, Any]:
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


def _faults(error: ValidationError, own: Any) -> list[DescriptionFault]:
    found: dict[str, DescriptionFault] = {}
    for one in error.errors(include_url=False)[:_MAX_FAULTS]:
        within = one.get("ctx", {}).get("at", "") if one["type"] == "placed" else ""
        pointer = "/description" + _pointer_in_given(one["loc"], own) + within
        found.setdefault(pointer, DescriptionFault(pointer, _sentence(one)))
    # What is wrong with a part is said at its innermost place: a list whose items are wrong is not also too short.
    return [fault for at, fault in found.items() if not any(other.startswith(f"{at}/") for other in found)]


def _pointer_in_given(loc: Sequence[str | int], document: Any) -> str:
    """A place in what was checked, as far as it is one in what was given."""
    at: list[str | int] = []
    for part in loc:
        if isinstance(document, dict) and part in document:
            document = document[str(part)]
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            continue  # Of a single one where a list may stand, or a word of the checker's own.
        at.append(part)
    return format_pointer(at)


def _sentence(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            return "there is no such field; remove it"
        case "missing":
            return f"{error['loc'][-1]!r} is missing; add it"
    return message[:1].lower() + message[1:] if error["type"] not in ("value_error", "placed") else message


def models_using_secret(secret: str, catalog: CatalogSnapshot) -> list[str]:
    """Return the models whose servers are called by a description with this secret.  Raises DatabaseUnavailable."""
    named = [(model_entry.name, model_entry.described_by) for model_entry in catalog.models.values()]
    for server in catalog.servers.values():
        named += [(model, server_descriptions.find_version(own)) for model, own in server.overrides.items()]
    return sorted({model for model, version in named if version is not None and _uses_secret(version, secret)})


def defaults_using_secret(secret: str, catalog: CatalogSnapshot) -> list[str]:
    """The same of defaults: kinds, and "" for those of the installation.  A model may be added that is spoken to so."""
    return [
        default.name
        for default in catalog.defaults.values()
        if default.described_by and _uses_secret(default.described_by, secret)
    ]


def _uses_secret(version: str, secret: str) -> bool:
    try:
        return secret in _compiled_description(version).description.secrets
    except Misconfigured:  # Nothing is sent by it.
        return False


# -- compiled by who speaks ------------------------------------------------------------------------------------


class Misconfigured(Exception):
    """A model is configured, or a server registered, so that no request can be made of it: a fault of that one."""


_compiled_by_version: dict[str, CompiledDescription] = {}


def is_loaded(version: str | None) -> bool:
    """Whether this process can speak by it without asking the record."""
    return version is None or version in _compiled_by_version


def load(version: str | None) -> None:
    """Read and compile a description, unless it is known.  Raises DatabaseUnavailable, Misconfigured."""
    if version is None or version in _compiled_by_version:
        return
    body = server_descriptions.read_description(database(), version)
    if body is None:
        raise Misconfigured(f"the description {version} is not in the record any more")
    try:
        compiled = compile_description(Description.model_validate_json(body))
    except ValueError as error:  # A newer release may say what this one does not understand.
        raise Misconfigured(f"the description {version} is not understood: {error}") from error
    while len(_compiled_by_version) >= _MAX_CACHED:
        del _compiled_by_version[next(iter(_compiled_by_version))]
    _compiled_by_version[version] = compiled


def _compiled_description(version: str) -> CompiledDescription:
    load(version)
    return _compiled_by_version[version]


def keeps_results(version: str | None) -> bool:
    """Whether a server that is spoken to so has a result still after it was read."""
    compiled = _compiled_by_version.get(version or "")
    return compiled is None or compiled.description.keeps_results


def adapter_for(url: str, model: Model, described_by: str | None) -> ServerAdapter:
    """Speaks to the endpoint `url` as the version `described_by` says, or else by the slot protocol with the
    configuration's own fields.

    Raises Misconfigured; and DatabaseUnavailable unless the version is known.
    """
    try:
        if described_by is None:
            return _cached_shorthand_adapter(url, *_shorthand(model.config))
        return _cached_adapter(url, model.name, described_by)
    except ValueError as error:
        raise Misconfigured(str(error)) from error


def health_adapter(catalog: CatalogSnapshot, server: registered.Server) -> ServerAdapter | None:
    """Return what asks for a server's health: by a model that describes how, if there is one.

    None: no description of its models can be used.
    """
    fallback = None
    for model, url in sorted(server.endpoints.items()):
        try:
            adapter = adapter_for(url, catalog.models[model], catalog.find_description(server.name, model))
        except Misconfigured as error:  # It concerns this model's jobs; how the server is stays unknown.
            log.warning("server_not_asked", server=server.name, model=model, error=str(error))
            continue
        if adapter.description.health is not None:
            return adapter
        fallback = fallback or adapter
    return fallback


def endpoint_of_run(catalog: CatalogSnapshot, server: str, model: str, sent_to: str | None) -> str | None:
    """Where a run is asked for; None: its server, or its endpoint, was removed.

    At the address to which it was sent.  Where only a password or the query has changed, that of now holds.
    """
    if server not in catalog.servers:
        return None
    now = catalog.endpoint(server, model)
    return (
        now
        if sent_to in (None, now) or (now is not None and parse_location(now) == parse_location(sent_to or ""))
        else sent_to
    )


def adapter_of_run(
    catalog: CatalogSnapshot, name: str, model_name: str, described_by: str | None, sent_to: str | None = None
) -> ServerAdapter | None:
    """Speaks to a server as a run of this model and version began, at the address to which that was sent.

    None: the server was removed.  Raises as server_for.
    """
    model, url = catalog.model(model_name), endpoint_of_run(catalog, name, model_name, sent_to)
    return None if url is None or model is None else adapter_for(url, model, described_by)


@lru_cache(maxsize=4096)
def _cached_adapter(url: str, model: str, version: str) -> ServerAdapter:
    return ServerAdapter(url, _compiled_description(version), secret=partial(vault.secret_for, model))


@lru_cache(maxsize=4096)
def _cached_shorthand_adapter(url: str, *shorthand: Any) -> ServerAdapter:
    return ServerAdapter(url, _compiled_shorthand(*shorthand))


@lru_cache(maxsize=4096)
def _compiled_shorthand(
    model_type: Literal["sync", "async"], template: str | None, id_field: str | None
) -> CompiledDescription:
    return compile_description(from_shorthand(model_type, template, id_field))


_shorthand: Callable[[ModelConfig], tuple[Any, ...]] = attrgetter(*SHORTHAND)
