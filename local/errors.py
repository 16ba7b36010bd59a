"""What can keep everything from starting."""

import click


class UpError(click.ClickException):
    """It cannot be started; the text is one line that says why and what to do."""


class Stopped(Exception):
    """Ctrl-C or a signal asks to stop."""
