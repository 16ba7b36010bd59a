"""Large answers are read in a process of their own, so that neither the event loop nor the heartbeat waits for it."""

import asyncio
import sys
from collections.abc import Collection
from typing import Any

import orjson
import structlog

from foundation import large_json
from tasks.servers.answers import NOT_JSON
from tasks.servers.pointers import Pointer

log = structlog.get_logger(__name__)

_WITHIN_S = 30.0
_AT_ONCE = asyncio.Semaphore(1)  # Together they would take the memory of all.


async def inspect(body: bytes, pointers: Collection[Pointer]) -> Any:
    """Return the JSON value of an answer, which is known where these pointers lead, or NOT_JSON."""
    command = [sys.executable, "-m", "foundation.large_json", orjson.dumps([list(it) for it in pointers]).decode()]
    async with _AT_ONCE:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            async with asyncio.timeout(_WITHIN_S):
                told, _ = await process.communicate(body)
        except TimeoutError:
            log.warning("answer_not_inspected", bytes=len(body))
            return NOT_JSON
        finally:
            if process.returncode is None:
                process.kill()
    return large_json.heard(body, told) if process.returncode == 0 else NOT_JSON
