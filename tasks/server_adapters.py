"""The adapter of each server: its stored description loaded and compiled, its secrets, its address.

A version of a description never changes (slotkeeper/registry/server_descriptions.py), so its compiled form stays valid.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Literal

import structlog

from slotkeeper.registry import server_descriptions
from slotkeeper.registry import values as registered
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.server_descriptions import Secret
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.urls import parse_location
from tasks.node_addresses import node_addresses
from tasks.security.vault import unseal
from tasks.servers import CompiledDescription, Description, ServerAdapter, compile_description, from_shorthand, presets
from tasks.servers.validation import SHORTHAND, merge
from tasks.services import database, dispatcher

log = structlog.get_logger(__name__)
_MAX_CACHED = 4096


def effective_description(config: ModelConfig, described_by: str | None) -> dict[str, Any] | None:
    """Return the description that is in force, with all defaults; None: it cannot be read, or it is invalid."""
    try:
        compiled = _compiled_description(described_by) if described_by else _compiled_shorthand(*_shorthand(config))
    except (ValueError, Misconfigured):
        return None
    return compiled.description.model_dump(mode="json")


def is_preset_outdated(config: ModelConfig, described_by: str | None) -> bool:
    """Return whether the preset has changed since this configuration was stored."""
    if config.preset not in presets.names() or described_by is None:
        return False
    try:
        current = Description.model_validate(merge(presets.get(config.preset), config.description or {}))
        return _compiled_description(described_by).description != current
    except (ValueError, Misconfigured):
        return False


def models_using_secret(secret: str, catalog: CatalogSnapshot) -> list[str]:
    """Return the models whose servers are called by a description with this secret.  Raises DatabaseUnavailable."""
    described = [(model_entry.name, model_entry.described_by) for model_entry in catalog.models.values()]
    for server in catalog.servers.values():
        described += [(model, server_descriptions.find_version(own)) for model, own in server.overrides.items()]
    return sorted({model for model, version in described if version is not None and _uses_secret(version, secret)})


def defaults_using_secret(secret: str, catalog: CatalogSnapshot) -> list[str]:
    """Return the defaults whose description contains this secret: kinds, and "" for the installation's defaults.

    They count although no model uses them, because a model that is added later may.  Raises DatabaseUnavailable.
    """
    return [
        default.name
        for default in catalog.defaults.values()
        if default.described_by and _uses_secret(default.described_by, secret)
    ]


def _uses_secret(version: str, secret: str) -> bool:
    try:
        return secret in _compiled_description(version).description.secrets
    except Misconfigured:  # No request is sent by it.
        return False


# -- adapters --------------------------------------------------------------------------------------------------


class Misconfigured(Exception):
    """No request can be made from the configuration of this model, or from the registration of this server."""


_compiled_by_version: dict[str, CompiledDescription] = {}


def is_loaded(version: str | None) -> bool:
    """Return whether this process has compiled the description, so that it needs no query of the database."""
    return version is None or version in _compiled_by_version


def load(version: str | None) -> None:
    """Read and compile a description, unless it is loaded.  Raises DatabaseUnavailable, Misconfigured."""
    if version is None or version in _compiled_by_version:
        return
    body = server_descriptions.read_description(database(), version)
    if body is None:
        raise Misconfigured(f"the description {version} is not in the record any more")
    try:
        compiled = compile_description(Description.model_validate_json(body))
    except ValueError as error:  # A newer release may have stored it, with fields that this one does not know.
        raise Misconfigured(f"the description {version} is not understood: {error}") from error
    while len(_compiled_by_version) >= _MAX_CACHED:
        del _compiled_by_version[next(iter(_compiled_by_version))]
    _compiled_by_version[version] = compiled


def _compiled_description(version: str) -> CompiledDescription:
    load(version)
    return _compiled_by_version[version]


def keeps_results(version: str | None) -> bool:
    """Return whether a server with this description still has a result after it was read."""
    compiled = _compiled_by_version.get(version or "")
    return compiled is None or compiled.description.keeps_results


def adapter_for(url: str, model: Model, described_by: str | None) -> ServerAdapter:
    """Return the adapter of the endpoint `url`, by the description `described_by`.

    described_by: None: the slot protocol, with the fields of the model's configuration.
    Raises Misconfigured; DatabaseUnavailable, unless the description is loaded.
    """
    try:
        if described_by is None:
            return _cached_shorthand_adapter(url, *_shorthand(model.config))
        return _cached_adapter(url, model.name, described_by)
    except ValueError as error:
        raise Misconfigured(str(error)) from error


def health_adapter(catalog: CatalogSnapshot, server: registered.Server) -> ServerAdapter | None:
    """Return an adapter for a server's health check: preferably of a model whose description contains one.

    None: no description of its models can be used.  Raises DatabaseUnavailable.
    """
    fallback = None
    for model, url in sorted(server.endpoints.items()):
        try:
            adapter = adapter_for(url, catalog.models[model], catalog.find_description(server.name, model))
        except Misconfigured as error:  # It concerns the jobs of this model only; another model may serve.
            log.warning("server_not_checked", server=server.name, model=model, error=str(error))
            continue
        if adapter.description.health is not None:
            return adapter
        fallback = fallback or adapter
    return fallback


def endpoint_of_run(catalog: CatalogSnapshot, server: str, model: str, sent_to: str | None) -> str | None:
    """Return the endpoint at which a run is polled; None: its server was removed, or its endpoint before it was sent.

    It is the URL to which the run was sent.  If only the password or the query has changed, it is the current URL.
    """
    if server not in catalog.servers:
        return None
    current = catalog.endpoint(server, model)
    if sent_to in (None, current):
        return current
    is_same_location = current is not None and parse_location(current) == parse_location(sent_to or "")
    return current if is_same_location else sent_to


def adapter_of_run(
    catalog: CatalogSnapshot, name: str, model_name: str, described_by: str | None, sent_to: str | None = None
) -> ServerAdapter | None:
    """Return the adapter for a run: by the description with which it started, at the URL to which it was sent.

    None: as `endpoint_of_run`, or the model was removed.  Raises as `adapter_for`.
    """
    model, url = catalog.model(model_name), endpoint_of_run(catalog, name, model_name, sent_to)
    return None if url is None or model is None else adapter_for(url, model, described_by)


@lru_cache(maxsize=4096)
def _cached_adapter(url: str, model: str, version: str) -> ServerAdapter:
    nodes = node_addresses() if url.startswith("node:") else None
    return ServerAdapter(url, _compiled_description(version), secret=partial(secret_for, model), nodes=nodes)


@lru_cache(maxsize=4096)
def _cached_shorthand_adapter(url: str, *shorthand: Any) -> ServerAdapter:
    return ServerAdapter(url, _compiled_shorthand(*shorthand))


@lru_cache(maxsize=4096)
def _compiled_shorthand(
    model_type: Literal["sync", "async"], template: str | None, id_field: str | None
) -> CompiledDescription:
    return compile_description(from_shorthand(model_type, template, id_field))


_shorthand: Callable[[ModelConfig], tuple[Any, ...]] = attrgetter(*SHORTHAND)


def secret_for(model: str, name: str) -> str | None:
    """Return the current value of a secret, for requests of this model; None: it has no such secret."""
    found: Secret | None = dispatcher().catalog.cached().secrets.get(name)
    return unseal(name, found.sealed) if found is not None and found.is_for(model) else None
