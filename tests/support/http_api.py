"""A client of the API of real processes."""

import os
from typing import Any

import requests

from tools.cluster.stack import RefServer, Stack, eventually


class HttpApi:
    """Sends HTTP requests to the API."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.session = requests.Session()
        self._tests: dict[str, str] = {}

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.session.request(method, self.stack.url + path, timeout=70, **options)

    def submit(self, model: str, payload: dict[str, Any] | None = None, **fields: Any) -> str:
        answer = self.call("POST", "/queue/submit", json={"model": model, "payload": payload or {}, **fields})
        assert answer.status_code == 202, answer.text
        return answer.json()["job_id"]

    def job(self, job_id: str, wait: int = 0) -> dict[str, Any]:
        answer = self.call("GET", f"/queue/jobs/{job_id}", params={"wait": wait} if wait else None)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ended(self, job_id: str, within_s: float = 60) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = self.job(job_id, wait=10)
            return job if job["completed_at"] else None

        return eventually(look, f"job {job_id} ends", within_s)

    def register(self, model: str, server: RefServer, **config: Any) -> None:
        test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
        assert self._tests.setdefault(model, test) == test, "a server of that test would take jobs of this one"
        if config:
            answer = self.call("PUT", f"/admin/model-configs/{model}", json=config)
            assert answer.ok, answer.text
        body = {"model": model, "server": server.name, "endpoint": server.endpoint, "slots": server.slots}
        answer = self.call("POST", "/admin/register", json=body)
        assert answer.ok, answer.text
