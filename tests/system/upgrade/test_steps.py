"""Each step on a record that has been used: what was stored survives, and the release before goes on beside it."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from alembic import command, op
from sqlalchemy import Connection, Engine, create_engine, text

from migrations import migrate
from slotkeeper.db.group_commit import Database
from slotkeeper.jobs import ledger
from slotkeeper.jobs.notifications import make_message_id
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox.redelivery import Callbacks
from slotkeeper.outbox.webhook_messages import MessageKey, MessageQueue
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.secrets import Secret
from slotkeeper.registry.tenants import Tenants
from tests.support.builders import T0, a_queued_job
from tests.system.upgrade.schema import schema_of

# As the first release wrote them: (table, rows).
_FIRST: list[tuple[str, list[dict[str, Any]]]] = [
    (
        "jobs",
        [
            {
                "id": f"j-{state}",
                "model": "zimg",
                "state": state.value,
                "why": "submitted",
                "priority": 5,
                "tenant": "acme",
                "attempt": 2,
                "created_ms": T0 + n,
                "source": "rest",
                "payload": f'{{"n":{n}}}',
                "callback_url": "https://client.example/hook",
                "error_message": "ein Fehler, 失敗",
            }
            for n, state in enumerate(State)
        ],
    ),
    ("events", [{"job_id": "j-queued", "type": "job.enqueued", "at_ms": T0, "attempt": 0, "data": "{}"}]),
    (
        "webhooks",
        [
            {
                "id": "msg_j-dead_2_dead",
                "job_id": "j-dead",
                "url": "https://client.example/hook",
                "status": "dead",
                "state": "pending",
                "next_ms": T0,
                "created_ms": T0,
            }
        ],
    ),
    (
        "idempotency_keys",
        [{"tenant": "acme", "key": "k", "job_id": "j-queued", "fingerprint": "f", "expires_ms": T0}],
    ),
    ("counters", [{"name": "catalog_version", "value": 7}]),
    (
        "models",
        [
            {"name": "zimg", "fleet": "zimg", "overrides": '{"max_retries":5}', "created_ms": T0},
            {"name": "flux", "fleet": "zimg", "overrides": "{}", "created_ms": T0},
        ],
    ),
    (
        "servers",
        [
            {"name": f"gpu{n}", "fleet": "zimg", "slots": 4, "state": state, "created_ms": T0}
            for n, state in enumerate(("online", "draining", "paused"))
        ],
    ),
    ("endpoints", [{"server": "gpu0", "model": "zimg", "url": "http://10.0.0.1/run"}]),
    ("tenants", [{"name": "acme", "key_hash": "0" * 64, "rate_per_s": 10, "created_ms": T0}]),
]


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    """A record that stands at the first step."""
    _stand_at(empty_url, "0001")
    opened = create_engine(empty_url)
    yield opened
    opened.dispose()


def _stand_at(url: str, step: str) -> None:
    with migrate._alone(url):
        command.upgrade(migrate._config(url), step)


def _go_back(url: str, step: str) -> None:
    with migrate._alone(url):
        command.downgrade(migrate._config(url), step)


def _write(connection: Connection, table: str, rows: list[dict[str, Any]]) -> None:
    names = list(rows[0])
    statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})"
    connection.execute(text(statement), rows)


def _use(engine: Engine) -> None:
    """What the first release does with a record."""
    with engine.begin() as connection:
        for table, rows in _FIRST:
            _write(connection, table, rows)


def _content(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    with engine.connect() as connection:
        return {
            table: [dict(row._mapping) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY 1, 2"))]
            for table, _ in _FIRST
        }


def test_everything_of_the_first_release_survives(empty_url, engine):
    _use(engine)
    before = _content(engine)
    migrate.upgrade(empty_url)
    after = _content(engine)
    for table in before.keys() - {"webhooks"}:
        rows = before[table]
        assert [{name: row[name] for name in rows[0]} for row in after[table]] == rows, table
    assert {row["constraints"] for row in after["jobs"]} == {""}
    assert {(row["attributes"], row["weight"], row["changed_ms"]) for row in after["servers"]} == {("{}", 1.0, None)}
    assert {(row["state"], row["reason"]) for row in after["models"]} == {("online", None)}


def test_the_new_release_understands_what_the_first_one_wrote(empty_url, engine):
    _use(engine)
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    snapshot = Catalog(database).read()
    assert snapshot.version == 7
    assert snapshot.models["zimg"].config == ModelConfig(max_retries=5)
    assert {server.name: server.state for server in snapshot.servers.values()} == {
        "gpu0": "online",
        "gpu1": "draining",
        "gpu2": "paused",
    }
    assert snapshot.servers["gpu0"].endpoints == {"zimg": "http://10.0.0.1/run"}
    assert snapshot.tenants == {}
    assert [tenant.name for tenant in Tenants(database).list_all()] == ["acme"]
    store = JobStore(database)
    (waiting,) = store.list_queued(["zimg"])
    assert waiting == store.get("j-queued").waiting
    assert (waiting.id, waiting.constraints) == ("j-queued", "")
    assert a_queued_job(store).seq > waiting.seq  # numbers go on where they were
    database.close()


def test_job_3_jobs_of_an_older_release_are_in_the_ledger_whether_they_came_before_or_after(empty_url, engine):
    _use(engine)
    migrate.upgrade(empty_url)
    late = {**_FIRST[0][1][0], "id": "j-late"}
    with engine.begin() as connection:
        _write(connection, "jobs", [late])
    database = Database(empty_url)
    found = ledger.read(database)
    database.close()
    assert found.balanced
    assert found.accepted == len(_FIRST[0][1]) + 1


def test_the_first_release_goes_on_writing_while_the_new_one_starts(empty_url, engine):
    migrate.upgrade(empty_url)
    _use(engine)
    database = Database(empty_url)
    assert Catalog(database).read().models["zimg"].state == "online"
    assert JobStore(database).get("j-queued").constraints == ""
    database.close()


def test_a_server_that_is_forgotten_still_takes_its_endpoints_along(empty_url, engine):
    """SQLite copies the table that they point to."""
    _use(engine)
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    database.write(lambda tx: tx.connection.execute(text("DELETE FROM servers WHERE name = 'gpu0'")))
    assert _content(engine)["endpoints"] == []
    database.close()


@pytest.mark.postgres
def test_no_step_rewrites_the_jobs(_empty_postgres_url):
    """It would hold its lock for as long as it takes to copy every one."""
    url = _empty_postgres_url
    _stand_at(url, "0001")
    engine = create_engine(url)
    _use(engine)
    files = text("SELECT relname, pg_relation_filenode(oid) FROM pg_class WHERE relname IN ('jobs', 'events')")
    with engine.connect() as connection:
        before = sorted(connection.execute(files).all())
    migrate.upgrade(url)
    with engine.connect() as connection:
        assert sorted(connection.execute(files).all()) == before
    engine.dispose()


@pytest.mark.postgres
def test_indexes_of_a_table_in_use_are_built_while_it_is_written_and_anew_where_one_was_left_half_built(
    _empty_postgres_url, monkeypatch
):
    url = _empty_postgres_url
    _stand_at(url, "0002")
    engine = create_engine(url)
    _use(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE INDEX ix_jobs_queued ON jobs (tenant)"))
    built: list[str] = []
    create_index = op.create_index

    def look(name: str, *parts: Any, **options: Any) -> Any:
        if name.startswith("ix_jobs"):
            with engine.begin() as somebody:  # In another transaction, which would wait for a lock of ours.
                somebody.execute(text("SET LOCAL lock_timeout = '1s'"))
                somebody.execute(text("UPDATE jobs SET priority = 5"))
        built.append(f"{name} {'CONCURRENTLY' if options.get('postgresql_concurrently') else ''}")
        return create_index(name, *parts, **options)

    monkeypatch.setattr("alembic.op.create_index", look)
    migrate.upgrade(url)
    of_jobs = [index for index in built if index.startswith("ix_jobs")]
    of_the_second, of_batches = ("tenant_seq", "model_seq", "queued"), ("batch_seq", "tenant_batch", "id_end")
    assert of_jobs == [f"ix_jobs_{name} CONCURRENTLY" for name in (*of_the_second, *of_batches, "to_be_resumed")]
    with engine.connect() as connection:
        found = connection.execute(text("SELECT indexdef FROM pg_indexes WHERE indexname = 'ix_jobs_queued'")).scalar()
        assert "(model, seq)" in found
        assert connection.execute(text("SELECT count(*) FROM pg_index WHERE NOT indisvalid")).scalar() == 0
    engine.dispose()


@pytest.mark.postgres
@pytest.mark.parametrize("step", ["0011", "0013", "0015"])
def test_a_step_that_ended_while_it_built_an_index_is_taken_again(_empty_postgres_url, monkeypatch, step):
    url = _empty_postgres_url
    _stand_at(url, "0001")
    engine = create_engine(url)
    _use(engine)
    command.upgrade(migrate._config(url), step)
    create_index = op.create_index

    def ends(name: str, *parts: Any, **options: Any) -> Any:
        if options.get("postgresql_concurrently"):
            raise InterruptedError
        return create_index(name, *parts, **options)

    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr("alembic.op.create_index", ends)
        migrate.upgrade(url)
    migrate.upgrade(url)
    assert migrate.check(url) is None
    engine.dispose()


def test_going_back_leads_to_the_schema_before_and_keeps_what_it_can_hold(empty_url, engine):
    with engine.connect() as connection:
        schema = schema_of(connection)
    _use(engine)
    content = _content(engine)
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    catalog = Catalog(database)
    catalog.register("zimg", "gpu0", "http://10.0.0.1/run", 4, T0, {"gpu": "A100"}, 2)
    catalog.set_server_state("gpu2", "frozen")
    catalog.set_model_state("flux", "paused")
    catalog.set_tenant_state("acme", "paused")
    catalog.configure("zimg", {"max_retries": 5, "policy": "fair", "weights": {"acme": 2}}, T0)
    catalog.configure("flux", {"policy": "fifo", "capacity": 3}, T0)
    database.close()
    _go_back(empty_url, "0001")
    with engine.connect() as connection:
        assert schema_of(connection) == schema
    after = _content(engine)
    overrides = {row["name"]: orjson.loads(row.pop("overrides")) for row in after["models"]}
    assert overrides == {"zimg": {"max_retries": 5}, "flux": {"policy": "fifo"}}
    for table in ("jobs", "events", "webhooks", "servers", "endpoints", "tenants", "idempotency_keys"):
        assert after[table] == content[table], table
    migrate.upgrade(empty_url)
    assert migrate.check(empty_url) is None


def test_going_back_is_refused_while_jobs_wait_that_may_not_run_anywhere(empty_url, engine):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    a_queued_job(JobStore(database), constraints="gpu=A100")
    with pytest.raises(RuntimeError, match="cancel them"):
        _go_back(empty_url, "0001")
    assert migrate.check(empty_url) is None
    assert len(JobStore(database).list_queued(["zimg"])) == 1
    database.close()


def test_going_back_forgets_every_override_that_the_release_before_does_not_know(empty_url, engine):
    """It would refuse to start on one."""
    known = {"model_type", "poll_endpoint_template", "id_field", "poll_interval", "max_poll_time", "max_retries"}
    known |= {"max_crashes", "retry_backoff", "retry_backoff_max", "max_payload_bytes", "max_waiting", "default_ttl"}
    known |= {"policy"}
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    every = ModelConfig().model_dump() | {"policy": "aging"}
    Catalog(database).configure("zimg", every, T0)
    database.close()
    _go_back(empty_url, "0001")
    (row,) = _content(engine)["models"]
    assert set(orjson.loads(row["overrides"])) == known - {"policy"}


def test_the_release_before_goes_on_beside_descriptions(empty_url, engine):
    """It configures, registers and starts without a word of them."""
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    catalog, store = Catalog(database), JobStore(database)
    catalog.configure("zimg", {"preset": "x"}, T0, "{}")
    job = a_queued_job(store)
    with engine.begin() as connection:
        connection.execute(text("UPDATE models SET overrides = :given"), {"given": '{"max_retries":5}'})
        server = {"name": "gpu", "fleet": "zimg", "slots": 1, "state": "online", "created_ms": T0}
        _write(connection, "servers", [server])
        _write(connection, "endpoints", [{"server": "gpu", "model": "zimg", "url": "http://10.0.0.1/run"}])
        connection.execute(text("UPDATE jobs SET state = 'running', why = 'started', attempt = 1, server = 'gpu'"))
    now = catalog.read()
    assert (now.models["zimg"].config.max_retries, now.find_description("gpu", "zimg")) == (5, None)
    assert store.get(job.id).described_by is None
    database.close()


def test_going_back_forgets_descriptions_and_secrets(empty_url, engine):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    catalog = Catalog(database)
    catalog.configure("zimg", {"preset": "x", "description": {}, "max_retries": 5}, T0, "{}")
    catalog.register("zimg", "gpu", "http://10.0.0.1/run", 1, T0, overrides={"preset": "x"}, description="{}")
    catalog.set_secret(Secret("KEY", None, "sealed", None, T0))
    database.close()
    _go_back(empty_url, "0007")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT overrides FROM models")).scalar() == '{"max_retries": 5}'
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    now = Catalog(database).read()
    assert (now.find_description("gpu", "zimg"), now.secrets) == (None, {})
    database.close()


_CALLBACK = {
    "job_id": "j-dead",
    "url": "https://client.example/hook",
    "status": "dead",
    "created_ms": T0,
    "id": "msg_j-dead_2_dead",
    "state": "pending",
    "tries": 3,
    "next_ms": T0 + 7,
    "last_error": "it answered 503",
}


def _callbacks(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [_CALLBACK | row for row in rows]


def test_callbacks_that_were_not_delivered_are_messages_afterwards_under_their_ids(empty_url, engine):
    _use(engine)
    _stand_at(empty_url, "0019")
    given_up = {"id": "msg_j-completed_12_completed", "job_id": "j-completed", "status": "completed"}
    late = {"id": "msg_j-dead_1_expired", "status": "expired"}
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM webhooks"))
        rows = _callbacks({}, given_up | {"state": "given_up"}, late | {"state": "delivered"})
        _write(connection, "webhooks", rows)
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    callbacks, messages = Callbacks(database), MessageQueue(database)
    (due,) = callbacks.list_due_callbacks(T0 + 7, 10)
    (claimed,) = messages.claim([MessageKey(due.job_id, due.event, of_job=True)], T0 + 7, T0 + 8)
    assert (claimed.id, claimed.type, claimed.at_ms) == ("msg_j-dead_2_dead", "job.dlq", T0)
    assert (claimed.tries, claimed.last_error) == (4, "it answered 503")
    (lost,) = callbacks.list_given_up_callbacks()
    assert (lost.message.id, lost.status, lost.message.ended_ms) == (given_up["id"], "completed", T0 + 7)
    database.close()


def test_callbacks_that_the_release_before_writes_are_sent_by_this_one(empty_url, engine):
    _use(engine)
    migrate.upgrade(empty_url)
    with engine.begin() as connection:
        _write(
            connection,
            "webhooks",
            _callbacks({"id": "msg_j-failed_10_failed", "job_id": "j-failed", "status": "failed"}),
        )
        assert connection.execute(text("SELECT * FROM webhooks")).all() == [], "it has nothing to send"
        for act in (
            "UPDATE webhooks SET state = 'delivered' WHERE id = 'x'",
            "DELETE FROM webhooks WHERE job_id = 'x'",
        ):
            connection.execute(text(act))
    database = Database(empty_url)
    due = Callbacks(database).list_due_callbacks(T0 + 7, 10)
    assert {(it.job_id, make_message_id(it.job_id, it.event)) for it in due} == {
        ("j-dead", "msg_j-dead_2_dead"),
        ("j-failed", "msg_j-failed_10_failed"),
    }
    database.close()
