"""Measure what nodes cost: python -m tools.benchmarks.node_costs [NODES] [SECONDS] [JOBS].

First NODES (2000) idle nodes connect to one gateway, from two other processes: its memory and processor time.  Then one
slot runs JOBS (300) jobs of no duration, as a server and as a node: the gap between two runs.  At last the gateway is
killed and started again under the idle nodes.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from app.up.ports import free_port
from slotkeeper import signatures
from slotkeeper.tunnel import handshake
from slotkeeper.tunnel.frames import SUBPROTOCOL, FrameType, decode_message, encode_json_frame
from slotkeeper.tunnel.handshake import Hello
from tools.benchmarks.measuring import print_line
from tools.cluster.stack import Process, Stack, eventually, listens

_PROCESSES = 2
_TICKS_S = os.sysconf("SC_CLK_TCK")
_DECLARATION = '{"models":{"bench":{}},"slots":1,"labels":{}}'
_TOKENS_AT_ONCE = 1000
_FUNCTION = "tools.drill.node_model:work"


def _memory_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def _start_gateway(stack: Stack, port: int, name: str) -> Process:
    stack.env |= {"SLOTKEEPER_NODE_PORT": str(port), "SLOTKEEPER_NODE_MAX": "100000"}
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
        with suppress(OSError, TimeoutError, ConnectionClosed):
            async with connect(
                f"ws://127.0.0.1:{port}",
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                compression=None,
                ping_interval=20,
                ping_timeout=60,
                open_timeout=30,
                max_queue=4,
            ) as websocket:
                challenge = next(iter(decode_message(bytes(await websocket.recv())))).json()  # type: ignore[arg-type]
                nonce = signatures.decode_bytes(challenge["nonce"])
                statement = handshake.hello_statement(nonce, "127.0.0.1", node, "i", _DECLARATION.encode())
                hello = Hello(
                    node,
                    signatures.key_id(signatures.public_key_of(key)),
                    signatures.encode_bytes(signatures.sign(key, signatures.HELLO_TYPE, statement)),
                    "127.0.0.1",
                    "i",
                    "bench",
                    _DECLARATION,
                    takes_jobs=True,
                    reason="",
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


def _measure_idle(count: int, seconds: float) -> None:
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


def _measure_gap(jobs: int, *, is_node: bool) -> None:
    with tempfile.TemporaryDirectory() as home, Stack(Path(home)) as stack:
        stack.maintenance("maintenance", "--embedded-beat")
        stack.worker(level="warning")
        stack.web()
        journal, port, gateway = Path(home) / "journal", free_port(), None
        stack.env |= {"SLOTKEEPER_DRILL_JOURNAL": str(journal), "SLOTKEEPER_DRILL_STARTS": f"{journal}.starts"}
        config = {"node_pools": ["bench"], "poll_interval": 0.2}
        requests.put(f"{stack.url}/admin/model-configs/bench", json=config, timeout=30).raise_for_status()
        payload = {"model": "bench", "payload": {"seconds": 0, "number": 1}}
        if is_node:
            gateway = _start_gateway(stack, port, "gateway")
            _start_agent(stack, Path(home) / "agent", port)
        else:
            server = stack.server("bench-server", 1, function=_FUNCTION)
            body = {"model": "bench", "server": "bench-server", "endpoint": server.endpoint, "slots": 1}
            requests.post(f"{stack.url}/admin/register", json=body, timeout=30).raise_for_status()
        requests.patch(f"{stack.url}/admin/models/bench", json={"state": "paused"}, timeout=30).raise_for_status()
        for _ in range(jobs):
            requests.post(f"{stack.url}/queue/submit", json=payload, timeout=30).raise_for_status()
        used_s = 0.0 if gateway is None else _processor_s(gateway.popen.pid)
        requests.patch(f"{stack.url}/admin/models/bench", json={"state": "online"}, timeout=30).raise_for_status()
        eventually(
            lambda: journal.exists() and len(journal.read_text().splitlines()) >= jobs, "all jobs have run", 300, 0.2
        )
        gaps = _gaps_ms(journal)[jobs // 10 :]
        what = "a node" if is_node else "a server"
        quantiles = statistics.quantiles(gaps, n=100)
        print_line(f"gap between two runs of {what}: p50 {quantiles[49]:.1f} ms, p99 {quantiles[98]:.1f} ms")
        if gateway is not None:
            spent_ms = (_processor_s(gateway.popen.pid) - used_s) / jobs * 1000
            print_line(f"processor time of the gateway for a run: {spent_ms:.2f} ms")


def _start_agent(stack: Stack, folder: Path, port: int) -> None:
    folder.mkdir()
    lines = [f'gateway = "ws://127.0.0.1:{port}"', "[models.bench]", f'function = "{_FUNCTION}"']
    (folder / "agent.toml").write_text("\n".join(lines))
    token = requests.post(f"{stack.url}/nodes/tokens", json={"pool": "bench"}, timeout=30).json()["token"]
    agent = [sys.executable, "-P", "-m", "slotkeeper.agent"]
    config = ["--config", str(folder / "agent.toml")]
    stack.run([*agent, "enroll", stack.url, "--name", "bench-node", "--token", token, *config])
    stack.start("agent", [*agent, "run", *config])
    eventually(lambda: _serves(stack), "the node serves its model")


def _serves(stack: Stack) -> bool:
    node = requests.get(f"{stack.url}/nodes/bench-node", timeout=30).json()
    return bool(node["state"] == "connected" and node["models"])


def main(count: int, seconds: float, jobs: int) -> None:
    """Measure all, and print a line for each figure."""
    for is_node in (False, True, False, True):
        _measure_gap(jobs, is_node=is_node)
    _measure_idle(count, seconds)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*given, *(2000, 60, 300)[len(given) :])
