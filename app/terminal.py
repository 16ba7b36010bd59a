"""Print untrusted text safely on a terminal.

A server's result, an error, a name or a reason may contain control characters: escape sequences that move the cursor,
write to the clipboard or hide a link, 8-bit controls, and marks that reverse the reading direction.  So all output of
commands is printed by this module.  It replaces invisible characters by visible escapes, and interprets no markup.
"""

import json
import re
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

import click

from slotkeeper.client_errors import ApiUnreachable, ClientError, OutcomeUnknown
from slotkeeper.errors import SlotkeeperError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_FILE_WIDTH = 200  # columns of a table that is written to a file or a pipe
_ASCII = re.compile(r"[\n\t -~]*")
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C has ended, as in shells; 1 would mean a failure."""


def escape_controls(text: str) -> str:
    """Return the text with visible escapes (\\x1b) for all characters but letters, marks, digits, symbols and spaces.

    Line breaks and tabs are kept.
    """
    if _ASCII.fullmatch(text):
        return text
    return "".join(ch if _is_plain(ch) or ch in "\n\t" else _escape(ch) for ch in text)


def escape_line(text: str) -> str:
    """As escape_controls, but also escape line breaks and tabs: for a name, a cell or a field."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def echo_json_text(text: bytes) -> None:
    """Print JSON as it is; on a terminal, without characters that control it."""
    click.echo(safe_json(json.loads(text)) if sys.stdout.isatty() else text)


def _is_plain(ch: str) -> bool:
    return ch.isprintable() or unicodedata.category(ch) == "Zs"


def _escape(ch: str) -> str:
    code = ord(ch)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe_json(value: Any, indent: int | None = None) -> str:
    """Return JSON of the same value, without characters that control a terminal."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if _ASCII.fullmatch(text):
        return text
    return "".join(ch if _is_plain(ch) or ch == "\n" else _json_escape(ch) for ch in text)


def _json_escape(ch: str) -> str:
    units = ch.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n] << 8 | units[n + 1]:04x}" for n in range(0, len(units), 2))


def echo(text: str = "", err: bool = False) -> None:
    """Print one or more lines, with escaped controls."""
    click.echo(escape_controls(text), err=err)


def console(stderr: bool = False) -> "Console":
    """Return Rich's console without markup, emoji codes and controls.  Use Text for styles."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, *, style: Any = "", **options: Any) -> Text:
            return Text(escape_controls(text), style, justify=options.get("justify"), overflow=options.get("overflow"))

    stream = sys.stderr if stderr else sys.stdout
    return Plain(
        file=stream, width=None if stream.isatty() else _FILE_WIDTH, highlight=False, markup=False, emoji=False
    )


def styled(text: str, style: str) -> "Text":
    """Return a text in a style, for the console."""
    from rich.text import Text

    return Text(escape_controls(text), style)


class _OutcomeUnknown(click.ClickException):
    exit_code = 3


class SafeGroup(click.Group):
    """Commands whose errors are printed with escaped controls: they may quote text of the API or the database."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except click.ClickException as error:
            error.message = escape_controls(str(error.message))  # type: ignore[misc]
            raise
        except SlotkeeperError as error:  # a wrong setting, or a database or Redis that cannot be used
            raise click.ClickException(escape_controls(error.detail)) from error
        except ClientError as error:
            is_outcome_known = not isinstance(error, ApiUnreachable | OutcomeUnknown)
            error_class = click.ClickException if is_outcome_known else _OutcomeUnknown
            raise error_class(escape_controls(error.message)) from error
