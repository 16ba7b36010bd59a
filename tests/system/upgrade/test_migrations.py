"""The migrations create exactly the declared tables, on both databases, for each process and after each repetition."""

import ast
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command, op
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, insert, inspect, make_url, select, text

from migrations import migrate, revisions
from routing.admission.labels import encode_labels, label_text
from slotkeeper.db import Database
from slotkeeper.db.schema import metadata
from slotkeeper.errors import Conflict, DatabaseUnavailable
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import job_labels
from slotkeeper.registry.api_keys import ApiKeys, hash_key
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.identity import FIRST_SCOPES, Scope, Tenant
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.tables import models, tenants
from slotkeeper.registry.tenant_limits import NO_LIMITS
from slotkeeper.registry.tenants import Tenants
from tests.house.tree import PACKAGES
from tests.support.builders import T0, a_queued_job, at_once, row_of
from tests.system.upgrade.schema import schema_of
from tools.cluster.postgres_process import Postgres

_KNOWN, _ = revisions.read_revisions()
_HEAD = ScriptDirectory.from_config(migrate._config("sqlite:///unused")).get_current_head()


@pytest.fixture
def connection(empty_url: str) -> Iterator[Connection]:
    migrate.upgrade(empty_url)
    engine = create_engine(empty_url)
    with engine.connect() as opened:
        yield opened
    engine.dispose()


def test_the_migrated_schema_shows_no_difference_from_the_models(connection):
    options = {"compare_type": True, "compare_server_default": True}
    context = MigrationContext.configure(connection, opts=options)
    assert compare_metadata(context, metadata) == []


def test_the_migrated_schema_is_the_one_that_the_models_would_create(connection, postgres_or_file):
    created = create_engine(postgres_or_file(connection.dialect.name))
    metadata.create_all(created)
    with created.connect() as other:
        expected = schema_of(other)
    created.dispose()
    assert len(expected) >= len(metadata.tables)  # the comparison saw something
    assert schema_of(connection) == expected


