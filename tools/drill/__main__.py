"""The command `python -m tools.drill` (`make drill`): prove on this machine that no job gets lost."""

import json
import secrets
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from app.terminal import console, echo
from app.up.errors import Stopped
from tools.drill.drill import DrillOptions
from tools.drill.drill import drill as run
from tools.drill.drill_setup import unavailable_reason
from tools.drill.fault_schedule import Kind

_HELP = """Prove on this machine that no job gets lost, whatever is killed.

Starts a whole Slotkeeper in a temporary folder, submits jobs over HTTP, and injects faults by a seed meanwhile.
Then compares the answers that clients got with what servers and webhook receivers recorded.

\b
Kinds of faults; `all` selects every kind that the setting allows:
  worker, maintenance, beat, web, redis, server, database   SIGKILL, and a start a moment later
  stop        SIGSTOP of a worker for longer than a lease, then SIGCONT
  restarts    SIGTERM of any process, and a start
  impatient   SIGTERM of any process, SIGKILL 5 s later, and a start
  flush       FLUSHALL
  full        a Redis has reached its maxmemory
  stale       Redis fails over to a replica that lacks the latest writes
  failover    a replica that lacks nothing is promoted; existing connections stay with the old primary
  refusal     Redis or PostgreSQL answers and takes no writes
  messages    the broker's messages are doubled, delayed, or lost
  silence     connections stay open and carry nothing, in one direction or in both
  cuts        connections are reset
  delays      everything that is sent arrives late
  commits     COMMITs are lost, or only their answers (PostgreSQL)
  revokes     Celery's revoke of jobs that wait or run
  clock       a process's clock is wrong by seconds or by an hour (libfaketime)
  step        the clock of all processes is wrong, for so long that it is followed (libfaketime)
  receivers   webhook receivers are slow or dead, or refuse a share of the messages
  deadlines   many jobs have the same deadline
  operator    slots, servers, policies and limits are changed
  unread      the log of maintenance goes into a pipe that is not read

Exit status 0: no job was lost, none ran twice at once, none was overtaken without a fault that explains it, none was
stuck, none was charged for a failure that was not its own, and no answer and no webhook was wrong.
"""


class _Kinds(click.ParamType):
    name = "kinds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
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


@click.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--jobs", default=1000, show_default=True, type=click.IntRange(1, 1_000_000), help="Jobs to submit.")
@click.option(
    "--seconds", default=60.0, show_default=True, type=click.FloatRange(1), help="How long faults are injected."
)
@click.option("--kills", type=click.IntRange(1), help="Number of faults, however long they take; replaces --seconds.")
@click.option("--seed", type=int, help="Repeats the drill of that seed.  [default: a new one]")
@click.option(
    "--kill-every",
    default=6.0,
    show_default=True,
    type=click.FloatRange(0.5),
    help="Seconds between faults, on average.",
)
@click.option("--faults", default="all", show_default=True, type=_Kinds(), help="Kinds, separated by commas; or none.")
@click.option("--clients", default=16, show_default=True, type=click.IntRange(1, 500), help="Threads that submit.")
@click.option(
    "--burst",
    default=50,
    show_default=True,
    type=click.IntRange(0, 100),
    help="Percent of the jobs that are submitted at once.",
)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 32), help="Worker processes.")
@click.option(
    "--slots", default=8, show_default=True, type=click.IntRange(4, 256), help="Slots of all servers together."
)
@click.option(
    "--database", default="sqlite", show_default=True, help="sqlite, postgresql, or the URL of an empty PostgreSQL."
)
@click.option(
    "--keep", is_flag=True, help="Keep journals and logs.  Those of a drill that does not pass are always kept."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the score card to this file."
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
    database: str,
    keep: bool,
    json_file: Path | None,
) -> None:
    """Prove on this machine that no job gets lost, whatever fails."""
    faults = _available_kinds(faults, database)
    if kills is not None and not faults:
        raise click.UsageError("--kills needs at least one kind of --faults.")
    if seed is None:
        seed = secrets.randbelow(1_000_000)
    out = console()
    command = _repeat_command(click.get_current_context(), seed)
    options = DrillOptions(
        jobs, seconds, seed, kill_every, faults, clients, burst / 100, keep, kills, workers, slots, database, command
    )
    try:
        card = run(options, out)
    except Stopped:
        out.print("Stopped; nothing is left running.")
        sys.exit(130)
    if json_file is not None:
        json_file.write_text(json.dumps(card.data(), indent=2) + "\n")
    card.show(out)
    sys.exit(0 if card.passed else 1)


def _available_kinds(kinds: tuple[Any, ...], database: str) -> tuple[Any, ...]:
    """Return the kinds that can happen here, and print why the others cannot."""
    unavailable = {kind: reason for kind in kinds if (reason := unavailable_reason(kind, database)) is not None}
    for kind, reason in unavailable.items():
        echo(f"{kind} is left out: {reason}.", err=True)
    return tuple(kind for kind in kinds if kind not in unavailable)


def _repeat_command(context: click.Context, seed: int) -> str:
    """Return the command that repeats this drill."""
    words = ["--seed", str(seed)]
    for option in context.command.params:
        name = option.name or ""
        if name in ("seed", "keep", "json_file") or _is_default(context, name):
            continue
        value = context.params[name]
        words += [option.opts[0], ",".join(value) if isinstance(value, tuple) else str(value)]
    return f"make drill DRILL_ARGS={shlex.quote(shlex.join(words))}"


def _is_default(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.DEFAULT


if __name__ == "__main__":
    drill(prog_name="python -m tools.drill")
