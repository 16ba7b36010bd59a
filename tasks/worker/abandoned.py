"""Runs that were given up here before their server answered: the answer still tells when their slots are free."""

import structlog

from routing.dispatch.dispatcher import ActiveRun, Dispatcher
from routing.dispatch.run_steps import OnPostponed, RunSteps
from tasks.servers import Call, ServerSession
from tasks.worker.event_loop import WorkerLoop

log = structlog.get_logger(__name__)


class AbandonedCalls:
    """Observes the answers of a worker's runs that have ended here.  For the event loop alone."""

    def __init__(self, worker_loop: WorkerLoop, dispatcher: Dispatcher, on_postponed: OnPostponed) -> None:
        self._worker_loop, self._steps = worker_loop, RunSteps(dispatcher, worker_loop, on_postponed)
        self._noted: dict[str, tuple[ServerSession, Call]] = {}  # by lease, until their ends are stored

    def note(self, lease: str, session: ServerSession, call: Call) -> None:
        """Remember the request of a run that is about to end here, if its answer is still to come."""
        if session.abandoned is not None:
            self._noted[lease] = session, call

    def observe(self, active: ActiveRun) -> None:
        """Free the slot of a run whose end is stored as soon as its answer has come."""
        noted = self._noted.pop(active.lease.name, None)
        if noted is not None:
            self._worker_loop.spawn_background(self._observe(active, *noted))

    async def _observe(self, active: ActiveRun, session: ServerSession, call: Call) -> None:
        if await session.is_run_over(call):
            log.info("run_over_at_server", job_id=active.run.job.id, slot=active.run.slot)
            await self._steps.release_quarantine(active)
