"""Real inference servers of other projects: their packages, how each is started, and how its jobs should end.

The newest release of each is installed from the registry into a separate virtual environment.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from app.up.ports import free_port
from routing.dispatch.outcome import OutcomeKind
from slotkeeper.state_folder import make_private_folder
from tasks.servers.probe import GENERIC

REPO = Path(__file__).resolve().parents[3]
APPS = Path(__file__).parent / "apps"
VENVS = Path(os.environ.get("SLOTKEEPER_LIVE_HOME") or REPO / "var" / "live")
SCENE = "scene"  # the property of a test that holds its line in the table server × scene
_STARTS_WITHIN_S = 120.0
_ENDS_WITHIN_S = 15


def prompt(word: str, sleep: float = 0) -> dict[str, Any]:
    return {"prompt": word, **({"sleep": sleep} if sleep else {})}


def tensor(number: float) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [number]}]}


def data(word: str, sleep: float = 0) -> dict[str, Any]:
    return {"data": [word, sleep]}


@dataclass(frozen=True)
class Live:
    """A server: its package, how it is started, and how its jobs should end.

    `payloads`: by name: good, wrong, boom (an error of the model), slow (two seconds).  `becomes`: their outcomes.
    """

    preset: str
    package: str
    command: tuple[str, ...]  # in bin of the virtual environment; {port}: the port
    path: str
    ready: str
    payloads: dict[str, Any]
    becomes: dict[str, OutcomeKind]
    result: Any
    folder: str = "."
    env: dict[str, str] = field(default_factory=dict)
    when_full: OutcomeKind = OutcomeKind.DONE  # for a server that queues requests
    cancels: bool = False
    recognized: bool = True
    described: dict[str, Any] | None = (
        None  # the description that a new user writes, from docs/reference/descriptions.md; None: the preset
    )

    def __str__(self) -> str:
        return f"{self.preset}-{self.package.partition('[')[0]}"


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "parrot", "messages": [{"role": "user", "content": content}], "stream": True, **more}


def tokens(count: int) -> dict[str, Any]:
    """What llama.cpp goes on with for so many tokens, or as many as its context holds."""
    return {"prompt": "Once upon a time", "max_tokens": count, "stream": True}


LLAMA_CONTEXT = 32_768
NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
WORDS = {"good": prompt("a cat"), "wrong": {"nope": 1}, "boom": prompt("boom"), "slow": prompt("slow", 2)}
NUMBERS = {"good": tensor(1.0), "wrong": {"nope": 1}, "boom": tensor(-1.0), "slow": tensor(102.0)}
FINAL = {"wrong": OutcomeKind.FAILED, "boom": OutcomeKind.RETRY}
COSTS_A_RETRY = {"wrong": OutcomeKind.RETRY, "boom": OutcomeKind.RETRY}
PAINTED = {"image": "A CAT"}

POTASSIUM: dict[str, Any] = {
    "mode": "sync",
    "submit": {"result": "", "rules": [{"if": {"status": "2xx"}, "then": "done"}]},
    "cancel": None,
    "health": {
        "path": "/__status__",
        "active": None,
        "job_ids": None,
        "rules": [{"if": {"pointer": "/gpu_available", "value": False}, "then": "busy"}],
    },
}
LANGSERVE: dict[str, Any] = {
    "mode": "sync",
    "submit": {
        "path": "{{endpoint}}/stream",
        "body": {"input": "{{payload/text}}"},
        "stream": {
            "piece": "",
            "join": "text",
            "rules": [
                {"if": {"event": "metadata"}, "then": "skip"},
                {"if": {"event": "error"}, "then": "retry"},
                {"if": {"event": "end"}, "then": "end"},
            ],
        },
    },
    "cancel": None,
    "health": {"path": "{{endpoint}}/input_schema", "active": None, "job_ids": None},
}

SERVERS = [
    Live("litserve", "litserve", ("python", "litserve_app.py"), "/predict", "/health", WORDS, COSTS_A_RETRY, PAINTED),
    Live(
        "openai-chat",
        "litserve",
        ("python", "litserve_openai.py"),
        "/v1/chat/completions",
        "/health",
        {"good": chat("a cat"), "wrong": {"nope": 1}, "boom": chat("boom"), "slow": chat("slow")},
        FINAL,
        {"output": "a cat", "finish_reason": "stop", "usage": NO_USAGE},
        recognized=False,
    ),
    Live(
        "openai-chat",
        "xllamacpp",
        ("python", "llama_app.py"),
        "/v1/chat/completions",
        "/health",
        {
            "good": chat("a cat", max_tokens=8),
            "wrong": {"nope": 1},
            "boom": chat("cat" * LLAMA_CONTEXT, max_tokens=8),
            "slow": chat("a cat", max_tokens=4000),
        },
        FINAL | {"boom": OutcomeKind.FAILED},
        None,
    ),
    Live(
        "openai-completions",
        "xllamacpp",
        ("python", "llama_app.py"),
        "/v1/completions",
        "/health",
        {
            "good": tokens(8) | {"stream": False},
            "wrong": {"nope": 1},
            "boom": {"prompt": "cat" * LLAMA_CONTEXT},
            "slow": tokens(4000),
        },
        FINAL | {"boom": OutcomeKind.FAILED},
        None,
    ),
    Live(
        "openai-embeddings",
        "xllamacpp",
        ("python", "llama_app.py", "embedding"),
        "/v1/embeddings",
        "/health",
        {"good": {"input": "a cat"}, "wrong": {"nope": 1}, "boom": {"input": 7}, "slow": {"input": "cat" * 100}},
        FINAL | {"boom": OutcomeKind.FAILED},
        None,
    ),
    Live(
        "bentoml",
        "bentoml",
        ("bentoml", "serve", "bentoml_app:Cat", "--port", "{port}", "--host", "127.0.0.1"),
        "/generate",
        "/readyz",
        WORDS,
        FINAL,
        PAINTED,
        when_full=OutcomeKind.BUSY,
    ),
    Live(
        "bentoml-task",
        "bentoml",
        ("bentoml", "serve", "bentoml_app:Cat", "--port", "{port}", "--host", "127.0.0.1"),
        "/paint",
        "/readyz",
        WORDS,
        COSTS_A_RETRY,
        PAINTED,
        when_full=OutcomeKind.BUSY,
    ),
    Live(
        "cog",
        "cog",
        ("python", "-m", "cog.server.http", "--host", "127.0.0.1"),
        "",
        "/health-check",
        WORDS,
        COSTS_A_RETRY,
        "A CAT",
        env={"COG_PREDICT_TYPE_STUB": "cog_app.py:Predictor"},
        when_full=OutcomeKind.BUSY,
        cancels=True,
    ),
    Live(
        "open-inference-v2",
        "mlserver",
        ("mlserver", "start", "."),
        "/v2/models/cat",
        "/v2/models/cat/ready",
        NUMBERS,
        FINAL,
        None,
        folder="mlserver",
        env={"MLSERVER_HTTP_PORT": "{port}", "MLSERVER_PARALLEL_WORKERS": "0", "MLSERVER_HOST": "127.0.0.1"},
    ),
    Live(
        "runpod-worker",
        "runpod",
        ("python", "runpod_app.py", "--rp_serve_api", "--rp_api_host", "127.0.0.1", "--rp_api_port", "{port}"),
        "",
        "/openapi.json",
        WORDS,
        COSTS_A_RETRY,
        PAINTED,
    ),
    Live(
        GENERIC,
        "mosec",
        ("python", "mosec_app.py", "--port", "{port}", "--address", "127.0.0.1", "--timeout", "30000"),
        "/inference",
        "/",
        WORDS,
        FINAL,
        PAINTED,
    ),
    Live(
        GENERIC,
        "starlette",
        ("python", "starlette_app.py"),
        "/predict",
        "/",
        WORDS,
        FINAL,
        PAINTED,
    ),
    Live(
        "gradio",
        "gradio",
        ("python", "gradio_app.py"),
        "/gradio_api/run/paint",
        "/gradio_api/info",
        {"good": data("a cat"), "wrong": {"nope": 1}, "boom": data("boom"), "slow": data("slow", 2)},
        FINAL,
        [PAINTED],
    ),
    Live(GENERIC, "fastapi", ("python", "fastapi_app.py"), "/predict", "/docs", WORDS, FINAL, PAINTED),
]
SERVERS += [
    Live(
        "described",
        "potassium",
        ("python", "potassium_app.py"),
        "/",
        "/__status__",
        WORDS,
        COSTS_A_RETRY,
        PAINTED,
        recognized=False,
        described=POTASSIUM,
    ),
    Live(
        "described",
        "langserve",
        ("python", "langserve_app.py"),
        "/parrot",
        "/parrot/input_schema",
        {"good": {"text": "a cat"}, "wrong": {"nope": 1}, "boom": {"text": "boom"}, "slow": {"text": "slow"}},
        FINAL,
        "a cat ",
        recognized=False,
        described=LANGSERVE,
    ),
]
_ALSO = {
    "starlette": ["uvicorn"],
    "fastapi": ["uvicorn"],
    "xllamacpp": ["gguf", "numpy"],
    "langserve": ["sse-starlette", "fastapi", "uvicorn"],
}


def wanted() -> list[Live]:
    """Those that LIVE names, by preset or package; without it, all."""
    names = set(os.environ.get("LIVE", "").split())
    return [one for one in SERVERS if not names or names & {one.preset, one.package}]


def installed(package: str) -> Path:
    """The virtual environment's bin."""
    make_private_folder(VENVS.parent)  # It may be the home of an installation, which only its owner may read.
    home = VENVS / package
    done = home / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "pip"), "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, package, *_ALSO.get(package, [])], check=True)
        done.touch()
    return home / "bin"


