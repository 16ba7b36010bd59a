"""The command `slotkeeper simulate`."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from app.cli.output import json_option, print_json
from app.terminal import console
from slotkeeper.registry.policies import list_names

if TYPE_CHECKING:
    from app.simulate.scenario import Scenario
    from app.simulate.simulation import Progress

_RETRY_INTERRUPT_S = 0.01
_PLAN_FIELDS = (
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
    """The scenarios to simulate, and the title of the output."""

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
            return self.fail(f"{value!r} is not a mix of priorities; write for example 1:1,5:8,9:1", param, ctx)


_OPTIONS = (
    click.option("--policy", "policies", multiple=True, metavar="NAME", help=f"{list_names()}; repeat it to compare."),
    click.option("--slots", multiple=True, metavar="N", help="Total slots, or SERVER=N,...; repeat it to compare."),
    click.option("--speed-up", "speed_ups", multiple=True, metavar="X", help="Run jobs X times as fast; or MODEL=X."),
    click.option(
        "--set", "settings", multiple=True, metavar="MODEL.FIELD=VALUE", help="Change a setting; * means all models."
    ),
    click.option("--load", "file", type=click.Path(path_type=Path), help="TOML or JSON that describes the load."),
    click.option("--from-record", metavar="WHEN", help="Stored load: yesterday, 2026-01-05, or FROM..TO (UTC)."),
    click.option("--seed", type=int, help="Seed of the random numbers.  [default: 1]"),
    click.option("--duration", metavar="TIME", help="Time in which jobs arrive: 90m, 24h, 7d.  [default: 24h]"),
    click.option(
        "--busy", type=float, help="Work that arrives, as a multiple of what the slots can do.  [default: 0.9]"
    ),
    click.option("--rate", type=float, help="Jobs per hour, instead of --busy."),
    click.option("--models", type=click.IntRange(1, 1000), help="Number of models.  [default: 1]"),
    click.option("--shared", is_flag=True, help="Every server serves all models."),
    click.option(
        "--servers", type=click.IntRange(1, 10_000), help="Number of servers, of each model or shared.  [default: 2]"
    ),
    click.option("--mean", metavar="TIME", help="Mean run time of a job.  [default: 20s]"),
    click.option("--spread", type=float, help="Standard deviation of run times, divided by their mean.  [default: 1]"),
    click.option("--tenants", type=int, help="Number of tenants.  [default: 20]"),
    click.option("--zipf", type=float, help="How unequal their demand is; 0: equal.  [default: 1]"),
    click.option("--priorities", "priorities", type=_Priorities(), help="Mix of priorities.  [default: 1:1,5:8,9:1]"),
    click.option("--swing", type=float, help="Daily variation of the rate, 0 to 1.  [default: 0]"),
    click.option("--bursts", "bursts_per_day", type=float, help="Bursts of 200 jobs per day.  [default: 0]"),
    click.option("--outages", "outages_per_day", type=float, help="Outages of each server per day.  [default: 0]"),
    click.option("--start-latency", metavar="TIME", help="Time from an offer to the start.  [default: 0]"),
    click.option("--swap", metavar="TIME", help="Time to load another model on a server.  [default: 0]"),
    click.option(
        "--plots",
        type=click.Path(file_okay=False, path_type=Path),
        help="Draw SVG files into this folder (needs matplotlib).",
    ),
)


def _add_options(command: Any) -> Any:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@_add_options
@json_option
def simulate(policies: Sequence[str], slots: Sequence[str], plots: Path | None, as_json: bool, **options: Any) -> None:
    """Simulate a day or a week of jobs in seconds.

    Jobs of a generated or a recorded load pass through the same policies and scripts as in production, with a queue in
    memory and a simulated clock.  The command changes nothing in your installation; --from-record only reads.

    \b
      slotkeeper simulate --policy fifo --policy fair --busy 1.1
      slotkeeper simulate --from-record yesterday --slots 12 --slots 16
      slotkeeper simulate --load load.toml --set demo.tier_head_start=30 --plots plots

    The same seed gives the same figures.  See docs/how-to/simulator.md for the file's fields.
    """
    from app.simulate import plots as plot_files
    from app.simulate import run, summarize
    from app.simulate.simulated_catalog import Variant
    from app.simulate.terminal_report import show

    with _errors_as_sentences(), _no_interrupt_lost():
        variants = [
            Variant(policy, count, options["settings"], options["speed_ups"])
            for policy, count in product(policies or (None,), slots or (None,))
        ]
        case = _recorded_case(variants, options) if options["from_record"] else _generated_case(variants, options)
        with _progress(sum(len(scenario.arrivals) for scenario in case.scenarios)) as progress:
            outcomes = [run(scenario, progress=progress) for scenario in case.scenarios]
        summaries = [summarize(outcome) for outcome in outcomes]
        written = plot_files.write(plots, summaries, outcomes) if plots else []
    if as_json:
        print_json({"load": case.title, "variants": [summary.data() for summary in summaries]})
        return
    out = console()
    out.print(case.title)
    show(out, summaries, outcomes)
    for path in written:
        out.print(f"{path}")


def _generated_case(variants: Sequence[Any], options: dict[str, Any]) -> _Case:
    from app.simulate import generated_load, load_plan, simulated_catalog
    from app.simulate.scenario import Scenario

    plan = load_plan.read_plan(options["file"], _plan_fields(options))
    catalogs = [simulated_catalog.apply_variant(simulated_catalog.from_plan(plan), changes) for changes in variants]
    slots = sum(server.slots for server in catalogs[0].servers.values())
    arrivals = generated_load.generate_arrivals(plan, slots)
    end_ms = generated_load.BEGIN_MS + int(plan.duration * 1000)
    outages, latency, swap = (
        generated_load.generate_outages(plan),
        int(plan.start_latency * 1000),
        int(plan.swap * 1000),
    )
    scenarios = []
    for changes, catalog in zip(variants, catalogs, strict=True):
        scaled = simulated_catalog.scale_run_times(arrivals, catalog.models, changes.speed_ups)
        scenarios.append(
            Scenario(scaled, catalog, generated_load.BEGIN_MS, end_ms, outages, latency, swap, changes.name)
        )
    from app.simulate.terminal_report import duration

    tenants = len({arrival.tenant for arrival in arrivals})
    return _Case(
        f"{len(arrivals):,} jobs of {tenants} tenants in {duration(plan.duration)}, seed {plan.seed}", scenarios
    )


def _recorded_case(variants: Sequence[Any], options: dict[str, Any]) -> _Case:
    from datetime import UTC, datetime

    from app.simulate import load_plan, recorded_load, simulated_catalog
    from app.simulate.scenario import Scenario
    from slotkeeper.config import StorageSettings

    given = sorted(set(_plan_fields(options)) - {"seed", "start_latency", "swap"}) + ["load"] * bool(options["file"])
    if given:
        raise click.UsageError(f"--from-record does not go with --{given[0].replace('_', '-')}: leave one out.")
    plan = load_plan.read_plan(None, _plan_fields(options))
    begin_ms, end_ms = recorded_load.parse_window(options["from_record"], datetime.now(UTC))
    with recorded_load.open_database(StorageSettings().sqlalchemy_url) as record:
        load = recorded_load.read_recorded_load(record, begin_ms, end_ms, plan.seed)
    latency, swap = int(plan.start_latency * 1000), int(plan.swap * 1000)
    scenarios = []
    for changes in variants:
        catalog = simulated_catalog.apply_variant(load.catalog, changes)
        scaled = simulated_catalog.scale_run_times(load.arrivals, catalog.models, changes.speed_ups)
        scenarios.append(Scenario(scaled, catalog, begin_ms, end_ms, (), latency, swap, changes.name))
    days = " to ".join(f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M}" for ms in (begin_ms, end_ms))
    notes = [f"{load.drawn:,} had not ended and run as long as others"] * bool(load.drawn)
    notes += [f"{load.unknown:,} of models that are gone are left out"] * bool(load.unknown)
    return _Case("; ".join([f"{len(load.arrivals):,} recorded jobs, {days} UTC", *notes]), scenarios)


def _plan_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the load plan that the options set.  Raises UsageError."""
    fields = {name: options[name] for name in (*_PLAN_FIELDS, "seed", "priorities") if options[name] is not None}
    run_times = {name: options[name] for name in ("mean", "spread") if options[name] is not None}
    has_fleet = options["models"] or options["servers"] or options["shared"]
    if not (run_times or has_fleet):
        return fields
    if options["file"]:
        given = {**run_times, **{name: options[name] for name in ("models", "servers", "shared") if options[name]}}
        name = next(iter(given))
        raise click.UsageError(f"--{name} does not go with --load: write it into the file.")
    names = [f"model{n}" for n in range(1, options["models"] + 1)] if (options["models"] or 1) > 1 else ["demo"]
    fields["models"] = [{"name": name, **run_times} for name in names]
    groups = [(f"{name}-", [name]) for name in names] if not options["shared"] else [("", names)]
    fields["servers"] = [
        {"name": f"{prefix}gpu{n}", "slots": 8, "models": models}
        for prefix, models in groups
        for n in range(1, (options["servers"] or 2) + 1)
    ]
    return fields


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
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
        raise click.ClickException(f"The simulation failed: {error}") from error


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Context manager: raise the exception of Ctrl-C again if a destructor or an import has discarded it."""

    def raise_later(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, _RETRY_INTERRUPT_S)  # outside of the destructor
        else:
            former_hook(unraisable)

    former_handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    former_hook, sys.unraisablehook = sys.unraisablehook, raise_later
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = former_hook
        signal.signal(signal.SIGALRM, former_handler)


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