@pytest.fixture
def postgres_or_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Makes one more empty database of a kind."""
    made: list[tuple[Postgres, str]] = []

    def make(kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{tmp_path / 'other.db'}"
        server: Postgres = request.getfixturevalue("postgres")
        made.append((server, server.create()))
        return made[-1][1]

    yield make
    for server, url in made:
        server.drop(url)


def test_an_upgraded_database_accepts_a_job(empty_url):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    job = a_queued_job(JobStore(database))
    assert row_of(database, job.id)["state"] == "queued"
    database.close()


def test_upgrading_twice_changes_nothing_and_keeps_the_jobs(empty_url):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    job = a_queued_job(JobStore(database))
    before = row_of(database, job.id)
    migrate.upgrade(empty_url)
    assert row_of(database, job.id) == before
    database.close()


def test_several_threads_may_upgrade_at_once(empty_url):
    assert at_once(*[lambda: migrate.upgrade(empty_url)] * 4) == [None] * 4
    assert migrate.check(empty_url) is None


def test_several_processes_may_upgrade_at_once(empty_url):
    program = f"from migrations.migrate import upgrade; upgrade({empty_url!r})"
    processes = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert migrate.check(empty_url) is None


def test_an_upgrade_waits_for_a_concurrent_upgrade_for_a_limited_time(empty_url, monkeypatch):
    monkeypatch.setattr(migrate, "_PATIENCE_S", 0.0)
    with migrate._alone(empty_url), pytest.raises(DatabaseUnavailable, match="Another process"):
        migrate.upgrade(empty_url)
    migrate.upgrade(empty_url)
    assert migrate.check(empty_url) is None


def test_a_migration_that_fails_leaves_nothing_behind(empty_url, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("alembic.op.create_index", _fail)
        with pytest.raises(ZeroDivisionError):
            migrate.upgrade(empty_url)
    assert _tables(empty_url) <= {"alembic_version"}
    migrate.upgrade(empty_url)
    assert migrate.check(empty_url) is None


def test_a_migration_step_that_fails_undoes_all_steps_before_it(empty_url, tmp_path, monkeypatch):
    steps = shutil.copytree(migrate.STEPS, tmp_path / "steps")
    (steps / "versions" / "9999_fails.py").write_text(
        f"revision, down_revision = '9999', '{_HEAD}'\ndef upgrade():\n    raise ZeroDivisionError\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "STEPS", steps)
        with pytest.raises(ZeroDivisionError):
            migrate.upgrade(empty_url)
    assert _tables(empty_url) <= {"alembic_version"}
    migrate.upgrade(empty_url)
    assert migrate.check(empty_url) is None


def test_the_newest_schema_is_the_one_that_alembic_takes_for_it():
    known, followed = revisions.read_revisions()
    steps = ScriptDirectory.from_config(migrate._config("sqlite:///unused"))
    assert known == {step.revision for step in steps.walk_revisions()}
    assert known - followed == set(steps.get_heads()) == {_HEAD}


def test_the_check_of_an_old_schema_names_the_migrate_command(empty_url, tmp_path, monkeypatch):
    migrate.upgrade(empty_url)
    steps = shutil.copytree(migrate.STEPS, tmp_path / "steps")
    (steps / "versions" / "9999_next.py").write_text(
        f'revision = "9999"\ndown_revision = "{_HEAD}"\n\n\ndef upgrade():\n    pass\n'
    )
    monkeypatch.setattr(migrate, "STEPS", steps)
    sentence = migrate.check(empty_url)
    assert _HEAD in sentence
    assert "needs 9999" in sentence
    assert "slotkeeper migrate" in sentence
    migrate.upgrade(empty_url)
    assert migrate.check(empty_url) is None


@pytest.mark.parametrize("change", ["RENAME COLUMN tenant TO tenant_of_later", "RENAME TO jobs_of_later"])
def test_a_process_that_is_newer_than_the_schema_raises_an_error_that_names_the_migration(empty_url, change):
    migrate.upgrade(empty_url)
    engine = create_engine(empty_url)
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE jobs {change}"))
    engine.dispose()
    database = Database(empty_url)
    with pytest.raises(DatabaseUnavailable, match="slotkeeper migrate") as refused:
        a_queued_job(JobStore(database))
    assert refused.value.retry_after_s
    with pytest.raises(DatabaseUnavailable, match="slotkeeper migrate"), database.read() as connection:
        connection.execute(text("SELECT tenant FROM jobs"))
    database.close()


@pytest.mark.parametrize("statement", ["SELEC 1", "SELECT no_such_function()"])
def test_an_invalid_statement_is_not_reported_as_an_old_schema(empty_url, statement):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    with pytest.raises(Exception) as failed, database.read() as connection:
        connection.execute(text(statement))
    assert "slotkeeper migrate" not in str(failed.value)
    database.close()


def _fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def _tables(url: str) -> set[str]:
    engine = create_engine(url)
    found = set(inspect(engine).get_table_names())
    engine.dispose()
    return found


def test_going_back_before_the_first_revision_is_refused_and_deletes_nothing(empty_url):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    job = a_queued_job(JobStore(database))
    with pytest.raises(RuntimeError, match="delete every job"):
        command.downgrade(migrate._config(empty_url), "base")
    assert row_of(database, job.id)["state"] == "queued"
    assert migrate.check(empty_url) is None
    database.close()


def test_a_downgrade_drops_exactly_the_announced_tables_and_columns(empty_url):
    migrate.upgrade(empty_url)
    before, announced = _columns(empty_url), migrate.dropped_by(empty_url, "0001")
    assert migrate.dropped_by(empty_url, _HEAD) == []
    migrate.migrate_to(empty_url, "0001")
    after = _columns(empty_url)
    tables = before.keys() - after.keys()
    columns = {f"{table}.{name}" for table, names in after.items() for name in before[table] - names}
    assert sorted(announced) == sorted(tables | columns)
    assert migrate.dropped_by(empty_url, _HEAD) == []


def test_the_labels_of_jobs_that_were_there_before_are_found_after_an_upgrade(empty_url):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    labels = {"run": "7", "odd": '\\"\\\\,[]'}
    job = a_queued_job(JobStore(database), labels=encode_labels(labels))
    a_queued_job(JobStore(database))
    migrate.migrate_to(empty_url, "0004")
    migrate.upgrade(empty_url)
    with database.read() as connection:
        rows = connection.execute(select(job_labels).order_by(job_labels.c.label)).all()
    assert rows == [(label_text(name, value), job.seq, job.tenant) for name, value in sorted(labels.items())]
    database.close()


def test_a_new_installation_limits_its_queues_and_requires_permission_for_urgent_priorities(empty_url):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    Catalog(database).register("zimg", "gpu", "http://gpu:1/run", 1, T0)
    catalog = Catalog(database).read()
    config = catalog.models["zimg"].config
    assert (config.policy, config.max_waiting) == ("aging", 1_000_000)
    assert [catalog.limits_of(tenant).most_urgent for tenant in ("acme", "default")] == [4, 1]
    assert Tenants(database).list_all() == []
    database.close()


def test_an_installation_that_has_a_model_keeps_its_order_and_its_limits(empty_url):
    migrate.migrate_to(empty_url, "0010")
    database = Database(empty_url)
    row = {"name": "zimg", "fleet": "zimg", "created_ms": T0}
    database.write(lambda tx: tx.connection.execute(insert(models).values(**row)))
    migrate.upgrade(empty_url)
    catalog = Catalog(database).read()
    assert catalog.models["zimg"].config == ModelConfig()
    assert catalog.limits_of("acme") == NO_LIMITS
    database.close()


def test_a_key_copied_from_the_previous_release_is_still_valid(empty_url):
    migrate.upgrade(empty_url)
    migrate.migrate_to(empty_url, "0006")
    database = Database(empty_url)
    columns = {"rate_per_s": 7, "created_ms": T0}
    rows = [
        columns | {"name": "root", "key_hash": hash_key("sk_root"), "admin": 1, "rights": ""},
        columns
        | {"name": "acme", "key_hash": hash_key("sk_acme"), "admin": 0, "rights": "audit"}
        | {"former_hash": hash_key("sk_former"), "former_until_ms": T0 + 1000},
    ]
    database.write(lambda tx: [tx.connection.execute(insert(tenants).values(**row)) for row in rows])
    migrate.upgrade(empty_url)
    found = ApiKeys(database).list_valid(T0)[1]
    opened = {key: found[hash_key(key)] for key in ("sk_root", "sk_acme", "sk_former")}
    of_acme = FIRST_SCOPES | {Scope.AUDIT}
    assert {key: (valid.identity.tenant.name, valid.identity.scopes) for key, valid in opened.items()} == {
        "sk_root": ("root", {Scope.OPERATE}),
        "sk_acme": ("acme", of_acme),
        "sk_former": ("acme", of_acme),
    }
    assert hash_key("sk_former") not in ApiKeys(database).list_valid(T0 + 1000)[1]
    assert Catalog(database).read().limits_of("acme").rate_per_s == 7
    database.close()


def test_after_a_downgrade_the_previous_release_has_the_first_key_of_each_tenant(empty_url):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    for name, scopes in (("ops", {Scope.OPERATE}), ("acme", FIRST_SCOPES)):
        Tenants(database).add(Tenant(name), T0, scopes)
        ApiKeys(database).add(name, {Scope.READ}, now_ms=T0 + 1)
    first = {key.tenant: key.id for name in ("ops", "acme") for key in ApiKeys(database).list_of(name)[1:]}
    hashes = {valid.identity.key_id: hashed for hashed, valid in ApiKeys(database).list_valid(T0)[1].items()}
    migrate.migrate_to(empty_url, "0006")
    with database.read() as connection:
        rows = connection.execute(text("SELECT name, key_hash, admin FROM tenants WHERE name IN ('ops', 'acme')")).all()
    known = {row.name: (row.key_hash, row.admin) for row in rows}
    assert known == {"ops": (hashes[first["ops"]], 1), "acme": (hashes[first["acme"]], 0)}
    database.close()


def _columns(url: str) -> dict[str, set[str]]:
    engine = create_engine(url)
    found = inspect(engine)
    columns = {table: {column["name"] for column in found.get_columns(table)} for table in found.get_table_names()}
    engine.dispose()
    return columns


@pytest.fixture
def a_later_step(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Gives this release one more step, which adds a column; returns what takes the step away again."""
    steps = shutil.copytree(migrate.STEPS, tmp_path / "steps")
    (steps / "versions" / "9999_next.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n\n"
        f'revision = "9999"\ndown_revision = "{_HEAD}"\n\n\n'
        'def upgrade():\n    op.add_column("jobs", sa.Column("later", sa.Text, nullable=True))\n\n\n'
        'def downgrade():\n    op.drop_column("jobs", "later")\n'
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(migrate, "STEPS", steps)
    yield patch.undo
    patch.undo()


def test_a_downgrade_and_a_new_upgrade_of_the_schema_keep_the_jobs(empty_url, a_later_step):
    migrate.upgrade(empty_url)
    database = Database(empty_url)
    job = a_queued_job(JobStore(database))
    migrate.migrate_to(empty_url, _HEAD)
    before = _schema(empty_url)
    older = migrate.check(empty_url)
    assert older is not None and "needs 9999" in older
    migrate.migrate_to(empty_url, "9999")
    assert migrate.check(empty_url) is None
    migrate.migrate_to(empty_url, _HEAD)
    a_later_step()
    assert migrate.check(empty_url) is None  # The older release runs on it.
    assert _schema(empty_url) == before
    assert row_of(database, job.id)["state"] == "queued"
    database.close()


def _schema(url: str) -> Any:
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return schema_of(connection)
    finally:
        engine.dispose()


def test_a_migration_to_an_unknown_schema_is_refused(empty_url, a_later_step):
    migrate.upgrade(empty_url)
    known = ", ".join([*sorted(_KNOWN), "9999"])
    with pytest.raises(Conflict, match=f"does not know the schema 1234; it knows {known}\\."):
        migrate.migrate_to(empty_url, "1234")
    a_later_step()
    with pytest.raises(Conflict, match="install the release that migrated it"):
        migrate.migrate_to(empty_url, _HEAD)


def test_a_schema_at_head_needs_no_migration(empty_url):
    migrate.upgrade(empty_url)
    assert migrate.check(empty_url) is None


def test_the_check_of_an_empty_database_names_the_migrate_command(empty_url):
    assert "slotkeeper migrate" in migrate.check(empty_url)


def test_asking_creates_no_file(tmp_path):
    migrate.check(f"sqlite:///{tmp_path / 'record.db'}")
    assert list(tmp_path.iterdir()) == []


def test_the_check_recognizes_the_schema_of_a_newer_release(empty_url):
    migrate.upgrade(empty_url)
    engine = create_engine(empty_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'from_the_future'"))
    engine.dispose()
    sentence = migrate.check(empty_url)
    assert "from_the_future" in sentence
    assert "newer" in sentence
    assert _HEAD in sentence
    with pytest.raises(Conflict, match="from_the_future"):
        migrate.upgrade(empty_url)


# -- pending migrations, checked without Alembic ---------------------------------------------------------------


def test_a_file_with_the_newest_schema_is_current(sqlite_url):
    assert revisions.is_current(sqlite_url)


@pytest.mark.parametrize("stored", [["0000"], ["from_the_future"], [_HEAD, "from_the_future"], []])
def test_a_file_with_any_other_revision_is_not_current(sqlite_url, stored):
    engine = create_engine(sqlite_url)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM alembic_version"))
        for revision in stored:
            connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revision})
    engine.dispose()
    assert not revisions.is_current(sqlite_url)


