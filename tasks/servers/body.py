"""The body of an answer while it comes: a large one goes to a file, so that memory does not grow with answers."""

import structlog

from slotkeeper.large_json import AnonymousFile

log = structlog.get_logger(__name__)

SPOOL_AFTER_BYTES = 4 << 20
"""Bytes.  Parsing more takes longer than other runs may wait."""
_MEMORY_BYTES = 1 << 20  # bytes that stay in memory, for patterns and messages


class ResponseBody:
    """Bytes that come piece by piece.  Where no file can be written, they stay in memory."""

    __slots__ = ("_file", "_keeps_in_memory", "_memory", "size")

    def __init__(self) -> None:
        self.size = 0
        self._memory = bytearray()  # all of it, or the beginning of what is in the file
        self._file: AnonymousFile | None = None
        self._keeps_in_memory = False  # in memory

    def add(self, piece: bytes) -> None:
        if self._file is None:
            self._memory += piece
            if len(self._memory) > SPOOL_AFTER_BYTES and not self._keeps_in_memory:
                self._move_to_file()
        else:
            try:
                self._file.append(piece)
            except OSError as error:
                self._move_to_memory(error)
                self._memory += piece
        self.size += len(piece)

    def whole(self) -> tuple[bytes, AnonymousFile | None]:
        """Return it, or its beginning and the file that has all of it."""
        return bytes(self._memory), self._file

    def _move_to_file(self) -> None:
        try:
            self._file = AnonymousFile()
            self._file.append(self._memory)
        except OSError as error:
            self._move_to_memory(error)
        else:
            del self._memory[_MEMORY_BYTES:]

    def _move_to_memory(self, error: OSError) -> None:
        log.warning("large_answer_in_memory", because=str(error))
        if self._file is not None and self._file.size:
            self._memory = bytearray(self._file.read(0, self.size))
        self._file, self._keeps_in_memory = None, True
