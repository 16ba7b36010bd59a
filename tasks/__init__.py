"""tasks: who does the work.  Thin Celery shells over routing.

    from tasks import infer
    infer.delay("zimg", {"prompt": "a sunset"}).get(timeout=60)

May import routing and jobs; never app or flask (setup.cfg, importlinter).
"""

from typing import TYPE_CHECKING, Any

import jobs.light  # noqa: F401  First of all.

if TYPE_CHECKING:
    from tasks.celery_app import celery
    from tasks.inference import infer
    from tasks.telling import JobFailed

__all__ = ["JobFailed", "celery", "infer"]


def __getattr__(name: str) -> Any:
    # Late, so that tasks.servers can be used without Celery and settings are read when they are needed.
    if name == "celery":
        from tasks.celery_app import celery

        return celery
    if name == "infer":
        from tasks.inference import infer

        return infer
    if name == "JobFailed":
        from tasks.telling import JobFailed

        return JobFailed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
