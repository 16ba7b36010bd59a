"""Measure what nodes cost: python -m tools.benchmarks.node_costs [NODES] [SECONDS] [JOBS].

gap        one slot runs JOBS (300) jobs of no duration, as a server and as a node: the time between two runs
busy       a server and a node with 200 slots run jobs of about 1 s for SECONDS (60): how much of their time the slots
           are used, and what processor time a run costs the gateway
large      a node returns a result of 60 MiB: how long that takes, the memory of the gateway, and how fast it answers
           for the node's health meanwhile
idle       NODES (2000) nodes connect from two other processes: memory and processor time of the gateway, and how long
           they take to come back when it was killed
"""

import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from app.up.ports import free_port
from slotkeeper import signatures
from slotkeeper.tunnel.frames import SUBPROTOCOL, FrameType, decode_control, encode_json_frame
from slotkeeper.tunnel.handshake import Hello
from tools.benchmarks.measuring import print_line
from tools.cluster.stack import Process, Stack, eventually, listens

_PROCESSES = 2
_TICKS_S = os.sysconf("SC_CLK_TCK")
_DECLARATION = '{"models":{"bench":{}},"slots":1,"labels":{}}'
_TOKENS_AT_ONCE = _JOBS_AT_ONCE = 1000
_BIND = "SLOTKEEPER_GATEWAY_BIND"
_FUNCTION, _LARGE_FUNCTION = "tools.drill.node_model:work", "tools.benchmarks.node_costs:return_much"
_BUSY_SLOTS = 200
_LARGE_BYTES = 60 << 20  # A result may have 64 MiB with all that belongs to it.


def _memory_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def _start_gateway(stack: Stack, port: int, name: str) -> Process:
    workers = f"127.0.0.1:{free_port()}"
    stack.env |= {"SLOTKEEPER_NODE_PORT": str(port), "SLOTKEEPER_NODE_MAX": "100000", _BIND: workers}
    process = stack.start(name, [sys.executable, "-P", "-m", "app.gateway"])
    process.source(lambda: listens(port), "it listens")
    return process


def _enroll(stack: Stack, count: int, first: int) -> list[tuple[str, bytes]]:
    """Enrol nodes over the API, and return the id and the private key of each."""
    made = list[tuple[str, bytes]]()
    session = requests.Session()
    while len(made) < count:
        uses = min(_TOKENS_AT_ONCE, count - len(made))
        body = {"pool": "bench", "uses": uses, "valid_s": 86_400}
        token = session.post(f"{stack.url}/nodes/tokens", json=body, timeout=30).json()["token"]
        for _ in range(uses):
            key = signatures.make_key()
            public = signatures.public_key_of(key)
            proof = signatures.sign(key, signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, public))
            node = {
                "token": token,
                "name": f"node-{first + len(made)}",
                "public_key": signatures.encode_bytes(public),
                "proof": signatures.encode_bytes(proof),
            }
            answer = session.post(f"{stack.url}/nodes/enroll", json=node, timeout=30)
            made.append((answer.json()["id"], signatures.encode_key(key)))
    return made


