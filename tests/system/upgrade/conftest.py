"""`empty_url`: a database without any table, once of each kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.cluster.postgres_process import Postgres


@pytest.fixture
def _empty_postgres_url(postgres: Postgres) -> Iterator[str]:
    url = postgres.create()
    yield url
    postgres.drop(url)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'new' / 'record.db'}"
    return request.getfixturevalue("_empty_postgres_url")
