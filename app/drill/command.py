"""The command `slotkeeper drill`."""

import json
import sys
from pathlib import Path
from typing import Any

import click


class _Kinds(click.ParamType):
    name = "kinds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        from app.drill.schedule import Kind

        if isinstance(value, tuple):
            return value
        names = [name.strip() for name in str(value).split(",") if name.strip()]
        if names == ["none"]:
            return ()
        if "all" in names:
            return tuple(Kind)
        wrong = [name for name in names if name not in set(Kind)]
        if wrong:
            self.fail(f"{wrong[0]!r} is none of all, none, {', '.join(Kind)}", param, ctx)
        return tuple(Kind(name) for name in names)


@click.command()
@click.option("--jobs", default=1000, show_default=True, type=click.IntRange(1, 1_000_000), help="Jobs to submit.")
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(1), help="How long faults go on.")
@click.option("--kills", type=click.IntRange(1), help="So many faults, however long that takes, instead of --seconds.")
@click.option("--seed", type=int, help="Repeats the drill of that seed.  [default: a new one]")
@click.option("--kill-every", default=6.0, show_default=True, type=click.FloatRange(0.5), help="Seconds, about.")
@click.option("--faults", default="all", show_default=True, type=_Kinds(), help="Kinds, with commas; or none.")
@click.option("--clients", default=16, show_default=True, type=click.IntRange(1, 500), help="Threads that submit.")
@click.option(
    "--burst", default=50, show_default=True, type=click.IntRange(0, 100), help="Percent of the jobs at once."
)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 32), help="Worker processes.")
@click.option("--slots", default=8, show_default=True, type=click.IntRange(4, 256), help="Of all servers together.")
@click.option("--keep", is_flag=True, help="Keep journals and logs.  They are kept anyway if it is not passed.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the score card there."
)
def drill(
    jobs: int,
    seconds: float,
    kills: int | None,
    seed: int | None,
    kill_every: float,
    faults: tuple[Any, ...],
    clients: int,
    burst: int,
    workers: int,
    slots: int,
    keep: bool,
    json_file: Path | None,
) -> None:
    """Prove on this machine that no job gets lost, whatever is killed.

    Starts a whole Slotkeeper in a temporary folder, submits jobs over HTTP, and meanwhile kills and stops its
    processes by a seed.  Then compares what clients were promised with what the servers did.

    \b
    Kinds of faults:
      worker, maintenance, beat, web, redis, server   SIGKILL, and started again
      stop    SIGSTOP of a worker for longer than a lease, then SIGCONT
      term    SIGTERM of a worker
      flush   FLUSHALL

    Exit status 0: nothing was lost, nothing ran twice at once, nothing was out of order that no fault explains.
    """
    import secrets

    from app.commands.common import console
    from app.drill.launcher import Wishes
    from app.drill.launcher import drill as run
    from app.up.errors import Stopped

    if kills is not None and not faults:
        raise click.UsageError("--kills needs at least one kind of --faults.")
    if seed is None:
        seed = secrets.randbelow(1_000_000)
    out = console()
    try:
        card = run(
            Wishes(jobs, seconds, seed, kill_every, faults, clients, burst / 100, keep, kills, workers, slots), out
        )
    except Stopped:
        out.print("Stopped; nothing is left running.")
        sys.exit(130)
    if json_file is not None:
        json_file.write_text(json.dumps(card.data(), indent=2) + "\n")
    card.show(out)
    sys.exit(0 if card.passed else 1)
