"""The executor of runs: it calls the served function for each run that has a slot."""

import threading
import time
from collections.abc import Generator
from queue import SimpleQueue
from typing import Any, Protocol

from slotkeeper.serve.exact import dumps
from slotkeeper.serve.logs import log_failure
from slotkeeper.serve.result_push import Pusher
from slotkeeper.serve.run_scheduler import Run, RunEnd, RunScheduler, State
from slotkeeper.serve.served_function import Canceled, Context, Model, NotStarted

MAX_ERROR_CHARS = 2000


class Journal(Protocol):
    """Where each run is noted when it ends, before its slot is free."""

    def note(self, run: Run, ending: RunEnd, started: tuple[int, int]) -> None:
        """Note a run that ends now.  `started`: monotonic and Unix time of its start, in ns."""


class RunExecutor:
    """An executor that calls the model for each run that has a slot, in the caller's thread or in a background thread.

    There is one background thread per slot, so a run never waits for a thread.  The threads live as long as the server,
    so libraries can keep thread-local state between runs.
    """

    def __init__(
        self, engine: RunScheduler, model: Model, journal: Journal | None = None, pusher: Pusher | None = None
    ) -> None:
        self._scheduler, self._model, self._journal, self._pusher = engine, model, journal, pusher
        self._ready_runs: SimpleQueue[Run | None] = SimpleQueue()
        for number in range(engine.slots):
            threading.Thread(target=self._work, name=f"slot-thread-{number}", daemon=True).start()

    def start(self, run: Run) -> None:
        """Execute a run in a background thread."""
        self._ready_runs.put(run)

    def run_here(self, run: Run) -> None:
        """Execute a run in this thread and return when it has ended.  Saves the switch to another thread."""
        next_run = self._run(run)
        if next_run:
            self.start(next_run)

    def close(self) -> None:
        """Stop the background threads, each after its current run."""
        for _ in range(self._scheduler.slots):
            self._ready_runs.put(None)

    def _work(self) -> None:
        while run := self._ready_runs.get():
            next_run: Run | None = run
            while next_run:
                next_run = self._run(next_run)

    def _run(self, run: Run) -> Run | None:
        """Execute a run, and return the queued run that received its slot."""
        started = (time.monotonic_ns(), time.time_ns()) if self._journal else (0, 0)
        ending = self._call(run)
        if self._journal:  # before the slot is free, so that intervals in the journal overlap only if the runs did
            self._journal.note(run, ending, started)
        next_run = self._scheduler.finish(run, ending)
        if self._pusher and run.callback:
            self._pusher.push(run, run.callback)
        return next_run

    def _call(self, run: Run) -> RunEnd:
        try:
            return RunEnd(State.COMPLETED, result=dumps(_collect_result(self._model(Context(run)), run)))
        except ValueError as error:
            return RunEnd(State.FAILED, error=_error_text(error), retryable=False)
        except NotStarted as error:
            return RunEnd(State.FAILED, error=str(error)[:MAX_ERROR_CHARS], retryable=True, was_started=False)
        except BaseException as error:  # also SystemExit: the run must free its slot in any case
            if isinstance(error, Canceled) and run.cancel.is_set():
                return RunEnd(State.CANCELED, error="canceled")
            log_failure(f"run {run.id}", error)
            return RunEnd(State.FAILED, error=_error_text(error), retryable=True)


def _collect_result(result: Any, run: Run) -> Any:
    """Return the complete result; if it is a generator, consume it and publish each piece.

    The result of a generator is its return value; without one, the concatenated texts or a list of the pieces.
    Raises Canceled if the run is canceled between two pieces.
    """
    if not isinstance(result, Generator):
        return result
    pieces = list[Any]()
    while True:
        try:
            piece = next(result)
        except StopIteration as ended:
            is_text = all(isinstance(piece, str) for piece in pieces)
            return ended.value if ended.value is not None else "".join(pieces) if is_text else pieces
        if run.cancel.is_set():
            result.close()
            raise Canceled
        pieces.append(piece)
        run.pieces.say(piece=piece)


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
