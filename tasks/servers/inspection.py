"""Large answers are read in a process of their own, so that neither the event loop nor the heartbeat waits for it."""

import asyncio
import sys
from collections.abc import Collection
from typing import Any

import orjson
import structlog

from slotkeeper import large_json
from slotkeeper.large_json import AnonymousFile
from tasks.servers.pointers import Pointer
from tasks.servers.responses import NOT_JSON

log = structlog.get_logger(__name__)

_WITHIN_S = 30.0


async def parse_in_subprocess(body: bytes | AnonymousFile, pointers: Collection[Pointer]) -> Any:
    """Return the JSON value of an answer, which is known where these pointers lead, or NOT_JSON."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "slotkeeper.large_json",
        orjson.dumps([list(it) for it in pointers]).decode(),
    ]
    source, sent = (body.rewind(), None) if isinstance(body, AnonymousFile) else (asyncio.subprocess.PIPE, body)
    process = await asyncio.create_subprocess_exec(*command, stdin=source, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(_WITHIN_S):
            told, _ = await process.communicate(sent)
    except TimeoutError:
        log.warning("answer_not_inspected")
        return NOT_JSON
    finally:
        if process.returncode is None:
            process.kill()
    return large_json.apply_report(body, told) if process.returncode == 0 else NOT_JSON
