"""Submit jobs one by one over HTTP, from clients in separate processes: they do not share an interpreter lock."""

import http.client
import json
import multiprocessing
import threading
import time
from urllib.parse import urlsplit

import requests

_PROCESSES = 2


def measure_submits(url: str, clients: int, seconds: float) -> float:
    """Return the accepted submits per second of `clients` clients with keep-alive connections."""
    requests.put(url + "/admin/model-configs/bench", json={}, timeout=10).raise_for_status()
    counts: multiprocessing.Queue[int] = multiprocessing.Queue()
    workers = [
        multiprocessing.Process(target=_submit_for, args=(url, clients // _PROCESSES, seconds, counts))
        for _ in range(_PROCESSES)
    ]
    for worker in workers:
        worker.start()
    total = sum(counts.get(timeout=seconds + 60) for _ in workers)
    for worker in workers:
        worker.join()
    return total / seconds


def _submit_for(url: str, clients: int, seconds: float, counts: "multiprocessing.Queue[int]") -> None:
    done: list[int] = []
    threads = [threading.Thread(target=_client, args=(url, seconds, done)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts.put(sum(done))


def _client(url: str, seconds: float, done: list[int]) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    body = json.dumps({"model": "bench", "payload": {"prompt": "a sunset", "seconds": 0.1}})
    end, accepted = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        connection.request("POST", "/queue/submit", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 202:
            raise RuntimeError(f"a submit was answered {answer.status}")
        accepted += 1
    done.append(accepted)
