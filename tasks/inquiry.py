"""What the record says of this worker's runs, when Redis cannot be relied on to say it."""

import threading
from collections.abc import Collection

import structlog
from redis.exceptions import RedisError

from jobs.errors import RecordUnavailable
from jobs.record import Brief
from jobs.states import FINAL, State
from jobs.store import Store
from routing.leases import Held, Leases, Restored
from tasks.aside import Aside
from tasks.heartbeat import Hold

log = structlog.get_logger(__name__)

_ASK_AGAIN_S = 1.0


class Inquiry:
    """Asks the record aside, so that no renewal waits for the database.

    A wish may have been missed while Redis was away; a lease that Redis does not know may have been lost with the
    last that Redis was told, and not be another's.  Until the record answers, the run goes on.
    """

    def __init__(self, store: Store, leases: Leases) -> None:
        self._store, self._leases = store, leases
        self._asked: dict[Hold, bool] = {}  # and whether Redis does not know its lease
        self._lock = threading.Lock()
        self._pause = threading.Event()
        self._aside = Aside("inquiry", self._answer)

    def ask(self, holds: Collection[Hold], *, doubted: bool = False) -> None:
        """Tell these runs, soon, what the record says of them.  `doubted`: Redis does not know their leases."""
        holds = [hold for hold in holds if not hold.starting]
        if not holds:
            return
        with self._lock:
            for hold in holds:
                self._asked[hold] = doubted or self._asked.get(hold, False)
        self._aside.ask()

    def look(self, asked: dict[Hold, bool]) -> None:
        """Tell runs, each with whether its lease is doubted, what the record says.  Raises RecordUnavailable."""
        briefs = self._store.briefs([hold.held.job_id for hold in asked])
        for hold, doubted in asked.items():
            self._tell(hold, briefs.get(hold.held.job_id), doubted)

    def _answer(self) -> None:
        with self._lock:
            asked, self._asked = {hold: doubted for hold, doubted in self._asked.items() if not hold.over}, {}
        if not asked:
            return
        try:
            self.look(asked)
        except RecordUnavailable as error:
            log.warning("inquiry_postponed", runs=len(asked), error=str(error))
            self._pause.wait(_ASK_AGAIN_S)
            for hold, doubted in asked.items():
                self.ask([hold], doubted=doubted)

    def _tell(self, hold: Hold, found: Brief | None, doubted: bool) -> None:
        if found is not None and _runs_under(found, hold.held):
            if doubted:
                self._write_again(hold, found)
            if found.cancel_requested:
                hold.ask_to_cancel()
            return
        ended_for_good = found is not None and found.state in FINAL - {State.COMPLETED}
        if ended_for_good:
            hold.ask_to_cancel()  # Its server is to hear of that.
        if doubted or not ended_for_good:
            hold.end("lost")

    def _write_again(self, hold: Hold, found: Brief) -> None:
        """The record has the run under this very lease, so it is this worker's, whatever Redis has forgotten."""
        held = hold.held
        try:
            written = self._leases.restore(held.fleet, [Restored(held, found.job)])
        except RedisError as error:  # The next renewal will ask once more.
            log.warning("lease_not_restored", job_id=held.job_id, error=str(error))
        else:
            log.warning("lease_was_lost", job_id=held.job_id, slot=held.slot, restored=bool(written))
            hold.restored = True
            if hold.over:  # It has ended meanwhile, and nobody else frees what was written just now.
                self._leases.release(held, back=False)


def _runs_under(found: Brief, held: Held) -> bool:
    return found.state is State.RUNNING and found.lease == held.tag
