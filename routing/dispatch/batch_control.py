"""Close, pause, resume and cancel batches, and end them when their last job has.

A request stores what is wanted and does as much of it as `within_s` allows; maintenance does the rest, also after the
process of the request has died (`drive_batches`).
"""

import random
import time
from collections import deque

from routing.dispatch.batch_lines import require_lines
from routing.dispatch.dispatcher import BatchCancellation, Dispatcher
from slotkeeper import audit
from slotkeeper.clock import clock, now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.db.pages import PAGE
from slotkeeper.errors import Conflict, InvalidJob, TooManyRequests
from slotkeeper.jobs.batches import Batch, Batches, BatchState, OnError, require

_SHARE_S = 0.5  # of one batch, in one pass over all


def close(dispatcher: Dispatcher, batches: Batches, batch: Batch, lines: int, within_s: float) -> Batch:
    """Take no more lines: the client has sent `lines` of them.  Returns the batch as it is afterwards.

    A batch that is closed already stays so.  Raises MissingLines: they have not all been received; Conflict: more have.
    """
    require_lines(batch, lines)
    if lines < batch.lines:
        detail = f"Batch {batch.id!r} has {batch.lines} lines, not {lines}; close it with lines={batch.lines}."
        raise Conflict(detail, batch=batch.id, next_line=batch.lines)
    if batch.state is BatchState.OPEN:
        if not batches.close(batch, now_ms()):  # Another client has sent lines, or closed it.
            return close(dispatcher, batches, _read(batches, batch), lines, within_s)
        crash_at("batch_closed")
    return _drive_again(dispatcher, batches, batch, within_s)


def set_paused(dispatcher: Dispatcher, batches: Batches, batch: Batch, is_paused: bool, within_s: float) -> Batch:
    """Start no more lines of a batch, or go on.  Returns the batch as it is afterwards.

    Jobs that run go on.  Raises Conflict: it has ended, or is no batch of lines.
    """
    word = "pause" if is_paused else "resume"
    if batch.state is BatchState.NAMED:
        detail = f"Batch {batch.id!r} was not made by POST /batches; only such a batch can be paused."
        raise Conflict(detail, batch=batch.id)
    if batch.state is BatchState.ENDED:
        raise Conflict(f"All jobs of batch {batch.id!r} have ended.", batch=batch.id)
    entry = audit.make_entry(f"batch.{word}", tenant=batch.tenant, batch=batch.id)
    batches.set_paused(batch, is_paused, entry.write)
    return _drive_again(dispatcher, batches, batch, within_s)


def cancel(dispatcher: Dispatcher, batches: Batches, batch: Batch, within_s: float) -> BatchCancellation:
    """Cancel the unfinished jobs of a batch, the first accepted first; of a batch of lines also those still to come.

    After `within_s` the rest of a batch of lines that has not ended is left to maintenance, of another one to the next
    call.
    """
    entry = audit.make_entry("batch.cancel", tenant=batch.tenant, batch=batch.id)
    if batch.state in (BatchState.NAMED, BatchState.ENDED):  # An ended batch may have jobs that were revived.
        audit.write_entry(batches.database, entry)
    else:
        batches.request_cancel(batch, now_ms(), entry.write)
    done = dispatcher.cancel_jobs_of_batch(batch.id, batch.tenant, within_s)
    if done.is_complete:
        batches.end(_read(batches, batch), now_ms())
    return done


def drive_all(dispatcher: Dispatcher, batches: Batches, open_s: float, within_s: float) -> None:
    """Go on with what is wanted of each batch, and close those whose clients have gone.

    open_s: an open batch that has received no line for so long is closed, or, if it is all or none, canceled.  Batches
    take turns, in another order each time, so that none keeps the others waiting.  After `within_s` the rest is left to
    the next call.
    """
    until = time.monotonic() + within_s
    unfinished = deque(batches.list_unfinished())
    random.shuffle(unfinished)
    while unfinished and time.monotonic() < until:
        batch = unfinished.popleft()
        if batch.state is BatchState.OPEN and batch.changed_ms < clock.ago_ms(round(open_s * 1000), now_ms()):
            if batch.on_error is OnError.REFUSE:
                batches.request_cancel(batch, now_ms())
            else:
                batches.close(batch, now_ms())
        current = _read(batches, batch)
        if not drive(dispatcher, batches, current, min(until, time.monotonic() + _SHARE_S)):
            unfinished.append(current)


def drive(dispatcher: Dispatcher, batches: Batches, batch: Batch, until: float) -> bool:
    """Go on with what is wanted of a batch, page by page, until a time (monotonic).  Returns False if more is left."""
    if batch.state is BatchState.ENDED:
        return True
    is_done = True
    if batch.state is BatchState.CLOSED and batch.is_refused and batch.cancel_ms is None:
        batches.request_cancel(batch, now_ms())
        batch = _read(batches, batch)
    if batch.cancel_ms is not None:
        is_done = dispatcher.cancel_jobs_of_batch(batch.id, batch.tenant, until - time.monotonic()).is_complete
    elif batch.is_paused:
        is_done = _hold(dispatcher, batch, until)
    elif batch.has_held and not batch.holds_lines:
        is_done = _release(dispatcher, batches, batch, until)
    if batch.state is BatchState.CLOSED and is_done:
        batches.end(batch, now_ms())
    return is_done


def _hold(dispatcher: Dispatcher, batch: Batch, until: float) -> bool:
    while True:
        held = dispatcher.store.hold_page_of_batch(batch.id, batch.tenant, now_ms())
        if held:
            crash_at("lines_held")
            dispatcher.withdraw(held)
        if len(held) < PAGE or time.monotonic() >= until:
            return len(held) < PAGE


def _release(dispatcher: Dispatcher, batches: Batches, batch: Batch, until: float) -> bool:
    """Let jobs on hold go on, as many as may wait in their queues.  Returns False if some are left for the time."""
    limit = PAGE
    while True:
        held = batches.list_held(batch, limit)
        try:
            dispatcher.admission.check_release(held, dispatcher.catalog.get(), now_ms())
        except InvalidJob:  # So many at once would never fit.
            limit = max(limit // 2, 1)
            continue
        except TooManyRequests:
            return True  # Not now: the next pass looks again.
        if not batches.release(batch, held, now_ms()) or not held:
            return True
        dispatcher.enqueue(dispatcher.store.promote_due(now_ms()))
        if time.monotonic() >= until:
            return False


def _drive_again(dispatcher: Dispatcher, batches: Batches, batch: Batch, within_s: float) -> Batch:
    """Go on with a batch that has been changed, and return it as it is afterwards."""
    drive(dispatcher, batches, _read(batches, batch), time.monotonic() + within_s)
    return _read(batches, batch)


def _read(batches: Batches, batch: Batch) -> Batch:
    """Return a batch as it is now.  Raises NotFound."""
    return require(batches.get(batch.tenant, batch.id), batch.id)
