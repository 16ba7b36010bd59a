"""The Celery application: the task `infer`, its messages and results, the schedule, and its processes.

from tasks import infer
infer.delay("zimg", {"prompt": "a sunset"}).get(timeout=60)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.celery_app import celery
    from tasks.inference import infer
    from tasks.results import JobFailed

__all__ = ["JobFailed", "celery", "infer"]


def __getattr__(name: str) -> Any:
    # Imported on first use: `tasks.servers` works without Celery, and settings are read only when they are needed.
    if name == "celery":
        from tasks.celery_app import celery

        return celery
    if name == "infer":
        from tasks.inference import infer

        return infer
    if name == "JobFailed":
        from tasks.results import JobFailed

        return JobFailed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
