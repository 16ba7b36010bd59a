"""The API over a real record and a real Valkey.  A test module asks for it with `pytest_plugins`.

api          one process's API: client, dispatcher, and builders that go in by the door
mortal_api   the same over a Valkey of its own, which the test may kill
timed_api    the same with a clock that the test sets
"""

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from flask.testing import FlaskClient
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from sqlalchemy import func, select
from werkzeug.exceptions import HTTPException
from werkzeug.routing import RequestRedirect
from werkzeug.test import TestResponse

from app.openapi import document
from jobs.db import Database
from jobs.models import events, idempotency_keys, jobs, webhooks
from jobs.once import Once
from jobs.record import Job, Waiting, now_ms
from jobs.states import Why
from jobs.store import Error, Moved
from jobs.tenants import Tenant, Tenants
from routing.dispatcher import Announcer, Dispatcher, Task
from routing.policies.verdict import Verdict
from routing.queues import Offer
from tests.support.valkey import Valkey

ENDPOINT = "http://127.0.0.1:9/generate"
A = TypeVar("A", bound="Api")


def clear_wiring() -> None:
    """Forget what this process has put together from the settings, so that the next use reads them anew."""
    from tasks import callbacks, keyring, wiring

    if wiring.database.made:
        wiring.database().close()
    for cached in vars(wiring).values():
        if isinstance(cached, Once):
            cached.cache_clear()
    keyring.installation_secrets.cache_clear()
    callbacks._base.cache_clear()


def point_celery_at(url: str) -> None:
    """Let Celery use this broker and result backend, whichever it has used before."""
    from tasks.celery_app import celery

    celery.conf.update(broker_url=url, broker_read_url=url, broker_write_url=url, result_backend=url)
    celery.amqp._producer_pool = None
    celery._pool = None
    celery._backend_cache = None
    celery._local.__dict__.pop("backend", None)


class CheckedClient(FlaskClient):
    """Holds every answer that a test gets against the document."""

    def open(self, *args: Any, **kwargs: Any) -> TestResponse:
        answer = super().open(*args, **kwargs)
        if answer.status_code >= 400 and answer.request.method != "HEAD":
            assert_problem(answer)
        operation = _operation(self, answer)
        if operation is not None and answer.status_code != 405:
            _assert_documented(answer, operation)
        return answer


def assert_problem(answer: TestResponse) -> None:
    """The answer is an RFC 9457 problem, whatever went wrong."""
    if answer.content_type == "application/json" and "parts" in answer.json:
        return  # health says what is wrong in its own words
    assert answer.content_type == "application/problem+json", answer.text
    assert {"type", "title", "status", "detail", "instance", "code"} <= answer.json.keys(), answer.text
    assert answer.json["status"] == answer.status_code
    assert answer.json["detail"] and "Traceback" not in answer.text


def _operation(client: FlaskClient, answer: TestResponse) -> dict[str, Any] | None:
    """What the document says of the view that answered; None: there is none, or it is not for programs."""
    request = answer.request
    adapter = client.application.url_map.bind("")
    try:
        rule, _ = adapter.match(request.path, request.method, return_rule=True)
    except (HTTPException, RequestRedirect):
        return None
    path = re.sub(r"<(?:[^<:]+:)?([^>]+)>", r"{\1}", rule.rule)
    found: dict[str, Any] | None = document(client.application)["paths"].get(path, {}).get(request.method.lower())
    return found and found | {"components": document(client.application)["components"]}


def _assert_documented(answer: TestResponse, operation: dict[str, Any]) -> None:
    described = operation["responses"].get(str(answer.status_code))
    where = f"{operation['operationId']} {answer.status_code}"
    assert described is not None, f"{where} is not documented: {answer.text}"
    content = described.get("content", {})
    if not answer.data or answer.mimetype not in ("application/json", "application/problem+json"):
        return
    assert answer.mimetype in content, f"{where} is documented as {list(content)}, not {answer.mimetype}"
    schema = content[answer.mimetype]["schema"] | {"components": operation["components"]}
    error = best_match(Draft202012Validator(schema).iter_errors(answer.json))
    assert error is None, f"{where}: {error}"


@dataclass
class Heard(Announcer):
    """Hands everything on, and remembers it."""

    real: Announcer
    offers: list[Offer] = field(default_factory=list)
    ends: list[tuple[Moved, bool]] = field(default_factory=list)

    def offered(self, offer: Offer, new: Waiting | None) -> None:
        self.offers.append(offer)
        self.real.offered(offer, new)

    def ended(self, moved: Moved, *, by_worker: bool) -> None:
        self.ends.append((moved, by_worker))
        self.real.ended(moved, by_worker=by_worker)


