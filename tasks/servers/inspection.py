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

_PARSE_TIMEOUT_S = 30.0


async def parse_in_subprocess(body: bytes | AnonymousFile, pointers: Collection[Pointer]) -> tuple[Any, str]:
    """Return the JSON value of an answer, which is known where these pointers lead, and "".

    If it cannot be read: NOT_JSON, and why.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "slotkeeper.large_json",
        orjson.dumps([list(pointer) for pointer in pointers]).decode(),
    ]
    source, sent = (body.rewind(), None) if isinstance(body, AnonymousFile) else (asyncio.subprocess.PIPE, body)
    process = await asyncio.create_subprocess_exec(*command, stdin=source, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(_PARSE_TIMEOUT_S):
            output, _ = await process.communicate(sent)
    except TimeoutError:
        log.warning("answer_not_inspected")
        return NOT_JSON, f"it could not be read within {_PARSE_TIMEOUT_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0:
        return large_json.apply_report(body, output), ""
    return NOT_JSON, output.decode() or "it cannot be read"
