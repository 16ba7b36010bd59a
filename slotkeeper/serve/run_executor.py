"""Runs the function in the slots that the engine gives."""

import threading
import time
from collections.abc import Generator
from queue import SimpleQueue
from typing import Any

from slotkeeper.serve.exact import dumps
from slotkeeper.serve.journal import Journal
from slotkeeper.serve.logs import log_failure
from slotkeeper.serve.result_push import Pusher
from slotkeeper.serve.run_scheduler import Run, RunEnd, RunScheduler, State
from slotkeeper.serve.served_function import Canceled, Context, Model

MAX_ERROR_CHARS = 2000


class RunExecutor:
    """Calls the model for runs that hold a slot, in the caller's thread or in one of its own.

    Own threads are as many as slots and live as long as the server: a run never waits for one, and a library that
    keeps state per thread finds it again.
    """

    def __init__(
        self, engine: RunScheduler, model: Model, journal: Journal | None = None, pusher: Pusher | None = None
    ) -> None:
        self._engine, self._model, self._journal, self._pusher = engine, model, journal, pusher
        self._ready: SimpleQueue[Run | None] = SimpleQueue()
        for number in range(engine.slots):
            threading.Thread(target=self._work, name=f"slot-thread-{number}", daemon=True).start()

    def start(self, run: Run) -> None:
        """Have it run in the background."""
        self._ready.put(run)

    def run_here(self, run: Run) -> None:
        """Run it in this thread, which saves a hand-over, and return when it has ended."""
        next_run = self._run(run)
        if next_run:
            self.start(next_run)

    def close(self) -> None:
        """Let the threads end, each after the run it has."""
        for _ in range(self._engine.slots):
            self._ready.put(None)

    def _work(self) -> None:
        while run := self._ready.get():
            next_run: Run | None = run
            while next_run:
                next_run = self._run(next_run)

    def _run(self, run: Run) -> Run | None:
        started = (time.monotonic_ns(), time.time_ns()) if self._journal else (0, 0)
        ending = self._call(run)
        if self._journal:  # before the slot is free: noted intervals overlap only if the runs did
            self._journal.note(run, ending, started)
        next_run = self._engine.finish(run, ending)
        if self._pusher and run.callback:
            self._pusher.push(run, run.callback)
        return next_run

    def _call(self, run: Run) -> RunEnd:
        try:
            return RunEnd(State.COMPLETED, result=dumps(_whole(self._model(Context(run)), run)))
        except ValueError as error:
            return RunEnd(State.FAILED, error=_text(error), retryable=False)
        except BaseException as error:  # SystemExit too: whatever happens, the slot must come back
            if isinstance(error, Canceled) and run.cancel.is_set():
                return RunEnd(State.CANCELED, error="canceled")
            log_failure(f"run {run.id}", error)
            return RunEnd(State.FAILED, error=_text(error), retryable=True)


def _whole(result: Any, run: Run) -> Any:
    """Of a result that comes in pieces: what the generator returns, else its texts joined, or a list of its pieces."""
    if not isinstance(result, Generator):
        return result
    pieces = list[Any]()
    while True:
        try:
            piece = next(result)
        except StopIteration as ended:
            is_text = all(isinstance(it, str) for it in pieces)
            return ended.value if ended.value is not None else "".join(pieces) if is_text else pieces
        if run.cancel.is_set():
            result.close()
            raise Canceled
        pieces.append(piece)
        run.pieces.say(piece=piece)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
