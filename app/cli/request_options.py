"""The options of `submit` that follow from the fields of a request (routing/admission/job_request.py: JobRequest).

They are created when the command is used: they need pydantic, whose import would slow down the other commands.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from app.cli.arguments import read_constraints, read_labels

if TYPE_CHECKING:
    from routing.admission.job_request import Given

# The functions that parse repeatable options.
_READERS: Mapping[str, Callable[[Iterable[str]], dict[str, Any]]] = {
    "constraints": read_constraints,
    "labels": read_labels,
}
_TYPES: Mapping[str, click.ParamType] = {
    "priority": click.IntRange(1, 9),
    "ttl": click.FloatRange(min=0, min_open=True),
}


class RequestCommand(click.Command):
    """A command with an option for each field of a request that declares one, before its own options."""

    _has_request_options = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self._has_request_options:
            from routing.admission.job_request import REQUEST_FIELDS

            arguments = [param for param in self.params if isinstance(param, click.Argument)]
            own = [param for param in self.params if not isinstance(param, click.Argument)]
            request_options = [_option(name, given) for name, given in REQUEST_FIELDS.items() if given.option]
            self.params, self._has_request_options = [*arguments, *request_options, *own], True
        return super().get_params(ctx)


def _option(name: str, given: "Given") -> click.Option:
    return click.Option(
        [given.option, name],
        metavar=given.metavar,
        help=given.help,
        multiple=name in _READERS,
        type=_TYPES.get(name, click.STRING),
    )


def read_request(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that were given as options.  Raises UsageError."""
    fields = {name: _READERS[name](value) if name in _READERS else value for name, value in options.items()}
    return {name: value for name, value in fields.items() if value not in (None, {})}
