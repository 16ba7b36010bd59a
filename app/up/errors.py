"""What can keep everything from starting."""

import click


class UpError(click.ClickException):
    """It cannot be started; the text is one line that says why and what to do."""


class Stopped(BaseException):
    """Ctrl-C or a signal asks to stop: as KeyboardInterrupt, nothing that deals with errors is to take it for one."""
