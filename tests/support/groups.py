"""Group commit at the moment that a test wants: who shares one transaction, and what happens before it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from slotkeeper.db import Database, Transaction
from tests.support.builders import eventually

Act = Callable[[], Any]


@contextmanager
def held(database: Database) -> Iterator[None]:
    """One unit holds the lead for as long as the block lasts; all others line up behind it."""
    began, go_on = threading.Event(), threading.Event()

    def hold(_: Transaction) -> None:
        began.set()
        assert go_on.wait(30)

    holder = threading.Thread(target=lambda: database.write(hold))
    holder.start()
    assert began.wait(30)
    try:
        yield
    finally:
        go_on.set()
        holder.join(30)


def in_one_group(database: Database, *acts: Act, before: Act = lambda: None) -> list[Any]:
    """Have all acts wait for one commit, in this order, then do `before`; their results or exceptions."""
    results: list[Future[Any]] = []
    with ThreadPoolExecutor(len(acts)) as pool:
        with held(database):
            for act in acts:
                results.append(pool.submit(act))
                eventually(lambda: len(database._group._waiting) == len(results))
            before()
        return [result.exception(30) or result.result() for result in results]
