"""Helpers that several commands share: the API client, options, and functions that print."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from app.terminal import console, echo, escape_line, safe_json
from slotkeeper.state_folder import is_private_folder

if TYPE_CHECKING:
    from slotkeeper.client import Client

_LOOPBACK = re.compile(r"https?://(127\.[0-9.]+|\[::1\]|localhost)(:[0-9]+)?")
_LISTENING = ("SLOTKEEPER_PORT", "SLOTKEEPER_HOST", "SLOTKEEPER_TLS_CERTIFICATE")
_GAP = 2  # characters between two columns of a table
_LAST_COLUMN = 24  # The last column of a table may be made as narrow as this.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
F = TypeVar("F", bound=Callable[..., Any])
output_option = click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Save the file in the result; several as FILE-1, FILE-2, ...; a result without files as JSON.",
)


def api_client() -> "Client":
    """Return a client for the API that the environment variables name."""
    from slotkeeper.client import Client

    url, key, ca = api_url(), os.environ.get("SLOTKEEPER_KEY"), os.environ.get("SLOTKEEPER_CA") or None
    # The certificate of an API on this machine names its public address.
    is_own = not os.environ.get("SLOTKEEPER_URL") and _LOOPBACK.fullmatch(url)
    return Client(url, key, ca or (False if is_own else None))


def api_url() -> str:
    """Return the URL of the API that the environment variables name.  Raises ClickException."""
    return os.environ.get("SLOTKEEPER_URL") or _local_url()


def _local_url() -> str:
    """Return the URL of this machine's API, from its settings or from the file that `slotkeeper up` writes.

    The key is sent to this URL, and another user may have created `var` in the current folder.  So that file must be in
    a private folder and name this machine.  Raises ClickException.
    """
    if any(os.environ.get(name) for name in _LISTENING):
        from app.config import AppSettings, local_api_url

        return local_api_url(AppSettings())
    home = os.environ.get("SLOTKEEPER_HOME")
    url_file = Path(home or "var", "url")
    try:
        url = url_file.read_text().strip()
    except OSError:
        return "http://127.0.0.1:8000"
    if home is None and not (is_private_folder(url_file.parent) and _LOOPBACK.fullmatch(url)):
        raise click.ClickException(
            f"{url_file} names an API, and is not trusted: only this user may have access to its folder, and the "
            f"address must be on this machine.  If it is right, set SLOTKEEPER_URL, or "
            f"SLOTKEEPER_HOME={url_file.parent}."
        )
    return url


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


def limit_option(command: F) -> F:
    return click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 100_000))(command)


def print_json(value: Any) -> None:
    click.echo(safe_json(value, indent=2))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[Any]], nothing: str) -> None:
    """Print rows as a table.  `nothing`: the sentence that is printed instead if there are no rows.

    Where a terminal is too narrow, columns are left out from the right; a file or a pipe gets all, however wide.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table

    cells = [[escape_line(display(value)) for value in row] for row in rows]
    if not cells:
        echo(nothing)
        return
    widths = [max(cell_len(text) for text in column) for column in zip(titles, *cells, strict=True)]
    screen, count = console(), len(titles)
    if not screen.is_terminal:
        screen.width = sum(widths) + _GAP * count
    while count > 1 and sum(widths[: count - 1], min(widths[count - 1], _LAST_COLUMN)) + _GAP * count > screen.width:
        count -= 1
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title, width in zip(titles[: count - 1], widths, strict=False):
        table.add_column(title, min_width=width)  # It is not wrapped: a wrapped name cannot be copied.
    table.add_column(titles[count - 1])
    for row in cells:
        table.add_row(*row[:count])
    screen.print(table)
    if left_out := ", ".join(filter(None, titles[count:])):
        echo(f"This terminal is too narrow for: {left_out}.  A wider one, a pipe and --json have them.", err=True)


def print_fields(facts: Mapping[str, Any], without: Iterable[str] = ()) -> None:
    """Print each name with its value on one line, without empty values and the names in `without`."""
    hidden = set(without)
    kept = {name: value for name, value in facts.items() if name not in hidden and value not in (None, [], {})}
    width = max((len(name) for name in kept), default=0)
    for name, value in kept.items():
        echo(f"{escape_line(name):<{width}}  {escape_line(display(value))}")


def display(value: Any) -> str:
    """Return a value as people read it: '-' for None, JSON for lists and objects."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case float():
            return f"{value:g}"
        case dict() | list():
            return safe_json(value)
    return str(value)


def age(when: str | None) -> str:
    """Return how long ago a time was, such as "3 min"."""
    if not when:
        return "-"
    seconds = max((datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds(), 0)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def short_id(job_id: str) -> str:
    """Return the end of a job's id where it is printed on a terminal: commands take it as well."""
    return job_id[-8:] if _UUID.fullmatch(job_id) and sys.stdout.isatty() else job_id


def short_time(when: str | None) -> str | None:
    """Return a time of the API without fractions where it is printed on a terminal, and without the date of today."""
    if when is None or not sys.stdout.isatty():
        return when
    date, time_of_day = when[:10], when[11:19]
    return time_of_day if date == datetime.now(UTC).date().isoformat() else f"{date} {time_of_day}"


def path_segment(segment: str) -> str:
    """Quote a string as one segment of a URL path."""
    from urllib.parse import quote

    return quote(segment, safe="")


def no_result(job: dict[str, Any], output: Path | None) -> click.ClickException:
    """Return the error of a command that was asked to save the result of a job without one."""
    return click.ClickException(f"{output} was not written: the job is {job['status']}, and has no result.")


def save_result(job: dict[str, Any], output: Path) -> bool:
    """Write the files in a job's result, or the result as JSON, and print the paths.

    Return False if the job has not completed.  Raises ClickException.
    """
    from app.result_files import files_in

    if job["status"] != "completed":
        return False
    files = files_in(job.get("result"))
    if not files:
        _write(output, json.dumps(job.get("result")).encode())
    for number, file in enumerate(files, 1):
        path = output if len(files) == 1 else output.with_name(f"{output.stem}-{number}{output.suffix}")
        try:
            _write(path, file.content())
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    return True


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
    echo(escape_line(f"{path}: {len(content)} bytes"), err=True)


def without_files(result: Any) -> Any:
    """Return the result with the size of each file instead of its base64."""
    from app.result_files import shortened

    return shortened(result)


@contextmanager
def acting_locally() -> Iterator[None]:
    """Record the user of the terminal as the actor of changes, and turn errors into one line.

    Raises ClickException for errors of the database and for invalid settings.
    """
    import socket

    from slotkeeper import audit, logs
    from slotkeeper.errors import SlotkeeperError

    logs.configure()
    try:
        with audit.acting_as(audit.Actor(_user_name(), "command line", socket.gethostname())):
            yield
    except SlotkeeperError as error:
        raise click.ClickException(error.detail) from error
    except (ValueError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


def _user_name() -> str:
    """Return the name of the user; in a container the user may have only an id."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
