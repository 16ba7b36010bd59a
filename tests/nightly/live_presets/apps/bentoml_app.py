"""A model behind BentoML, as a service and as a task."""

import time

import bentoml
from gate import noted, pass_through


@bentoml.service(traffic={"max_concurrency": 1, "timeout": 60})
class Cat:
    @bentoml.api
    def generate(self, prompt: str, sleep: float = 0, gate: str = "") -> dict:
        return _painted(prompt, sleep, gate)

    @bentoml.task
    def paint(self, prompt: str, sleep: float = 0, gate: str = "") -> dict:
        return _painted(prompt, sleep, gate)


def _painted(prompt: str, sleep: float, gate: str) -> dict:
    if prompt == "boom":
        raise RuntimeError("told to fail")
    with noted(prompt):
        time.sleep(sleep)
        pass_through(gate)
    return {"image": prompt.upper()}
