"""Exceptions of `slotkeeper up`."""

import click


class UpError(click.ClickException):
    """The installation cannot be started.  The message is one line with the reason and the remedy."""


class Stopped(BaseException):
    """Ctrl-C or a signal requests a stop.  A BaseException, as KeyboardInterrupt: error handlers must not catch it."""
