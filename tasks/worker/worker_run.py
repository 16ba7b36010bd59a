"""One run of this process, as its executor and its server call share it."""

from typing import NamedTuple

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.run_steps import RunSteps
from routing.queue.queues import Offer
from slotkeeper.jobs.values import Run
from tasks.worker.concurrency import TakenOffer
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.patient_io import RetryingIo


class WorkerRun(NamedTuple):
    """The job and its lease, what is done to it from outside, the offer it came by, and how its end is stored."""

    active: ActiveRun
    watch: LeaseWatch
    taken: TakenOffer
    offer: Offer  # as it was claimed: a message does not carry all of it
    io: RetryingIo
    steps: RunSteps

    @property
    def run(self) -> Run:
        return self.active.run

    @property
    def canceling(self) -> bool:
        return self.watch.cancel or self.run.cancel_requested
