"""The command `python -m slotkeeper.serve package.module:function --slots 2`, also available as `slotkeeper serve`."""

import logging
from pathlib import Path

import click

from slotkeeper.serve.run_scheduler import ResultRetention
from slotkeeper.serve.server import ServeConfig, ServeError, serve


@click.command("serve")
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--slots", default=1, show_default=True, help="Runs at the same time.")
@click.option("--async", "asynchronous", is_flag=True, help="Answer with an id to be polled, not with the result.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option(
    "--allow-host", "allow_hosts", metavar="NAME", multiple=True, help="A name it may be called by; repeat it."
)
@click.option("--port", default=9001, show_default=True, help="0 takes any free one.")
@click.option("--endpoint", default="/generate", show_default=True)
@click.option("--model", help="Name shown in /health; the function's by default.")
@click.option(
    "--max-direct-queue",
    default=10,
    show_default=True,
    envvar="MAX_DIRECT_QUEUE",
    help="Direct calls that may wait.",
)
@click.option("--recent-results", default=1000, show_default=True, help="Ended runs that are remembered.")
@click.option("--recent-age", default=3600.0, show_default=True, help="Seconds for which they are.")
@click.option("--max-body", default=16 << 20, show_default=True, help="Largest request, in bytes.")
@click.option("--push", is_flag=True, help="Obey X-Callback-Url: POST the end of a run there.")
@click.option("--journal", type=click.Path(path_type=Path, dir_okay=False), help="Append a JSON line per run.")
@click.option("--grace", default=10.0, show_default=True, help="Seconds that runs get when the server is stopped.")
@click.option("--debug", is_flag=True, help="Log errors of the function in full; their texts may hold payloads.")
def main(
    target: str,
    slots: int,
    asynchronous: bool,
    host: str,
    allow_hosts: tuple[str, ...],
    port: int,
    endpoint: str,
    model: str | None,
    max_direct_queue: int,
    recent_results: int,
    recent_age: float,
    max_body: int,
    push: bool,
    journal: Path | None,
    grace: float,
    debug: bool,
) -> None:
    """Serve a Python function as an inference server.

    MODULE:FUNCTION names a function that takes the payload of a job and returns its result.
    """
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(message)s")
    try:
        config = ServeConfig(
            slots=slots,
            asynchronous=asynchronous,
            host=host,
            allow_hosts=allow_hosts,
            port=port,
            endpoint=endpoint,
            model=model,
            max_direct_queue=max_direct_queue,
            memory=ResultRetention(runs=recent_results, age_s=recent_age),
            max_body_bytes=max_body,
            push=push,
            journal=journal,
            grace_s=grace,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        serve(target, config, say=click.echo)
    except ServeError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main(prog_name="python -m slotkeeper.serve")
