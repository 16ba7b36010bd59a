"""All screens of the page, put together."""

from flask import Flask

from app.page import (
    audit,
    batches,
    dead,
    departures,
    entrance,
    jobs,
    models,
    overview,
    servers,
    settings,
    tenants,
    webhooks,
)

SCREENS = (overview, models, servers, departures, jobs, batches, dead, tenants, webhooks, audit, settings)


def register(app: Flask) -> None:
    entrance.register(app)
