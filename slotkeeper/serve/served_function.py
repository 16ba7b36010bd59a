"""The served function: its import, its call, and its context with progress and cancel."""

import asyncio
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from slotkeeper.serve.run_scheduler import Run

Function = Callable[..., Any]
Model = Callable[["Context"], Any]


class InvalidRequest(ValueError):
    """The payload itself is wrong, so that no retry can help.  The server treats any ValueError the same way."""


class Canceled(Exception):
    """A client has canceled this run.  The function must let this exception propagate."""


class NotStarted(Exception):
    """The function could not begin, and nothing has run: another server, or a later try, may do better."""


class TargetError(Exception):
    """The function to serve cannot be imported or is not callable."""


class Context:
    """The run of a function call.  A function with a parameter named `context` receives it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def payload(self) -> Any:
        return self._run.payload

    @property
    def model(self) -> str:
        """The name of the model, on a server that runs several; otherwise empty."""
        return self._run.model

    @property
    def job_id(self) -> str:
        """The dispatcher's id of the job; for a direct call the server's id of the run."""
        return self._run.job_id

    @property
    def attempt(self) -> int | None:
        """The dispatcher's number of this start of the job, from 1; None for a direct call."""
        return self._run.attempt

    @property
    def slot(self) -> int:
        """The slot number, 0 … slots - 1.  No other run has it at the same time, so it can select a GPU."""
        return self._run.slot

    @property
    def canceled(self) -> bool:
        """True after a client has canceled the run."""
        return self._run.cancel.is_set()

    def progress(self, far: Any) -> None:
        """Report the progress of the run, as any JSON value.  It appears in `/status` and in the stream."""
        self._run.pieces.say(progress=far)

    def check(self) -> None:
        """Raise Canceled if the run was canceled.  Call it between steps."""
        if self.canceled:
            raise Canceled

    def sleep(self, seconds: float) -> None:
        """Sleep.  Raises Canceled as soon as the run is canceled."""
        if self._run.cancel.wait(max(0.0, seconds)):
            raise Canceled


def load(target: str) -> Function:
    """Import `package.module:function` and return the function.  Also searches the current folder.

    Raises TargetError.  An error inside the module is not caught, because its author needs the traceback.
    """
    module_name, _, attributes = target.partition(":")
    if not module_name or not attributes:
        raise TargetError(f"{target!r} is not of the form package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script, unlike `python -m`, does not search the current folder
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise TargetError(f"there is no module {error.name!r}") from error
        raise
    for name in attributes.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise TargetError(f"module {module_name!r} has no function {attributes!r}")
    return found


def takes_context(function: Function) -> bool:
    """Return True if the function has a parameter `context`, with which it can observe a cancel."""
    try:
        return "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return False


def streams(function: Function) -> bool:
    """Return True if the function is a generator function, which yields its result in pieces."""
    return inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(type(function).__call__)


def adapt(function: Function) -> Model:
    """Return a synchronous callable that takes only the context, for a plain or `async def` function."""
    with_context = takes_context(function)

    def call(context: Context) -> Any:
        if with_context:
            return function(context.payload, context=context)
        return function(context.payload)

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return lambda context: asyncio.run(call(context))
    return call
