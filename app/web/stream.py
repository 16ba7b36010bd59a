"""One stream of events: first what its client has missed, page by page, then what happens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import orjson
import structlog

from app.later import Following
from app.web.feed import Feed, Shown, shown
from app.web.gateway import Answer
from app.web.hall import Errand, Lane
from app.web.request import Request
from database.db import Database
from foundation.errors import SlotkeeperError
from insight.said import Said, Watcher, Watching
from outbox import tail

if TYPE_CHECKING:
    from app.web.connection import Connection

log = structlog.get_logger(__name__)

HEARTBEAT_S = 15.0
_PAGE = 200  # events that are read at one go for a client that has missed some
_MOST_KEPT = 5_000  # that happen while it reads what it has missed
_RETRY_MS = 2_000
_GAP = "Some of what happened after this event is not in the record any more: look at the jobs themselves."


class Stream:
    """A Listener of the feed.  Called in the event loop's thread only, but for `_look_back`."""

    def __init__(
        self,
        owner: str,
        connection: "Connection",
        request: Request,
        head: Answer,
        following: Following,
        feed: Feed,
        database: Database,
        lane: Lane,
    ) -> None:
        """`lane`: its threads read what was missed."""
        self.wanted = following.wanted
        self._owner, self._connection, self._request, self._head = owner, connection, request, head
        self._feed, self._database, self._lane = feed, database, lane
        self._after = following.after
        self._cursor = following.after or 0  # All up to this event has been sent.
        self._target = 0  # up to which the record is read, what is later comes from the feed
        self._kept: list[Shown] | None = []  # what has happened meanwhile; None: all is sent at once
        self._aimed = 0  # the target when the record was last asked
        self._opened = self._closed = False
        self._over = False  # What was sent last is the end of its job.
        self._is_heard = False  # Its server is listened to.
        self._sent_at = connection.now()
        self._heard = following.heard  # All that the server has said up to here has been sent.
        self._watching: Watching | None = None
        self._watcher: Watcher | None = None

    def hear(self, watching: Watching) -> None:
        """Tell also what the job's server says meanwhile."""
        if self.wanted.job_id is not None:
            self._watching, self._watcher = watching, Watcher(self.wanted.job_id, self._heard, self._say)

    # -- the feed --------------------------------------------------------------------------------------------

    def begin(self, position: int) -> None:
        if self._closed or self._opened:
            return
        self._opened = True
        self._connection.open_stream(self._request, self._head, self)
        self._target = position
        self._send(b"retry: %d\n\n" % _RETRY_MS)
        if self._after is None and self.wanted.job_id is None:
            self._cursor = position
            self._send(b"id: %d\n\n" % position)
            self._kept = None
        else:
            self._read(first=True)

    def take(self, part: Sequence[Shown], text: bytes) -> None:
        if self._closed:
            return
        if self._kept is None:
            if self._ends_within(part):  # What happens until its last words are here is kept.
                self._kept = []
                self._tell_in_order(part, text, self._catch_up)
                return
            self._tell(part, text)
            return
        self._kept.extend(part)
        if len(self._kept) > _MOST_KEPT:  # They are in the record, too.
            self._target = self._kept[-1].number
            self._kept.clear()

    def end(self) -> None:
        """Nothing more comes."""
        if self._closed:
            return
        self.leave()
        if self._opened:
            self._connection.end_stream()
        else:
            self._connection.give_way()

    def leave(self) -> None:
        """Its client is gone."""
        self._closed = True
        self._feed.unfollow(self)
        if self._watching is not None and self._watcher is not None:
            self._watching.end(self._watcher)

    # -- what was missed -------------------------------------------------------------------------------------

    def _read(self, *, first: bool = False) -> None:
        self._aimed = self._target

        if not self._lane.enter(Errand(self._owner, partial(self._look_back, first), lambda: not self._closed)):
            self._connection.give_way()

    def _look_back(self, first: bool) -> Callable[[], object]:
        """In a lane's thread."""
        job_id = self.wanted.job_id
        try:
            whole = not first or job_id is not None or tail.is_complete(self._database, self._cursor)
            page = tail.page(self._database, self._cursor, _PAGE, job_id)
        except Exception as error:  # Its client comes again.
            if not isinstance(error, SlotkeeperError):
                log.error("stream_failed", exc_info=error)
            return self._connection.give_way
        return partial(self._turn, page, whole, [Shown(it, shown(it)) for it in page.entries])

    def _turn(self, page: tail.Page, whole: bool, found: Sequence[Shown]) -> None:
        """A page of it."""
        if self._closed:
            return
        if not whole:
            self._tell_of_gap()
        part = [it for it in found if it.number <= self._target and self.wanted.includes(it.entry)]
        self._tell_in_order(part, b"".join(it.text for it in part), lambda: self._turned(page))

    def _turned(self, page: tail.Page) -> None:
        self._cursor = max(self._cursor, min(page.last, self._target))
        if (page.full and page.last < self._target) or self._aimed != self._target:
            self._connection.when_sent(self._read)
        else:
            self._catch_up()

    def _tell_of_gap(self) -> None:
        data = orjson.dumps({"after": self._cursor, "detail": _GAP})
        self._send(b"event: stream.gap\ndata: %b\n\n" % data)
        self._cursor = min(self._cursor, self._target)

    def _catch_up(self) -> None:
        kept, self._kept = self._kept or [], None
        self._tell(kept, b"".join(it.text for it in kept))
        self._end_if_over()
        if not self._closed and self._watching is not None and self._watcher is not None and not self._is_heard:
            self._is_heard = True
            self._watching.begin(self._watcher)

    def _end_if_over(self) -> None:
        """A stream of one job ends with it."""
        if self._over and self.wanted.job_id is not None:
            self.end()

    # -- what its server says ----------------------------------------------------------------------------------

    def _say(self, said: Said) -> None:
        if self._closed:
            return
        place = said.place
        self._heard = place
        self._send(b"id: %d-%d-%d\nevent: progress\ndata: %b\n\n" % (self._cursor, *place, said.text))

    def _ends_within(self, part: Sequence[Shown]) -> bool:
        return self.wanted.job_id is not None and any(it.ends for it in part)

    def _tell_in_order(self, part: Sequence[Shown], text: bytes, then: Callable[[], None]) -> None:
        """Tell these, the end of the job only after all that its server has said; then go on."""
        end = next((n for n, it in enumerate(part) if it.ends), None)
        if end is None or self._watching is None or self._watcher is None:
            self._tell(part, text)
            then()
            return

        def go_on() -> None:
            if not self._closed:
                self._is_heard = False
                self._tell(part[end:], b"".join(it.text for it in part[end:]))
                then()

        self._tell(part[:end], b"".join(it.text for it in part[:end]))
        self._watching.rest(self._watcher, go_on)

    # -- sending ---------------------------------------------------------------------------------------------

    def _tell(self, part: Sequence[Shown], text: bytes) -> None:
        if part and part[0].number <= self._cursor:  # Another process was ahead of us, or the record told it already.
            part = [it for it in part if it.number > self._cursor]
            text = b"".join(it.text for it in part)
        if not part:
            return
        self._cursor, self._over = part[-1].number, part[-1].ends
        self._send(text)

    def tick(self, now_s: float) -> None:
        """Called about every second."""
        if self._opened and not self._closed and now_s - self._sent_at >= HEARTBEAT_S:
            known = self._kept is None and self.wanted.job_id is None
            self._cursor = max(self._cursor, self._feed.handed) if known else self._cursor
            self._send(b": still here\n" + (b"id: %d\n\n" % self._cursor if known else b"\n"))

    def _send(self, data: bytes) -> None:
        self._sent_at = self._connection.now()
        self._connection.send(data)