@pytest.mark.parametrize("content", [None, b"", b"no database " * 500])
def test_a_file_without_a_database_is_not_current_and_is_not_changed(tmp_path, content):
    file = tmp_path / "record.db"
    if content is not None:
        file.write_bytes(content)
    assert not revisions.is_current(f"sqlite:///{file}")
    assert (file.read_bytes() if file.exists() else None) == content


def test_a_file_that_is_locked_is_not_reported_as_current(sqlite_url, tmp_path):
    with closing(sqlite3.connect(tmp_path / "record.db")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert not revisions.is_current(sqlite_url)


@pytest.mark.parametrize("url", ["postgresql://nobody@/record", "sqlite:///record.db", "sqlite://"])
def test_a_database_that_is_no_file_with_an_absolute_path_is_not_current(url):
    assert not revisions.is_current(url)


@pytest.mark.parametrize("act", [migrate.upgrade, migrate.check])
def test_a_database_that_is_not_there_is_unavailable(act, tmp_path):
    with pytest.raises(DatabaseUnavailable):
        act(f"postgresql://nobody@/record?host={tmp_path}")


@pytest.mark.postgres
@pytest.mark.parametrize("act", [migrate.upgrade, migrate.check])
def test_the_error_for_a_missing_database_says_how_to_create_it(_empty_postgres_url, act):
    url = make_url(_empty_postgres_url).set(database="missing").render_as_string(hide_password=False)
    with pytest.raises(DatabaseUnavailable, match=r'"missing" does not exist\): create it \(docs/how-to/postgresql.md'):
        act(url)


@pytest.mark.parametrize("act", [migrate.upgrade, migrate.check])
@pytest.mark.parametrize(("query", "expected"), [("", "5"), ("?connect_timeout=9", "9")])
def test_a_postgresql_that_does_not_answer_is_waited_for_a_few_seconds_only(monkeypatch, act, query, expected):
    given = []

    def connect(*_: object, **options: Any) -> None:
        given.append(options["connect_timeout"])
        raise psycopg.OperationalError("no answer")

    monkeypatch.setattr(psycopg, "connect", connect)
    monkeypatch.setattr(psycopg.Connection, "connect", connect)
    with pytest.raises(DatabaseUnavailable, match="no answer"):
        act(f"postgresql://nobody:p%40ss@192.0.2.1/record{query}")
    assert given == [expected]


@pytest.mark.postgres
def test_the_connection_that_migrates_waits_no_longer_than_the_one_that_looks(_empty_postgres_url, monkeypatch):
    given = []
    connect = psycopg.connect

    def noted(*parts: Any, **options: Any) -> Any:
        given.append(options["connect_timeout"])
        return connect(*parts, **options)

    monkeypatch.setattr(psycopg, "connect", noted)
    migrate.upgrade(_empty_postgres_url)
    assert given == ["5", "5"]  # the lock's, and the one of the steps


def test_an_in_memory_database_is_refused():
    with pytest.raises(ValueError, match="name a file"):
        migrate.upgrade("sqlite://")


def test_a_folder_named_migrations_in_the_working_directory_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'record.db'}"
    migrate.upgrade(url)
    assert migrate.check(url) is None


