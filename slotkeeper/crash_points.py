"""Named points between two effects, at which a test can have the process die.

    SLOTKEEPER_CRASH_AT="submit_committed,run_sent:2"

kills the process with SIGKILL when it passes `submit_committed` for the first time, or `run_sent` for the second.
SLOTKEEPER_STOP_AT names points in the same way, at which the process stops (SIGSTOP) until it is continued.
Without the variables a point costs one look at two empty dictionaries.
"""

import os
import signal
import threading

POINTS = (
    "submit_committed",  # recorded, not in the waiting room
    "submit_enqueued",  # in the room, perhaps offered, not published
    "offer_published",  # the wake-up is sent, the submit not answered
    "start_claimed",  # the lease is ours, the record says queued
    "start_committed",  # running, nothing sent
    "run_sent",  # the server has answered or not, nothing is stored
    "run_remote_noted",  # the server's id is stored, not polled
    "slot_passed_on",  # the server has let go, the slot is free or the next job's, the end is not stored
    "settle_committed",  # ended or back in the record, the slot still held
    "settle_released",  # the slot is free, the next job is ours and not started
    "slot_quarantined",  # the run has ended, its slot drains, nothing else is done
    "quarantine_ended",  # the record has let go of a slot that drains, Redis has not
    "end_notified",  # the outside is told, the next job not begun
    "hand_back_committed",  # queued in the record, the slot kept for a resume that is not offered yet
    "cancel_committed",  # canceled in the record, still in the room
    "cancel_requested",  # the wish is in the record, the worker does not know
    "relay_read",  # events are read, and no sink has got them
    "relay_published",  # the sink keeps them, its cursor does not say so
    "relay_moved",  # the cursor says so
    "events_fanned_out",  # events have become messages of tenants' webhooks, nothing is sent
    "message_claimed",  # a try of one is counted, nothing sent
    "message_sent",  # its receiver has it, the record does not say so
    "result_notified",  # Celery's clients know how the job ended, the record owes it to them still
    "promote_committed",  # queued in the record, not in the room
    "expire_committed",  # expired in the record, still in the room
    "reap_seized",  # the lease is the reaper's, the record says running
    "reap_committed",  # queued in the record, the slot still held
    "stale_seized",  # the lease is the reaper's, the record says running, the server knows nothing of it
    "stale_committed",  # queued in the record, the slot still held
    "rebuild_leases",  # leases are back, the room is empty
    "rebuild_filled",  # the room is full, not open
    "reconcile_filled",  # what was missing is back
    "purge_committed",  # some are removed, more to go
)


def _read(text: str) -> dict[str, int]:
    """Point -> at which passing to die, or to stop.  Raises ValueError for a point that does not exist."""
    wanted: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, times = item.partition(":")
        if name not in POINTS:
            raise ValueError(f"SLOTKEEPER_CRASH_AT or SLOTKEEPER_STOP_AT names {name!r}, which is no crash point")
        wanted[name] = int(times or 1)
    return wanted


_left = _read(os.environ.get("SLOTKEEPER_CRASH_AT", ""))
_stops_left = _read(os.environ.get("SLOTKEEPER_STOP_AT", ""))
_lock = threading.Lock()


def crash_at(point: str) -> None:
    """Die or stop here, if a test wants it."""
    if point in _left and _is_reached(_left, point):
        os.kill(os.getpid(), signal.SIGKILL)
    if point in _stops_left and _is_reached(_stops_left, point):
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # This thread, with all others, goes no further.


def _is_reached(left: dict[str, int], point: str) -> bool:
    with _lock:
        left[point] -= 1
        return left[point] == 0
