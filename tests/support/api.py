"""The API with a real database and a real Valkey.

api          one process's API: client, dispatcher, and builders that send requests
mortal_api   the same with a private Valkey, which the test may kill
timed_api    the same with a clock that the test sets
"""

import os
import re
import shutil
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from flask import Flask
from flask.testing import FlaskClient
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from sqlalchemy import func, select
from werkzeug.exceptions import HTTPException
from werkzeug.routing import RequestRedirect
from werkzeug.test import TestResponse

from app.api.openapi import openapi_document
from app.context import context_of
from routing.dispatch.dispatcher import ActiveRun, Dispatcher, Notifier
from routing.queue import worker_capacity
from routing.queue.queues import Offer
from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import Transition
from slotkeeper.jobs.tables import events, idempotency_keys, jobs, messages
from slotkeeper.jobs.values import Job, JobError, QueuedJob
from slotkeeper.process import Singleton
from slotkeeper.registry.identity import Scope
from tests.support.ends import end_run_with
from tests.support.held_leases import hold
from tests.support.keys import add_key
from tools.cluster.direct_starts import begin_run
from tools.cluster.valkey_process import Valkey

ENDPOINT = "http://127.0.0.1:9/generate"
A = TypeVar("A", bound="Api")


def clear_wiring() -> None:
    """Forget all objects that this process has made from its settings, so that the next use reads them again."""
    from tasks import identity, maintenance, server_push, services, step_tokens
    from tasks.security import keyring

    if services.database.created:
        services.database().close()
    for cached in [each for module in (services, maintenance, identity, step_tokens) for each in vars(module).values()]:
        if isinstance(cached, Singleton):
            cached.cache_clear()
    keyring.installation_secrets.cache_clear()
    server_push._callback_base_url.cache_clear()


def point_celery_at(url: str) -> None:
    """Let Celery use this broker and result backend, whichever it has used before."""
    from tasks.celery_app import celery

    celery.conf.update(broker_url=url, broker_read_url=url, broker_write_url=url, result_backend=url)
    celery.amqp._producer_pool = None  # type: ignore[attr-defined]
    celery._pool = None  # type: ignore[attr-defined]
    celery._backend_cache = None  # type: ignore[attr-defined]
    celery._local.__dict__.pop("backend", None)  # type: ignore[attr-defined]


class CheckedClient(FlaskClient):
    """Holds every answer that a test gets against the document."""

    def open(self, *args: Any, **kwargs: Any) -> TestResponse:
        answer = super().open(*args, **kwargs)
        if answer.status_code >= 400 and answer.request.method != "HEAD":
            assert_problem(answer)
        operation = _operation(self, answer)
        if operation is not None and answer.status_code != 405:
            _assert_documented(self, answer, operation)
        return answer


def assert_problem(answer: TestResponse) -> None:
    """The answer is an RFC 9457 problem, whatever went wrong."""
    if answer.content_type == "application/json" and "parts" in answer.json:
        return  # health says what is wrong in its own words
    assert answer.content_type == "application/problem+json", answer.text
    assert {"type", "title", "status", "detail", "instance", "code"} <= answer.json.keys(), answer.text
    assert answer.json["status"] == answer.status_code
    assert answer.json["detail"] and "Traceback" not in answer.text


def _operation(client: FlaskClient, answer: TestResponse) -> tuple[str, str] | None:
    """Path and method, as the document has them, of the view that answered; None: it is not for programs."""
    request = answer.request
    adapter = client.application.url_map.bind("")
    try:
        rule, _ = adapter.match(request.path, request.method, return_rule=True)
    except (HTTPException, RequestRedirect):
        return None
    path, method = re.sub(r"<(?:[^<:]+:)?([^>]+)>", r"{\1}", rule.rule), request.method.lower()
    return (path, method) if method in _document(client)["paths"].get(path, {}) else None