def test_a_percent_sign_in_the_url_is_no_placeholder(tmp_path):
    url = f"sqlite:///{tmp_path / '100%' / 'record.db'}"
    migrate.upgrade(url)
    assert migrate.check(url) is None
    assert Path(make_url(url).database).exists()


def test_a_new_sqlite_database_is_in_wal_mode_from_the_start(tmp_path):
    # Switching later can fail with "locked" when two processes do it at the same moment.
    url = f"sqlite:///{tmp_path / 'record.db'}"
    migrate.upgrade(url)
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()


@pytest.mark.postgres
def test_a_migration_limits_its_wait_for_locks(_empty_postgres_url, monkeypatch):
    """Queries queue behind a migration that waits for a lock."""
    seen: dict[str, str] = {}
    create_table = op.create_table

    def look(*parts: Any, **options: Any) -> Any:
        for name in ("lock_timeout", "statement_timeout"):
            seen[name] = op.get_bind().exec_driver_sql(f"SHOW {name}").scalar()
        return create_table(*parts, **options)

    monkeypatch.setattr("alembic.op.create_table", look)
    migrate.upgrade(_empty_postgres_url)
    assert seen == {"lock_timeout": "5s", "statement_timeout": "1min"}


def test_migrations_import_of_the_product_only_its_tables():
    """A step that used the product's code would change its meaning with it."""
    imported = {
        name
        for path in (*migrate.STEPS.glob("versions/*.py"), migrate.STEPS / "env.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _modules(node)
    }
    assert {name for name in imported if name.split(".")[0] in PACKAGES} == {
        "slotkeeper.db.schema",
        "slotkeeper.jobs.tables",
        "slotkeeper.registry.tables",
        "slotkeeper.outbox.tables",
    }


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
