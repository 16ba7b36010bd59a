"""The command line of the simulator."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli.__main__ import main
from app.cli.simulate_command import _no_interrupt_lost
from slotkeeper.clock import now_ms
from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore
from slotkeeper.registry.catalog import Catalog
from tests.app.simulate.scenarios import POLICIES
from tests.app.up.tiny_programs import until
from tests.support.builders import a_queued_job, a_start
from tests.support.ends import store_end

pytestmark = pytest.mark.usefixtures("simulator")
SMALL = ("--rate", "600", "--duration", "30m")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *words])


def test_the_command_compares_policies_in_one_table():
    done = run(*SMALL, "--policy", "fifo", "--policy", "priority", "--mean", "1m")
    assert (done.exit_code, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["fifo", "priority"] in rows
    for label in ("jobs", "p99", "longest", "priority", "heavy"):
        assert next(row for row in rows if row[:1] == [label])
    assert "seed 1" in done.stdout.splitlines()[0]


def test_four_policies_fit_a_terminal_of_80_columns():
    done = run(*SMALL, "--mean", "2m", *(word for policy in POLICIES for word in ("--policy", policy)))
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80


def test_the_command_compares_numbers_of_slots_under_the_same_load():
    done = run(*SMALL, "--slots", "4", "--slots", "8", "--policy", "fifo", "--mean", "30s", "--json")
    few, many = json.loads(done.stdout)["variants"]
    assert (few["name"], many["name"]) == ("fifo, 4 slots", "fifo, 8 slots")
    assert (few["slots"], many["slots"]) == (4, 8)
    assert few["waits"]["jobs"] == many["waits"]["jobs"]
    assert few["waits"]["mean"] > many["waits"]["mean"]


def test_the_same_seed_prints_the_same():
    assert run(*SMALL, "--seed", "9").stdout == run(*SMALL, "--seed", "9").stdout
    assert run(*SMALL, "--seed", "9", "--json").stdout != run(*SMALL, "--seed", "10", "--json").stdout


def test_a_speed_up_and_settings_are_played(tmp_path):
    slow, fast = (
        json.loads(run(*SMALL, "--mean", "90s", *more, "--json").stdout) for more in ((), ("--speed-up", "2"))
    )
    assert fast["variants"][0]["use"] == pytest.approx(slow["variants"][0]["use"] / 2, rel=0.1)
    assert run(*SMALL, "--set", "demo.max_retries=3").exit_code == 0


def test_plots_are_written(tmp_path):
    done = run(*SMALL, "--plots", str(tmp_path / "plots"))
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "distribution.svg",
        "use.svg",
        "waiting.svg",
        "waits.svg",
    ]
    assert "waits.svg" in done.stdout


def test_several_models_on_shared_servers_swap():
    done = run(*SMALL, "--models", "3", "--shared", "--servers", "2", "--swap", "5s", "--json")
    figures = json.loads(done.stdout)["variants"][0]
    assert sorted(figures["models"]) == ["model1", "model2", "model3"]
    assert figures["swaps"] > 0 and figures["slots"] == 16


def test_a_file_is_played_and_an_option_changes_it(tmp_path):
    file = tmp_path / "load.toml"
    file.write_text('rate = 100\nduration = "1h"\nseed = 4\n[[models]]\nname = "flux"\nconfig = {policy = "fifo"}\n')
    done = run("--load", str(file), "--tenants", "3")
    assert done.exit_code == 0
    assert "of 3 tenants in 60.0 min" not in done.stderr and "seed 4" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--policy", "random"), "policy"),
        (("--busy", "-1"), "busy"),
        (("--duration", "soon"), "duration"),
        (("--slots", "many"), "--slots many"),
        (("--speed-up", "0"), "--speed-up 0"),
        (("--set", "demo.color=1"), "color"),
        (("--priorities", "1:a"), "mix of priorities"),
        (("--priorities", "10:1"), "priorities.10"),
        (("--load", "absent.toml"), "absent.toml cannot be read"),
        (("--from-record", "someday"), "--from-record someday"),
        (("--from-record", "today", "--busy", "1"), "--from-record does not go with --busy"),
        (("--from-record", "today", "--models", "2"), "--from-record does not go with --models"),
        (("--from-record", "today", "--load", "x.toml"), "--from-record does not go with --load"),
        (("--load", "x.toml", "--models", "2"), "--models does not go with --load"),
    ],
)
def test_wrong_input_is_one_sentence_and_status_2(words, says):
    done = run(*words)
    assert done.exit_code == 2, done.output
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert says in error
    assert done.stderr.strip().endswith(error)


def test_the_jobs_of_yesterday_are_simulated_from_the_database(sqlite_url, monkeypatch):
    yesterday = now_ms() // 86_400_000 * 86_400_000 - 43_200_000
    record = Database(sqlite_url)
    Catalog(record).register("zimg", "gpu1", "http://127.0.0.1:9/", 1, yesterday)
    store = JobStore(record)
    for n in range(20):
        job = a_queued_job(store, now_ms=yesterday + n * 1000)
        attempt = a_start(store, job.id, now_ms=yesterday + n * 10_000).attempt
        assert store_end(store, job.id, attempt, Reason.FINISHED, yesterday + (n + 1) * 10_000, result="{}")
    record.close()
    monkeypatch.setenv("SLOTKEEPER_DATABASE_URL", sqlite_url)
    done = run("--from-record", "yesterday", "--policy", "fifo", "--slots", "1", "--slots", "2", "--json")
    assert done.exit_code == 0, done.output
    one, two = json.loads(done.stdout)["variants"]
    assert one["waits"]["longest"] == 19 * 9
    assert two["waits"]["longest"] == 9 * 8


def test_a_missing_database_is_not_created(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path / "absent"))
    done = run("--from-record", "yesterday")
    assert done.exit_code == 2 and "There is no record at" in done.stderr
    assert not (tmp_path / "absent").exists()


def test_a_database_without_a_schema_is_refused_with_the_migrate_command(tmp_path, monkeypatch):
    (tmp_path / "record.db").touch()
    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    done = run("--from-record", "yesterday")
    assert done.exit_code == 2 and "slotkeeper migrate" in done.stderr


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket: that of `tmp_path` grows with each run of pytest."""
    with tempfile.TemporaryDirectory(prefix="sim-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_simulation_that_a_signal_ends_leaves_no_process(short_folder, number):
    words = [sys.executable, "-P", "-m", "app.cli", "simulate", "--rate", "20000", "--duration", "5h"]
    env = os.environ | {"TMPDIR": str(short_folder)}
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: valkey_below(short_folder) or process.poll() is not None, "a Valkey")
        assert process.poll() is None
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    until(lambda: valkey_below(short_folder) is None, "the end of the Valkey")
    if number == signal.SIGINT:
        # At some moments of Ctrl-C, Python dies by the signal instead, which a shell reports as 130, too.
        assert process.returncode in (130, -signal.SIGINT) and stderr in ("Interrupted.\n", "")
        assert list(short_folder.iterdir()) == []


class Dying:
    """Python discards whatever is raised while it destroys this."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_during_the_destruction_of_an_object_is_not_lost():
    with pytest.raises(KeyboardInterrupt), _no_interrupt_lost():
        Dying()
        until(lambda: False, "the interrupt")


def test_the_timer_that_repeats_an_interrupt_is_removed_after_the_simulation():
    handler = signal.getsignal(signal.SIGALRM)
    with suppress(KeyboardInterrupt), _no_interrupt_lost():
        Dying()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) is handler


def valkey_below(folder: Path) -> int | None:
    """A process that listens on a socket in this folder."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"unixsocket:{folder}/".encode() in entry.read_bytes():
                return int(entry.parent.name)
    return None
