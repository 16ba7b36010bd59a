"""A model behind RunPod's worker."""

import time
from typing import Any

import runpod


def handler(job: dict[str, Any]) -> dict[str, Any]:
    payload = job["input"]
    if payload["prompt"] == "boom":
        return {"error": "told to fail"}
    time.sleep(payload.get("sleep", 0))
    return {"image": payload["prompt"].upper()}


runpod.serverless.start({"handler": handler})
