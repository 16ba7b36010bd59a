"""The compositions of `infer` with an application's tasks that work with each broker.

Each function composes tasks and checks their results; `app` is the application, and its worker reads its default queue.
"""

from collections.abc import Callable
from typing import Any

from celery import Celery, chain, chord, group

WITHIN_S = 60


def _infer(app: Celery, model: str, prompt: str) -> Any:
    return app.signature("infer", args=(model, {"prompt": prompt}), immutable=True, queue="celery")


def call_infer(app: Celery, model: str) -> None:
    assert _infer(app, model, "one").apply_async().get(timeout=WITHIN_S)["prompt"] == "one"


def chain_with_a_task_of_its_own(app: Celery, model: str) -> None:
    """Its own task makes the payload of the next job out of the result before."""
    exclaim = app.tasks["tests.system.engines.canvas.exclaim"].s().set(queue=app.conf.task_default_queue)
    following = app.signature("infer", kwargs={"model": model}, queue="celery")
    result = chain(_infer(app, model, "first"), exclaim, following)()
    assert result.get(timeout=WITHIN_S)["prompt"] == "first!"


def group_of_jobs(app: Celery, model: str) -> None:
    results = group(_infer(app, model, str(n)) for n in range(3))().get(timeout=WITHIN_S)
    assert sorted(result["prompt"] for result in results) == ["0", "1", "2"]


def chord_with_a_task_of_its_own(app: Celery, model: str) -> None:
    """Its own task gets the results of all jobs."""
    prompts = app.tasks["tests.system.engines.canvas.prompts"].s().set(queue=app.conf.task_default_queue)
    assert chord([_infer(app, model, str(n)) for n in range(2)])(prompts).get(timeout=WITHIN_S) == ["0", "1"]


CONTRACT: list[Callable[[Celery, str], None]] = [
    call_infer,
    chain_with_a_task_of_its_own,
    group_of_jobs,
    chord_with_a_task_of_its_own,
]


def add_tasks(app: Celery) -> None:
    """The application's own tasks."""

    @app.task(name="tests.system.engines.canvas.exclaim")
    def exclaim(result: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": result["prompt"] + "!"}

    @app.task(name="tests.system.engines.canvas.prompts")
    def prompts(results: list[dict[str, Any]]) -> list[str]:
        return sorted(result["prompt"] for result in results)
