"""The relay: publishes all events from the database to each sink, in order.

    python -m tasks.relay                        # as a separate process
    python -m tasks.webhooks --embedded-relay    # in threads of the process `webhooks`

The relay reads events as event streams do (slotkeeper/outbox/event_reader.py): it skips none, and it publishes none
that a power cut could undo.  The cursor of each sink is stored in the database (slotkeeper/outbox/sink_cursors.py).  It
is advanced when the sink has confirmed the events, so each event is published at least once.  A sink that is
unavailable delays no other sink; its events stay in the database.  Any number of these processes may run, and one at a
time relays to a sink.
"""

import os
import socket
import threading
import time
import uuid

import structlog

from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.db import Database
from slotkeeper.db.change_listener import ChangeListener
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.outbox.event_reader import EventReader
from slotkeeper.outbox.sink_cursors import SinkCursors
from slotkeeper.registry.catalog import Catalog
from tasks import liveness, services
from tasks.config import EventSettings
from tasks.relay import cloudevents, sinks
from tasks.relay.sinks.sink import CursorMismatch, PublishedEvent, Sink, SinkUnavailable

log = structlog.get_logger(__name__)

_FIRST_BATCH, _MAX_BATCH = 50, 500
_SLOW_BATCH_S = 1.0  # After a slower batch, the next one is smaller, so that no batch outlasts the hold of _HOLD_MS.
# The pause between two polls grows while there are no events.  A poll costs as much as publishing twenty events.
_MIN_PAUSE_S, _MAX_PAUSE_S, _PAUSE_GROWTH = 0.2, 0.5, 1.4
_HOLD_MS = 10_000  # how long a cursor is held; longer than any sink takes to confirm
_HOLD_PERIOD_S = 3.0  # between two renewals of a hold
_MIN_RETRY_S, _MAX_RETRY_S = 0.25, 2.0
_STOP_WAIT_S = 4.5


