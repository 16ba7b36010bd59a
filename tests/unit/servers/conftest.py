from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import requests

from tasks.servers import new_session
from tests.unit.servers.scripted import Act, Scripted, Seen


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with new_session(pool_size=4) as session:
        yield session


@pytest.fixture
def scripted() -> Iterator[Callable[[Callable[[Seen], Act]], Scripted]]:
    """Starts servers that do what they are told, and stops them."""
    with ExitStack() as stack:
        yield lambda act: stack.enter_context(Scripted(act))
