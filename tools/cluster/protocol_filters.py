"""What a door must understand of a protocol to lose the right bytes: COMMITs of PostgreSQL, messages of a broker.

Each has a plan, which the drill changes from any thread and which all connections share, and a sieve for each
connection (tcp_proxy.py).
"""

import random
from collections.abc import Iterator
from enum import StrEnum

from tools.cluster.tcp_proxy import Cut, Direction, Later, StreamFilter

# -- PostgreSQL --------------------------------------------------------------------------------------------

_STARTUP_MAJOR = 3  # of the protocol; other untyped messages ask for TLS or cancel
_QUERY, _PARSE, _COMPLETE = b"Q"[0], b"P"[0], b"C"[0]


class LostCommits:
    """While armed, a share of COMMITs is lost: with their answers, or before they reach the database."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._way: Direction | None = None
        self._share = 0.0
        self.lost = 0
        """How many were."""

    def lose(self, way: Direction, share: float) -> None:
        """ANSWERS: the database commits and nobody hears of it.  REQUESTS: it never learns that it should."""
        self._way, self._share = way, share

    def stop(self) -> None:
        self._way = None

    def make_filter(self, _: Later) -> StreamFilter:
        return _CommitFilter(self)

    def on_commit(self, way: Direction) -> None:
        """A COMMIT, or its answer, comes by.  Raises Cut."""
        if self._way is way and self._chance.random() < self._share:
            self.lost += 1
            raise Cut


class _CommitFilter:
    def __init__(self, plan: LostCommits) -> None:
        self._plan = plan
        self._sent, self._told = _Frames(begun=False), _Frames(begun=True)

    def requests(self, piece: bytes) -> bytes:
        for kind, body in self._sent.feed(piece):
            if (kind == _QUERY and _says_commit(body)) or (kind == _PARSE and _says_commit(body.partition(b"\0")[2])):
                self._plan.on_commit(Direction.REQUESTS)
        return piece

    def answers(self, piece: bytes) -> bytes:
        for kind, body in self._told.feed(piece):
            if kind == _COMPLETE and body == b"COMMIT\0":
                self._plan.on_commit(Direction.ANSWERS)
        return piece


def _says_commit(query: bytes) -> bool:
    return query.partition(b"\0")[0].strip().upper() == b"COMMIT"


class _Frames:
    """Cuts a stream into PostgreSQL's messages: (type, body).  A client's first message has no type."""

    def __init__(self, begun: bool) -> None:
        self._begun, self._rest = begun, b""

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        self._rest += piece
        while len(self._rest) >= self._head:
            length = int.from_bytes(self._rest[self._head - 4 : self._head])
            end = self._head - 4 + length
            if len(self._rest) < end:
                return
            body = self._rest[self._head : end]
            kind = self._rest[0] if self._begun else 0
            self._begun = self._begun or int.from_bytes(body[:2]) == _STARTUP_MAJOR
            self._rest = self._rest[end:]
            yield kind, body

    @property
    def _head(self) -> int:
        return 5 if self._begun else 4


# -- the broker --------------------------------------------------------------------------------------------

_QUEUES = (b"gpu.", b"webhooks", b"maintenance")


class MessageFault(StrEnum):
    """What can become of a message."""

    DOUBLED = "doubled"
    DELAYED = "delayed"
    LOST = "lost"


class BrokerMessages:
    """While armed, a share of the messages on their way to the broker is doubled, delayed, or lost."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._twist: MessageFault | None = None
        self._share = self._longest_s = 0.0
        self.injected = 0
        """How many were."""

    def inject(self, how: MessageFault, share: float, longest_s: float) -> None:
        """`longest_s`: by which a message, or its double, is late at most."""
        self._twist, self._share, self._longest_s = how, share, longest_s

    def stop(self) -> None:
        """What is delayed arrives all the same."""
        self._twist = None

    def make_filter(self, later: Later) -> StreamFilter:
        return _MessageFilter(self, later)

    def deliver(self, queue: bytes, command: bytes, later: Later) -> bytes:
        """What the broker gets instead of `command`, which puts a message into `queue`."""
        how = self._twist
        if how is None or self._chance.random() >= self._share:
            return command
        self.injected += 1
        if how is not MessageFault.LOST:
            later(command, self._chance.uniform(0, self._longest_s))
        # Whoever sent it gets a number as an answer, as LPUSH would give one.
        return command if how is MessageFault.DOUBLED else _command(b"LLEN", queue)


class _MessageFilter:
    def __init__(self, mail: BrokerMessages, later: Later) -> None:
        self._mail, self._later = mail, later
        self._rest = b""

    def requests(self, piece: bytes) -> bytes:
        """Passes whole commands only; those that put nothing into a queue as they are."""
        self._rest += piece
        passed = []
        while (found := _first_command(self._rest)) is not None:
            words, end = found
            command, self._rest = self._rest[:end], self._rest[end:]
            if len(words) == 3 and words[0].upper() == b"LPUSH" and words[1].startswith(_QUEUES):
                command = self._mail.deliver(words[1], command, self._later)
            passed.append(command)
        return b"".join(passed)

    def answers(self, piece: bytes) -> bytes:
        return piece


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _first_command(data: bytes) -> tuple[list[bytes], int] | None:
    """The words of the first command and where it ends; None: it is not whole yet."""
    end = data.find(b"\r\n")
    if end < 0:
        return None
    if data[:1] != b"*":  # a line of plain words
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
