"""A model behind Potassium."""

import os
import time
from typing import Any

from gate import noted
from potassium import Potassium, Request, Response

app = Potassium("cat")


@app.init
def init() -> dict[str, Any]:
    return {}


@app.handler()
def handler(context: dict[str, Any], request: Request) -> Response:
    payload = request.json
    if payload["prompt"] == "boom":
        raise RuntimeError("told to fail")
    with noted(payload["prompt"]):
        time.sleep(payload.get("sleep", 0))
    return Response(json={"image": payload["prompt"].upper()}, status=200)


if __name__ == "__main__":
    app.serve("127.0.0.1", int(os.environ["PORT"]))
