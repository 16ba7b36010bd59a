"""The client in docs/how-to/streams.md works as printed."""

import re
import subprocess
import sys

import pytest

from tests.house.tree import REPO
from tests.support.scripted import Act, Scripted, Seen, answer, hang_up

_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _cut_after(event: bytes) -> bytes:
    """Return a stream that is cut after an event, like that of a killed process."""
    return _STREAM + b"%x\r\n%s\r\n" % (len(event), event)


@pytest.mark.timeout(60)
def test_the_documented_client_reconnects_and_continues_after_its_last_event() -> None:
    code = re.search("```python\n(.*?)```", (REPO / "docs" / "how-to" / "streams.md").read_text("utf-8"), re.DOTALL)
    assert code is not None
    acts: list[Act] = [_cut_after(b"id: 7\ndata: first\n\n"), hang_up, answer(b"", 503)]

    def act(seen: Seen) -> Act:
        return acts.pop(0) if acts else _cut_after(b"id: 8\ndata: second\n\n")

    with Scripted(act) as server:
        script = code[1].replace("http://127.0.0.1:8000", server.url).replace("time.sleep(1)", "time.sleep(0)")
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            printed = []
            while "second" not in printed:
                printed.append(client.stdout.readline().strip())
            client.kill()
        after = [seen.headers.get("last-event-id") for seen in server.seen[:4]]
    assert printed[0] == "first" and all(line.startswith("The stream broke off") for line in printed[1:-1])
    assert after == [None, "7", "7", "7"]
