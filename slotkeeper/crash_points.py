"""Named points between two effects, at which a test can kill or stop this process.

    SLOTKEEPER_CRASH_AT="submit_committed,run_sent:2"

kills the process with SIGKILL when it passes `submit_committed` for the first time, or `run_sent` for the second.
SLOTKEEPER_STOP_AT names points in the same way, at which the process stops (SIGSTOP) until it is continued.
Without the variables a point costs two lookups in empty dictionaries.
"""

import os
import signal
import threading

POINTS = (
    "submit_committed",  # stored, not in Redis
    "submit_enqueued",  # in Redis, perhaps offered, not published
    "offer_published",  # the message is sent, the client has no answer
    "batch_chunk_committed",  # a chunk of lines is stored, not in Redis
    "batch_closed",  # the batch has all its lines; those on hold are not released
    "parts_folded",  # the parts of a tenant's balance are their sum, those of other tenants are not
    "lines_held",  # some queued lines are on hold in the database, still in Redis
    "start_claimed",  # this worker holds the lease, the database says queued
    "start_committed",  # running, nothing sent
    "run_sent",  # the request is sent, nothing is stored
    "run_remote_noted",  # the run's id at the server is stored, not polled
    "slot_passed_on",  # the slot is released or has the next job, the end is not stored
    "settle_committed",  # ended or queued in the database, the slot is still held
    "settle_released",  # the slot is released, the next job is claimed and not started
    "slot_quarantined",  # the run has ended and its slot is quarantined, nothing else is done
    "quarantine_ended",  # the database has ended a quarantine, Redis has not
    "end_notified",  # clients are notified, the next job has not begun
    "hand_back_committed",  # queued in the database, the slot is kept for a resume that is not offered
    "cancel_committed",  # canceled in the database, still in Redis
    "cancel_requested",  # the request is stored, the worker does not know it
    "relay_read",  # events are read, no sink has received them
    "relay_published",  # the sink has stored them, its cursor has not moved
    "relay_moved",  # the cursor has moved
    "events_fanned_out",  # webhook messages are written, none is sent
    "message_claimed",  # a try is counted, nothing is sent
    "message_sent",  # the receiver has it, the database does not say so
    "result_notified",  # Celery clients are notified, the notification is still pending in the database
    "promote_committed",  # queued in the database, not in Redis
    "expire_committed",  # expired in the database, still in Redis
    "reap_seized",  # the lease is seized, the database says running
    "reap_committed",  # queued in the database, the slot is still held
    "stale_seized",  # the lease is seized, the database says running, the server does not know the run
    "stale_committed",  # queued in the database, the slot is still held
    "rebuild_claimed",  # the queue has a new epoch, nothing is filled in
    "rebuild_leases",  # leases are restored, the queue is empty
    "rebuild_filled",  # the queue is filled, not open
    "reconcile_filled",  # missing jobs are enqueued
    "purge_committed",  # some jobs are deleted, others follow
)


def _read(text: str) -> dict[str, int]:
    """Return which passing of each point kills or stops.  Raises ValueError for a point that does not exist."""
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
    """Kill or stop this process here, if a test has asked for it."""
    if point in _left and _is_reached(_left, point):
        os.kill(os.getpid(), signal.SIGKILL)
    if point in _stops_left and _is_reached(_stops_left, point):
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # Stops the whole process, this thread first.


def _is_reached(left: dict[str, int], point: str) -> bool:
    with _lock:
        left[point] -= 1
        return left[point] == 0
