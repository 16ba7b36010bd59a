"""Save the files in results, and show results without the base64 of their files."""

import json
from pathlib import Path
from typing import Any

import click

from app.terminal import echo, escape_line

output_option = click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Save the file in the result; several as FILE-1, FILE-2, ...; a result without files as JSON.",
)


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
