"""Stream filters that lose or change COMMITs of PostgreSQL and messages of a Redis broker.

Each fault has a plan, which all connections share and which any thread may change, and one stream filter for each
connection (tcp_proxy.py).
"""

import random
from collections.abc import Iterator
from enum import StrEnum

from tools.cluster.tcp_proxy import Cut, Direction, Later, StreamFilter

# -- PostgreSQL --------------------------------------------------------------------------------------------

_STARTUP_MAJOR = 3  # version of the protocol; other untyped messages request TLS or cancel a query
_QUERY, _PARSE, _COMPLETE = b"Q"[0], b"P"[0], b"C"[0]


class LostCommits:
    """A plan that loses a share of COMMITs: their answers, or the COMMITs before they reach the database."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._direction: Direction | None = None
        self._share = 0.0
        self.lost = 0
        """The number of COMMITs or answers that were lost."""

    def lose(self, direction: Direction, share: float) -> None:
        """Lose this share.  ANSWERS: the database commits, and the client gets no answer.  REQUESTS: no commit."""
        self._direction, self._share = direction, share

    def stop(self) -> None:
        self._direction = None

    def make_filter(self, _: Later) -> StreamFilter:
        return _CommitFilter(self)

    def on_commit(self, direction: Direction) -> None:
        """Decide whether a COMMIT, or its answer, passes.  Raises Cut: it does not."""
        if self._direction is direction and self._rng.random() < self._share:
            self.lost += 1
            raise Cut


class _CommitFilter:
    def __init__(self, plan: LostCommits) -> None:
        self._plan = plan
        self._requested, self._answered = _MessageParser(started=False), _MessageParser(started=True)

    def requests(self, piece: bytes) -> bytes:
        for kind, body in self._requested.feed(piece):
            if (kind == _QUERY and _is_commit(body)) or (kind == _PARSE and _is_commit(body.partition(b"\0")[2])):
                self._plan.on_commit(Direction.REQUESTS)
        return piece

    def answers(self, piece: bytes) -> bytes:
        for kind, body in self._answered.feed(piece):
            if kind == _COMPLETE and body == b"COMMIT\0":
                self._plan.on_commit(Direction.ANSWERS)
        return piece


def _is_commit(query: bytes) -> bool:
    return query.partition(b"\0")[0].strip().upper() == b"COMMIT"


class _MessageParser:
    """Splits a stream into PostgreSQL's messages: (type, body).  A client's first message has no type."""

    def __init__(self, started: bool) -> None:
        self._started, self._rest = started, b""

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        self._rest += piece
        while len(self._rest) >= self._head:
            length = int.from_bytes(self._rest[self._head - 4 : self._head])
            end = self._head - 4 + length
            if len(self._rest) < end:
                return
            body = self._rest[self._head : end]
            kind = self._rest[0] if self._started else 0
            self._started = self._started or int.from_bytes(body[:2]) == _STARTUP_MAJOR
            self._rest = self._rest[end:]
            yield kind, body

    @property
    def _head(self) -> int:
        return 5 if self._started else 4


# -- the broker --------------------------------------------------------------------------------------------

_QUEUES = (b"gpu.", b"webhooks", b"maintenance")


class MessageFault(StrEnum):
    """What happens to a disturbed message."""

    DOUBLED = "doubled"
    DELAYED = "delayed"
    LOST = "lost"


class BrokerMessages:
    """A plan that doubles, delays or loses a share of the messages that are sent to the broker."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._fault: MessageFault | None = None
        self._share = self._longest_s = 0.0
        self.injected = 0
        """The number of disturbed messages."""

    def inject(self, how: MessageFault, share: float, longest_s: float) -> None:
        """Disturb this share of the messages.  `longest_s`: the longest delay of a message, or of its duplicate."""
        self._fault, self._share, self._longest_s = how, share, longest_s

    def stop(self) -> None:
        """Disturb no more messages.  Those that are delayed still arrive."""
        self._fault = None

    def make_filter(self, later: Later) -> StreamFilter:
        return _MessageFilter(self, later)

    def disturb(self, queue: bytes, command: bytes, later: Later) -> bytes:
        """Return what the broker gets instead of `command`, which puts a message into `queue`."""
        how = self._fault
        if how is None or self._rng.random() >= self._share:
            return command
        self.injected += 1
        if how is not MessageFault.LOST:
            later(command, self._rng.uniform(0, self._longest_s))
        # The client gets a number as the answer, as from LPUSH.
        return command if how is MessageFault.DOUBLED else _command(b"LLEN", queue)


class _MessageFilter:
    def __init__(self, plan: BrokerMessages, later: Later) -> None:
        self._plan, self._later = plan, later
        self._rest = b""

    def requests(self, piece: bytes) -> bytes:
        """Return the complete commands to pass; those that put no message into a queue are unchanged."""
        self._rest += piece
        passed = []
        while (first := _first_command(self._rest)) is not None:
            words, end = first
            command, self._rest = self._rest[:end], self._rest[end:]
            if len(words) == 3 and words[0].upper() == b"LPUSH" and words[1].startswith(_QUEUES):
                command = self._plan.disturb(words[1], command, self._later)
            passed.append(command)
        return b"".join(passed)

    def answers(self, piece: bytes) -> bytes:
        return piece


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _first_command(data: bytes) -> tuple[list[bytes], int] | None:
    """Return the words of the first command and its end; None: it is incomplete."""
    end = data.find(b"\r\n")
    if end < 0:
        return None
    if data[:1] != b"*":  # an inline command
        return data[:end].split(), end + 2
    words, at = [], end + 2
    for _ in range(int(data[1:end])):
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        length = int(data[at + 1 : end])
        if len(data) < end + 4 + length:
            return None
        words.append(data[end + 2 : end + 2 + length])
        at = end + 4 + length
    return words, at
