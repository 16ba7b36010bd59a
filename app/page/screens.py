"""All modules with views of the page.  Importing a module registers its views."""

from flask import Flask

from app.page import (
    audit,
    batches,
    dead,
    job_pages,
    login,
    model_pages,
    overview_pages,
    removal,
    server_pages,
    settings,
    tenants,
    webhook_pages,
)

SCREENS = (
    overview_pages,
    model_pages,
    server_pages,
    removal,
    job_pages,
    batches,
    dead,
    tenants,
    webhook_pages,
    audit,
    settings,
)


def register(app: Flask) -> None:
    login.register(app)
