"""The commands and programs of README and docs/ succeed in the order of their page, on a real installation."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import pytest

from app.up.ports import free_port
from tests.house.tree import REPO
from tests.support.installation import Installation
from tests.support.snippets import PAGES, RUNNABLE, Snippet, snippets, without_chance
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

_BIN = Path(sys.executable).parent
_DONE = "-- the snippet has ended --"
# A Python shell: blocks of one page share their names.
_PYTHON = f"""
import sys
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    exec(compile(open(line.strip()).read(), line.strip(), "exec"), names)
    print({_DONE!r}, flush=True)
"""
# Ports of programs that pages start, beside those of the installation.
_OTHER_PORTS = ("9000", "9001", "9002")


def runnable(page: Path) -> list[Snippet]:
    return [snippet for snippet in snippets(page) if snippet.language in RUNNABLE and snippet.not_run is None]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """What `make run` starts, which may send webhooks to this machine."""
    home = tmp_path_factory.mktemp("documents") / "var"
    installation = Installation(home, SLOTKEEPER_WEBHOOK_ALLOW="127.0.0.0/8")
    with installation.up() as up:
        up.says("Ctrl-C stops everything.")
        yield installation


class Reader:
    """Runs the snippets of one page in a new folder, with one shell, one Python shell and second terminals."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self._installation, self._folder = installation, folder
        (folder / ".venv").symlink_to(_BIN.parent)
        self._environment = {
            **installation.environment,
            "PATH": f"{_BIN}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }
        ports = {"8000": "PORT", "5555": "FLOWER_PORT", "6399": "REDIS_PORT"}
        self._ports = {shown: installation.ports[name] for shown, name in ports.items()}
        self._ports |= {shown: free_port() for shown in _OTHER_PORTS}
        self._started: list[subprocess.Popen[str]] = []
        self._servers = self._names("servers")
        self._shell: subprocess.Popen[str] | None = None
        self._python: subprocess.Popen[str] | None = None

    def run(self, snippet: Snippet) -> None:
        """Run one snippet to its end.  Raises AssertionError with its output if it fails."""
        numbers = "|".join(self._ports)
        code = re.sub(rf"\b({numbers})\b", lambda found: str(self._ports[found[0]]), snippet.code)
        file = self._folder / f"line-{snippet.line}.{snippet.language}"
        file.write_text(code)
        if snippet.until is not None:
            self._run_beside(snippet, file)
        elif snippet.language == "python":
            self._python = self._python or self._start([str(_BIN / "python"), "-c", _PYTHON])
            self._run_in(self._python, str(file), snippet)
        else:
            self._shell = self._shell or self._start(["bash", "-eEu", "-o", "pipefail"])
            self._run_in(self._shell, f"source {file} </dev/null; echo; echo '{_DONE}'", snippet)

    def close(self) -> None:
        """End what the page has started, and remove what it has registered."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for webhook in self._installation.ask("webhooks", "list")["webhooks"]:
            self._installation.run("webhooks", "remove", webhook["webhook"])
        for node in self._installation.ask("nodes", "list"):
            self._installation.run("nodes", "revoke", node["name"])
            self._installation.run("nodes", "remove", node["name"])
        for server in self._names("servers") - self._servers:
            self._installation.run("servers", "remove", server, "--force")

    def _names(self, kind: str) -> set[str]:
        return {found["server"] for found in self._installation.ask(kind, "list")[kind]}

    def _start(self, command: list[str], output: int | IO[str] = subprocess.PIPE) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def _run_in(self, process: "subprocess.Popen[str]", line: str, snippet: Snippet) -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        printed = []
        for output in process.stdout:
            if output.rstrip() == _DONE:
                if snippet.prints is not None:
                    assert without_chance("".join(printed)) == without_chance(snippet.prints), str(snippet)
                return
            printed.append(output)
        pytest.fail(f"{snippet} failed:\n{snippet.code}\n{''.join(printed)}")

    def _run_beside(self, snippet: Snippet, file: Path) -> None:
        program = ["bash", "-e"] if snippet.language == "sh" else [str(_BIN / "python")]
        output = file.with_suffix(".out")
        with open(output, "w") as written:
            process = self._start([*program, str(file)], written)
        eventually(lambda: str(snippet.until) in output.read_text() or process.poll() is not None, str(snippet), 30)
        assert process.poll() is None, f"{snippet} has ended:\n{output.read_text()}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if runnable(page)],
    ids=lambda page: page.name,
)
def test_the_commands_of_a_page_succeed(page: Path, installation: Installation, tmp_path: Path) -> None:
    reader = Reader(installation, tmp_path)
    with ExitStack() as stack:
        stack.callback(reader.close)
        for snippet in runnable(page):
            reader.run(snippet)


def test_the_tutorial_shows_what_the_start_prints(tmp_path: Path) -> None:
    page = REPO / "docs/tutorial/first-job.md"
    (start,) = (snippet for snippet in snippets(page) if snippet.code.strip() == "make run")
    installation = Installation(tmp_path / "var")
    with installation.up() as up:
        up.says("Ctrl-C stops everything.")
        printed = up.printed.replace(str(tmp_path / "var"), "var").replace(str(_BIN), ".venv/bin")
    assert without_chance(printed) == without_chance(str(start.prints))


def test_the_output_of_a_block_is_compared_with_the_documented_output(
    installation: Installation, tmp_path: Path
) -> None:
    reader = Reader(installation, tmp_path)
    with ExitStack() as stack:
        stack.callback(reader.close)
        reader.run(Snippet(PAGES[0], 7, "sh", "echo 3 jobs", None, None, "4 jobs\n"))
        with pytest.raises(AssertionError, match="jobs"):
            reader.run(Snippet(PAGES[0], 7, "sh", "echo 3 jobs", None, None, "3 servers\n"))


def test_a_snippet_that_fails_is_reported_with_its_file_and_line(installation: Installation, tmp_path: Path) -> None:
    for language, code in (("sh", "slotkeeper job no-such-job"), ("python", "import no_such_module")):
        folder = tmp_path / language
        folder.mkdir()
        reader = Reader(installation, folder)
        with (
            ExitStack() as stack,
            pytest.raises(pytest.fail.Exception, match=r"(?is)README\.md:7 failed.*(no such job|no module)"),
        ):
            stack.callback(reader.close)
            reader.run(Snippet(PAGES[0], 7, language, code, None, None))
