"""A model behind RunPod's worker."""

import time
from typing import Any

import runpod
from gate import noted


def handler(job: dict[str, Any]) -> dict[str, Any]:
    payload = job["input"]
    if payload["prompt"] == "boom":
        return {"error": "told to fail"}
    with noted(payload["prompt"]):
        time.sleep(payload.get("sleep", 0))
    return {"image": payload["prompt"].upper()}


runpod.serverless.start({"handler": handler})
