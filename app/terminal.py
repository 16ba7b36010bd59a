"""Text from outside, made safe for a terminal.

A server's result, an error, a name or a reason may hold what a terminal obeys: escape sequences that move the cursor,
write to the clipboard or hide a link, controls of 8 bits, marks that reverse the direction of reading.  So whatever
commands print goes through here.  What cannot be seen becomes an escape that can; nothing is markup.
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

_WIDE = 200  # columns for a table that goes into a file or a pipe
_ASCII = re.compile(r"[\n\t -~]*")


def escape_controls(text: str) -> str:
    """The text with visible escapes (\\x1b) for all that is no letter, mark, figure, sign or blank.

    Line ends and tabs stay.
    """
    if _ASCII.fullmatch(text):
        return text
    return "".join(ch if _is_plain(ch) or ch in "\n\t" else _escape(ch) for ch in text)


def escape_line(text: str) -> str:
    """As `plain`, and line ends and tabs are escaped, too: for a name, a cell, a field."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def _is_plain(ch: str) -> bool:
    return ch.isprintable() or unicodedata.category(ch) == "Zs"


def _escape(ch: str) -> str:
    code = ord(ch)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe_json(value: Any, indent: int | None = None) -> str:
    """JSON that reads the same to programs, and in which a terminal finds nothing to obey."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if _ASCII.fullmatch(text):
        return text
    return "".join(ch if _is_plain(ch) or ch == "\n" else _json_escape(ch) for ch in text)


def _json_escape(ch: str) -> str:
    units = ch.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n] << 8 | units[n + 1]:04x}" for n in range(0, len(units), 2))


def echo(text: str = "", err: bool = False) -> None:
    """Print a line, or some."""
    click.echo(escape_controls(text), err=err)


def console(stderr: bool = False) -> "Console":
    """Rich's console, for which a text is a text: no markup, no emoji codes, no controls.  Styles come as Text."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, *, style: Any = "", **wishes: Any) -> Text:
            return Text(escape_controls(text), style, justify=wishes.get("justify"), overflow=wishes.get("overflow"))

    stream = sys.stderr if stderr else sys.stdout
    return Plain(file=stream, width=None if stream.isatty() else _WIDE, highlight=False, markup=False, emoji=False)


def styled(text: str, style: str) -> "Text":
    """A text in a style, for the console."""
    from rich.text import Text

    return Text(escape_controls(text), style)


INTERRUPTED = 130
"""Exit status of a command that Ctrl-C has ended, as shells give it; 1 would say that it has failed."""


class _OutcomeUnknown(click.ClickException):
    exit_code = 3


class SafeGroup(click.Group):
    """Commands whose errors are said safely, whatever the API or the record quotes in them."""

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
            is_known = not isinstance(error, ApiUnreachable | OutcomeUnknown)
            kind = click.ClickException if is_known else _OutcomeUnknown
            raise kind(escape_controls(error.message)) from error
