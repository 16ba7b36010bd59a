"""A model behind BentoML, as a service and as a task."""

import time

import bentoml


@bentoml.service(traffic={"max_concurrency": 1, "timeout": 60})
class Cat:
    @bentoml.api
    def generate(self, prompt: str, sleep: float = 0) -> dict:
        return _painted(prompt, sleep)

    @bentoml.task
    def paint(self, prompt: str, sleep: float = 0) -> dict:
        return _painted(prompt, sleep)


def _painted(prompt: str, sleep: float) -> dict:
    if prompt == "boom":
        raise RuntimeError("told to fail")
    time.sleep(sleep)
    return {"image": prompt.upper()}
