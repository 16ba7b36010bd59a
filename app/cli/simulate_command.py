"""The command `slotkeeper simulate`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from app.cli.output import json_option, print_json
from app.terminal import console, echo
from slotkeeper.registry.policies import list_names

if TYPE_CHECKING:
    from app.simulate.scenario import Scenario
    from app.simulate.simulation import Progress

_AGAIN_S = 0.01

_LOAD = (
    "duration",
    "busy",
    "rate",
    "swing",
    "tenants",
    "zipf",
    "bursts_per_day",
    "outages_per_day",
    "start_latency",
    "swap",
)


@dataclass(frozen=True, slots=True)
class _Case:
    """What is simulated, and how it is called."""

    title: str
    scenarios: list["Scenario"]


class _Priorities(click.ParamType):
    name = "priority=share,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.replace("=", ":").partition(":") for part in value.split(",")]
        try:
            return {int(priority): float(share or 1) for priority, _, share in pairs}
        except ValueError:
            return self.fail(f"{value!r} is no mix of priorities; write for example 1:1,5:8,9:1", param, ctx)


_OPTIONS = (
    click.option("--policy", "policies", multiple=True, metavar="NAME", help=f"{list_names()}; again: compare."),
    click.option("--slots", multiple=True, metavar="N", help="Slots in all, or SERVER=N,...; again: compare."),
    click.option("--speed-up", "speed_ups", multiple=True, metavar="X", help="Jobs run X times as fast; or MODEL=X."),
    click.option("--set", "settings", multiple=True, metavar="MODEL.FIELD=VALUE", help="Configure a model; * is all."),
    click.option("--load", "file", type=click.Path(path_type=Path), help="TOML or JSON that describes the load."),
    click.option("--from-record", metavar="WHEN", help="The record's load: yesterday, 2026-01-05, or FROM..TO (UTC)."),
    click.option("--seed", type=int, help="Another seed, other chances.  [default: 1]"),
    click.option("--duration", metavar="TIME", help="How long jobs arrive: 90m, 24h, 7d.  [default: 24h]"),
    click.option(
        "--busy", type=float, help="Work that arrives, as a multiple of what the slots can do.  [default: 0.9]"
    ),
    click.option("--rate", type=float, help="Jobs per hour, instead of --busy."),
    click.option("--models", type=click.IntRange(1, 1000), help="So many models.  [default: 1]"),
    click.option("--shared", is_flag=True, help="Every server serves all models."),
    click.option(
        "--servers", type=click.IntRange(1, 10_000), help="Servers of each model, or shared ones.  [default: 2]"
    ),
    click.option("--mean", metavar="TIME", help="Mean run time of a job.  [default: 20s]"),
    click.option("--spread", type=float, help="Standard deviation over mean of run times.  [default: 1]"),
    click.option("--tenants", type=int, help="How many tenants.  [default: 20]"),
    click.option("--zipf", type=float, help="How unequal their demand is; 0: equal.  [default: 1]"),
    click.option("--priorities", "priorities", type=_Priorities(), help="Mix of priorities.  [default: 1:1,5:8,9:1]"),
    click.option("--swing", type=float, help="How much the rate rises by day, 0 to 1.  [default: 0]"),
    click.option("--bursts", "bursts_per_day", type=float, help="Bursts of 200 jobs a day.  [default: 0]"),
    click.option("--outages", "outages_per_day", type=float, help="Outages a day of each server.  [default: 0]"),
    click.option("--start-latency", metavar="TIME", help="From an offer to the start.  [default: 0]"),
    click.option("--swap", metavar="TIME", help="What loading another model costs a server.  [default: 0]"),
    click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Write SVG files into this folder."),
)


def _options(command: Any) -> Any:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@_options
@json_option
def simulate(policies: Sequence[str], slots: Sequence[str], plots: Path | None, as_json: bool, **wishes: Any) -> None:
    """Simulate a day or a week of jobs in seconds.

    Jobs of a generated or a recorded load pass through the same policies and scripts as in production, with a queue in
    memory and a simulated clock.  The command changes nothing in your installation; --from-record only reads.

    \b
      slotkeeper simulate --policy fifo --policy fair --busy 1.1
      slotkeeper simulate --from-record yesterday --slots 12 --slots 16
      slotkeeper simulate --load load.toml --set demo.tier_head_start=30 --plots plots

    The same seed gives the same figures.  See docs/how-to/simulator.md for the file's fields.
    """
    from app.simulate import plots as drawings
    from app.simulate import run, summarize
    from app.simulate.simulated_catalog import Variant
    from app.simulate.terminal_report import show

    with _friendly_errors(), _stoppable():
        variants = [
            Variant(policy, count, wishes["settings"], wishes["speed_ups"])
            for policy, count in product(policies or (None,), slots or (None,))
        ]
        case = _recorded(variants, wishes) if wishes["from_record"] else _generated(variants, wishes)
        with _progress(sum(len(scenario.arrivals) for scenario in case.scenarios)) as progress:
            outcomes = [run(scenario, progress=progress) for scenario in case.scenarios]
        found = [summarize(outcome) for outcome in outcomes]
        written = drawings.write(plots, found, outcomes) if plots else []
    if as_json:
        print_json({"load": case.title, "variants": [summary.data() for summary in found]})
        return
    out = console()
    out.print(case.title)
    show(out, found, outcomes)
    for path in written:
        out.print(f"{path}")


def _generated(variants: Sequence[Any], wishes: dict[str, Any]) -> _Case:
    from app.simulate import generated_load, load_plan, simulated_catalog
    from app.simulate.scenario import Scenario

    made = load_plan.read_plan(wishes["file"], _plan_fields(wishes))
    catalogs = [simulated_catalog.apply_variant(simulated_catalog.from_plan(made), changes) for changes in variants]
    first = sum(server.slots for server in catalogs[0].servers.values())
    arrivals = generated_load.generate_arrivals(made, first)
    end_ms = generated_load.BEGIN_MS + int(made.duration * 1000)
    outages, latency, swap = (
        generated_load.generate_outages(made),
        int(made.start_latency * 1000),
        int(made.swap * 1000),
    )
    scenarios = []
    for changes, catalog in zip(variants, catalogs, strict=True):
        coming = simulated_catalog.scale_run_times(arrivals, catalog.models, changes.speed_ups)
        scenarios.append(
            Scenario(coming, catalog, generated_load.BEGIN_MS, end_ms, outages, latency, swap, changes.name)
        )
    from app.simulate.terminal_report import duration

    tenants = len({arrival.tenant for arrival in arrivals})
    return _Case(
        f"{len(arrivals):,} jobs of {tenants} tenants in {duration(made.duration)}, seed {made.seed}", scenarios
    )


def _recorded(variants: Sequence[Any], wishes: dict[str, Any]) -> _Case:
    from datetime import UTC, datetime

    from app.simulate import load_plan, recorded_load, simulated_catalog
    from app.simulate.scenario import Scenario
    from slotkeeper.config import StorageSettings

    given = sorted(set(_plan_fields(wishes)) - {"seed", "start_latency", "swap"}) + ["load"] * bool(wishes["file"])
    if given:
        raise click.UsageError(f"--from-record does not go with --{given[0].replace('_', '-')}: leave one out.")
    made = load_plan.read_plan(None, _plan_fields(wishes))
    begin_ms, end_ms = recorded_load.parse_window(wishes["from_record"], datetime.now(UTC))
    with recorded_load.open_database(StorageSettings().sqlalchemy_url) as record:
        found = recorded_load.read_recorded_load(record, begin_ms, end_ms, made.seed)
    latency, swap = int(made.start_latency * 1000), int(made.swap * 1000)
    scenarios = []
    for changes in variants:
        catalog = simulated_catalog.apply_variant(found.catalog, changes)
        coming = simulated_catalog.scale_run_times(found.arrivals, catalog.models, changes.speed_ups)
        scenarios.append(Scenario(coming, catalog, begin_ms, end_ms, (), latency, swap, changes.name))
    days = " to ".join(f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M}" for ms in (begin_ms, end_ms))
    notes = [f"{found.drawn:,} had not ended and run as long as others"] * bool(found.drawn)
    notes += [f"{found.unknown:,} of models that are gone are left out"] * bool(found.unknown)
    return _Case("; ".join([f"{len(found.arrivals):,} recorded jobs, {days} UTC", *notes]), scenarios)


def _plan_fields(wishes: dict[str, Any]) -> dict[str, Any]:
    """The fields of the plan that options set."""
    fields = {name: wishes[name] for name in (*_LOAD, "seed", "priorities") if wishes[name] is not None}
    shape = {name: wishes[name] for name in ("mean", "spread") if wishes[name] is not None}
    makes_fleet = wishes["models"] or wishes["servers"] or wishes["shared"]
    if not (shape or makes_fleet):
        return fields
    if wishes["file"]:
        given = {**shape, **{name: wishes[name] for name in ("models", "servers", "shared") if wishes[name]}}
        name = next(iter(given))
        raise click.UsageError(f"--{name} does not go with --load: write it into the file.")
    names = [f"model{n}" for n in range(1, wishes["models"] + 1)] if (wishes["models"] or 1) > 1 else ["demo"]
    fields["models"] = [{"name": name, **shape} for name in names]
    served = [(f"{name}-", [name]) for name in names] if not wishes["shared"] else [("", names)]
    fields["servers"] = [
        {"name": f"{prefix}gpu{n}", "slots": 8, "models": models}
        for prefix, models in served
        for n in range(1, (wishes["servers"] or 2) + 1)
    ]
    return fields


@contextmanager
def _friendly_errors() -> Iterator[None]:
    """Turn errors into one sentence; exit status 2 for wrong usage, 1 for other errors."""
    from redis.exceptions import RedisError

    from app.simulate.scenario import SimulationError
    from slotkeeper.errors import SlotkeeperError

    try:
        yield
    except SimulationError as error:
        raise click.UsageError(str(error)) from error
    except SlotkeeperError as error:
        raise click.ClickException(error.detail) from error
    except RedisError as error:
        raise click.ClickException(f"The simulation broke off: {error}") from error


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP end the simulation as Ctrl-C does; a second signal does not disturb the cleaning up."""
    import signal

    from app.up.signals import STOPPING

    def stop(number: int, _: object) -> None:
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    def stop_again(lost: "sys.UnraisableHookArgs") -> None:
        """An object was just being destroyed, and Python drops what is raised there."""
        if lost.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            hook(lost)

    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGALRM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN or number == signal.SIGINT:
            signal.signal(number, stop)
    hook, sys.unraisablehook = sys.unraisablehook, stop_again
    try:
        yield
    except KeyboardInterrupt:
        echo("Stopped; nothing is left running.", err=True)
        sys.exit(130)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(jobs: int) -> Iterator["Progress"]:
    """Yield a function that advances a progress bar, which is shown if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress as Bar

    with Bar(console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=jobs)
        yield lambda count: bar.advance(task, count)
