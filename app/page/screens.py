"""All modules with views of the page.  Importing a module registers its views."""

from flask import Flask

from app.page import (
    admin_pages,
    credit_pages,
    job_pages,
    key_pages,
    login,
    model_pages,
    overview_pages,
    server_pages,
    webhook_pages,
)

SCREENS = (
    overview_pages,
    model_pages,
    server_pages,
    job_pages,
    webhook_pages,
    admin_pages,
    key_pages,
    credit_pages,
)


def register(app: Flask) -> None:
    login.register(app)
