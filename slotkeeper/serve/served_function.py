"""The function that is served: how it is found, called, and told of a cancel."""

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
    """The payload itself is wrong; no retry can help.  Any ValueError is understood the same way."""


class Canceled(Exception):
    """Somebody asked for the end of this run.  Let it pass through."""


class TargetError(Exception):
    """What was to be served cannot be found or called."""


class Context:
    """What a function may know about its run: give it a parameter called `context` to receive it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def payload(self) -> Any:
        return self._run.payload

    @property
    def job_id(self) -> str:
        """The dispatcher's id of the job; of a direct call the server's own."""
        return self._run.job_id

    @property
    def attempt(self) -> int | None:
        """The dispatcher's count of starts, from 1; None for a direct call."""
        return self._run.attempt

    @property
    def slot(self) -> int:
        """0 … slots - 1; no other run has it at the same time, so it can choose a GPU."""
        return self._run.slot

    @property
    def canceled(self) -> bool:
        return self._run.cancel.is_set()

    def progress(self, far: Any) -> None:
        """Say how far the run is, in any JSON; who asks for its status, or follows its stream, is told."""
        self._run.pieces.say(progress=far)

    def check(self) -> None:
        """Raise Canceled if somebody asked for the end; call it between steps."""
        if self.canceled:
            raise Canceled

    def sleep(self, seconds: float) -> None:
        """Wait; raises Canceled as soon as somebody asks for the end."""
        if self._run.cancel.wait(max(0.0, seconds)):
            raise Canceled


def load(target: str) -> Function:
    """`package.module:function`, looked up from the current folder too.  Raises TargetError.

    An error inside the module is not caught: its traceback is what its author needs.
    """
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise TargetError(f"{target!r} is not of the form package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script, unlike `python -m`, does not look in the current folder
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise TargetError(f"there is no module {error.name!r}") from error
        raise
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise TargetError(f"module {module_name!r} has no function {path!r}")
    return found


def takes_context(function: Function) -> bool:
    """Whether the function has a parameter `context`, and so can hear of a cancel."""
    try:
        return "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-ins tell nothing about themselves
        return False


def streams(function: Function) -> bool:
    """Whether the function yields its result in pieces."""
    return inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(type(function).__call__)


def adapt(function: Function) -> Model:
    """One shape for all: a plain or `async def` function, with or without `context`."""
    with_context = takes_context(function)

    def call(context: Context) -> Any:
        if with_context:
            return function(context.payload, context=context)
        return function(context.payload)

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return lambda context: asyncio.run(call(context))
    return call
