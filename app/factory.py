"""The WSGI application, which the process `web` (app.web) serves."""

from importlib.metadata import PackageNotFoundError, version

from flask import Flask
from flask_openapi import APIBlueprint

from app import auth, context, errors, kinds, metrics, openapi, schemas, sealed
from app.api import (
    callback,
    dlq,
    docs,
    health,
    jobs,
    ledger,
    models,
    presets,
    queue,
    secrets,
    servers,
    streams,
    tenants,
)
from app.config import AppSettings
from app.context import Context
from insight.places import Places
from jobs.tenants import Tenants
from tasks import startup, wiring

_APIS: tuple[APIBlueprint, ...] = (
    queue.api,
    jobs.api,
    streams.api,
    callback.api,
    servers.api,
    presets.api,
    models.api,
    tenants.api,
    secrets.api,
    dlq.api,
    ledger.api,
    health.api,
    health.metrics_api,
)


def create_app(settings: AppSettings | None = None) -> Flask:
    """The API of one process.  Nothing is connected before the first request, but for a look at the secret in Redis.

    Raises ValueError where the settings would serve the network without keys.
    """
    settings = settings or AppSettings()
    settings.check()
    dispatcher = wiring.dispatcher()
    startup.begin()
    app = openapi.new_app(_version())
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    estimates = wiring.estimates()
    places = Places(dispatcher.fleet, dispatcher.queues, estimates)
    context.put(app.extensions, Context(dispatcher, settings, places, estimates))
    app.extensions["slotkeeper_metrics"] = metrics.registry(dispatcher)
    errors.register(app)
    for body in (
        schemas.SubmitBody,
        schemas.BatchItem,
        schemas.RegisterBody,
        schemas.StateBody,
        kinds.ProbeBody,
        sealed.SecretBody,
        schemas.ListQuery,
        schemas.WaitQuery,
        streams.StreamQuery,
        streams.JobStreamQuery,
    ):
        errors.know_fields(body.__name__, body.model_fields)
    auth.register(app, settings, Tenants(wiring.database()))
    for api in _APIS:
        app.register_api(api)
    docs.register(app)
    return app


def _version() -> str:
    try:
        return version("slotkeeper")
    except PackageNotFoundError:
        return "0"