async def _stay(node: str, pem: bytes, port: int, connected: Any) -> None:
    """Be an idle agent, which connects again after a random pause."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key: Any = load_pem_private_key(pem, None)
    while True:
        with suppress(OSError, TimeoutError, WebSocketException):
            async with connect(
                f"ws://127.0.0.1:{port}",
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                compression=None,
                ping_interval=20,
                ping_timeout=60,
                open_timeout=30,
                max_queue=4,
            ) as websocket:
                challenge = decode_control(await websocket.recv())
                nonce = signatures.decode_bytes(challenge["nonce"])
                hello = Hello.signed(
                    key,
                    nonce,
                    node=node,
                    host="127.0.0.1",
                    instance="i",
                    agent="bench",
                    declaration=_DECLARATION.encode(),
                )
                await websocket.send(encode_json_frame(FrameType.CONTROL, 0, hello.message()))
                await websocket.recv()
                with connected.get_lock():
                    connected.value += 1
                try:
                    async for _ in websocket:
                        pass
                finally:
                    with connected.get_lock():
                        connected.value -= 1
        await asyncio.sleep(1 + int.from_bytes(os.urandom(2)) / 65_536 * 3)


def _be_agents(nodes: list[tuple[str, bytes]], port: int, connected: Any) -> None:
    async def run() -> None:
        await asyncio.gather(*(_stay(node, pem, port, connected) for node, pem in nodes))

    asyncio.run(run())


def _measure_idle(count: int, seconds: int) -> None:
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        stack.web()
        port, connected = free_port(), multiprocessing.Value("i", 0)
        gateway = _start_gateway(stack, port, "gateway")
        nodes = _enroll(stack, count, 0)
        before = _memory_kib(gateway.popen.pid)
        parts = [nodes[number::_PROCESSES] for number in range(_PROCESSES)]
        agents = [multiprocessing.Process(target=_be_agents, args=(part, port, connected)) for part in parts]
        began_s = time.monotonic()
        for agent in agents:
            agent.start()
        try:
            eventually(lambda: connected.value == count, "all nodes are connected", 300, 0.1)
            print_line(f"nodes connected: {count} in {time.monotonic() - began_s:.1f} s")
            time.sleep(5)
            after = _memory_kib(gateway.popen.pid)
            print_line(f"memory of the gateway for an idle node: {(after - before) / count:.1f} KiB")
            used_s, from_s = _processor_s(gateway.popen.pid), time.monotonic()
            time.sleep(seconds)
            share = (_processor_s(gateway.popen.pid) - used_s) / (time.monotonic() - from_s)
            print_line(f"processor time of the gateway with {count} idle nodes: {share:.1%} of a core")
            os.killpg(gateway.popen.pid, signal.SIGKILL)
            gateway.popen.wait()
            eventually(lambda: connected.value == 0, "all nodes have noticed it", 60)
            began_s = time.monotonic()
            _start_gateway(stack, port, "gateway2")
            eventually(lambda: connected.value == count, "all nodes are back", 300, 0.1)
            print_line(f"all nodes back after the gateway's death: {time.monotonic() - began_s:.1f} s")
        finally:
            for agent in agents:
                agent.kill()


def _gaps_ms(journal: Path) -> list[float]:
    runs = sorted((line["started_ns"], line["ended_ns"]) for line in map(json.loads, journal.read_text().splitlines()))
    return [(later[0] - earlier[1]) / 1e6 for earlier, later in pairwise(runs)]


def return_much(payload: dict[str, Any], context: Any) -> str:
    """Return a result of 60 MiB."""
    del payload, context
    return "x" * _LARGE_BYTES


@contextmanager
def _installation(slots: int, *, is_node: bool = True, function: str = _FUNCTION) -> Iterator[tuple[Stack, Process]]:
    """Start an installation with one server or node, whose model is paused; and its gateway, or the web process."""
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        stack.maintenance("maintenance", "--embedded-beat")
        stack.worker(threads=_BUSY_SLOTS, level="warning")
        web = stack.web()
        journal = _journal_of(stack)
        stack.env |= {"SLOTKEEPER_DRILL_JOURNAL": str(journal), "SLOTKEEPER_DRILL_STARTS": f"{journal}.starts"}
        config = {"node_pools": ["bench"], "poll_interval": 0.2}
        requests.put(f"{stack.url}/admin/model-configs/bench", json=config, timeout=30).raise_for_status()
        if is_node:
            port = free_port()
            process = _start_gateway(stack, port, "gateway")
            _start_agent(stack, Path(home) / "agent", port, slots, function)
        else:
            process, server = web, stack.server("bench-server", slots, function=function)
            body = {"model": "bench", "server": "bench-server", "endpoint": server.endpoint, "slots": slots}
            requests.post(f"{stack.url}/admin/register", json=body, timeout=30).raise_for_status()
        _set_state(stack, "paused")
        yield stack, process


def _journal_of(stack: Stack) -> Path:
    return stack.home / "journal"


def _set_state(stack: Stack, state: str) -> None:
    requests.patch(f"{stack.url}/admin/models/bench", json={"state": state}, timeout=30).raise_for_status()


def _submit(stack: Stack, jobs: int, longest_s: float) -> None:
    """Submit jobs that take 0.6 to 1 times as long: runs that all end at once would wait for one another."""
    chance = random.Random(1)
    for first in range(0, jobs, _JOBS_AT_ONCE):
        seconds = [longest_s * chance.uniform(0.6, 1) for _ in range(min(_JOBS_AT_ONCE, jobs - first))]
        many = [{"model": "bench", "payload": {"seconds": each, "number": 1}} for each in seconds]
        requests.post(f"{stack.url}/queue/submit-batch", json=many, timeout=30).raise_for_status()


def _run_all(stack: Stack, gateway: Process, jobs: int) -> float:
    """Let all jobs run, and return what processor time of the gateway a run has cost, in ms."""
    journal, used_s = _journal_of(stack), _processor_s(gateway.popen.pid)
    _set_state(stack, "online")
    eventually(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= jobs, "all jobs have run", 300, 0.2)
    return (_processor_s(gateway.popen.pid) - used_s) / jobs * 1000


def _measure_gap(jobs: int, *, is_node: bool) -> None:
    with _installation(1, is_node=is_node) as (stack, process):
        _submit(stack, jobs, 0)
        spent_ms = _run_all(stack, process, jobs)
        gaps = _gaps_ms(_journal_of(stack))[jobs // 10 :]
        what = "a node" if is_node else "a server"
        quantiles = statistics.quantiles(gaps, n=100)
        print_line(f"gap between two runs of {what}: p50 {quantiles[49]:.1f} ms, p99 {quantiles[98]:.1f} ms")
        if is_node:
            print_line(f"processor time of the gateway for a run, one slot: {spent_ms:.2f} ms")


def _measure_busy(seconds: int, *, is_node: bool) -> None:
    with _installation(_BUSY_SLOTS, is_node=is_node) as (stack, process):
        jobs = _BUSY_SLOTS * seconds
        _submit(stack, jobs, 1.25)
        spent_ms = _run_all(stack, process, jobs)
        runs = [json.loads(line) for line in _journal_of(stack).read_text().splitlines()]
        from_ns = sorted(run["started_ns"] for run in runs)[_BUSY_SLOTS]  # All slots have had a first run.
        until_ns = max(run["started_ns"] for run in runs)  # Afterwards no job waits.
        used_ns = sum(max(0, min(run["ended_ns"], until_ns) - max(run["started_ns"], from_ns)) for run in runs)
        use, what = used_ns / (_BUSY_SLOTS * (until_ns - from_ns)), "a node" if is_node else "a server"
        print_line(f"use of {_BUSY_SLOTS} slots of {what}, runs of about 1 s: {use:.3f}")
        if is_node:
            print_line(f"processor time of the gateway for a run, {_BUSY_SLOTS} slots: {spent_ms:.2f} ms")


def _measure_large() -> None:
    with _installation(2, function=_LARGE_FUNCTION) as (stack, gateway):
        job = requests.post(f"{stack.url}/queue/submit", json={"model": "bench", "payload": {}}, timeout=30).json()
        before, slowest_s, most_kib = _memory_kib(gateway.popen.pid), 0.0, 0
        node = requests.get(f"{stack.url}/nodes/bench-node", timeout=30).json()["id"]
        secret = stack.run_with_input("from tasks.security.keyring import gateway_keys as k; print(k()[0])", "")
        key, address = {"Authorization": f"Bearer {secret.strip()}"}, f"http://{stack.env[_BIND]}"
        _set_state(stack, "online")
        began_s, state = time.monotonic(), "queued"
        while state not in ("completed", "dead", "failed"):
            asked_s = time.monotonic()
            requests.get(f"{address}/n/{node}/0/health", headers=key, timeout=30).raise_for_status()
            slowest_s = max(slowest_s, time.monotonic() - asked_s)
            most_kib = max(most_kib, _memory_kib(gateway.popen.pid))
            state = requests.get(f"{stack.url}/queue/jobs/{job['job_id']}", timeout=30).json()["status"]
        took_s = time.monotonic() - began_s
        print_line(f"a result of 60 MiB, {state}: {took_s:.1f} s, gateway {(most_kib - before) / 1024:+.1f} MiB")
        began_s = time.monotonic()
        status = requests.get(f"{address}/n/{node}/0/status/{job['job_id']}-1", headers=key, timeout=60)
        rate = len(status.content) / (1 << 20) / (time.monotonic() - began_s)
        print_line(f"the same bytes from the node through the tunnel alone: {rate:.0f} MiB/s")
        print_line(f"the node's health during the run: at most {slowest_s * 1000:.0f} ms")


def _start_agent(stack: Stack, folder: Path, port: int, slots: int, function: str) -> None:
    folder.mkdir()
    lines = [f'gateway = "ws://127.0.0.1:{port}"', f"slots = {slots}", "[models.bench]", f'function = "{function}"']
    (folder / "agent.toml").write_text("\n".join(lines))
    body = {"pool": "bench", "max_slots": slots}
    token = requests.post(f"{stack.url}/nodes/tokens", json=body, timeout=30).json()["token"]
    agent = [sys.executable, "-P", "-m", "slotkeeper.agent"]
    config = ["--config", str(folder / "agent.toml")]
    stack.run([*agent, "enroll", stack.url, "--name", "bench-node", "--token", token, *config])
    stack.start("agent", [*agent, "run", *config])
    eventually(lambda: _serves(stack), "the node serves its model")


def _serves(stack: Stack) -> bool:
    node = requests.get(f"{stack.url}/nodes/bench-node", timeout=30).json()
    return bool(node["state"] == "connected" and node["models"])


def main(count: int, seconds: int, jobs: int) -> None:
    """Measure all, and print a line for each figure."""
    for is_node in (False, True, False, True):
        _measure_gap(jobs, is_node=is_node)
    for is_node in (False, True):
        _measure_busy(seconds, is_node=is_node)
    _measure_large()
    _measure_idle(count, seconds)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*given, *(2000, 60, 300)[len(given) :])