def _assert_documented(client: FlaskClient, answer: TestResponse, operation: tuple[str, str]) -> None:
    path, method = operation
    described = _document(client)["paths"][path][method]
    documented = described["responses"].get(str(answer.status_code))
    where = f"{described['operationId']} {answer.status_code}"
    assert documented is not None, f"{where} is not documented: {answer.text}"
    content = documented.get("content", {})
    if not answer.data or answer.mimetype not in ("application/json", "application/problem+json"):
        return
    assert answer.mimetype in content, f"{where} is documented as {list(content)}, not {answer.mimetype}"
    validator = _validator(_asks_for_keys(client), path, method, str(answer.status_code), answer.mimetype)
    error = best_match(validator.iter_errors(answer.json))
    assert error is None, f"{where}: {error}"


_documents: dict[bool, dict[str, Any]] = {}


def _asks_for_keys(client: FlaskClient) -> bool:
    return context_of(client.application).settings.require_keys


def _document(client: FlaskClient) -> dict[str, Any]:
    """Made once for all tests: it differs only by whether keys are asked for."""
    keyed = _asks_for_keys(client)
    if keyed not in _documents:
        _documents[keyed] = openapi_document(client.application, keyed)
    return _documents[keyed]


@cache
def _validator(keyed: bool, path: str, method: str, status: str, mimetype: str) -> Draft202012Validator:
    """What holds one kind of answer against its schema: to make it costs more than to use it."""
    described = _documents[keyed]
    schema = described["paths"][path][method]["responses"][status]["content"][mimetype]["schema"]
    return Draft202012Validator(schema | {"components": described["components"]})


@dataclass
class RecordingNotifier(Notifier):
    """Calls the real notifier, and keeps what it was called with."""

    real: Notifier
    offers: list[Offer] = field(default_factory=list)
    ends: list[Transition] = field(default_factory=list)

    def wake_worker(self, offer: Offer, new: QueuedJob | None) -> None:
        self.offers.append(offer)
        self.real.wake_worker(offer, new)

    def notify_ended(self, moved: Transition) -> None:
        self.ends.append(moved)
        self.real.notify_ended(moved)


@dataclass
class Api:
    """One process's API, with its database and Redis."""

    client: FlaskClient
    dispatcher: Dispatcher
    valkey: Valkey
    folder: Path  # of the database
    notifications: RecordingNotifier

    @property
    def database(self) -> Database:
        return self.dispatcher.store.database

    def register(self, model: str = "zimg", server: str = "gpu1", slots: int = 1, **more: Any) -> TestResponse:
        body = {"model": model, "server": server, "endpoint": ENDPOINT, "slots": slots} | more
        return self.client.post("/admin/register", json=body)

    def model(self, name: str = "zimg", **overrides: Any) -> None:
        """Configure a model without a server, so that its jobs wait."""
        assert self.client.put(f"/admin/model-configs/{name}", json=overrides).status_code == 200

    def submit(self, headers: dict[str, str] | None = None, **fields: Any) -> TestResponse:
        body = {"model": "zimg", "payload": {"prompt": "a cat"}} | fields
        return self.client.post("/queue/submit", json=body, headers=headers)

    def submitted(self, headers: dict[str, str] | None = None, **fields: Any) -> str:
        """Submit a job, and return its id."""
        answer = self.submit(headers, **fields)
        assert answer.status_code == 202, answer.text
        return str(answer.json["job_id"])

    def job(self, job_id: str) -> Job:
        found = self.dispatcher.store.get(job_id)
        assert found is not None
        return found

    def started(self, **fields: Any) -> ActiveRun:
        """Submit a job, and start it as a worker does."""
        job_id = self.submitted(**fields)
        offer = next(offer for offer in self.notifications.offers if offer.job_id == job_id)
        task = begin_run(self.dispatcher, offer, "a-worker")
        assert task is not None
        return task

    def tenant(self, name: str, *, admin: bool = False) -> dict[str, str]:
        """Return the header with a new key of a tenant."""
        return self.with_key(name, *([Scope.OPERATE] if admin else []))

    def with_key(self, tenant: str, *scopes: Scope) -> dict[str, str]:
        """The header with a new key of a tenant, which is added if it is new."""
        return {"Authorization": f"Bearer {add_key(self.database, tenant, *scopes)}"}

    def stored(self) -> dict[str, int]:
        """Return the number of rows of each table that a submit writes to, without audit entries."""
        with self.database.read() as connection:
            counts = {
                table.name: select(func.count()).select_from(table)
                for table in (jobs, events, idempotency_keys, messages)
            }
            counts["events"] = counts["events"].where(events.c.actor.is_(None))
            return {name: connection.execute(count).scalar_one() for name, count in counts.items()}

    def take_database_away(self) -> None:
        """Move the folder of the database away."""
        self.database.close()  # Connections that are open do not notice.
        os.rename(self.folder, f"{self.folder}.away")

    def bring_database_back(self) -> None:
        os.rename(f"{self.folder}.away", self.folder)