@dataclass
class Api:
    """One process's API, and what stands behind it."""

    client: FlaskClient
    dispatcher: Dispatcher
    valkey: Valkey
    folder: Path  # of the record
    heard: Heard

    @property
    def database(self) -> Database:
        return self.dispatcher.store.database

    def register(self, model: str = "zimg", server: str = "gpu1", slots: int = 1, **more: Any) -> TestResponse:
        body = {"model": model, "server": server, "endpoint": ENDPOINT, "slots": slots} | more
        return self.client.post("/admin/register", json=body)

    def model(self, name: str = "zimg", **overrides: Any) -> None:
        """A model without a server: its jobs wait."""
        assert self.client.put(f"/admin/model-configs/{name}", json=overrides).status_code == 200

    def submit(self, headers: dict[str, str] | None = None, **fields: Any) -> TestResponse:
        body = {"model": "zimg", "payload": {"prompt": "a cat"}} | fields
        return self.client.post("/queue/submit", json=body, headers=headers)

    def submitted(self, headers: dict[str, str] | None = None, **fields: Any) -> str:
        """A submitted job's id."""
        answer = self.submit(headers, **fields)
        assert answer.status_code == 202, answer.text
        return str(answer.json["job_id"])

    def job(self, job_id: str) -> Job:
        found = self.dispatcher.store.get(job_id)
        assert found is not None
        return found

    def started(self, **fields: Any) -> Task:
        """A job that runs, as if a worker had taken its offer."""
        job_id = self.submitted(**fields)
        offer = next(offer for offer in self.heard.offers if offer.job_id == job_id)
        task = self.dispatcher.start(offer, "a-worker")
        assert task is not None
        return task

    def tenant(self, name: str, *, admin: bool = False) -> dict[str, str]:
        """A new tenant's header."""
        key = Tenants(self.database).add(Tenant(name, admin), now_ms())
        return {"Authorization": f"Bearer {key}"}

    def stored(self) -> dict[str, int]:
        """How many rows each table has that a submit writes to."""
        with self.database.read() as connection:
            return {
                table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (jobs, events, idempotency_keys, webhooks)
            }

    def take_database_away(self) -> None:
        """As if its disk were gone."""
        self.database.close()  # Connections that are open do not notice.
        os.rename(self.folder, f"{self.folder}.away")

    def bring_database_back(self) -> None:
        os.rename(f"{self.folder}.away", self.folder)


@dataclass
class TimedApi(Api):
    """The same with a clock that the test sets, for the record and for the room."""

    now: int = 0

    def set_clock(self, now: int) -> None:
        self.now = now
        with self.valkey.client() as redis:
            for tag in ("zimg", "flux", "slotkeeper:workers"):
                redis.set(f"clock:{{{tag}}}", now)

    def later(self, ms: int) -> None:
        self.set_clock(self.now + ms)

    def run(self, took_ms: int = 60_000, why: Why = Why.FINISHED) -> str:
        """The job whose offer came first, run for so long; answers its id."""
        task = self.dispatcher.start(self.heard.offers.pop(0), "a-worker")
        assert task is not None
        self.later(took_ms)
        failed = None if why is Why.FINISHED else Error(why.value, "out of memory")
        result = "{}" if why is Why.FINISHED else None
        self.dispatcher.settle(task, Verdict(why), result=result, error=failed)
        return task.run.job.id

    def explain(self, job_id: str) -> dict[str, Any]:
        answer = self.client.get(f"/queue/jobs/{job_id}/explain")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json
        return found


NOTHING = {"jobs": 0, "events": 0, "idempotency_keys": 0, "webhooks": 0}


def build(
    valkey: Valkey,
    template: Path,
    folder: Path,
    settings: dict[str, str],
    patch: pytest.MonkeyPatch,
    kind: type[A] = Api,  # type: ignore[assignment]
) -> A:
    from app.factory import create_app
    from tasks import wiring

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
    dispatcher = wiring.dispatcher()
    valkey.client().hset(wiring.scripts().keys.workers(), "tests", f"1000000 {10**15}")  # a worker with room for all
    heard = dispatcher._announcer = Heard(dispatcher._announcer)
    app = create_app()
    app.test_client_class = CheckedClient
    return kind(app.test_client(), dispatcher, valkey, folder, heard)
