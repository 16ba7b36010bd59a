"""The WSGI application, which the process `web` (app.server) serves."""

from flask import Flask
from flask_openapi import APIBlueprint

from app import context, metrics, problems, request_deadline, request_json
from app.api import (
    audit_views,
    batch_views,
    credit_views,
    job_views,
    key_views,
    model_views,
    node_views,
    openapi,
    operation_views,
    preset_views,
    push_views,
    server_views,
    stream_views,
    submit_views,
    tenant_views,
    usage_views,
    validation_views,
    webhook_views,
)
from app.auth import access
from app.config import AppSettings
from app.context import Context
from app.page import screens
from app.readiness import PROBES, Readiness
from slotkeeper.process import package_version
from tasks import services, startup

_APIS: tuple[APIBlueprint, ...] = (
    submit_views.api,
    job_views.api,
    batch_views.api,
    batch_views.queue_api,
    stream_views.api,
    webhook_views.api,
    push_views.api,
    server_views.api,
    preset_views.api,
    model_views.api,
    model_views.defaults_api,
    tenant_views.api,
    tenant_views.secrets_api,
    key_views.api,
    usage_views.api,
    credit_views.api,
    credit_views.admin_api,
    validation_views.api,
    node_views.api,
    job_views.dlq_api,
    operation_views.ledger_api,
    audit_views.api,
    operation_views.health_api,
    operation_views.figures_api,
    operation_views.processes_api,
)


def create_app(settings: AppSettings | None = None) -> Flask:
    """Return the API of one process.  Before the first request it only connects to Redis, to compare the secret.

    Raises InvalidSetting if the settings would open the API to the network without keys.
    """
    settings = settings or AppSettings()
    settings.check_exposure()
    app = create_routes()
    configure(app, settings)
    return app


def create_routes() -> Flask:
    """Return an application with all views and their before_request functions, which depend on no setting."""
    app = openapi.new_app(package_version())
    problems.register_error_handlers(app)
    request_deadline.register(app)
    app.before_request(request_json.reject_nul)
    access.register(app)
    for api in _APIS:
        app.register_api(api)
    openapi.register(app)
    screens.register(app)
    return app


def configure(app: Flask, settings: AppSettings) -> None:
    """Give `app` its settings, and the objects that its views share."""
    startup.prepare()
    dispatcher = services.dispatcher()
    app.extensions["slotkeeper_version"] = package_version()
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    shared = Context(dispatcher, settings, Readiness(PROBES))
    context.set_context(app, shared)
    app.extensions["slotkeeper_metrics"] = metrics.metrics_registry(
        dispatcher, services.scripts(), services.processes(), services.process_counters()
    )
    access.configure_access(app, settings, services.database())
    app.wsgi_app = submit_views.DirectSubmit(app.wsgi_app, shared, access.key_cache_of(app))  # type: ignore[method-assign]