@dataclass
class TimedApi(Api):
    """An Api with a clock that the test sets, for the database and for Redis."""

    now: int = 0

    def set_clock(self, now_ms: int) -> None:
        self.now = now_ms
        with self.valkey.client() as redis:
            for tag in ("zimg", "flux", "slotkeeper:workers"):
                redis.set(f"clock:{{{tag}}}", now_ms)

    def later(self, ms: int) -> None:
        self.set_clock(self.now + ms)

    def run(self, took_ms: int = 60_000, why: Reason = Reason.FINISHED) -> str:
        """Run the job of the first offer for so long, and return its id."""
        task = begin_run(self.dispatcher, self.notifications.offers.pop(0), "a-worker")
        assert task is not None
        hold(self.dispatcher, task.lease, self.later, took_ms)
        failed = None if why is Reason.FINISHED else JobError(why.value, "out of memory")
        result = "{}" if why is Reason.FINISHED else None
        end_run_with(self.dispatcher, task, why, result=result, error=failed)
        return task.run.job.id

    def explain(self, job_id: str) -> dict[str, Any]:
        answer = self.client.get(f"/queue/jobs/{job_id}/explain")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json
        return found


@cache
def _routes() -> Flask:
    """Made once for all tests: no setting changes them, and they take longer than most tests."""
    from app.factory import create_routes

    app = create_routes()
    app.test_client_class = CheckedClient
    assert app.jinja_env  # Now, so that templates are read once too.
    return app


def _an_app() -> Flask:
    """As `create_app` makes it from the settings of this moment, but with the routes of all tests."""
    from app.config import AppSettings
    from app.factory import configure

    settings = AppSettings()
    settings.check_exposure()
    app = copy(_routes())
    app.extensions, app.config = {}, copy(app.config)
    configure(app, settings)
    return app


NOTHING = {"jobs": 0, "events": 0, "idempotency_keys": 0, "messages": 0}


def build(
    valkey: Valkey,
    template: Path,
    folder: Path,
    settings: dict[str, str],
    patch: pytest.MonkeyPatch,
    kind: type[A] = Api,  # type: ignore[assignment]
) -> A:
    from tasks import services

    folder.mkdir()
    shutil.copy(template, folder / "record.db")
    given = {
        "HOME": str(folder.parent / "home"),
        "DATABASE_URL": f"sqlite:///{folder / 'record.db'}",
        "REDIS_URL": valkey.url,
        "CATALOG_REFRESH_S": "0",
        **settings,
    }
    for name, value in given.items():
        patch.setenv(f"SLOTKEEPER_{name}", value)
    clear_wiring()
    point_celery_at(valkey.url)
    dispatcher = services.dispatcher()
    patch.setattr(worker_capacity, "_REPORT_TTL_MS", 10**15)  # A test reports once, and may set the clock.
    valkey.client().hset(
        services.scripts().keys.workers(), "tests", f"1000000 {10**15}"
    )  # a worker with enough capacity for all
    notifications = dispatcher._notifier = RecordingNotifier(dispatcher._notifier)
    app = _an_app()
    return kind(app.test_client(), dispatcher, valkey, folder, notifications)
