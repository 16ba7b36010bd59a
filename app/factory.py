"""The WSGI application, which the process `web` (app.server) serves."""

from importlib.metadata import PackageNotFoundError, version

from flask import Flask
from flask_openapi import APIBlueprint
from pydantic import BaseModel

from app import auth, context, errors, kinds, metrics, openapi, reading, receivers, schemas, sealed
from app.api import (
    audit,
    batches,
    callback,
    defaults,
    dlq,
    docs,
    figures,
    health,
    jobs,
    ledger,
    models,
    presets,
    processes,
    queue,
    secrets,
    servers,
    streams,
    tenants,
    webhooks,
)
from app.config import AppSettings
from app.context import Context
from app.page import entrance, screens
from app.readiness import PROBES, Readiness
from routing.queries.positions import QueuePositions
from slotkeeper.registry.tenants import Tenants
from tasks import services, startup

_APIS: tuple[APIBlueprint, ...] = (
    queue.api,
    jobs.api,
    batches.api,
    streams.api,
    webhooks.api,
    callback.api,
    servers.api,
    presets.api,
    models.api,
    defaults.api,
    tenants.api,
    secrets.api,
    dlq.api,
    ledger.api,
    audit.api,
    health.api,
    figures.api,
    processes.api,
)


_BODIES: tuple[type[BaseModel], ...] = (
    schemas.SubmitBody,
    schemas.BatchItem,
    schemas.RegisterBody,
    schemas.StateBody,
    schemas.TenantBody,
    kinds.ProbeBody,
    sealed.SecretBody,
    receivers.ReceiverBody,
    receivers.ReceiverChange,
    receivers.ReasonBody,
    receivers.ReplayBody,
    receivers.ReceiverQuery,
    receivers.TriesQuery,
    receivers.GivenUpQuery,
    receivers.CallbacksQuery,
    receivers.CallbacksReplayBody,
    schemas.ListQuery,
    batches.BatchQuery,
    schemas.WaitQuery,
    streams.StreamQuery,
    audit.AuditQuery,
    streams.JobStreamQuery,
)


def create_app(settings: AppSettings | None = None) -> Flask:
    """The API of one process.  Nothing is connected before the first request, but for a look at the secret in Redis.

    Raises ValueError where the settings would serve the network without keys.
    """
    settings = settings or AppSettings()
    settings.check()
    app = with_routes()
    equip(app, settings)
    return app


def with_routes() -> Flask:
    """All views and what stands before them, which no setting changes."""
    app = openapi.new_app(_version())
    errors.register(app)
    for body in _BODIES:
        errors.know_fields(body.__name__, body.model_fields)
    app.before_request(reading.refuse_nul)
    auth.register(app)
    for api in _APIS:
        app.register_api(api)
    docs.register(app)
    screens.register(app)
    return app


def equip(app: Flask, settings: AppSettings) -> None:
    """Give `app` its settings, and what its views share."""
    startup.prepare()
    dispatcher = services.dispatcher()
    app.extensions["slotkeeper_version"] = _version()
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    estimates = services.estimates()
    places = QueuePositions(dispatcher.catalog, dispatcher.queues, estimates)
    context.put(app.extensions, Context(dispatcher, settings, places, estimates, Readiness(PROBES)))
    app.extensions["slotkeeper_metrics"] = metrics.registry(
        dispatcher, services.scripts(), services.processes(), services.tallies()
    )
    auth.equip(app, settings, Tenants(services.database()))
    entrance.equip(app)


def _version() -> str:
    try:
        return version("slotkeeper")
    except PackageNotFoundError:
        return "0"
