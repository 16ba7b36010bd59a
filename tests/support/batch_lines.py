"""Send the lines of a batch, for tests of the API."""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.api import Api

NDJSON = {"Content-Type": "application/x-ndjson"}
CAT = {"payload": {"prompt": "a cat"}}


def create(api: Api, headers: dict[str, str] | None = None, **head: Any) -> str:
    answer = api.client.post("/batches", json={"model": "zimg"} | head, headers=headers)
    assert answer.status_code == 201, answer.text
    return str(answer.json["batch"])


def send(api: Api, batch: str, lines: Sequence[Any], first: int = 0, headers: dict[str, str] | None = None) -> Any:
    body = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return api.client.post(f"/batches/{batch}/lines?from={first}", data=body, headers=NDJSON | (headers or {}))


def sent(api: Api, batch: str, lines: Sequence[Any], first: int = 0) -> Any:
    answer = send(api, batch, lines, first)
    assert answer.status_code == 200, answer.text
    return answer.json


def close(api: Api, batch: str, lines: int) -> Any:
    return api.client.post(f"/batches/{batch}/close", json={"lines": lines})


def shown(api: Api, batch: str) -> Any:
    return api.client.get(f"/batches/{batch}").json


def results(api: Api, batch: str, query: str = "") -> list[Any]:
    answer = api.client.get(f"/batches/{batch}/results{query}")
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.data.splitlines()]
