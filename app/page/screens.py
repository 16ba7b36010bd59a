"""All screens of the page, put together."""

from flask import Flask

from app.page import (
    audit,
    batches,
    dead,
    entrance,
    jobs,
    models,
    overview,
    removal,
    servers,
    settings,
    tenants,
    webhooks,
)

SCREENS = (overview, models, servers, removal, jobs, batches, dead, tenants, webhooks, audit, settings)


def register(app: Flask) -> None:
    entrance.register(app)
