"""The start of a run, as the database stores it."""

import structlog

from dispatch.dispatcher import Dispatcher
from foundation.errors import RecordUnavailable, RecordUncertain, SlotkeeperError
from jobs.record import Run, now_ms
from jobs.states import State
from registry.catalog import Snapshot
from routing.leases import Lease
from routing.queues import Offer
from tasks.engine import Engine
from tasks.heartbeat import Watch
from tasks.ways import Ways
from upkeep.runs import active_run

log = structlog.get_logger(__name__)

_STORE_AGAIN_S = 1.0


class Starts:
    """Stores the starts of one worker's runs."""

    def __init__(self, dispatcher: Dispatcher, ways: Ways, engine: Engine) -> None:
        self._dispatcher, self._ways, self._engine = dispatcher, ways, engine

    async def store(self, offer: Offer, watch: Watch, node: str) -> Run | None:
        """Store a start; None: the job is gone.  `node`: what Celery calls this worker.

        Where its COMMIT was not heard of, the record is asked until it answers.  Raises RecordUnavailable: it was not
        stored; RecordUncertain: this was not found out before the worker had to stop; SlotkeeperError.
        """
        if not self._ways.find(Snapshot.has, offer.server, offer.model):
            await self._engine.rarely(self._dispatcher.catalog.refresh)
        by = self._ways.find(Snapshot.described_by, offer.server, offer.model)
        sent_to = self._ways.find(Snapshot.endpoint, offer.server, offer.model)
        start = self._dispatcher.store.starting(
            offer.job_id, offer.server, offer.slot, watch.lease.tag, now_ms(), offer.number, by, node, sent_to
        )
        try:
            return await self._engine.store(start)
        except RecordUncertain:
            while not (watch.lost or watch.stop):
                await watch.wait(_STORE_AGAIN_S)
                try:
                    return await self._engine.rarely(self._recorded_start, watch.lease)
                except RecordUnavailable as error:
                    log.warning("start_not_known", job_id=offer.job_id, error=str(error))
            raise

    def _recorded_start(self, lease: Lease) -> Run | None:
        """The run that the record has under this lease; None: the job is gone.

        Raises RecordUnavailable; SlotkeeperError: the start was not stored.
        """
        job = self._dispatcher.store.get(lease.job_id)
        if job is not None and job.state is State.QUEUED:
            raise SlotkeeperError("The start was not stored.")
        active = None if job is None else active_run(self._dispatcher, job)
        return active.run if active is not None and active.lease.tag == lease.tag else None