class Relay:
    """Publishes events to one sink while it holds the sink's cursor.  For one thread."""

    def __init__(self, name: str, database: Database, sink: Sink, holder: str = "") -> None:
        """Create a relay.  `name`: of the sink.  `holder`: its name as holder of the cursor; "": a unique one."""
        self._name, self._database, self._sink = name, database, sink
        self._cursors, self._catalog = SinkCursors(database), Catalog(database)
        self._holder = holder or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._stopped = threading.Event()
        self._wake = threading.Event()  # There was a commit, or `stop` was called.
        self._has_listener = False  # whether a change listener sets _wake
        self._source = ""
        self._reader: EventReader | None = None  # None: the position must be read from the cursor and the sink
        self._position = 0  # of the cursor
        self._batch_size = _FIRST_BATCH
        self._has_more = False  # The last batch was full.
        self._renew_at = 0.0
        self._retry_s = 0.0  # the pause after the last failure; 0: the last batch succeeded

    def run(self) -> None:
        """Publish events until `stop`."""
        retry_after_s = _MIN_PAUSE_S
        while not self._stopped.is_set():
            try:
                published = self.relay_batch()
                retry_after_s = _MIN_PAUSE_S if published else min(retry_after_s * _PAUSE_GROWTH, _MAX_PAUSE_S)
                self._retry_s = 0.0
            except (SinkUnavailable, DatabaseUnavailable) as error:
                retry_after_s = self._wait_longer(error)
            except Exception as error:
                log.exception("relay_failed", sink=self._name)
                retry_after_s = self._wait_longer(error)
            self._wait(0.0 if self._has_more else retry_after_s)
        self._close()

    def stop(self) -> None:
        """Make `run` return.  May be called in any thread."""
        self._stopped.set()
        self._wake.set()

    def wake_on_change(self, listener: ChangeListener) -> None:
        """Poll after a commit, and otherwise only to renew the hold of the cursor."""
        self._has_listener = True
        listener.on_change(self._wake.set)

    def _wait(self, seconds: float) -> None:
        """Wait for `seconds`.  An idle relay with the longest pause waits for a commit or the renewal of its hold."""
        if self._is_idle and seconds == _MAX_PAUSE_S:
            self._wake.wait(max(self._renew_at - time.monotonic(), seconds))
            self._wake.clear()
        else:
            self._stopped.wait(seconds)

    @property
    def _is_idle(self) -> bool:
        """Whether only a commit can bring new events: all are published, and this relay holds the cursor."""
        return self._has_listener and self._reader is not None and not self._reader.has_gap

    def relay_batch(self) -> int:
        """Publish new events, at most a batch, and return how many.  Raises SinkUnavailable, DatabaseUnavailable."""
        self._has_more = False
        reader = self._hold_cursor()
        if reader is None:
            return 0
        self._reader = None  # After any failure, the next call reads the position again.
        found = reader.read(self._batch_size)
        is_full = len(found) == self._batch_size
        if found:
            crash_at("relay_read")
            try:
                self._publish([PublishedEvent(entry, self._source) for entry in found])
            except CursorMismatch:
                return 0
            crash_at("relay_published")
        if self._move_cursor(reader.position):
            self._reader, self._has_more = reader, is_full
        if found:
            crash_at("relay_moved")
        return len(found)

    def _publish(self, batch: list[PublishedEvent]) -> None:
        """Publish a batch.  If the sink takes long, the next batch is half as large, else twice as large.

        Raises SinkUnavailable, CursorMismatch.
        """
        began, smaller = time.monotonic(), max(self._batch_size // 2, 1)
        try:
            self._sink.publish(batch)
        except SinkUnavailable:  # The batch may have been too large for the sink's timeout.
            self._batch_size = smaller
            raise
        took_long = time.monotonic() - began > _SLOW_BATCH_S
        self._batch_size = smaller if took_long else min(self._batch_size * 2, _MAX_BATCH)

    def _hold_cursor(self) -> EventReader | None:
        """Return a reader at the sink's position; None: another relay holds the cursor.

        The hold is renewed every few seconds.
        """
        if self._reader is not None and time.monotonic() < self._renew_at:
            return self._reader
        self._renew_at = time.monotonic() + _HOLD_PERIOD_S
        now = now_ms()
        position = self._cursors.acquire(self._name, self._holder, now, now + _HOLD_MS, self._sink.retention)
        if position is None:
            self._reader = None
        elif self._reader is None or position != self._position:
            self._position = position
            self._source = self._source or f"/slotkeeper/{self._catalog.get_database_id()}"
            resume_after = self._sink.resume_after(position)
            self._reader = EventReader(self._database, after=resume_after, transitions_only=False)
        return self._reader

    def _move_cursor(self, to: int) -> bool:
        """Advance the cursor to `to`, up to which the sink has all events.

        Returns False if another relay has moved the cursor.
        """
        if to <= self._position:  # The sink had lost events, which were published to it again.
            return True
        until = now_ms() + _HOLD_MS
        moved = self._cursors.advance(self._name, self._holder, self._position, to, until)
        if moved:
            self._position = to
        return moved

    def _wait_longer(self, error: Exception) -> float:
        if not self._retry_s:
            log.warning("events_not_relayed", sink=self._name, error=str(error))
        self._retry_s = min(max(self._retry_s * 2, _MIN_RETRY_S), _MAX_RETRY_S)
        return self._retry_s

    def _close(self) -> None:
        try:
            self._sink.close()
            self._cursors.release(self._name, self._holder)
        except Exception as error:  # The hold expires by itself.
            log.warning("relay_stop_failed", sink=self._name, error=str(error))


def make_relays(database: Database, settings: EventSettings, holder: str = "") -> list[Relay]:
    """Return a relay for each sink that the settings name.

    Raises InvalidSetting if a setting or a library of a sink is missing.
    """

    def find_event(number: int) -> str | None:
        found = EventReader(database, after=number - 1, transitions_only=False).read(1)
        if not found or found[0].event.id != number:
            return None
        return cloudevents.to_json(found[0], f"/slotkeeper/{Catalog(database).get_database_id()}")

    return [Relay(name, database, sinks.make(name, settings, find_event), holder) for name in settings.sinks]


class RelayThreads:
    """All relays of one process, each in a thread."""

    def __init__(self, database: Database, settings: EventSettings, listener: ChangeListener) -> None:
        """Create the relays.  Raises InvalidSetting as `make_relays`."""
        self._relays = make_relays(database, settings)
        self._listener = listener
        for relay in self._relays:
            relay.wake_on_change(listener)
        self._threads = [threading.Thread(target=relay.run, name="relay", daemon=True) for relay in self._relays]
        self._process_report: liveness.ProcessReport | None = None

    def start(self) -> None:
        """Start the threads."""
        self._listener.start()
        for thread in self._threads:
            thread.start()
        self._process_report = liveness.start_reporting("relay", services.processes())

    def stop(self) -> None:
        """Make all threads end.  May be called in a signal handler."""
        self._listener.stop()
        for relay in self._relays:
            relay.stop()

    def end(self) -> None:
        """Stop, and wait until all relays have released their cursors, for 4.5 s at most."""
        self.stop()
        if self._process_report is not None:
            self._process_report.end()
        until = time.monotonic() + _STOP_WAIT_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