@contextmanager
def started(live: Live, binaries: Path) -> Iterator[str]:
    port = free_port()
    child = launch(live, binaries, port)
    try:
        wait_until_ready(live, port, child)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(child)


def launch(live: Live, binaries: Path, port: int, **more: str) -> "subprocess.Popen[bytes]":
    """Start the server in a separate process group; `more` is added to its environment."""
    command = [part.replace("{port}", str(port)) for part in live.command]
    env = {name: value.replace("{port}", str(port)) for name, value in live.env.items()}
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [str(binaries / command[0]), *command[1:]],
        cwd=APPS / live.folder,
        env={**os.environ, "PATH": path, "PORT": str(port), "PYTHONPATH": "", **env, **more},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_until_ready(live: Live, port: int, child: "subprocess.Popen[bytes]") -> None:
    _wait_for(f"http://127.0.0.1:{port}{live.ready}", child)


def stop(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()  # Some servers start processes in separate sessions, which only they can end.
    with suppress(subprocess.TimeoutExpired):
        child.wait(_ENDS_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _wait_for(url: str, child: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < deadline:
        assert child.poll() is None, f"the server ended with {child.returncode}"
        try:
            answer = requests.get(url, timeout=2)
            if answer.status_code < 500 and "STARTING" not in answer.text:
                return
        except requests.RequestException:
            pass
        time.sleep(0.2)
    pytest.fail(f"{url} did not answer within {_STARTS_WITHIN_S:g} s")
